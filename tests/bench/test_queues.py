"""The experiment `queues` in small: every way hands over what it was given, and a wrong sum is noticed."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import pinned, queues
from bench.runner import Case, Setting
from rings.segment import SHM

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
CASES = list(queues.cases(Setting(quick=True))) if len(CPUS) > 1 else []


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_all_messages_come_over(case: Case) -> None:
    if case.skip:
        pytest.skip(case.skip)
    prepare, _ = queues._WAYS[case.name]
    figures = queues._measure(prepare, 2000, (CPUS[0], CPUS[1]))()
    assert figures["ok"]
    assert figures["value"] > 0
    ours = f"bench{os.getpid()}-"
    assert not [*Path(tempfile.gettempdir()).glob(f"{ours}*"), *SHM.glob(f"*{ours}*")]


def test_iceoryx2_loses_nothing_where_there_is_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("iceoryx2")
    monkeypatch.setattr(queues, "_MANY", 2)  # full before the reader has looked for the first time
    monkeypatch.setattr(pinned, "_LONGEST_S", 10)
    assert queues._measure(queues._iceoryx2, 2000, (CPUS[0], CPUS[1]))()["ok"]


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "find_spec", lambda name: find_spec(name) if name != "zmq" else None)
    skipped = {case.name: case.skip for case in queues.cases(Setting(quick=True))}
    assert skipped["pyzmq"] == "zmq is not installed: pip install 'rxring[peers]'"
    assert skipped["multiprocessing.Pipe"] == ""


def test_a_message_that_is_not_what_it_was_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "number", lambda message: 7)
    prepare, _ = queues._WAYS["multiprocessing.Pipe"]
    assert not queues._measure(prepare, 100, (CPUS[0], CPUS[1]))()["ok"]
