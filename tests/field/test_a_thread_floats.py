"""Case 28: a helper thread takes the pin and the others float; threads born later go where they like."""

import os
import threading
from collections.abc import Iterator

import pytest

from engine.affinity import pinning, topology


@pytest.fixture
def cpu() -> Iterator[int]:
    """A CPU to pin to; afterwards the tests go on unpinned."""
    before = os.sched_getaffinity(0)
    yield topology.allowed()[-1]
    for thread in pinning.verify(os.getpid()):
        os.sched_setaffinity(thread.tid, before)


class Idlers:
    """Threads that exist until the end of a `with`."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> "Idlers":
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        for thread in self.threads:
            thread.join()

    def start(self) -> int:
        up = threading.Event()
        thread = threading.Thread(target=lambda: (up.set(), self.end.wait()))
        thread.start()
        up.wait()
        self.threads.append(thread)
        assert thread.native_id is not None
        return thread.native_id


def test_threads_from_before_and_after_are_pinned_alike(cpu: int) -> None:
    with Idlers() as idlers:
        old = idlers.start()
        pinning.pin(os.getpid(), [cpu])
        young = idlers.start()
        facts = {thread.tid: thread.cpus for thread in pinning.verify(os.getpid())}
    assert facts[os.getpid()] == facts[old] == facts[young] == (cpu,)


def test_a_thread_that_got_away_is_seen_at_the_next_look(cpu: int) -> None:
    if len(topology.allowed()) < 2:
        pytest.skip("needs two CPUs")
    with Idlers() as idlers:
        pinning.pin(os.getpid(), [cpu])
        stray = idlers.start()
        os.sched_setaffinity(stray, topology.allowed())
        found = pinning.floating(pinning.verify(os.getpid()), [cpu])
        assert [thread.tid for thread in found] == [stray]
        assert not pinning.floating(pinning.pin(os.getpid(), [cpu]), [cpu])


def test_threads_born_while_pinning_do_not_escape(cpu: int) -> None:
    stop = threading.Event()

    def breed() -> None:
        while not stop.is_set():
            child = threading.Thread(target=stop.wait, args=(0.001,))
            child.start()
            child.join()

    with Idlers() as idlers:
        for _ in range(3):
            idlers.start()
        breeder = threading.Thread(target=breed)
        breeder.start()
        try:
            for _ in range(20):
                for thread in pinning.verify(os.getpid()):
                    if thread.tid in (os.getpid(), breeder.native_id):
                        os.sched_setaffinity(thread.tid, topology.allowed())
                threads = pinning.pin(os.getpid(), [cpu])
                assert {thread.cpus for thread in threads} == {(cpu,)}
        finally:
            stop.set()
            breeder.join()
