from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import await_

from rings import locks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "locked"
    file.touch()
    return file


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _hold(path: Path, byte: int, board: Any) -> None:
    assert locks.acquire(_open(path), byte)
    board[0] = 1
    signal.pause()


def test_one_holder_for_each_byte(path: Path) -> None:
    one, other = _open(path), _open(path)
    assert not locks.held_by_other(other, 5)
    assert locks.acquire(one, 5)
    assert locks.acquire(one, 5)  # of the same description: it has it already
    assert locks.held_by_other(other, 5)
    assert not locks.held_by_other(one, 5)
    assert not locks.acquire(other, 5)
    assert locks.acquire(other, 4)
    assert locks.acquire(other, 6)
    locks.release(one, 5)
    assert locks.acquire(other, 5)
    os.close(other)
    assert not locks.held_by_other(one, 5)
    os.close(one)


def test_the_kernel_frees_it_at_death_and_not_at_sigstop(path: Path, fork: Any, board: Any) -> None:
    fd = _open(path)
    child = fork(_hold, path, 64, board)
    await_(lambda: board[0])
    assert locks.held_by_other(fd, 64)
    child.send(signal.SIGSTOP)
    assert locks.held_by_other(fd, 64)
    child.kill()
    assert not locks.held_by_other(fd, 64)
    os.close(fd)


def _acquire_in_time(path: Path, byte: int) -> None:
    assert locks.acquire_within(_open(path), byte, 20.0)


def test_who_waits_gets_it_at_death(path: Path, fork: Any, board: Any) -> None:
    fd = _open(path)
    child = fork(_hold, path, 2, board)
    await_(lambda: board[0])
    assert not locks.acquire_within(fd, 2, 0.02)
    waiting = fork(_acquire_in_time, path, 2)
    child.kill()
    assert waiting.wait() == 0
    os.close(fd)


def test_a_forked_child_keeps_its_parents_lock_until_it_closes_it(path: Path, fork: Any) -> None:
    """The reason for Segment.forget."""
    fd, other = _open(path), _open(path)
    assert locks.acquire(fd, 1)
    child = fork(signal.pause)
    os.close(fd)
    assert locks.held_by_other(other, 1)
    child.kill()
    assert not locks.held_by_other(other, 1)
    os.close(other)


def test_other_errors_are_not_taken_for_a_holder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        locks.acquire(fd, 1)
    os.close(fd)


def test_compiled_code_sees_the_same(path: Path) -> None:
    from rings.writer import _is_locked

    one, other = _open(path), _open(path)
    assert not _is_locked(other, 70)
    locks.acquire(one, 70)
    assert _is_locked(other, 70)
    assert not _is_locked(other, 71)
    assert not _is_locked(one, 70)
    os.close(one)
    assert not _is_locked(other, 70)
    os.close(other)
    assert _is_locked(other, 70)  # it can't tell: nobody is evicted on a guess
