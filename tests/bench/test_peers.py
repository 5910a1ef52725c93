"""The experiment `peers` in small: each of them receives what is sent, and says so."""

import os

import pytest

from bench import native, peers
from bench.runner import Case, Setting

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
CASES = list(peers.cases(Setting(quick=True))) if len(CPUS) > 1 else []


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_receives(case: Case) -> None:
    if case.skip:
        pytest.skip(case.skip)
    figures = case.run()
    assert figures["ok"]
    assert figures["packets"] > 0
    assert figures["sent_per_second"] > 0
    assert figures.get("ledger_balanced", True)


def test_every_claim_is_about_cases_that_there_are() -> None:
    names = {case.name for case in CASES}
    for claim in peers.CLAIMS:
        assert {claim.case, claim.against} <= names


def test_c_without_a_compiler_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    skipped = {case.name for case in peers.cases(Setting(quick=True)) if case.skip}
    assert {"C, GRO, timestamps", "C, timestamps", "C"} <= skipped
