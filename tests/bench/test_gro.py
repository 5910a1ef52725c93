"""The experiment `gro` in small: frames hold what they should, and the better of two runs is the figure."""

import os
from typing import Any

import pytest

from bench import gro
from bench.runner import Case, Setting

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
CASES = {case.name: case for case in gro.cases(Setting(quick=True))} if len(CPUS) > 1 else {}


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("64 × 100 B, auto", 60, 64), ("63 × 1024 B, on", 60, 63), ("1 × 100 B, auto", 1, 1)],
)
def test_a_frame_holds_the_packets_of_a_message(name: str, least: float, most: float) -> None:
    figures = CASES[name].run()
    assert figures["ok"]
    assert figures["ledger_balanced"]
    for run in (figures["together"], figures["apart"]):
        assert least <= run["packets_per_frame"] <= most
    assert figures["value"] == max(figures["together"]["value"], figures["apart"]["value"]) > 0


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.name.endswith("C")], ids=str)
def test_c_receives_what_the_engine_does(case: Case) -> None:
    if case.skip:
        pytest.skip(case.skip)
    figures = case.run()
    assert figures["ok"]
    assert figures["packets"] > 0


def run(value: float, **facts: Any) -> dict[str, Any]:
    return {"value": value, "ok": True, "ledger_balanced": True, "gro": True, **facts}


@pytest.mark.parametrize("fault", [{"ok": False}, {"ledger_balanced": False}, {"gro": False}])
def test_a_fault_of_the_worse_run_is_noticed(fault: dict[str, Any]) -> None:
    good, bad = run(2.0), run(1.0, **fault)
    for figures in (gro._better(good, bad, 100, True), gro._better(bad, good, 100, True)):
        assert (figures["value"], figures["gigabytes_per_second"]) == (2.0, 0.2)
        assert not (figures["ok"] and figures["ledger_balanced"])
