from __future__ import annotations

import os
from typing import Any

import pytest

from bench import distance, native
from bench.distance import TRIES, Distance, steady
from bench.runner import Case

CPUS = sorted(os.sched_getaffinity(0))
compiler = pytest.mark.skipif(bool(native.missing()), reason=native.missing())


class Told(Distance):
    """One that is told what it sees."""

    def __init__(self, *seen_ns: float) -> None:
        self._seen_ns = [100.0]
        self.seen = list(seen_ns)

    def look(self) -> float:
        return self.seen.pop(0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(distance, "_LOOK_S", 0.1)


def _runs(*seen_ns: float, ok: bool = True) -> tuple[dict[str, Any], int]:
    runs = []

    def run() -> dict[str, Any]:
        runs.append(len(runs))
        return {"value": len(runs), "ok": ok}

    return distance._near(run, Told(*seen_ns))(), len(runs)


def test_a_run_with_the_cpus_near_is_taken_at_once() -> None:
    figures, runs = _runs(100, 120)
    assert (figures["value"], figures["between_cpus_ns"], runs) == (1, 120, 1)
    assert "flags" not in figures


@pytest.mark.parametrize("moved", [(400, 100), (100, 400)])
def test_a_run_that_began_or_ended_with_them_apart_is_done_again(moved: tuple[float, float]) -> None:
    figures, runs = _runs(*moved, 110, 90)
    assert (figures["value"], figures["between_cpus_ns"], runs) == (2, 110, 2)
    assert "flags" not in figures


def test_cpus_that_stay_apart_are_a_flag() -> None:
    figures, runs = _runs(*[400] * 2 * TRIES)
    assert runs == TRIES
    assert figures["flags"] == ["the CPUs were moved apart: 400 instead of 100 ns"]


def test_a_wrong_answer_is_not_tried_again() -> None:
    figures, runs = _runs(400, 400, ok=False)
    assert (figures["ok"], runs) == (False, 1)


@compiler
@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU is near to nobody")
def test_a_word_goes_to_and_fro() -> None:
    between = Distance(*CPUS[:2])
    assert between.look() > 10
    assert between.is_near(between.nearest_ns)
    assert not between.is_near(3 * between.nearest_ns)


def test_one_odd_look_is_not_the_nearest() -> None:
    between = Told()
    between._seen_ns = [100, 400, 30, 90]
    assert between.nearest_ns == 100


def test_without_a_compiler_cases_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    case = Case("A", "ns", lambda: {"value": 1.0, "ok": True})
    assert list(steady([case], 0, 1)) == [case]
