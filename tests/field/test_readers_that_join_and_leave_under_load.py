"""Case 20 (disruptor#30): readers that joined and left while packets flowed made the others throw, or lose.

Here 10,000 of them come and go beside a writer at full rate: the one that stays has every frame, whole and in
order, and each of the others an account that adds up, in a slot that is free again.
"""

from __future__ import annotations

from typing import Any

from forked import await_
from ring_loops import FRAMES, PACKETS, TORN

import rings
from rings.ring import Ring

TIMES = 10_000
MOST = 60  # bytes of a payload
_STEADY, _SHORT, _JOINED, _STOP = 0, 16, 40, 41  # places on the board


def test_whoever_stays_loses_nothing(name: str, fork: Any, loops: Any, board: Any) -> None:
    def stay() -> None:
        with rings.attach(name).reader("steady") as reader:
            board[_JOINED] += 1
            assert loops.read(reader.record, 0, MOST, 2, board, _STEADY, 1 << 62, 1 << 62) == loops.CLOSED

    def write() -> None:
        with rings.attach(name).writer() as writer:
            while not board[_STOP]:
                head = int(writer.record[0]["head"])
                loops.write(writer.record, head + 1000, MOST, 8, 1 << 62)

    with rings.create(name, frames=1024, arena_bytes=1 << 16, readers=4) as ring:
        staying = fork(stay)
        await_(lambda: board[_JOINED] == 1)
        writing = fork(write)
        for n in range(TIMES):
            come_and_go(ring, ("gate", "skip")[n % 2], loops, board)
        board[_STOP] = 1
        assert writing.wait() == 0
        assert staying.wait() == 0
        frames, packets = ring.published()
        assert board[_STEADY + FRAMES] == frames > 0
        assert board[_STEADY + PACKETS] == packets
        assert board[_STEADY + TORN] == board[_SHORT + TORN] == 0
        assert [reader.state for reader in ring.readers()] == ["left"] * len(ring.readers())


def come_and_go(ring: Ring, policy: str, loops: Any, board: Any) -> None:
    """Join, read what is there or nothing, and leave; the account adds up from first to last."""
    with ring.reader("short", policy=policy) as reader:
        joined = int(reader.record[0]["packets"])
        loops.read(reader.record, 0, MOST, 1, board, _SHORT, board[_SHORT + FRAMES] + 1, 0)
        record = reader.record[0]
        assert record["delivered"] + record["skipped"] == record["packets"] - joined
    (info,) = (info for info in ring.readers() if info.name == "short")
    assert (info.state, info.joined_packets) == ("left", joined)
