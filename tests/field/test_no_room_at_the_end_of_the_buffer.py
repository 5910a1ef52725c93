"""Case 22 (agrona#22): a record did not fit before the end of the buffer, and the reader was stuck.

Every length against every place near the end: all of them in small arenas, the lengths of real datagrams
(0 … 65,507, and a whole GRO frame's 65,536) in one that is just large enough.
"""

from __future__ import annotations

import numpy as np
import pytest
from ring_loops import most_at_every_offset

import rings
from rings.layout import ALIGN, MAX_FRAME_BYTES


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("arena", [32, 64, 256, 512])
def test_every_length_at_every_offset(name: str, policy: str, arena: int) -> None:
    with rings.create(name, frames=64, arena_bytes=arena) as ring, ring.writer() as writer:
        reader = ring.reader(policy=policy)
        for offset in range(0, arena, ALIGN):
            for length in range(arena // 2 + 1):
                _go_to(writer, reader, offset, arena)
                payload = bytes([length % 251]) * length
                assert writer.write(payload)
                batch = reader.poll()
                assert batch is not None
                assert batch.payload(0).tobytes() == payload
                at = int(batch.descriptors["offset"][0]) * ALIGN
                assert at + length <= arena
                assert at == (offset if offset + length <= arena else 0)
                reader.poll()
        reader.close()


def _go_to(writer: object, reader: object, offset: int, arena: int) -> None:
    """The next payload's place is `offset`: fill up to there, and read it."""
    while True:
        here = int(writer.record[0]["position"]) & (arena - 1)  # type: ignore[attr-defined]
        if here == offset:
            return
        step = min((offset - here) & (arena - 1), arena // 2)
        if here + step > arena:
            step = arena - here
        assert writer.write(bytes(step))  # type: ignore[attr-defined]
        while reader.poll() is not None:  # type: ignore[attr-defined]
            pass


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_every_datagram_near_the_end(name: str, policy: str) -> None:
    """Each length 0 … 65,536, its place drawn from those where it just fits, just does not, or may not."""
    board = np.zeros(4, np.int64)
    arena = 1 << 17
    with rings.create(name, frames=64, arena_bytes=arena) as ring, ring.writer() as writer:
        reader = ring.reader(policy=policy)
        wrong = most_at_every_offset(writer.record, reader.record, MAX_FRAME_BYTES, board)
        assert wrong == 0
        assert board[0] == MAX_FRAME_BYTES + 1
        assert board[1] > MAX_FRAME_BYTES // 4  # went round
        assert board[2] > MAX_FRAME_BYTES // 4  # fitted before the end
        info = ring.readers()[0]
        assert (info.skipped, info.unread) == (0, 0)
        reader.close()
