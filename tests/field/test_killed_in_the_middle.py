"""Case 13 (iceoryx#325, #1546, #2193, ramen#221): a peer killed in the middle of an operation left the ring
hanging for the others. Here at random moments; tests/rings/test_interleavings.py goes through every place."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from forked import await_
from ring_loops import FRAMES, PACKETS, TORN

import rings
from rings.ring import Ring

SLOTS = 4


def _come_and_go(name: str, loops: Any, board: Any, policy: str) -> None:
    ring = rings.attach(name)
    for i in range(1 << 30):
        with ring.reader(name=f"{policy}{i % 2}", policy=policy) as reader:
            loops.read(reader.record, 1, 100, 2, board, 8, board[8] + 20, 1 << 62)


def _write(name: str, loops: Any) -> None:
    while True:
        writer = rings.attach(name).writer()
        loops.write(writer.record, writer.record[0]["head"] + 3000, 100, 4, 1 << 62)
        writer.abandon()


def _read(name: str, loops: Any, board: Any) -> None:
    with rings.attach(name).reader(name="survivor") as reader:
        board[5] = 1
        loops.read(reader.record, 0, 100, 2, board, 0, 1 << 62, 1 << 62)


def _balanced(ring: Ring) -> None:
    for info in ring.readers():
        total = info.delivered + info.skipped + info.passed + info.unread + info.joined_packets
        assert total == ring.published()[1]


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_reader_or_the_writer_killed_at_any_moment(
    name: str, policy: str, fork: Any, loops: Any, board: Any
) -> None:
    chance = random.Random(policy)
    with rings.create(name, frames=64, arena_bytes=8192, readers=SLOTS) as ring:
        survivor = fork(_read, name, loops, board)
        await_(lambda: board[5])
        writer = fork(_write, name, loops)
        await_(lambda: ring.published()[0] > 0)
        for round_ in range(40):
            victim = fork(_come_and_go, name, loops, board, policy)
            time.sleep(chance.random() * 0.02)
            if round_ % 4 == 3:
                writer.kill()
                _balanced_after_death = ring.readers()
                writer = fork(_write, name, loops)
            victim.kill()
            before = ring.published()[0]
            await_(lambda before=before: ring.published()[0] > before + 100)  # nobody hangs
        writer.kill()
        _balanced(ring)
        # All slots can be had again, and the ring works.
        readers = [ring.reader(name=f"after {i}") for i in range(SLOTS - 1)]
        end = ring.writer()
        loops.write(end.record, ring.published()[0] + 1000, 100, 4, time.monotonic_ns() + 10**7)
        for reader in readers:
            reader.close()
        end.close()
        assert survivor.wait() == 0
        _balanced(ring)
        assert board[TORN] == board[8 + TORN] == 0
        info = next(info for info in ring.readers() if info.name == "survivor")
        assert (info.delivered, info.skipped, info.unread) == (board[PACKETS], 0, 0)
        assert board[FRAMES] == ring.published()[0]


def test_the_owner_killed_with_everyone_at_work(name: str, fork: Any, loops: Any, board: Any) -> None:
    """Those who read go on, drain, and see that nobody will come; nothing but the dead is collected."""

    def own() -> None:
        ring = rings.create(name, frames=64, arena_bytes=8192)
        writer = ring.writer()
        board[16] = 1
        loops.write(writer.record, 1 << 62, 100, 4, 1 << 62)

    owner = fork(own)
    await_(lambda: board[16])
    ring = rings.attach(name)
    reader = ring.reader(name="reader")
    loops.read(reader.record, 0, 100, 1, board, 0, 5000, 1 << 62)
    owner.kill()
    assert reader.state == "orphaned"
    left = ring.published()[0] - int(reader.record[0]["cursor"])
    loops.read(reader.record, 0, 100, 1, board, 0, board[FRAMES] + left, time.monotonic_ns() + 10**9)
    (info,) = ring.readers()
    assert (info.unread, info.skipped) == (0, 0)
    assert info.delivered == board[PACKETS]
    assert board[TORN] == 0
    reader.close()
    ring.close()
    assert [found for found in rings.collect() if name in found]
