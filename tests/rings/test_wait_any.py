"""One consumer, several rings: it sleeps on all of them, and whichever writer publishes wakes it."""

from __future__ import annotations

import ctypes
import errno
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rings
from rings.jit import jit
from rings.libc import futex_wait_any, monotonic_ns
from rings.reader import READER_STATE, Reader, poll, release
from rings.ring import Ring
from rings.wait import STRATEGIES, wait_any

strategies = pytest.mark.parametrize("strategy", ["block", "yield", "spin"])
RINGS = 3
LOST_NS = 90_000_000  # a sleeper that nobody woke comes back after 100 ms


@jit
def wait_for_any(readers, strategy, deadline_ns):  # type: ignore[no-untyped-def]
    return wait_any(readers, strategy, deadline_ns)


@jit
def take(readers, which):  # type: ignore[no-untyped-def]
    """Read what is there in ring `which`; how many frames."""
    r = readers[which]
    count = poll(r, 1 << 30)
    release(r, count)
    return count


def wait_s(readers: NDArray[Any], strategy: str, seconds: float) -> bool:
    return bool(wait_for_any(readers, STRATEGIES[strategy], int(monotonic_ns()) + int(seconds * 1e9)))


@pytest.fixture
def several(name: str) -> Iterator[list[Ring]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(rings.create(name, number=i, frames=64, arena_bytes=1 << 14))
            for i in range(RINGS)
        ]


def attach_all(stack: ExitStack, several: list[Ring]) -> tuple[NDArray[Any], list[Reader]]:
    records = np.zeros(len(several), READER_STATE)
    readers = [
        stack.enter_context(ring.reader("r", record=records[i : i + 1])) for i, ring in enumerate(several)
    ]
    return records, readers


@strategies
@pytest.mark.parametrize("which", range(RINGS))
def test_what_is_there_in_any_is_not_waited_for(several: list[Ring], strategy: str, which: int) -> None:
    with ExitStack() as stack:
        records, _ = attach_all(stack, several)
        writers = [stack.enter_context(ring.writer()) for ring in several]
        writers[which].write(b"x")
        before = time.monotonic()
        assert all(wait_s(records, strategy, 60) for _ in range(100))
        assert time.monotonic() - before < 10
        assert [int(take(records, i)) for i in range(RINGS)] == [int(i == which) for i in range(RINGS)]
        assert not wait_s(records, strategy, 0.01)


@strategies
@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.03])
def test_a_time_out_is_kept(several: list[Ring], strategy: str, seconds: float) -> None:
    with ExitStack() as stack:
        records, _ = attach_all(stack, several)
        _writers = [stack.enter_context(ring.writer()) for ring in several]
        before = time.monotonic()
        assert not wait_s(records, strategy, seconds)
        assert max(seconds, 0.0) <= time.monotonic() - before < seconds + 20


@strategies
def test_the_end_of_one_wakes_nobody_for_good_the_end_of_all_does(several: list[Ring], strategy: str) -> None:
    with ExitStack() as stack:
        records, _ = attach_all(stack, several)
        first, *others = [stack.enter_context(ring.writer()) for ring in several]
        first.write(b"x")
        first.close()
        assert take(records, 0) == 1
        before = time.monotonic()
        assert not wait_s(records, strategy, 0.02)
        assert time.monotonic() - before >= 0.02  # a closed ring is no reason to come back
        for writer in others:
            writer.close()
        assert wait_s(records, strategy, 60)


@strategies
def test_every_packet_of_slow_writers_wakes(
    several: list[Ring], name: str, strategy: str, fork: Any, loops: Any
) -> None:
    """One every 3 ms, in one ring after the other. A lost wake would show each only 100 ms later."""

    def write() -> None:
        with ExitStack() as stack:
            writers = [stack.enter_context(rings.attach(name, i).writer()) for i in range(RINGS)]
            for n in range(60):
                time.sleep(0.003)
                assert writers[n % RINGS].write(np.array([time.monotonic_ns()]), timeout_s=20)

    delays_ns: list[int] = []
    with ExitStack() as stack:
        records, readers = attach_all(stack, several)
        child = fork(write)
        while len(delays_ns) < 60:
            wait_s(records, strategy, 20)  # a sleep lasts 100 ms at most
            for reader in readers:
                while (batch := _polled(reader)) is not None:
                    now_ns = time.monotonic_ns()
                    delays_ns += [now_ns - int(payload.view(np.int64)[0]) for payload in batch]
        assert child.wait() == 0
    assert sorted(delays_ns)[30] < LOST_NS / 2


def _polled(reader: Reader) -> Any:
    try:
        return reader.poll()
    except StopIteration:
        return None


def test_no_writer_pays_for_a_wake_that_nobody_waits_for(several: list[Ring]) -> None:
    """The flag of each ring is set before the sleep, and cleared by the wake of that ring alone."""
    with ExitStack() as stack:
        records, _ = attach_all(stack, several)
        writers = [stack.enter_context(ring.writer()) for ring in several]
        assert not wait_s(records, "block", 0.01)
        wakes = [int(ring.counters["wake"]) for ring in several]
        writers[1].write(b"x")
        writers[1].write(b"x")
        assert [int(ring.counters["wake"]) - wake for ring, wake in zip(several, wakes, strict=True)] == [
            0,
            1,
            0,
        ]


def test_a_signal_ends_the_sleep(several: list[Ring]) -> None:
    def on_alarm(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with ExitStack() as stack:
            records, _ = attach_all(stack, several)
            _writers = [stack.enter_context(ring.writer()) for ring in several]
            assert not wait_s(records, "block", 0.0)  # compiled
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            began = time.monotonic()
            while not wait_s(records, "block", 60) and time.monotonic() - began < 0.02:
                pass
            assert time.monotonic() - began < 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Filter(ctypes.Structure):
    """struct sock_filter"""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter)))


def _refuse_futex_waitv(error: int) -> None:
    """For the rest of this process: seccomp(2) as a container runtime uses it."""
    load, equal, answer = 0x20, 0x15, 0x06
    rules = [(load, 0, 0, 0), (equal, 0, 1, 449), (answer, 0, 0, 0x50000 | error), (answer, 0, 0, 0x7FFF0000)]
    program = _Program(len(rules), (_Filter * len(rules))(*rules))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_without_a_call_that_sleeps_on_several_it_naps(several: list[Ring], error: int, fork: Any) -> None:
    """Linux before 5.16; a container whose rules are older."""

    def wait_often() -> None:
        with ExitStack() as stack:
            records, _ = attach_all(stack, several)
            writers = [stack.enter_context(ring.writer()) for ring in several]
            wait_s(records, "block", 0.0)
            _refuse_futex_waitv(error)
            before = time.monotonic()
            for _ in range(20):
                assert not wait_s(records, "block", 60)
            assert time.monotonic() - before >= 0.02
            writers[1].write(b"x")
            assert wait_s(records, "block", 60)

    assert fork(wait_often).wait() == 0


def test_a_changed_word_is_not_slept_on() -> None:
    words = np.zeros(4, np.uint32)
    words[1] = 5
    waiters = np.array([[0, words.ctypes.data, 0], [4, words.ctypes.data + 4, 0]])
    assert futex_wait_any(waiters, int(monotonic_ns()) + 60_000_000_000) == -1
