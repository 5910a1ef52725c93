"""How the cost of a packet grows with consumers, receivers, the size of the ring, and flows.

A flood of packets of 100 bytes, in GSO messages of 64, to an engine with `--gro off`: 1 consumer, 1 receiver,
a ring of 40 MiB, 1 flow; then one of these changed at a time. Every consumer reads every packet, with
`latency`, gating and blocking. Consumers have the CPUs that neither sender nor receiver has, in turn; where
there is none they all share the receiver's, and their cost comes out of its rate. A second receiver has
another of those CPUs; where there is none, the sender's. There are 64 flows then, so that it gets some.
`cpus` in the parameters of a case says who ran where.

The rate is that of packets received, each counted once. Costs are threads' own time for a packet received;
those of consumers are of all of them together.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bench import pictures
from bench.flood import Flood
from bench.machine import two_cpus
from bench.place import LO
from bench.report import number, span
from bench.runner import Case, Figures, Setting
from bench.section import Picture, Section, Table
from bench.spread import median, overlap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("lo",)
CLAIMS = ()

SIZE, SEGMENTS, RING, SHARED_FLOWS = 100, 64, 40, 64
# axis: its values (MiB for rings), and those of a quick look
AXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "consumers": ((2, 4), (4,)),
    "receivers": ((2,), (2,)),
    "ring": ((5, 10, 20, 80), (5,)),
    "flows": ((8, SHARED_FLOWS, 1000), (SHARED_FLOWS, 1000)),
}


def cases(setting: Setting) -> Iterator[Case]:
    warm_s, window_s = (0.2, 0.4) if setting.quick else (0.5, 1.0)
    receiver, sender = two_cpus()
    place = setting.places[0] if setting.places else LO
    flood = Flood(SIZE, SEGMENTS, receiver, sender, warm_s, window_s, place)
    free = [cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu not in (receiver, sender)]
    yield _case("base", "base", 1, flood, [receiver], free)
    for axis, (values, quick_values) in AXES.items():
        for value in quick_values if setting.quick else values:
            more = Flood(
                *(SIZE, SEGMENTS, receiver, sender, warm_s, window_s, place),
                flows={"flows": value, "receivers": SHARED_FLOWS}.get(axis, 1),
            )
            receivers = [receiver, *(free or [sender])[: value - 1]] if axis == "receivers" else [receiver]
            name = f"{axis} {value}{' MiB' if axis == 'ring' else ''}"
            yield _case(axis, name, value, more, receivers, free)


def _case(
    axis: str, name: str, value: int, flood: Flood, receivers: Sequence[int], free: Sequence[int]
) -> Case:
    left = [cpu for cpu in free if cpu not in receivers] or [flood.receive_cpu]
    consumers = [left[i % len(left)] for i in range(value if axis == "consumers" else 1)]
    ring = f"{value if axis == 'ring' else RING}MiB"
    run = functools.partial(_run, flood, consumers, list(receivers), ring)
    cpus = {"receivers": list(receivers), "consumers": consumers, "sender": flood.send_cpu}
    parameters = flood.parameters | {"axis": axis, "at": value, "ring": ring, "cpus": cpus}
    return Case(name, "M/s", run, parameters, _no_room(int(ring.removesuffix("MiB")) << 20))


def _run(flood: Flood, consumers: Sequence[int], receivers: Sequence[int], ring: str) -> Figures:
    found = flood.engine(consumers, "off", receive=receivers, ring=ring)
    return found | {"engine_ns": _sum(found["receiver_ns"], found["consumer_ns"])}


def _sum(*costs: float | None) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


def _no_room(size: int) -> str:
    """Why a ring of so many bytes is not made here; "" if it fits."""
    room = os.statvfs("/dev/shm")
    free = room.f_bavail * room.f_frsize
    return "" if size < free else f"/dev/shm has {free >> 20} MiB free, not {size >> 20}"


# ── what the report tells ────────────────────────────────────────────────────────────────────────────

_COLUMNS = ("case", "M/s", "min – max", "lost %", "receiver ns", "consumers ns", "softirq ns", "ns / base's")


def tell(result: dict[str, Any]) -> Iterator[Section]:
    able = [case for case in result["cases"] if case["median"] is not None]
    base = next((case for case in able if case["name"] == "base"), None)
    if base is None:
        return
    rows = tuple(_row(case, base) for case in able)
    by_axis = {axis: [case for case in able if case["parameters"]["axis"] == axis] for axis in AXES}
    text = tuple(_told(chosen, base) for chosen in by_axis.values())
    picture = Picture(
        "cost", "What a packet costs, by consumers, receivers, ring and flows", lambda: _picture(able)
    )
    yield Section("What a packet costs", tuple(filter(None, text)), Table(_COLUMNS, rows), picture)


def _told(cases: Sequence[dict[str, Any]], base: dict[str, Any]) -> str:
    """How much more the last of an axis costs than the base."""
    if not cases:
        return ""
    last = cases[-1]
    one, other = (_middle(case, "engine_ns") for case in (last, base))
    if not one or not other:
        return ""
    same = "cannot be told from" if overlap(last["ci"], base["ci"]) else "is not"
    cost = f"{one:.0f} ns a packet for receivers and consumers, {one / other:.2f} of the base's"
    return f"{last['name']}: {cost}; the rate {same} the base's."


def _middle(case: dict[str, Any], figure: str) -> float | None:
    found = [run[figure] for run in case["runs"] if run.get(figure) is not None]
    return median(found) if found else None


def _row(case: dict[str, Any], base: dict[str, Any]) -> tuple[str, ...]:
    lost = _middle(case, "lost")
    costs = [_middle(case, f"{who}_ns") for who in ("receiver", "consumer", "softirq")]
    one, other = (_middle(each, "engine_ns") for each in (case, base))
    return (
        *(case["name"], number(case["median"]), span(case["min"], case["max"])),
        "–" if lost is None else f"{100 * lost:.1f}",
        *("–" if cost is None else f"{cost:.0f}" for cost in costs),
        f"{one / other:.2f}" if one and other else "–",
    )


def _picture(able: Sequence[dict[str, Any]]) -> Figure:
    parts = {"receivers": "receiver_ns", "consumers": "consumer_ns"}
    rows = {
        case["name"]: {part: _middle(case, figure) or 0.0 for part, figure in parts.items()} for case in able
    }
    return pictures.bars(rows, "CPU time for a packet, ns")
