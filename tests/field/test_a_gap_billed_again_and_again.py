"""Case 11 (horus#157, AtomicRing#4): a lapped reader counted the same gap at every look, 7.5 × 10⁹ missed of
681,629, and took torn data for whole."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from forked import await_
from numba import carray
from ring_loops import FRAMES, GAPS, PACKETS, TORN, is_whole, length_of, packets_of

import rings
from rings.atomics import pointer
from rings.jit import jit
from rings.layout import DESCRIPTOR
from rings.libc import monotonic_ns
from rings.reader import NEVER, is_closed, poll, release

_FRAME_BYTES = DESCRIPTOR.itemsize
LATE, STOP, JOINED = 5, 6, 8  # on the board, with what `loops.read` writes there
_SOME = 20  # batches of which the writer overtook a part while they were copied …
_WITHIN_S = 20  # … and how long a busy machine may take for them


def test_looking_often_changes_nothing(name: str) -> None:
    with rings.create(name, frames=8, arena_bytes=1024) as ring, ring.writer() as writer:
        reader = ring.reader(name="slow", policy="skip")
        for i in range(681):
            writer.write(bytes([i % 251]))
        for _ in range(100):
            reader.wait(0)
            (info,) = ring.readers()
            assert (info.delivered, info.skipped, info.unread) == (0, 0, 681)
        got = 0
        for _ in range(100):
            batch = reader.poll(1)
            if batch is not None:
                assert batch.payload(0).tobytes() == bytes([(681 - 7 + got) % 251])
                got += 1
            (info,) = ring.readers()
            assert info.skipped == 681 - 7
        assert got == 7
        assert info.delivered + info.skipped == 681
        reader.close()


@pytest.mark.parametrize("nap_s", [0.0, 0.002])
def test_received_and_missed_are_what_was_sent(
    name: str, nap_s: float, fork: Any, loops: Any, board: Any
) -> None:
    frames = 2_000_000

    def read() -> None:
        reader = rings.attach(name).reader(name="slow", policy="skip")
        board[JOINED] = 1
        while loops.read(reader.record, 0, 100, 1, board, 0, board[FRAMES] + 50, 1 << 62) != loops.CLOSED:
            time.sleep(nap_s)  # long enough to be lapped many times

        reader.close()

    def write() -> None:
        with rings.attach(name).writer() as writer:
            loops.write(writer.record, frames, 100, 4, 1 << 62)

    with rings.create(name, frames=64, arena_bytes=8192) as ring:
        reading = fork(read)
        await_(lambda: board[JOINED])
        assert fork(write).wait() == 0
        assert reading.wait() == 0
        (info,) = ring.readers()
        assert ring.published()[0] == frames
        assert info.delivered + info.skipped == ring.published()[1]
        assert info.delivered == board[PACKETS]
        assert 0 < info.skipped < ring.published()[1]
        assert board[GAPS] > 0
        assert board[TORN] == 0


@jit
def _read(state, most, board, end_ns):  # type: ignore[no-untyped-def]
    """Read and check until closed. `most` as the writer has it.

    Asks for the end after _SOME late batches, at the first torn frame or at the deadline.
    """
    r = state[0]
    while True:
        closed = is_closed(r)
        count = poll(r, NEVER)
        if count == 0:
            if closed:
                return
            continue
        # What was overtaken during the copy is left out at its beginning.
        board[LATE] += 1 if r.batch_descriptors > r.copied_descriptors else 0
        packets = 0
        for i in range(count):
            sequence = r.cursor + i
            words = carray(pointer(r.batch_descriptors + i * _FRAME_BYTES), 4, np.int64)
            length = words[2] >> 32
            address = r.batch_arena + (words[2] & 0xFFFFFFFF) * 16
            right = words[1] == sequence and length == length_of(sequence, most)
            right = right and words[0] == r.packets + packets
            if not right or not is_whole(address, sequence, length):
                board[TORN] += 1
            packets += packets_of(sequence, most)
        board[FRAMES] += count
        board[PACKETS] += packets
        release(r, count)
        if board[LATE] >= _SOME or board[TORN] > 0 or monotonic_ns() > end_ns:
            board[STOP] = 1


@pytest.mark.parametrize(
    ("frames", "arena_bytes", "most"), [(64, 1 << 20, 8000), (1024, 1 << 20, 4000), (8, 8192, 400)]
)
def test_what_is_overtaken_during_a_copy_is_missed_once(
    name: str, frames: int, arena_bytes: int, most: int, fork: Any, loops: Any, board: Any
) -> None:
    """Copies that take long beside a writer that does not wait: some are overtaken in the middle.

    On one CPU none is: between two turns of the reader the writer passes all of the ring.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    end_ns = int(monotonic_ns()) + _WITHIN_S * 1_000_000_000

    def read() -> None:
        reader = rings.attach(name).reader(name="slow", policy="skip")
        board[JOINED] = 1
        _read(reader.record, most, board, end_ns)
        reader.close()

    def write() -> None:
        with rings.attach(name).writer() as writer:
            while not board[STOP]:
                loops.write(writer.record, writer.record[0]["head"] + 1000, most, 4, end_ns)

    with rings.create(name, frames=frames, arena_bytes=arena_bytes) as ring:
        reading = fork(read)
        await_(lambda: board[JOINED])
        assert fork(write).wait(_WITHIN_S + 30) == 0
        assert reading.wait(_WITHIN_S + 30) == 0
        (info,) = ring.readers()
        assert board[TORN] == 0
        assert info.delivered == board[PACKETS]
        assert info.delivered + info.skipped == ring.published()[1]
        if board[LATE] < _SOME:  # test_torn_within_one_claim_of_a_lap.py goes through this step by step
            pytest.skip(f"the writer came in between only {board[LATE]} times in {_WITHIN_S} s")
