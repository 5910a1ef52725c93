"""The loop around a handler: everything is handled once and in order, and the loop knows when to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from forked import Child, await_
from numpy.typing import NDArray
from runs import ended

from engine.consumer import DRAINED, SLICE, Consumer, consume
from engine.handlers.api import Handler
from engine.spec import ConsumerSpec
from engine.status import STOP, Status
from engine.worker import Worker
from engine.worker import fork as fork_worker
from rings import locks
from rings.layout import LOCK_OWNER
from rings.libc import monotonic_ns
from rings.reader import Reader
from rings.ring import Ring, attach, create
from rings.writer import Writer

STATE = np.dtype([("packets", "i8"), ("bytes", "i8"), ("checksum", "i8")], align=True)


def on_packet(state, payload, meta):  # type: ignore[no-untyped-def]
    state.packets += 1
    state.bytes += payload.size
    state.checksum = state.checksum * 31 + payload.size
    if payload.size == 13:
        raise ValueError("unlucky")


counting = Handler(STATE, on_packet=on_packet)
SPEC = ConsumerSpec(handler="test:counting", name="c")


def checksum(lengths: list[int]) -> int:
    total = 0
    for length in lengths:
        total = (total * 31 + length) & (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total


@pytest.fixture(scope="module")
def consumer() -> Consumer:
    return Consumer.compile(SPEC, counting, "none")


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with create(name, frames=256, arena_bytes=1 << 16) as ring:
        yield ring


def run_for(
    consumer: Consumer,
    reader: Reader,
    state: NDArray[Any],
    seconds: float,
    pace: NDArray[np.int64] | None = None,
) -> int:
    deadline_ns = int(monotonic_ns()) + int(seconds * 1e9)
    pace = np.full(1, 64) if pace is None else pace
    handle = consumer.on_batch, state.ctypes.data
    return int(consume(reader.record, *handle, reader.strategy, pace, deadline_ns))


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("wait", ["block", "yield", "spin"])
def test_everything_is_handled_once_and_in_order(
    consumer: Consumer, ring: Ring, policy: str, wait: str
) -> None:
    lengths = [n * 7 % 300 + 20 for n in range(100)]
    state = np.zeros(1, STATE)
    with ring.writer() as writer, ring.reader("c", policy=policy, wait=wait) as reader:
        for length in lengths[:60]:
            assert writer.write(bytes(length))
        assert run_for(consumer, reader, state, 0.02) == SLICE
        assert (state[0]["packets"], state[0]["bytes"]) == (60, sum(lengths[:60]))
        for length in lengths[60:]:
            assert writer.write(bytes(length))
        writer.close()
        assert run_for(consumer, reader, state, 60) == DRAINED
        assert state[0].tolist() == (100, sum(lengths), checksum(lengths))
        assert ring.readers()[0].delivered == 100


def test_it_comes_back_at_its_deadline_under_any_load(consumer: Consumer, ring: Ring) -> None:
    """Also while packets never cease: whoever calls has other things to look after."""
    state = np.zeros(1, STATE)
    with ring.writer() as writer, ring.reader("c") as reader:
        for _ in range(200):
            writer.write(b"")
        assert run_for(consumer, reader, state, -1) == SLICE
        assert state[0]["packets"] <= 200  # one batch at most
        began_ns = int(monotonic_ns())
        assert run_for(consumer, reader, state, 0.01) == SLICE
        assert int(monotonic_ns()) - began_ns >= 10_000_000


def take_a_millisecond(state, payload, meta):  # type: ignore[no-untyped-def]
    state.packets += 1
    end_ns = monotonic_ns() + 1_000_000
    while monotonic_ns() < end_ns:
        pass


def test_batches_follow_how_long_the_handler_takes(consumer: Consumer, ring: Ring) -> None:
    """A slow one releases often, and looks at its deadline; a fast one has large batches."""
    slow = Consumer.compile(SPEC, Handler(STATE, on_packet=take_a_millisecond), "none")
    state, pace = np.zeros(1, STATE), np.full(1, 128)
    with ring.writer() as writer, ring.reader("c") as reader:
        for _ in range(200):
            writer.write(b"")
        assert run_for(slow, reader, state, -1, pace) == SLICE  # the first one shows it
        assert 1 <= pace[0] <= 10
        before = int(state[0]["packets"])
        assert run_for(slow, reader, state, -1, pace) == SLICE
        assert 1 <= state[0]["packets"] - before <= 10
        for _ in range(100):
            writer.write(b"")
            run_for(consumer, reader, state, -1, pace)
        assert pace[0] > 10


def test_a_handlers_code_ends_it_and_its_batch_is_not_released(consumer: Consumer, ring: Ring) -> None:
    state = np.zeros(1, STATE)
    with ring.writer() as writer, ring.reader("c", max_frames=4) as reader:
        for length in [1, 2, 3, 4, 5, 13, 6]:
            writer.write(bytes(length))
        assert run_for(consumer, reader, state, 60) not in (SLICE, DRAINED)
        assert state[0]["packets"] == 6
        assert ring.readers()[0].delivered == 4
        assert ring.readers()[0].unread == 3


class Life:
    """A consumer as a worker of a supervisor that is this process."""

    def __init__(self, name: str, consumer: Consumer, ring: Ring) -> None:
        self.status = Status.create(name, kind="engine", workers=["c"], state_bytes=[consumer.state_bytes])
        self.consumer, self.ring, self.restarts = consumer, ring, -1

    def start(self) -> int:
        self.restarts += 1
        readable, ready_fd = os.pipe()
        worker = Worker("c", 0, self.status, None, None, False, ready_fd=ready_fd)
        pid = fork_worker(
            worker,
            lambda worker: self.consumer.run(worker, self.ring.name, 1, restarts=self.restarts),
            self.ring.forget,
        )
        os.close(ready_fd)
        assert os.read(readable, 1) == b"r"
        os.close(readable)
        return pid

    def state(self) -> Any:
        return np.frombuffer(self.status.read(0)[1], STATE)[0]


@pytest.fixture
def life(name: str, consumer: Consumer, ring: Ring) -> Iterator[Life]:
    life = Life(name, consumer, ring)
    yield life
    life.status.close()


def write_all(writer: Writer, lengths: list[int]) -> None:
    for length in lengths:
        assert writer.write(bytes(length), timeout_s=10)


def test_its_life_from_the_first_packet_to_the_last(life: Life) -> None:
    lengths = [n % 100 + 20 for n in range(1000)]
    with life.ring.writer() as writer:
        pid = life.start()
        assert life.status.read(0)[0]["since_packet"] == 0
        write_all(writer, lengths)
    assert ended(pid) == 0
    assert life.state().tolist() == (1000, sum(lengths), checksum(lengths))
    (info,) = life.ring.readers()
    assert (info.state, info.delivered, info.unread) == ("left", 1000, 0)


def test_the_stop_word_is_not_for_it_the_closed_ring_is(life: Life) -> None:
    """It ends when all is drained, not when somebody says stop."""
    with life.ring.writer() as writer:
        pid = life.start()
        life.status.stop = STOP
        write_all(writer, [20] * 500)
    assert ended(pid) == 0
    assert life.state()["packets"] == 500


def test_after_a_death_it_goes_on_where_it_was(life: Life) -> None:
    with life.ring.writer() as writer:
        pid = life.start()
        write_all(writer, [20] * 300)
        await_(lambda: life.ring.readers()[0].delivered == 300)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        write_all(writer, [20] * 50)
        pid = life.start()
        assert life.status.read(0)[0]["since_packet"] == 300
    assert ended(pid) == 0
    assert life.state()["packets"] == 50
    assert life.ring.readers()[0].delivered == 350


def test_a_handler_that_gives_up_ends_it_with_its_words(life: Life) -> None:
    with life.ring.writer() as writer:
        pid = life.start()
        write_all(writer, [1, 13])
        assert ended(pid) == 1
    assert life.status.read(0)[0]["error"] == "consumer c: the handler raised an exception"
    assert life.state()["packets"] == 2


def abandon_after(name: str, lengths: list[int], board: NDArray[Any]) -> None:
    """A writer's life that ends without a word."""
    ring = attach(name)
    writer = ring.writer()
    write_all(writer, lengths)
    board[0] = 1
    await_(lambda: board[1])


def test_without_supervisor_and_writer_it_drains_and_leaves(
    name: str, life: Life, fork: Callable[..., Child], board: NDArray[Any]
) -> None:
    writer = fork(abandon_after, name, [20] * 100, board)
    await_(lambda: board[0])
    pid = life.start()
    locks.release(life.status.segment.fd, LOCK_OWNER)
    board[1] = 1
    assert writer.wait() == 0
    assert ended(pid) == 0
    (info,) = life.ring.readers()
    assert (info.state, info.unread) == ("left", 0)
