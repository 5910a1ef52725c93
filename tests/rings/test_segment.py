from __future__ import annotations

import ctypes
import os
import signal
import stat
import time
from typing import Any

import pytest
from forked import await_, descriptors_of

from rings import locks, segment
from rings.layout import LOCK_OWNER, LOCK_WRITER
from rings.segment import (
    SHM,
    RingError,
    check_name,
    create_segment,
    find,
    object_name,
    open_segment,
    remove_if_dead,
)

SIZE = 64 * 1024


@pytest.fixture
def object_(name: str) -> str:
    return object_name(name, 0)


@pytest.mark.parametrize("bad", ["", "a" * 33, "a/b", "-a", "ä", ".", "..", "a b", "a\n", "a\0"])
def test_bad_names(bad: str) -> None:
    with pytest.raises(RingError, match="use 1 to 32 of"):
        check_name(bad)


@pytest.mark.parametrize("good", ["a", "A_z.9", "a" * 32, "..."])
def test_good_names(good: str) -> None:
    assert check_name(good) == good


@pytest.mark.parametrize("number", [-1, 10_000])
def test_bad_numbers(number: int) -> None:
    """A number that the list would not find again is none."""
    with pytest.raises(RingError, match="use 0 to 9999"):
        object_name("a", number)


def test_created_private_whole_and_zero(object_: str) -> None:
    made = create_segment(object_, SIZE)
    status = os.stat(SHM / object_[1:])
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE  # committed, never a SIGBUS later
    assert bytes(made.map(writable=False)) == bytes(SIZE)
    assert not os.get_inheritable(made.fd)
    made.unlink()
    assert not (SHM / object_[1:]).exists()
    made.forget()


def test_opened_with_its_own_size(object_: str) -> None:
    made = create_segment(object_, SIZE)
    made.map(writable=True)[5] = 7
    opened = open_segment(object_)
    assert opened.size == SIZE
    assert opened.map(writable=False)[5] == 7
    with pytest.raises(FileNotFoundError):
        open_segment(object_ + "1")
    made.unlink()


def test_what_is_mapped_read_only_cannot_be_written(object_: str) -> None:
    made = create_segment(object_, SIZE)
    view = made.map(writable=False)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    made.unlink()


def test_a_living_owner_keeps_its_name(object_: str, fork: Any, board: Any) -> None:
    def own() -> None:
        made = create_segment(object_, SIZE)
        board[0] = made.fd
        signal.pause()

    child = fork(own)
    await_(lambda: board[0])
    with pytest.raises(RingError, match=f"{object_[1:]} is in use by process {child.pid}: end it first"):
        create_segment(object_, SIZE)
    assert not remove_if_dead(object_)
    child.kill()
    made = create_segment(object_, 2 * SIZE)
    assert made.size == os.stat(SHM / object_[1:]).st_size == 2 * SIZE
    made.unlink()


def test_a_living_writer_without_an_owner_keeps_it_too(object_: str) -> None:
    made = create_segment(object_, SIZE)
    writer = made.reopen()
    assert locks.acquire(writer.fd, LOCK_WRITER)
    made.forget()
    assert not remove_if_dead(object_)
    writer.forget()
    assert remove_if_dead(object_, unfinished_s=0)
    assert remove_if_dead(object_)


def test_no_lock_outlives_forget_not_even_with_arrays_on_the_mapping(object_: str) -> None:
    made = create_segment(object_, SIZE)
    other = made.reopen()
    view = made.map(writable=True)
    assert locks.held_by_other(other.fd, LOCK_OWNER)
    made.forget()
    assert not locks.held_by_other(other.fd, LOCK_OWNER)
    view[0] = 1  # still mapped
    assert bytes(other.map(writable=False, length=4096))[0] == 1
    other.unlink()


def test_a_forked_child_that_forgets_keeps_no_lock_of_its_parents(
    object_: str, fork: Any, board: Any
) -> None:
    def parent() -> None:
        made = create_segment(object_, SIZE)
        view = made.map(writable=True)
        if os.fork() == 0:
            made.forget()
            board[0] = os.getpid()
            signal.pause()
        await_(lambda: board[0])
        del view
        os.kill(os.getpid(), signal.SIGKILL)

    fork(parent).wait()
    try:
        looking = open_segment(object_)
        assert not locks.held_by_other(looking.fd, LOCK_OWNER)
        looking.unlink()
    finally:
        os.kill(int(board[0]), signal.SIGKILL)


def test_what_is_dropped_lets_go(object_: str) -> None:
    made = create_segment(object_, SIZE)
    other = made.reopen()
    before = descriptors_of(object_)
    del made
    assert not locks.held_by_other(other.fd, LOCK_OWNER)
    assert descriptors_of(object_) == before - 1
    other.unlink()


def test_unlink_spares_a_later_object_of_the_name(object_: str) -> None:
    old = create_segment(object_, SIZE)
    assert old.is_linked()
    os.unlink(SHM / object_[1:])
    assert not old.is_linked()
    new = create_segment(object_, SIZE)
    old.unlink()
    assert not old.is_linked()
    assert new.is_linked()
    new.unlink()
    new.unlink()


def test_an_unfinished_object_is_spared_for_a_minute_and_replaced_at_once(object_: str) -> None:
    create_segment(object_, SIZE).forget()  # its creator died before the magic
    assert not remove_if_dead(object_)
    create_segment(object_, SIZE).forget()
    fd = os.open(SHM / object_[1:], os.O_RDWR)
    os.pwrite(fd, b"MAGIC", 0)
    os.close(fd)
    assert remove_if_dead(object_)


def test_an_old_unfinished_object_is_removed(object_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_segment(object_, SIZE).forget()
    later = time.time() + 61
    monkeypatch.setattr(segment.time, "time", lambda: later)
    assert remove_if_dead(object_)


def test_an_empty_object_is_unfinished(object_: str) -> None:
    (SHM / object_[1:]).touch(0o600)
    assert not remove_if_dead(object_)
    assert remove_if_dead(object_, unfinished_s=0)


def test_of_many_that_create_at_once_one_does(object_: str, fork: Any, board: Any) -> None:
    def create(mine: int) -> None:
        await_(lambda: board[0])
        try:
            made = create_segment(object_, SIZE)
        except RingError as error:
            board[mine] = 2 if "is in use" in str(error) else 3
        else:
            board[mine] = 1
            await_(lambda: board[0] == 2)
            assert made.is_linked()
            made.unlink()

    for _ in range(10):
        board[:] = 0
        children = [fork(create, i) for i in range(1, 7)]
        board[0] = 1
        await_(lambda: 0 not in board[1:7])
        assert sorted(board[1:7]) == [1, 2, 2, 2, 2, 2]
        board[0] = 2
        assert [child.wait() for child in children] == [0] * 6


def test_many_creators_and_removers_never_hurt_the_living(object_: str, fork: Any) -> None:
    def churn() -> None:
        for _ in range(150):
            try:
                made = create_segment(object_, 4096)
            except RingError:
                continue
            assert made.is_linked()
            made.map(writable=True)[0:1] = b"M"
            assert made.is_linked()
            made.unlink() if os.getpid() % 2 else None
            made.forget()

    def remove() -> None:
        for _ in range(300):
            remove_if_dead(object_, unfinished_s=0)

    children = [fork(churn), fork(churn), fork(remove)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert remove_if_dead(object_, unfinished_s=0)


def test_find_lists_ours_and_nothing_else(name: str) -> None:
    made = [create_segment(object_name(name, part), SIZE) for part in (0, 12, "status")]
    stranger = SHM / f"rxring-{os.getuid()}-{name}-x"
    stranger.touch()
    found = [(f.object, f.part, f.size) for f in find() if f.name == name]
    assert found == [(object_name(name, part), part, SIZE) for part in ("0", "12", "status")]
    for each in made:
        each.unlink()
    stranger.unlink()


def test_more_than_there_is_leaves_nothing(object_: str) -> None:
    space = os.statvfs(SHM)
    with pytest.raises(RingError, match=r"/dev/shm has \d+ MiB free, .* needs \d+ MiB: ask for a smaller"):
        create_segment(object_, 2 * space.f_blocks * space.f_frsize)
    assert not (SHM / object_[1:]).exists()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small /dev/shm: needs root")
def test_a_full_shared_memory_is_refused_not_a_sigbus_later(object_: str, fork: Any) -> None:
    def within_one_mebibyte() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
        assert libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None) == 0  # MS_PRIVATE, MS_REC
        assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
        first = create_segment(object_, 600 * 1024)
        with pytest.raises(RingError, match=r"/dev/shm has 0 MiB free, .* needs 1 MiB"):
            create_segment(object_ + "1", 600 * 1024)
        assert os.listdir(SHM) == [object_[1:]]
        first.unlink()
        first.forget()
        create_segment(object_, 1000 * 1024)

    assert fork(within_one_mebibyte).wait() == 0


def test_an_interrupted_create_leaves_nothing(object_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_segment(object_, SIZE)
    assert not (SHM / object_[1:]).exists()
