"""Pictures of results: every run as a dot, lines and percentile curves with their spread, stacked bars.

Each function returns a matplotlib Figure, to be given to a `Picture` (bench/section.py) in a lambda. What
only an experiment knows, a limit or an annotation, it adds to `figure.axes`. Labels say the unit. Curves are
told apart by colour, by marker and by dashes; the colours are Okabe and Ito's, for all kinds of eyes.

    panels = {"100 B": [Curve("recvmmsg", [(1, [0.9, 1.0]), (8, [1.4, 1.5])])]}
    Picture("batch", "Rate over batch", lambda: lines(panels, "batch, packets", "M packets/s", log_x=True))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.spread import interval, median

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DARK = (0, 2, 4, 6)  # of the colours: writing on them is white
_ALARM = "#D55E00"
_WIDTH = 7.5  # inches, of a picture that stands alone in a report
_STEP = 0.01  # of the width, from one curve's bars to the next one's, which would hide them
_MANY_TICKS = 10


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: (x, the values of all runs there) in ascending order of x.

    style: which colour and marker; None: the next, the same for one name in all panels. dashed: for a kin
    of another curve in that one's style, its marker hollow.
    """

    name: str
    points: Sequence[tuple[float, Sequence[float]]]
    style: int | None = None
    dashed: bool = False


def dots(rows: Mapping[str, Sequence[float]], x: str, alarming: frozenset[str] = frozenset()) -> Figure:
    """A row for each name: all its runs, the median, the median's interval (bench/spread.py).

    x: what is counted, with its unit. alarming: names whose figures are not to be trusted. The axis is
    logarithmic where values lie more than a factor of 30 apart.
    """
    figure, ((axes,),) = _figure(1, 1, height=1.5 + 0.24 * len(rows))
    for place, (name, values) in enumerate(rows.items()):
        colour = _ALARM if name in alarming else COLOURS[0]
        axes.hlines(place, *interval(values), color=colour, linewidth=2.5, alpha=0.45)
        axes.plot(values, [place] * len(values), ".", color="#555555", markersize=5, zorder=3)
        axes.plot(median(values), place, "|", color=colour, markersize=12, markeredgewidth=2.5, zorder=4)
        if name in alarming:
            axes.plot(median(values), place, "X", color=colour, markersize=9, zorder=5)
    found = [value for values in rows.values() for value in values]
    if min(found) > 0 and max(found) > 30 * min(found):
        axes.set(xscale="log")
    elif min(found) >= 0:
        axes.set(xlim=(0, 1.05 * max(found) or 1))
    key = f"dot: a run; bar: median and its interval{'; ×: not to be relied on' if alarming else ''}"
    axes.set(xlabel=f"{x}\n({key})", ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    return figure


def lines(
    panels: Mapping[str, Sequence[Curve]], x: str, y: str, *, log_x: bool = False, log_y: bool = False
) -> Figure:
    """Side by side, a panel for each title ("" for none): medians, with bars from least to greatest run.

    x, y: what the axes show, with units. Ticks of x stand at the points, where these are few.
    """
    figure, axes = _panels(panels, y, log_x)
    ticks = sorted({place for curves in panels.values() for curve in curves for place, _ in curve.points})
    for axis in axes:
        if log_y:
            axis.set(yscale="log")
        else:
            axis.set(ylim=(0, None))
        axis.set(xlabel=x)
        if len(ticks) <= _MANY_TICKS:
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
    return figure


def percentiles(panels: Mapping[str, Sequence[Curve]], y: str) -> Figure:
    """Latency curves: x of a point is a percentile, 50 ≤ x < 100, on an axis that gives each nine the same
    room; y, with its unit, is logarithmic. Medians over the runs, with bars from least to greatest."""
    stretched = {
        title: [
            Curve(
                curve.name, [(100 / (100 - p), runs) for p, runs in curve.points], curve.style, curve.dashed
            )
            for curve in curves
        ]
        for title, curves in panels.items()
    }
    figure, axes = _panels(stretched, y, log_x=True)
    most = max(point[0] for curves in stretched.values() for curve in curves for point in curve.points)
    ticks = [p for p in (50, 90, 99, 99.9, 99.99, 99.999) if 100 / (100 - p) <= most * 1.01]
    for axis in axes:
        axis.set(yscale="log", xlabel="percentile")
        axis.set_xticks([100 / (100 - p) for p in ticks], [f"{p:g} %" for p in ticks])
        axis.minorticks_off()
    return figure


def bars(rows: Mapping[str, Mapping[str, float]], x: str) -> Figure:
    """A bar for each row, stacked of its parts, each labelled where it has room: where costs lie.

    x: what is added up, with its unit.
    """
    figure, ((axes,),) = _figure(1, 1, height=1.6 + 0.32 * len(rows))
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    most = max(sum(row.values()) for row in rows.values())
    left = [0.0] * len(rows)
    for index, part in enumerate(parts):
        sizes = [row.get(part, 0.0) for row in rows.values()]
        drawn = axes.barh(
            range(len(rows)), sizes, 0.7, left, label=part, color=COLOURS[index], edgecolor="white"
        )
        labels = [f"{size:.3g}" if size > 0.06 * most else "" for size in sizes]
        ink = "white" if index in _DARK else "black"
        axes.bar_label(drawn, labels, label_type="center", color=ink, fontsize=8)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set(xlabel=x, ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=min(4, len(parts)), frameon=False)
    return figure


def _figure(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    """(figure, its axes by row and column)."""
    from matplotlib.figure import Figure  # heavy, and not always there

    figure = Figure(figsize=(max(_WIDTH, 4 * columns), height), dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)
    for axes in grid.flat:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.grid(visible=False, which="both")
    return figure, grid


def _panels(panels: Mapping[str, Sequence[Curve]], y: str, log_x: bool) -> tuple[Figure, Sequence[Axes]]:
    figure, (row,) = _figure(1, len(panels), height=4.6)
    names = list(dict.fromkeys(curve.name for curves in panels.values() for curve in curves))
    found = [place for curves in panels.values() for curve in curves for place, _ in curve.points]
    least, most = min(found), max(found)
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        for curve in curves:
            index = names.index(curve.name)
            aside = _STEP * (index - (len(names) - 1) / 2)
            places = [
                x * (most / least) ** aside if log_x else x + aside * (most - least) for x, _ in curve.points
            ]
            _draw(axes, curve, places, index)
        axes.set(title=title)
        axes.grid(visible=True)
        if log_x:
            axes.set(xscale="log")
    row[0].set(ylabel=y)
    drawn: dict[str, Any] = {}
    for axes in row:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            drawn.setdefault(name, handle)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure, row


def _draw(axes: Axes, curve: Curve, places: Sequence[float], index: int) -> None:
    style = index if curve.style is None else curve.style
    colour = COLOURS[style % len(COLOURS)]
    medians = [median(runs) for _, runs in curve.points]
    low = [middle - min(runs) for middle, (_, runs) in zip(medians, curve.points, strict=True)]
    high = [max(runs) - middle for middle, (_, runs) in zip(medians, curve.points, strict=True)]
    axes.errorbar(
        places,
        medians,
        yerr=(low, high),
        label=curve.name,
        color=colour,
        marker=MARKERS[style % len(MARKERS)],
        markersize=5,
        markerfacecolor="white" if curve.dashed else colour,
        linestyle="--" if curve.dashed else "-",
        linewidth=1.3,
        capsize=2.5,
        clip_on=False,
    )
