"""Which CPU takes the interrupts, which receives, which processes: every layout of `rxring pin`, measured.

On each place, each layout that can be had is applied to the receiving device by `rxring pin`, and taken back
after the run. That packets were handled on its interrupt CPU, and that every thread ran on its own, is
counted (bench/flood.py). On lo and veth the interrupt CPU is made by an RPS mask of one bit. The sender has a
CPU of its own where one is left; else it shares the consumer's, and the report says so.

A run is two phases. First packets of 100 bytes at a moderate rate, for latency by stage: under a flood that
would only tell how long queues are. Then a flood of the same, as fast as the sender can: the rate that is
received and what is lost. GRO is off, so that every packet costs what a packet costs.

Beside the layouts: how the consumer waits (`block`, `yield`, and `spin` where it has a CPU of its own), and
its policy (`gate`, `skip`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import pictures
from bench.flood import Flood
from bench.pictures import Curve
from bench.place import Place
from bench.report import number, span
from bench.runner import Case, Figures, Setting, is_sound
from bench.section import Alarm, Picture, Section, Table
from bench.spread import interval, median, overlap
from engine.affinity import devices, topology
from engine.affinity.layouts import NAMES, Layout, find
from engine.errors import Refused

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACES = ("lo", "veth")
CLAIMS = ()

SIZE, SEGMENTS, PACED = 100, 64, 50_000
STAGES = ("network", "socket", "ring", "total")
COLLAPSE = 0.5  # of the rate of the best layout: below it, the receiver starves
# How a consumer takes packets. Waiting does not depend on the policy, so that few are crossed.
HOW = (("block", "gate"), ("block", "skip"), ("yield", "gate"), ("spin", "gate"), ("spin", "skip"))
QUICK_HOW = (("block", "gate"),)


@dataclass(frozen=True, slots=True)
class Cores:
    """The CPU of each role under a layout."""

    layout: str
    interrupt: int
    receive: int
    process: int
    send: int

    @property
    def roles(self) -> dict[int, list[str]]:
        """By CPU, in the order of a packet's way."""
        found: dict[int, list[str]] = {}
        for role in ("send", "interrupt", "receive", "process"):
            found.setdefault(getattr(self, role), []).append(role)
        return found

    @property
    def shared(self) -> str:
        """Which roles share a CPU."""
        return "; ".join(
            f"CPU {cpu}: {' and '.join(roles)}" for cpu, roles in self.roles.items() if len(roles) > 1
        )


def cores(layout: Layout, allowed: Collection[int]) -> Cores:
    """With a CPU for the sender: one of its own, if there is one.

    Else the consumer's, unless that is the receiver's, who is to be measured.
    """
    interrupt, receive, process = layout.interrupt, layout.receive, layout.process[0]
    free = [cpu for cpu in sorted(allowed) if cpu not in (interrupt, receive, process)]
    elsewhere = [cpu for cpu in sorted(allowed) if cpu != receive]
    shared = process if process != receive else (*elsewhere, process)[0]
    return Cores(layout.name, interrupt, receive, process, (*free, shared)[0])


def layouts(place: Place) -> Iterator[tuple[str, Cores | None, str]]:
    """(name, its CPUs, why it cannot be had) of each layout, here."""
    machine, side = topology.read(), place.receive
    device = devices.read(side.device) if not side.namespace and side.device in devices.names() else None
    for name in NAMES:
        try:
            yield name, cores(find(name, machine, device), machine.allowed), ""
        except Refused as refused:
            yield name, None, str(refused).partition(": ")[2]


def cases(setting: Setting) -> Iterator[Case]:
    for place in setting.places:
        for name, found, why_not in layouts(place):
            if found is None:
                yield Case(f"{place.name}, {name}", "M/s", dict, {"place": place.name}, why_not)
            else:
                yield from _of_layout(place, found, setting.quick)


def _of_layout(place: Place, found: Cores, quick: bool) -> Iterator[Case]:
    warm_s, window_s = (0.15, 0.3) if quick else (0.4, 0.8)
    flood = Flood(
        *(SIZE, SEGMENTS, found.receive, found.send, warm_s, window_s, place),
        interrupt_cpu=found.interrupt,
        paced=PACED,
    )
    for wait, policy in QUICK_HOW if quick else HOW:
        parameters = flood.parameters | {"layout": found.layout, "process_cpu": found.process}
        parameters |= {"wait": wait, "policy": policy, "shared": found.shared}
        alone = found.roles[found.process] == ["process"]
        skip = "" if wait != "spin" or alone else f"spin needs a CPU of its own: {found.shared}"
        run = functools.partial(_run, flood, found, wait, policy)
        yield Case(f"{place.name}, {found.layout}, {wait}, {policy}", "M/s", run, parameters, skip)


def _run(flood: Flood, found: Cores, wait: str, policy: str) -> Figures:
    with flood.place.receive.layout(found.layout):
        return flood.engine(found.process, "off", wait=wait, policy=policy)


# ── what the report tells ────────────────────────────────────────────────────────────────────────────

_RATES = (
    *("layout", "wait", "policy", "M/s", "min – max", "lost %"),
    *("softirq", "receiver", "consumer", "sender"),
)
_STAGES = ("layout", "wait", "policy", *STAGES)
_CPUS = ("layout", "interrupt", "receive", "process", "send", "shared")


def tell(result: dict[str, Any]) -> Iterator[Section]:
    able = [case for case in result["cases"] if not case["skip"] and _runs(case)]
    for place in dict.fromkeys(case["parameters"]["place"] for case in able):
        here = [case for case in able if case["parameters"]["place"] == place]
        plain = [case for case in here if _how(case) == ("block", "gate")]
        yield Section(f"{place}: which layout", (*choose(plain), *starved(plain)))
        yield Section(
            f"{place}: cores",
            (),
            Table(_CPUS, tuple(map(_cpus_row, plain))),
            Picture(f"cores-{place}", _alt(place, plain), functools.partial(draw_cores, plain)),
        )
        text = (
            f"A flood of packets of {SIZE} bytes. Costs are in ns for a packet received. A thread's own time "
            "has in it what interrupts took while it ran, unless the kernel counts those apart.",
        )
        yield Section(f"{place}: rates and costs", text, Table(_RATES, tuple(map(_rate_row, here))))
        yield Section(
            f"{place}: latency by stage",
            (f"At {PACED} packets/s, in µs: median / 99th percentile.",),
            Table(_STAGES, tuple(map(_stage_row, here))),
            Picture(f"latency-{place}", f"Latency by layout on {place}", functools.partial(_curves, here)),
        )
    missing = tuple((case["name"], case["skip"]) for case in result["cases"] if case["skip"])
    if missing:
        yield Section("Not measured here", (), Table(("case", "why"), missing))


def choose(plain: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Use this one, because: the highest rate; of those as fast, as far as can be told, the lowest p99."""
    if not plain:
        return
    best = max(plain, key=lambda case: float(case["median"]))
    alike = [case for case in plain if overlap(case["ci"], best["ci"])]
    if len(alike) == 1:
        others = "; ".join(f"{_layout(case)} {_rate(case)}" for case in plain if case is not best)
        beside = f"; {others}" if others else ", and there is no other here"
        yield f"Use `{_layout(best)}`, because it receives most: {_rate(best)}{beside}."
        return
    yield "By rate these cannot be told apart: " + "; ".join(f"{_layout(c)} {_rate(c)}" for c in alike) + "."
    lowest = min(alike, key=lambda case: median(_p99s(case)))
    same = [c for c in alike if overlap(interval(_p99s(c)), interval(_p99s(lowest)))]
    told = "; ".join(f"{_layout(case)} {_p99(case)}" for case in alike)
    if len(same) == 1:
        yield f"Use `{_layout(lowest)}`, because its 99th percentile of `total` is lowest: {told}."
    else:
        yield f"Neither can they by the 99th percentile of `total`: {told}. Use whichever you like."


def starved(plain: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Does the receiver starve where the interrupts are on its CPU?"""
    by_layout = {_layout(case): case for case in plain}
    same, rest = by_layout.pop("same", None), list(by_layout.values())
    if same is None or not rest:
        return
    best = max(rest, key=lambda case: float(case["median"]))
    ratio = same["median"] / best["median"]
    if ratio < COLLAPSE and not overlap(same["ci"], best["ci"]):
        lost = median([run["lost"] for run in _runs(same)])
        socket = median([_share_at_socket(run["ledger"]) for run in _runs(same)])
        lost_of, at_socket = f"{100 * lost:.0f} % is lost", f"{100 * socket:.0f} %"
        yield Alarm(
            f"With interrupts on the receiver's CPU it starves: {_rate(same)}, {number(ratio)} of what "
            f"`{_layout(best)}` receives. Of what was sent {lost_of}, {at_socket} of that at the socket, "
            "which the receiver could not empty in time, the rest in the CPU's backlog before it: interrupts "
            "come before any process, and a flood leaves it none of the CPU (receive livelock)."
        )


def _share_at_socket(ledger: dict[str, Any]) -> float:
    """Of what was lost."""
    lost = ledger["sent"] - ledger["received"]
    return ledger["socket_dropped"] / lost if lost else 0.0


def _runs(case: dict[str, Any]) -> list[Figures]:
    runs = [run for run in case["runs"] if run["value"] is not None and "latency" in run]
    return [run for run in runs if is_sound(run)] or runs


def _layout(case: dict[str, Any]) -> str:
    return str(case["parameters"]["layout"])


def _how(case: dict[str, Any]) -> tuple[str, str]:
    return case["parameters"]["wait"], case["parameters"]["policy"]


def _rate(case: dict[str, Any]) -> str:
    return f"{number(case['median'])} M/s ({span(*case['ci'])})"


def _p99s(case: dict[str, Any]) -> list[float]:
    return [found for run in _runs(case) if (found := run["latency"]["total"]["p99_ns"]) is not None]


def _p99(case: dict[str, Any]) -> str:
    low, high = interval(_p99s(case))
    return f"{number(median(_p99s(case)) / 1e3)} µs ({span(low / 1e3, high / 1e3)})"


def _middle(case: dict[str, Any], figure: str) -> float | None:
    found = [run[figure] for run in _runs(case) if run.get(figure) is not None]
    return median(found) if found else None


def _stage(case: dict[str, Any], stage: str, percentile: str) -> str:
    found = [run["latency"][stage][percentile] for run in _runs(case)]
    known = [ns for ns in found if ns is not None]
    return number(median(known) / 1e3) if known else "–"


def _cpus_row(case: dict[str, Any]) -> tuple[str, ...]:
    cpus = (str(case["parameters"][f"{role}_cpu"]) for role in ("interrupt", "receive", "process", "send"))
    return (_layout(case), *cpus, case["parameters"]["shared"] or "nothing")


def _rate_row(case: dict[str, Any]) -> tuple[str, ...]:
    lost = _middle(case, "lost")
    costs = (_middle(case, f"{who}_ns") for who in ("softirq", "receiver", "consumer", "sender"))
    return (
        *(_layout(case), *_how(case), number(case["median"]), span(case["min"], case["max"])),
        "–" if lost is None else f"{100 * lost:.1f}",
        *("–" if cost is None else f"{cost:.0f}" for cost in costs),
    )


def _stage_row(case: dict[str, Any]) -> tuple[str, ...]:
    found = (f"{_stage(case, stage, 'p50_ns')} / {_stage(case, stage, 'p99_ns')}" for stage in STAGES)
    return (_layout(case), *_how(case), *found)


def _curves(here: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each stage, a curve for each layout: how a blocking consumer that gates gets them."""
    panels: dict[str, list[Curve]] = {}
    for case in here:
        if _how(case) != ("block", "gate"):
            continue
        for stage in STAGES:
            points = []
            for percentile in (50, 75, 90, 95, 99, 99.9):
                key = f"p{str(percentile).replace('.', '')}_ns"
                values = [run["latency"][stage][key] for run in _runs(case)]
                points.append((percentile, [max(ns, 1) / 1e3 for ns in values if ns is not None]))
            if all(values for _, values in points):
                panels.setdefault(stage, []).append(Curve(_layout(case), points))
    return pictures.percentiles(panels, "µs")


# ── the picture of the cores ─────────────────────────────────────────────────────────────────────────

_ROWS = {"send": 3, "interrupt": 2, "receive": 1, "process": 0}  # a packet's way, downwards
_NAMES = {"send": "sender", "interrupt": "interrupts", "receive": "receiver", "process": "consumer"}


def _alt(place: str, plain: Sequence[dict[str, Any]]) -> str:
    told = (
        f"{_layout(case)}: {case['parameters']['shared']}, {number(case['median'])} M/s" for case in plain
    )
    return f"CPUs and what runs on them on {place}; {'; '.join(told)}"


def draw_cores(plain: Sequence[dict[str, Any]]) -> Figure:
    """Each layout: a box for each CPU, the roles in it, and a packet's way through them with its rates."""
    from matplotlib.figure import Figure  # heavy, and not always there

    figure = Figure(figsize=(max(7.5, 4.4 * len(plain)), 4.4), dpi=120, layout="constrained")
    for axes, case in zip(figure.subplots(1, len(plain), squeeze=False).flat, plain, strict=True):
        _draw_layout(axes, case)
    return figure


def _draw_layout(axes: Axes, case: dict[str, Any]) -> None:
    cpu_of = {role: case["parameters"][f"{role}_cpu"] for role in _ROWS}
    column = {cpu: 1.25 * place for place, cpu in enumerate(sorted(set(cpu_of.values())))}
    for cpu, x in column.items():
        _box(axes, x, 1.575, 1.04, 4.25, face="#f2f2f2", edge="#888888")
        axes.text(x, 3.5, f"CPU {cpu}", ha="center", va="center", weight="bold", fontsize=9)
    for index, (role, y) in enumerate(_ROWS.items()):
        x = column[cpu_of[role]]
        _box(axes, x, y, 0.84, 0.4, face="white", edge=pictures.COLOURS[(6, 4, 0, 2)[index]])
        axes.text(x, y, _NAMES[role], ha="center", va="center", fontsize=9)
    ways = list(_ROWS)
    right = max(column.values()) + 0.62
    for (one, other), words in zip(itertools.pairwise(ways), _way_words(case), strict=True):
        begin, end = (column[cpu_of[one]], _ROWS[one] - 0.22), (column[cpu_of[other]], _ROWS[other] + 0.22)
        axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.4})
        axes.text(right, (_ROWS[one] + _ROWS[other]) / 2, words, ha="left", va="center", fontsize=8)
    axes.set(xlim=(-0.65, right + 1.35), ylim=(-0.7, 3.85), title=_layout(case))
    axes.set_axis_off()


def _box(axes: Axes, x: float, y: float, width: float, height: float, *, face: str, edge: str) -> None:
    """Around (x, y), its corners round."""
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.06"
    box = FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=1.5)
    axes.add_patch(box)


def _way_words(case: dict[str, Any]) -> tuple[str, str, str]:
    sent, lost = _middle(case, "sent_per_second"), _middle(case, "lost")
    dropped = "" if lost is None else f"\n{100 * lost:.1f} % lost"
    return (
        f"{number((sent or 0) / 1e6)} M/s sent",
        f"{number(case['median'])} M/s\nreceived{dropped}",
        f"total p99\n{_stage(case, 'total', 'p99_ns')} µs",
    )
