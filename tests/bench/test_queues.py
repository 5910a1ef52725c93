"""The experiment `queues` in small: every way hands over what it was given, and a wrong sum is noticed."""

import os

import pytest

from bench import queues
from bench.runner import Case

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
CASES = list(queues.cases(quick=True)) if len(CPUS) > 1 else []


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_all_messages_come_over(case: Case) -> None:
    if case.skip:
        pytest.skip(case.skip)
    prepare, _ = queues._WAYS[case.name]
    figures = queues._measure(prepare, 2000, (CPUS[0], CPUS[1]))()
    assert figures["ok"]
    assert figures["value"] > 0


def test_a_message_that_is_not_what_it_was_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "number", lambda message: 7)
    prepare, _ = queues._WAYS["multiprocessing.Pipe"]
    assert not queues._measure(prepare, 100, (CPUS[0], CPUS[1]))()["ok"]
