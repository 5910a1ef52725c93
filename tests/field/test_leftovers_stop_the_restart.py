"""Case 14 (iceoryx2#601, #1584, posix_ipc#6, #51): after kill -9 what was left behind stopped the restart, or
an empty object killed who opened it with SIGBUS."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from forked import await_

import rings
from rings import RingError
from rings.segment import SHM, object_name


def _run(name: str, board: Any) -> None:
    ring = rings.create(name, frames=64, arena_bytes=8192)
    writer, reader = ring.writer(), ring.reader(name="reader")
    writer.write(b"before")
    board[0] += 1
    signal.pause()
    reader.close()


def test_restart_after_kill_9(name: str, fork: Any, loops: Any, board: Any) -> None:
    for round_ in range(1, 6):
        child = fork(_run, name, board)
        await_(lambda round_=round_: board[0] == round_)
        child.kill()
        assert (SHM / object_name(name, 0)[1:]).exists()
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        assert ring.published() == (0, 0)
        assert ring.readers() == []


@pytest.mark.parametrize("content", [b"", b"\0", bytes(100), bytes(4096), bytes(1 << 20), b"x" * 4096])
def test_what_a_creator_left_half_done(name: str, content: bytes) -> None:
    path = SHM / object_name(name, 0)[1:]
    path.write_bytes(content)
    with pytest.raises(RingError, match=r"never finished|not a ring") as refusal:
        rings.attach(name, timeout_s=0)
    assert "\n" not in str(refusal.value)
    assert [info.readable for info in rings.list() if info.name == name] == [False]
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        with ring.writer() as writer:
            assert writer.write(b"works")
        assert ring.published() == (1, 1)


def test_an_object_cut_short_is_refused_not_a_sigbus(name: str) -> None:
    with rings.create(name, frames=64, arena_bytes=8192) as ring:
        os.truncate(SHM / ring.segment.object[1:], 8192)
        with pytest.raises(RingError, match="is 8192 bytes, its geometry says"):
            rings.attach(name)


def test_collecting_spares_the_living_and_other_users(name: str, fork: Any, board: Any) -> None:
    killed = fork(_run, name + "k", board)
    await_(lambda: board[0] == 1)
    living = fork(_run, name + "l", board)
    await_(lambda: board[0] == 2)
    killed.kill()
    foreign = SHM / f"rxring-{os.getuid() + 7}-{name}-0"
    foreign.touch()
    status = SHM / object_name(name, "status")[1:]
    status.write_bytes(b"RXSTAT")
    being_made = SHM / object_name(name, 1)[1:]
    being_made.touch(0o600)
    try:
        collected = [found for found in rings.collect() if name in found]
        assert sorted(collected) == sorted([object_name(name + "k", 0)[1:], status.name])
        assert foreign.exists()
        assert being_made.exists()
        assert (SHM / object_name(name + "l", 0)[1:]).exists()
    finally:
        living.kill()
        rings.remove(name + "l")
