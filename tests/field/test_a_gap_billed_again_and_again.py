"""Case 11 (horus#157, AtomicRing#4): a lapped reader counted the same gap at every look, 7.5 × 10⁹ missed of
681,629, and took torn data for whole."""

from __future__ import annotations

from typing import Any

import pytest
from forked import await_
from ring_loops import FRAMES, GAPS, PACKETS, TORN

import rings


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
    import time

    frames = 2_000_000

    def read() -> None:
        reader = rings.attach(name).reader(name="slow", policy="skip")
        board[8] = 1
        while loops.read(reader.record, 0, 100, 1, board, 0, board[FRAMES] + 50, 1 << 62) != loops.CLOSED:
            time.sleep(nap_s)  # long enough to be lapped many times

        reader.close()

    def write() -> None:
        with rings.attach(name).writer() as writer:
            loops.write(writer.record, frames, 100, 4, 1 << 62)

    with rings.create(name, frames=64, arena_bytes=8192) as ring:
        reading = fork(read)
        await_(lambda: board[8])
        assert fork(write).wait() == 0
        assert reading.wait() == 0
        (info,) = ring.readers()
        assert ring.published()[0] == frames
        assert info.delivered + info.skipped == ring.published()[1]
        assert info.delivered == board[PACKETS]
        assert 0 < info.skipped < ring.published()[1]
        assert board[GAPS] > 0
        assert board[TORN] == 0
