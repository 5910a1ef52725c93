"""A result of `halfring` as a table, a plot and a verdict: `python -m bench.plots DIR`.

DIR is where `rxring bench halfring` wrote its result.json; halfring.md and halfring.png are written beside
it. The plot needs matplotlib: `pip install 'rxring[plots]'`. Without it there is none, and that is said.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.report import number
from bench.spread import median, ratios
from engine.errors import Refused

DROP = 0.8  # of the rate with the cap: what is below it, is a drop
RARE = 0.01  # of the reads: so few long ones explain no drop
_COLUMNS = ("ring", "way", "asked for ÷ ring", "cap", "M/s", "min – max", "frames a read", "reads > half")
# Told apart without colours too; these are Okabe and Ito's, for all kinds of eyes.
_STYLES = {
    "whole": ("#0072B2", "o"),
    "spin": ("#E69F00", "s"),
    "block": ("#009E73", "^"),
    "skip": ("#CC79A7", "D"),
}
_SIDESTEP = 0.006  # of one curve to the next, so that their bars stand side by side
_NO_PLOT = "no plot: matplotlib is not installed (pip install 'rxring[plots]')"


def draw(folder: Path) -> list[str]:
    """Write halfring.md and, if it can, halfring.png into the result's folder; what there is to say."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"no result in {folder} ({error}): give a folder of `rxring bench`") from None
    if result["name"] != "halfring":
        raise Refused(f"{folder} holds a result of {result['name']}: only halfring has a plot")
    cases = [case for case in result["cases"] if case["median"] is not None]
    said = [*verdicts(cases), *([] if find_spec("matplotlib") else [_NO_PLOT])]
    (folder / "halfring.md").write_text(_markdown(cases, said))
    if find_spec("matplotlib"):
        _plot(cases, folder / "halfring.png")
    return said


def verdicts(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each ring and way to read: does asking for all of it cost throughput, and if not, why not?"""
    rates = {_key(case): [run["value"] for run in case["runs"]] for case in cases}
    for case in cases:
        frames, way, fraction, capped = _key(case)
        if fraction < 1 or capped or (frames, way, fraction, True) not in rates:
            continue
        found = ratios(rates[frames, way, fraction, False], rates[frames, way, fraction, True])
        if found:
            yield f"{frames} frames, {way}: {_verdict(way, median(found), _of_runs(case, 'above_half'))}"


def _verdict(way: str, ratio: float, above_half: float) -> str:
    without = f"without the cap {number(ratio)} of the rate with it"
    share = f"{number(100 * above_half)} % of the reads were longer than half the ring"
    if way == "skip":
        return f"{without}; the writer waits for nobody, so lockstep is not possible ({share})"
    if above_half < RARE:
        return f"{without}; lockstep needs long reads, and only {share}"
    if ratio <= DROP:
        return f"the drop shows: {without} ({share})"
    if above_half < 0.5:
        return f"the drop does not show: {without}; it needs long reads, and only {share}"
    return (
        f"the drop does not show: {without}, though {share}; something else sets the pace: one of the two is "
        "much the faster, or sleeps, or the machine changed between the runs"
    )


def _key(case: dict[str, Any]) -> tuple[int, str, float, bool]:
    parameters = case["parameters"]
    return parameters["frames"], parameters["way"], parameters["fraction"], parameters["capped"]


def _of_runs(case: dict[str, Any], figure: str) -> float:
    return median([run[figure] for run in case["runs"] if run["value"] is not None])


def _markdown(cases: Sequence[dict[str, Any]], said: Sequence[str]) -> str:
    rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
    for case in cases:
        frames, way, fraction, capped = _key(case)
        spread = f"{number(case['min'])} – {number(case['max'])}"
        reads = (number(_of_runs(case, figure)) for figure in ("frames_per_read", "above_half"))
        cap = "half" if capped else "none"
        rows.append((str(frames), way, f"{fraction:g}", cap, number(case["median"]), spread, *reads))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "# halfring\n\n" + "".join(f"- {line}\n" for line in said) + f"\n{table}\n"


def _plot(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Above, the rate (median, minimum to maximum); below, the share of long reads. A ring, a column."""
    from matplotlib.figure import Figure  # heavy, and not always there

    sizes, ticks = sorted({_key(case)[0] for case in cases}), sorted({_key(case)[2] for case in cases})
    figure = Figure(figsize=(max(7, 4.5 * len(sizes)), 7.5), layout="constrained")
    grid = figure.subplots(2, len(sizes), sharex=True, sharey="row", squeeze=False)
    for (rate, share), frames in zip(grid.T, sizes, strict=True):
        for curve, (way, capped) in enumerate(itertools.product(_STYLES, (True, False))):
            chosen = [case for case in cases if _is_of(_key(case), frames, way, capped)]
            if not chosen:
                continue
            at = [_key(case)[2] + (curve - 3.5) * _SIDESTEP for case in chosen]
            medians = [case["median"] for case in chosen]
            low = [case["median"] - case["min"] for case in chosen]
            high = [case["max"] - case["median"] for case in chosen]
            colour, marker = _STYLES[way]
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "clip_on": False,
                "linestyle": "-" if capped else "--",
            }
            style |= {"label": f"{way}{'' if capped else ', no cap'}", "mfc": colour if capped else "white"}
            rate.errorbar(at, medians, yerr=(low, high), capsize=3, **style)
            share.plot(at, [100 * _of_runs(case, "above_half") for case in chosen], **style)
        for axes in (rate, share):
            axes.axvline(0.5, color="grey", linestyle=":", zorder=0)
        share.annotate("half the ring", (0.49, 50), rotation=90, ha="right", va="center", color="grey")
        rate.set(title=f"ring of {frames} frames", ylim=(0, None))
        share.set(xlabel="asked for ÷ ring", xlim=(0, 1.1))
        share.set(xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
    grid[0][0].set(ylabel="throughput, M/s (median, min to max)")
    grid[1][0].set(ylabel="reads longer than half the ring, %", ylim=(-5, 105))
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def _is_of(key: tuple[int, str, float, bool], frames: int, way: str, capped: bool) -> bool:
    """Is the case of this curve? The one without the cap parts from the other at half the ring."""
    same = key[2] == 0.5 and way != "skip"
    return key[:2] == (frames, way) and (key[3] == capped or same)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m bench.plots DIR", file=sys.stderr)
        return 2
    try:
        print("\n".join(draw(Path(argv[0]))))
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
