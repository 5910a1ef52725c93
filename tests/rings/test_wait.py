from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forked import await_
from ring_loops import SLEEP, ping

import rings
from rings.libc import monotonic_ns
from rings.ring import Ring
from rings.wait import BLOCK, SPIN, YIELD

strategies = pytest.mark.parametrize("wait", ["block", "yield", "spin"])
LOST_NS = 90_000_000  # a sleeper that nobody woke comes back after 100 ms


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=16, arena_bytes=4096) as made:
        yield made


@strategies
def test_what_is_there_is_not_waited_for(ring: Ring, wait: str) -> None:
    with ring.writer() as writer, ring.reader(wait=wait) as reader:
        writer.write(b"x")
        before = time.monotonic()
        assert all(reader.wait(60) for _ in range(100))
        assert time.monotonic() - before < 10


@strategies
@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.03, 0.13])
def test_a_time_out_is_kept(ring: Ring, wait: str, timeout_s: float) -> None:
    with ring.writer(), ring.reader(wait=wait) as reader:
        before = time.monotonic()
        assert not reader.wait(timeout_s)
        assert max(timeout_s, 0.0) <= time.monotonic() - before < timeout_s + 20


@strategies
def test_every_packet_of_a_slow_writer_wakes(ring: Ring, name: str, wait: str, fork: Any, loops: Any) -> None:
    """One every 3 ms. A lost wake would show each only 100 ms later; a busy machine delays a few."""

    def write() -> None:
        with rings.attach(name).writer() as writer:
            for _ in range(40):
                time.sleep(0.003)
                assert writer.write(np.array([time.monotonic_ns()]), timeout_s=20)

    with ring.reader(wait=wait) as reader:
        child = fork(write)
        delays_ns = []
        for batch in reader:
            for i in range(len(batch)):
                delays_ns.append(time.monotonic_ns() - int(batch.payload(i).view(np.int64)[0]))
        assert child.wait() == 0
    assert len(delays_ns) == 40
    assert sorted(delays_ns)[20] < LOST_NS / 2


@strategies
def test_closing_wakes(ring: Ring, name: str, wait: str, fork: Any, loops: Any, board: Any) -> None:
    def read() -> None:
        with rings.attach(name).reader(wait=wait) as reader:
            board[0] = 1
            assert reader.wait(60)
            assert reader.poll() is None
            board[1] = monotonic_ns()

    def end() -> None:
        with pytest.raises(StopIteration):
            read()

    writer = ring.writer()
    child = fork(end)
    await_(lambda: board[0])
    time.sleep(0.02)
    closed_ns = monotonic_ns()
    writer.close()
    assert child.wait() == 0
    assert monotonic_ns() - closed_ns < 20_000_000_000


@strategies
def test_two_sleepers_are_both_woken(ring: Ring, name: str, wait: str, fork: Any, loops: Any) -> None:
    def read(mine: str) -> None:
        with rings.attach(name).reader(name=mine, wait=wait) as reader:
            seen = sum(len(batch) for batch in reader)
            assert seen == 30

    children = [fork(read, f"{i}") for i in range(2)]
    await_(lambda: sum(info.state == "active" and info.pid != 0 for info in ring.readers()) == 2)
    with ring.writer() as writer:
        for _ in range(30):
            time.sleep(0.002)
            assert writer.write(b"x", timeout_s=20)
    assert [child.wait() for child in children] == [0, 0]


@pytest.mark.parametrize(
    ("strategy", "rounds"), [(SLEEP, 100_000), (BLOCK, 3_000), (YIELD, 20_000), (SPIN, 200)]
)
def test_no_wake_is_lost(name: str, strategy: int, rounds: int, fork: Any, loops: Any, board: Any) -> None:
    """Ping-pong: each side sleeps until the other has written. A lost wake would cost 100 ms."""
    there = rings.create(name, number=0, frames=4, arena_bytes=256)
    back = rings.create(name, number=1, frames=4, arena_bytes=256)

    def echo() -> None:
        reader = rings.attach(name, 0).reader()
        writer = rings.attach(name, 1).writer()
        board[8] = 1
        ping(reader.record, writer.record, strategy, rounds, board, 4, False)

    child = fork(echo)
    await_(lambda: board[8])
    writer, reader = there.writer(), back.reader()
    ping(reader.record, writer.record, strategy, rounds, board, 0, True)
    assert child.wait() == 0
    assert board[0] == board[4] == rounds
    # Nothing proves that this machine was not asleep itself once or twice.
    assert board[1] + board[5] <= 5
    assert there.published() == back.published() == (rounds, rounds)
    for each in (writer, reader, there, back):
        each.close()


def test_a_signal_ends_a_sleep(ring: Ring) -> None:
    from rings.reader import _wait_entry

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with ring.writer(), ring.reader() as reader:
            _wait_entry(reader.record, 0, 0)
            began = monotonic_ns()
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert not _wait_entry(reader.record, 0, began + 60_000_000_000)
            assert monotonic_ns() - began < LOST_NS
    finally:
        signal.signal(signal.SIGALRM, before)


def test_nobody_waiting_costs_no_wake(ring: Ring) -> None:
    """The futex word moves only when somebody had said that he sleeps."""
    with ring.writer() as writer, ring.reader(name="one", policy="skip") as reader:
        for _ in range(10):
            writer.write(b"")
        assert int(ring.counters["wake"]) == 0
        while reader.poll():
            pass
        assert not reader.wait(0.001)
        for _ in range(10):
            writer.write(b"")
        assert int(ring.counters["wake"]) == 1


def test_closing_moves_the_word_that_sleepers_sleep_on(ring: Ring) -> None:
    """A sleep is bounded, so a close that wakes nobody would only be late."""
    writer = ring.writer()
    with ring.reader() as reader:
        assert not reader.wait(0.001)
        before = int(ring.counters["wake"])
        writer.close()
        assert int(ring.counters["wake"]) == before + 1
        assert reader.wait(0)


def test_a_reader_killed_in_its_sleep_costs_one_wake(ring: Ring, name: str, fork: Any) -> None:
    def sleep() -> None:
        with rings.attach(name).reader(name="sleeper", policy="skip") as reader:
            reader.wait(60)

    with ring.writer() as writer:
        child = fork(sleep)
        await_(lambda: int(np.frombuffer(ring._memory, np.uint32)[ring.geometry.waiting // 4]) == 1)
        child.kill()
        for _ in range(100):
            writer.write(b"")
        assert int(ring.counters["wake"]) == 1


def test_fast_packets_are_napped_for(ring: Ring, loops: Any) -> None:
    """At a pace where a nap brings a fair batch, blocking arms no futex: the writer pays nothing."""
    from rings.reader import _wait_entry

    with ring.writer() as writer, ring.reader() as reader:
        board = np.zeros(8, np.int64)
        _wait_entry(reader.record, 0, 0)
        for _ in range(50):
            loops.write(writer.record, writer.record[0]["head"] + 15, 8, 5, 1 << 62)
            while reader.record[0]["cursor"] < writer.record[0]["head"]:
                loops.read(reader.record, 0, 8, 1, board, 0, 0, 1 << 62)
        wakes = int(ring.counters["wake"])
        began = monotonic_ns()
        while int(reader.record[0]["nap_since_ns"]) < began:  # 750 frames since the last wait
            assert not _wait_entry(reader.record, 0, monotonic_ns() + 400_000)
        assert int(ring.counters["wake"]) == wakes
