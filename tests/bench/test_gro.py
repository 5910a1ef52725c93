"""The experiment `gro` in small: frames hold what they should, and GRO is what was asked for."""

import os
from typing import Any

import pytest

from bench import gro
from bench.flood import Flood
from bench.runner import Case, Setting

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
CASES = {case.name: case for case in gro.cases(Setting(quick=False))} if len(CPUS) > 1 else {}


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("64 × 100 B, on", 60, 64), ("4 × 100 B, on", 3.5, 4), ("1 × 100 B, auto", 1, 1)],
)
def test_a_frame_holds_the_packets_of_a_message(name: str, least: float, most: float) -> None:
    figures = CASES[name].run()
    assert figures["ok"]
    assert figures["ledger_balanced"]
    assert least <= figures["packets_per_frame"] <= most
    assert figures["gigabytes_per_second"] == pytest.approx(figures["value"] / 10)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.name == "64 × 100 B, C"], ids=str)
def test_c_receives_what_the_engine_does(case: Case) -> None:
    if case.skip:
        pytest.skip(case.skip)
    figures = case.run()
    assert figures["ok"]
    assert figures["packets"] > 0


def test_an_engine_without_the_gro_that_was_asked_for_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(*_: Any) -> dict[str, Any]:
        return {"value": 1.0, "ok": True, "gro": False}

    monkeypatch.setattr(Flood, "engine", engine)
    assert not CASES["64 × 100 B, on"].run()["ok"]
    assert CASES["64 × 100 B, off"].run()["ok"]


def test_every_claim_is_about_cases_that_there_are() -> None:
    for claim in gro.CLAIMS:
        assert {claim.case, claim.against} <= {*CASES, None}
