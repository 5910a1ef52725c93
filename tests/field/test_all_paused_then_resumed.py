"""Case 23 (aeron#268): all processes were paused for longer than a time-out, and stuck after they went on.

No time-out decides who lives here. Everyone is stopped, at any moment, and goes on in any order: nothing is
lost but what is counted.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Child, await_
from ring_loops import FRAMES, PACKETS, TORN

import rings


def _read(name: str, loops: Any, board: Any, at: int, policy: str, wait: str) -> None:
    with rings.attach(name).reader(name=policy, policy=policy, wait=wait) as reader:
        board[at + 5] = 1
        loops.read(reader.record, reader.strategy, 100, 2, board, at, 1 << 62, 1 << 62)


def _write(name: str, loops: Any) -> None:
    writer = rings.attach(name).writer()
    loops.write(writer.record, 1 << 62, 100, 4, 1 << 62)


def _is_stopped(child: Child) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("wait", ["block", "yield"])
def test_all_stopped_and_resumed_in_any_order(
    name: str, wait: str, fork: Any, loops: Any, board: Any
) -> None:
    chance = random.Random(wait)
    with rings.create(name, frames=64, arena_bytes=8192) as ring:
        readers = [
            fork(_read, name, loops, board, 0, "gate", wait),
            fork(_read, name, loops, board, 8, "skip", wait),
        ]
        await_(lambda: board[5] and board[13])
        everyone = [*readers, fork(_write, name, loops)]
        for round_ in range(12):
            before = ring.published()[0]
            await_(lambda: ring.published()[0] > before)  # noqa: B023 — it is called at once
            for child in chance.sample(everyone, 3):
                child.send(signal.SIGSTOP)
            await_(lambda: all(_is_stopped(child) for child in everyone))
            paused = ring.published()
            time.sleep(0.25 if round_ == 0 else 0.01)  # longer than any wait in the ring
            assert ring.published() == paused
            assert ring.state == "live"
            assert [info.state for info in ring.readers()] == ["active", "active"]
            for child in chance.sample(everyone, 3):
                child.send(signal.SIGCONT)
        before = ring.published()[0]
        await_(lambda: ring.published()[0] > before + 1000)
        everyone[-1].kill()
        ring.writer().close()
        assert [reader.wait() for reader in readers] == [0, 0]
        gate, skip = ring.readers()
        assert board[TORN] == board[8 + TORN] == 0
        assert board[FRAMES] == ring.published()[0]
        assert (gate.delivered, gate.skipped, gate.unread) == (board[PACKETS], 0, 0)
        assert (skip.delivered, skip.unread) == (board[8 + PACKETS], 0)
        assert skip.delivered + skip.skipped == ring.published()[1]


def test_a_stopped_reader_is_not_taken_for_dead(name: str, fork: Any, loops: Any, board: Any) -> None:
    """The writer waits for a gate however long it stands; one that is killed while it stands is let go."""
    with rings.create(name, frames=64, arena_bytes=8192) as ring:
        reader = fork(_read, name, loops, board, 0, "gate", "block")
        await_(lambda: board[5])
        reader.send(signal.SIGSTOP)
        await_(lambda: _is_stopped(reader))
        writer = ring.writer()
        while writer.write(b"", time_ns=1, timeout_s=0):
            pass
        assert not writer.write(b"", timeout_s=4)  # no time-out of seconds that lets it go
        assert ring.readers()[0].state == "active"
        reader.kill()
        assert writer.write(b"", timeout_s=5)
        assert ring.readers()[0].state == "dead"
        writer.close()
