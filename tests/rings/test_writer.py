from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forked import await_
from ring_loops import put, reserve_only

import rings
from rings import RingError
from rings.layout import ALIGN, MAX_FRAME_BYTES, SlotState
from rings.ring import Ring


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=8, arena_bytes=1024, readers=4) as made:
        yield made


def _put(writer: Any, *lengths: int, segment: int = 0) -> bool:
    data = np.frombuffer(bytes(range(256)) * (sum(lengths) // 256 + 1), np.uint8)
    return bool(put(writer.record, data, np.array(lengths), np.full(len(lengths), segment)))


def test_one_writer(ring: Ring, name: str) -> None:
    writer = ring.writer()
    with pytest.raises(RingError, match="has a writer: there can be only one"):
        ring.writer()
    with pytest.raises(RingError, match="has a writer"), rings.attach(name) as attached:
        attached.writer()
    writer.abandon()
    with ring.writer():
        assert ring.state == "live"
    assert ring.state == "closed"


def test_epochs_and_pids_are_told(ring: Ring) -> None:
    import os

    for epoch in (1, 2, 3):
        with ring.writer():
            assert int(ring.counters["epoch"]) == epoch
            assert int(ring.counters["pid"]) == os.getpid()


@pytest.mark.parametrize(
    "payload",
    [
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        np.frombuffer(b"abc", np.uint8),
        memoryview(b"xabcx")[1:4],
    ],
)
def test_any_contiguous_buffer(ring: Ring, payload: Any) -> None:
    writer, reader = ring.writer(), ring.reader()
    assert writer.write(payload, time_ns=42)
    (batch,) = [reader.poll()]
    assert batch is not None
    assert batch.payload(0).tobytes() == b"abc"
    assert batch.descriptors["time_ns"].tolist() == [42]


def test_other_types_count_their_bytes(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    numbers = np.arange(4, dtype=np.float32)
    writer.write(numbers)
    batch = reader.poll()
    assert batch is not None
    assert batch.payload(0).view(np.float32).tolist() == [0, 1, 2, 3]


def test_now_is_the_default_time(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    before = time.clock_gettime_ns(time.CLOCK_REALTIME)
    writer.write(b"")
    batch = reader.poll()
    assert batch is not None
    assert before <= batch.descriptors["time_ns"][0] <= time.clock_gettime_ns(time.CLOCK_REALTIME)


@pytest.mark.parametrize(("arena", "most"), [(1024, 512), (1 << 20, MAX_FRAME_BYTES)])
def test_what_is_too_long_is_refused_and_nothing_changes(name: str, arena: int, most: int) -> None:
    with rings.create(name, frames=8, arena_bytes=arena) as ring, ring.writer() as writer:
        with pytest.raises(RingError, match=f"{most + 1} bytes do not fit"):
            writer.write(bytes(most + 1))
        assert ring.published() == (0, 0)
        assert writer.write(bytes(most))
        reader = ring.reader(policy="skip", max_bytes=1)
        writer.write(b"\1" * most)
        batch = reader.poll()
        assert batch is not None
        assert batch.payload(0).tobytes() == b"\1" * most
        reader.close()


def test_after_close_nothing_is_written(ring: Ring) -> None:
    writer = ring.writer()
    writer.close()
    writer.close()
    with pytest.raises(RingError, match="is closed: take another"):
        writer.write(b"x")
    writer = ring.writer()
    writer.abandon()
    with pytest.raises(RingError, match="is closed"):
        writer.write(b"x")
    assert ring.published() == (0, 0)


def test_counters(ring: Ring) -> None:
    with ring.writer() as writer:
        writer.write(b"12345")
        _put(writer, 10, 20, 0)
        _put(writer, 250, segment=100)
        counters = ring.counters
        assert int(counters["packets"]) == 1 + 3 + 3
        assert int(counters["bytes"]) == 5 + 30 + 250
        assert ring.published() == (5, 7)


def test_n_frames_hold_n_minus_one(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    assert [writer.write(b"", timeout_s=0) for _ in range(9)] == [True] * 7 + [False] * 2
    assert ring.first_packet(7) == 7
    assert [batch.frames for batch in iter(reader.poll, None)] == [4, 3]
    assert writer.write(b"")


def test_m_bytes_hold_m_minus_16(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    assert _put(writer, 504)
    assert not _put(writer, 512)
    assert _put(writer, 496)
    assert not _put(writer, 0, 1)
    assert _put(writer, 0)
    assert [(b.frames, b.arena.size) for b in iter(reader.poll, None)] == [(1, 504), (2, 496)]
    assert _put(writer, 1008)


def test_a_payload_never_straddles_the_end(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    for length in itertools.islice(itertools.cycle([300, 17, 0, 461, 128]), 500):
        assert writer.write(b"z" * length)
        batch = reader.poll()
        assert batch is not None
        at, size = int(batch.descriptors["offset"][0]) * ALIGN, int(batch.descriptors["length"][0])
        assert size == length
        assert at + size <= 1024
        assert batch.payload(0).tobytes() == b"z" * length
        reader.poll()


def test_a_batch_is_contiguous_and_dense(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    assert _put(writer, 1, 16, 17, 0, 3)
    batch = reader.poll(5)
    assert batch is not None
    assert (batch.descriptors["offset"] * ALIGN).tolist()[:4] == [0, 16, 32, 64]


def test_the_floor_rises_before_anything_is_overwritten(ring: Ring) -> None:
    writer = ring.writer()
    for sent in range(40):
        writer.write(bytes(sent % 3 * 100))
        floor, head = int(ring.counters["floor"]), ring.published()[0]
        assert head - floor <= 7
    assert reserve_only(writer.record, 7, 0)
    assert int(ring.counters["floor"]) == 40  # nothing has come, but it might have


def test_a_reserve_of_all_that_there_is(ring: Ring) -> None:
    writer = ring.writer()
    for _ in range(20):
        assert _put(writer, *[144] * 7)
        assert int(ring.counters["floor"]) == ring.published()[0] - 7


# Full, and the dead -----------------------------------------------------------------------------------


def test_full_is_counted_once_and_timed(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    while writer.write(b"", timeout_s=0):
        pass
    for _ in range(5):
        assert not writer.write(b"", timeout_s=0)
    before = time.monotonic_ns()
    assert not writer.write(b"", timeout_s=0.02)
    assert time.monotonic_ns() - before >= 20_000_000
    assert int(ring.counters["full_events"]) == 1
    stalled_ns = int(ring.counters["full_ns"])
    assert stalled_ns >= 20_000_000  # while it lasts, too
    reader.poll()
    reader.poll()
    assert writer.write(b"")
    assert int(ring.counters["full_events"]) == 1
    assert stalled_ns < int(ring.counters["full_ns"]) < 60_000_000_000
    assert int(ring.counters["high_water"]) == 7


def test_a_write_comes_when_there_is_room(ring: Ring) -> None:
    writer = ring.writer()
    reader = ring.reader()
    while writer.write(b"", timeout_s=0):
        pass

    def release_later() -> None:
        time.sleep(0.15)
        reader.release(7)

    reader.poll()
    thread = threading.Thread(target=release_later)
    thread.start()
    assert writer.write(b"at last")
    thread.join()


def test_ctrl_c_ends_a_write_that_waits(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    while writer.write(b"", timeout_s=0):
        pass
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.write(b"", timeout_s=600)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 10
    reader.close()


def test_only_the_dead_in_the_way_are_evicted(ring: Ring) -> None:
    writer = ring.writer()
    readers = {name: ring.reader(name=name) for name in ("dead", "living", "ahead")}
    while writer.write(b"", timeout_s=0):
        pass
    for name in ("living", "ahead"):
        while readers[name].poll():
            pass
    readers["dead"]._segment.forget()
    readers["ahead"]._segment.forget()
    assert [info.state for info in ring.readers()] == ["dead", "active", "dead"]
    assert writer.write(b"")
    words = [int(word) & 0xFF for word in ring.slots["word"]]
    assert words == [SlotState.FREE, SlotState.ACTIVE, SlotState.ACTIVE, SlotState.FREE]
    assert [info.state for info in ring.readers()] == ["dead", "active", "dead"]


def test_a_living_reader_is_never_evicted(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    while writer.write(b"", timeout_s=0):
        pass
    for _ in range(100):
        assert not writer.write(b"", timeout_s=0)
    assert int(ring.slots["word"][0]) & 0xFF == SlotState.ACTIVE
    assert sum(batch.frames for batch in iter(reader.poll, None)) == 7


def test_skippers_and_those_who_left_are_not_waited_for(ring: Ring) -> None:
    writer = ring.writer()
    skipper = ring.reader(name="skipper", policy="skip")
    ring.reader(name="left").close()
    assert all(writer.write(b"") for _ in range(100))
    assert int(ring.counters["full_events"]) == 0
    skipper.close()


# Restart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", range(20))
def test_the_next_writer_goes_on_where_the_last_published(ring: Ring, before: int) -> None:
    reader = ring.reader(policy="skip")
    writer = ring.writer()
    for i in range(before):
        writer.write(bytes([i]) * (37 * i % 300))
    floor = int(ring.counters["floor"])
    reserve_only(writer.record, 2, 200)  # it dies in the middle of a batch
    reserved = int(ring.counters["floor"])
    writer.abandon()
    writer = ring.writer()
    assert ring.published() == (before, before)
    assert int(ring.counters["floor"]) == reserved >= floor
    for i in range(before, before + 20):
        assert writer.write(bytes([i]) * (37 * i % 300))
        batches = [reader.poll()]
        assert batches[0] is not None
        while reader.record[0]["cursor"] + batches[-1].frames <= i:  # type: ignore[union-attr]
            batches.append(reader.poll())
        got = [b.payload(k).tobytes() for b in batches[-1:] if b for k in range(len(b))]
        assert got[-1] == bytes([i]) * (37 * i % 300)
    info = ring.readers()[0]
    assert info.delivered + info.skipped + info.unread == before + 20
    reader.close()


def test_a_restarted_writer_waits_for_the_readers_of_the_last(ring: Ring) -> None:
    reader = ring.reader()
    writer = ring.writer()
    while writer.write(b"old", timeout_s=0):
        pass
    writer.abandon()
    writer = ring.writer()
    assert not writer.write(b"new", timeout_s=0)
    got = []
    for batch in iter(reader.poll, None):
        got += [batch.payload(i).tobytes() for i in range(len(batch))]
    assert got == [b"old"] * 7
    assert writer.write(b"new")
    reader.close()


def test_a_killed_writer_is_followed(ring: Ring, name: str, fork: Any, loops: Any) -> None:
    def write() -> None:
        writer = rings.attach(name).writer()
        loops.write(writer.record, 1 << 60, 100, 3, 1 << 62)

    reader = ring.reader(policy="skip")
    board = np.zeros(8, np.int64)
    for _ in range(10):
        before = ring.published()
        child = fork(write)
        await_(lambda before=before: ring.published()[0] > before[0] + 1000)
        loops.read(reader.record, 0, 100, 1, board, 0, 1 << 60, 0)
        child.kill()
        assert ring.state == "orphaned"
    writer = ring.writer()
    loops.write(writer.record, ring.published()[0] + 100, 100, 3, 1 << 62)
    writer.close()
    assert loops.read(reader.record, 0, 100, 1, board, 0, 1 << 60, 1 << 62) == 1
    assert board[loops.TORN] == 0
    info = ring.readers()[0]
    assert info.delivered == board[loops.PACKETS]
    assert info.delivered + info.skipped == ring.published()[1]
    assert int(ring.counters["epoch"]) == 11
    reader.close()
