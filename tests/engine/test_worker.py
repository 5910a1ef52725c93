"""A forked worker: signals, locks, names, CPUs, and how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import await_
from runs import ended

from engine.errors import Failed, Refused
from engine.status import STOP, Status
from engine.worker import Worker, fork
from rings import locks
from rings.layout import LOCK_OWNER
from rings.segment import RingError


@dataclass
class Bench:
    """A status segment of two workers, and how to start the second of them."""

    status: Status
    pids: list[int]

    def start(self, life: Callable[[Worker], None], **more: Any) -> int:
        settings: dict[str, Any] = {"cpus": None, "fifo": None, "mlock": False, **more}
        readable, ready_fd = os.pipe()
        worker = Worker("second", 1, self.status, ready_fd=ready_fd, **settings)
        self.pids.append(fork(worker, life, lambda: None))
        os.close(ready_fd)
        os.close(readable)
        return self.pids[-1]

    def end(self, pid: int) -> int:
        code = ended(pid)
        self.pids.remove(pid)
        return code

    @property
    def facts(self) -> dict[str, Any]:
        return self.status.read(1)[0]


@pytest.fixture
def bench(name: str) -> Iterator[Bench]:
    status = Status.create(name, kind="engine", workers=["first", "second"], state_bytes=[0, 100])
    bench = Bench(status, [])
    yield bench
    for pid in bench.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    status.close()


def until_stopped(worker: Worker) -> None:
    worker.ready({"here": True})
    await_(lambda: worker.status.stop == STOP)


def test_it_tells_who_it_is_and_where_it_may_run(bench: Bench) -> None:
    pid = bench.start(until_stopped)
    await_(lambda: bench.facts.get("here"))
    assert bench.facts["pid"] == pid
    assert bench.facts["cpus"] == sorted(os.sched_getaffinity(0))
    assert bench.facts["last_cpu"] in bench.facts["cpus"]
    assert Path(f"/proc/{pid}/comm").read_text() == "rx:second\n"
    bench.status.stop = STOP
    assert bench.end(pid) == 0


def test_it_runs_where_it_is_told_to(bench: Bench) -> None:
    cpu = max(os.sched_getaffinity(0))
    pid = bench.start(until_stopped, cpus=(cpu,))
    await_(lambda: bench.facts.get("here"))
    assert bench.facts["cpus"] == [cpu]
    assert os.sched_getaffinity(pid) == {cpu}
    bench.status.stop = STOP
    assert bench.end(pid) == 0


def test_signals_of_the_group_are_for_the_supervisor(bench: Bench) -> None:
    pid = bench.start(until_stopped)
    await_(lambda: bench.facts.get("here"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    bench.status.stop = STOP
    assert bench.end(pid) == 0


def refuse(worker: Worker) -> None:
    raise Refused("not like this: do it like that")


def fail(worker: Worker) -> None:
    raise Failed("it broke")


def no_ring(worker: Worker) -> None:
    raise RingError("no ring: make one")


def stumble(worker: Worker) -> None:
    raise IndexError("there is no 7")


@pytest.mark.parametrize(
    ("life", "code", "words"),
    [
        (refuse, 2, "not like this: do it like that"),
        (fail, 1, "it broke"),
        (no_ring, 2, "no ring: make one"),
        (stumble, 1, "IndexError: there is no 7"),
    ],
)
def test_its_last_words_are_kept(
    bench: Bench, capfd: pytest.CaptureFixture[str], life: Callable[[Worker], None], code: int, words: str
) -> None:
    assert bench.end(bench.start(life)) == code
    assert bench.facts["error"] == words
    assert capfd.readouterr() == ("", "")


def test_a_cpu_that_it_cannot_have_is_refused(bench: Bench) -> None:
    assert bench.end(bench.start(until_stopped, cpus=(4000,))) == 2
    assert "4000" in bench.facts["error"]


def test_its_compiled_loops_see_the_stop_word(bench: Bench) -> None:
    worker = Worker("second", 1, bench.status, None, None, False)
    bench.status.stop = 77
    word = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 1).from_address(worker.stop_address))
    assert word[0] == 77


def until_alone(worker: Worker) -> None:
    assert worker.supervisor_lives()
    worker.ready({"here": True})
    await_(lambda: not worker.supervisor_lives())


def test_it_sees_that_the_supervisor_is_gone_and_removes_what_is_left(bench: Bench) -> None:
    """By the lock, which it does not hold itself: the kernel frees it, whatever ends the supervisor."""
    pid = bench.start(until_alone)
    await_(lambda: bench.facts.get("here"))
    assert locks.held_by_other(Status.open(bench.status.name).segment.fd, LOCK_OWNER)
    bench.status.disown()  # closes our descriptor: were there another one, the lock would stay
    assert bench.end(pid) == 0
    with pytest.raises(FileNotFoundError):
        Status.open(bench.status.name)


def test_while_the_supervisor_lives_it_removes_nothing(bench: Bench) -> None:
    assert bench.end(bench.start(lambda worker: None)) == 0
    assert Status.open(bench.status.name).workers == ["first", "second"]
