"""How near to each other two CPUs are, and runs that count only while they stay so.

A word that two CPUs hand to and fro says it: some 60 ns where they share a core, 100 ns where they share a
last-level cache, 400 ns from one to another. A hypervisor may move a machine's CPUs several times a second,
and then whatever crosses between them is four times as slow, and as fast again a moment later. A ratio of two
runs of which only one was moved says nothing about either.

So each run waits until the CPUs are about as near as they have been seen here, and is done again where they
are not so afterwards. One that did not succeed in TRIES tries says so, as a flag. Where nothing moves, this
takes a few milliseconds a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from bench import native
from bench.runner import Case, Figures

TRIES = 3
FURTHER = 2.5  # times the nearest: the CPUs are in different caches
_TRIPS = 20_000  # a few milliseconds
_PATIENCE_S = 0.5  # for them to come back
_LOOK_S = 2.0  # at first, for how near they can be
_NAP_S = 0.05


class Distance:
    """Between two CPUs, as seen at times."""

    def __init__(self, first_cpu: int, second_cpu: int) -> None:
        self._cpus = first_cpu, second_cpu
        self._seen_ns: list[float] = []
        end = time.monotonic() + _LOOK_S
        while time.monotonic() < end:
            self.look()
            time.sleep(_NAP_S)

    def look(self) -> float:
        """The round trip now, ns."""
        trips, seconds, _ = native.run("pingpong", "raw", _TRIPS, *self._cpus)
        now_ns = seconds / trips * 1e9
        self._seen_ns.append(now_ns)
        return now_ns

    @property
    def nearest_ns(self) -> float:
        """The third of the shortest round trips seen: one or two may be odd."""
        return sorted(self._seen_ns)[:3][-1]

    def is_near(self, now_ns: float) -> bool:
        return now_ns <= FURTHER * self.nearest_ns

    def await_near(self) -> float:
        """Wait until they are near, or for as long as patience lasts; the round trip then, ns."""
        end = time.monotonic() + _PATIENCE_S
        while not self.is_near(now_ns := self.look()) and time.monotonic() < end:
            time.sleep(_NAP_S)
        return now_ns


def steady(cases: Iterable[Case], first_cpu: int, second_cpu: int) -> Iterator[Case]:
    """The cases, each run of which has the two CPUs near from its beginning to its end, or says that not.

    Without a C compiler they are as they were.
    """
    if native.missing():
        yield from cases
        return
    distance = Distance(first_cpu, second_cpu)
    for case in cases:
        yield replace(case, run=_near(case.run, distance))


def _near(run: Callable[[], Figures], distance: Distance) -> Callable[[], Figures]:
    def run_near() -> Figures:
        for _ in range(TRIES):
            before_ns = distance.await_near()
            figures = run()
            furthest_ns = max(before_ns, distance.look())
            if not figures["ok"] or distance.is_near(furthest_ns):
                break
        figures["between_cpus_ns"] = furthest_ns
        if not distance.is_near(furthest_ns):
            moved = f"the CPUs were moved apart: {furthest_ns:.0f} instead of {distance.nearest_ns:.0f} ns"
            figures["flags"] = [*figures.get("flags", ()), moved]
        return figures

    return run_near
