"""Shared-memory objects: create, open, list, remove, and who is alive on them.

An object is `/rxring-UID-NAME-PART`: a ring (PART is its number) or an engine's status (PART is
`status`). Mode 0600. Its first eight bytes are its magic, stored last: an object without it is not
ready yet, or was left by a creator that died.

Whoever creates it holds its owner lock until the end. An object with neither owner nor writer is dead:
it may be replaced by a creator of the same name, or collected.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pwd
import re
import stat
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import posix_ipc

from rings import locks
from rings.layout import LOCK_OWNER, LOCK_WRITER

SHM = Path("/dev/shm")
FOREVER_NS = 1 << 61  # 73 years: a time-out without end
UNFINISHED_S = 60.0  # how long an object may stand without its magic before it counts as left behind
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,31}")
_OBJECT = re.compile(rf"rxring-(\d+)-({_NAME.pattern})-(\d{{1,4}}|status)")


class RingError(Exception):
    """What cannot be done with a ring, and what to do instead. One line."""


def check_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise RingError(f"name {name!r}: use 1 to 32 of A-Z a-z 0-9 _ . -, no - first")
    return name


def object_name(name: str, part: int | str) -> str:
    if not isinstance(part, str) and not 0 <= part <= 9999:
        raise RingError(f"number {part} of {name!r}: use 0 to 9999")
    return f"/rxring-{os.getuid()}-{check_name(name)}-{part}"


@dataclass(frozen=True, slots=True)
class Found:
    """An object of this user in /dev/shm."""

    object: str
    name: str
    part: str
    size: int


def find() -> list[Found]:
    """The rxring objects of the calling user, by name."""
    found = []
    for path in sorted(SHM.glob(f"rxring-{os.getuid()}-*")):
        match = _OBJECT.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            if match and facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode):
                found.append(Found(f"/{path.name}", match[2], match[3], facts.st_size))
    return found


def duration_ns(seconds: float | None) -> int:
    """Of a time-out in seconds; None and infinity: for ever. RingError where it is no number."""
    try:
        return min(int(seconds * 1e9), FOREVER_NS) if seconds is not None else FOREVER_NS
    except OverflowError:
        return FOREVER_NS if seconds and seconds > 0 else 0
    except (TypeError, ValueError):
        raise RingError(f"a time-out of {seconds!r}: give seconds, or None for ever") from None


@dataclass(slots=True)
class Segment:
    """One shared-memory object, opened. `fd` is read-write, since its locks need that."""

    object: str
    fd: int
    size: int
    maps: list[mmap.mmap] = field(default_factory=list)

    def map(self, *, writable: bool, offset: int = 0, length: int = 0, ahead: bool = False) -> memoryview:
        """Map `length` bytes from `offset` (a page boundary); by default all of it.

        ahead: all pages now, so that the first lap of a ring costs no page faults.
        """
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if ahead else 0)
        # mmap keeps a duplicate of the descriptor until the last array on the mapping is gone. It must
        # not be of the description that holds our locks: they would outlive `forget`.
        other = self.reopen()
        mapped = mmap.mmap(other.fd, length or self.size - offset, flags, access, offset=offset)
        other.forget()
        self.maps.append(mapped)
        return memoryview(mapped)

    def unmap(self) -> None:
        """Close the mappings that no array looks at any more."""
        for mapped in self.maps:
            with contextlib.suppress(BufferError):  # an array of the user's still looks at it
                mapped.close()
        self.maps.clear()

    def reopen(self) -> Segment:
        """The same object through an open file description of its own, for locks of its own."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        return Segment(self.object, fd, self.size)

    def is_linked(self) -> bool:
        """Does the object's name still lead to this object, and not to none or a later one?"""
        try:
            there = os.stat(SHM / self.object[1:])
        except FileNotFoundError:
            return False
        mine = os.fstat(self.fd)
        return (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev)

    def unlink(self) -> None:
        """Remove the name, if it is still ours. Mappings stay valid until they are closed."""
        if self.is_linked():
            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_shared_memory(self.object)

    def forget(self) -> None:
        """Close the descriptor, and with it our locks, and the mappings."""
        self.close()
        self.unmap()

    def close(self) -> None:
        """Close the descriptor; the mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        """What was dropped lets go, as if its process had died: a lock without a holder stops the others."""
        self.forget()


_held: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_children(holder: Any, disown: Callable[[Any], None]) -> None:
    """In every process forked from this one, call `disown(holder)`, which closes the holder's descriptor.

    A lock belongs to the open file, which a child inherits: held by it, it would outlive its process.
    """
    _held[holder] = disown


def _disown_all() -> None:
    for holder, disown in _held.items():
        disown(holder)


os.register_at_fork(after_in_child=_disown_all)


def open_segment(name: str) -> Segment:
    """Open an existing object by its full name. FileNotFoundError where there is none.

    RingError where it is another user's, or no shared memory at all.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG((SHM / name[1:]).lstat().st_mode):
            raise RingError(f"{SHM / name[1:]} is no shared memory: remove it, or use another name")
    try:
        memory = posix_ipc.SharedMemory(name)  # size 0: never resize what exists
    except posix_ipc.ExistentialError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
    except posix_ipc.PermissionsError:
        raise RingError(f"{name[1:]} belongs to {_owner_of(name)}: use another name, or that user") from None
    os.set_inheritable(memory.fd, False)
    facts = os.fstat(memory.fd)
    segment = Segment(name, memory.fd, facts.st_size)
    if facts.st_uid != os.getuid():  # root may open anyone's, and anyone what is open to all
        segment.forget()
        raise RingError(f"{name[1:]} belongs to {_owner_of(name)}: use another name, or that user")
    return segment


def create_segment(name: str, size: int) -> Segment:
    """Create an object of `size` bytes, all committed, and take its owner lock.

    A dead object of that name is replaced. RingError where a living one holds the name, or where
    /dev/shm has no room.
    """
    segment = _create_locked(name, size)
    try:
        os.posix_fallocate(segment.fd, 0, size)
    except BaseException as error:
        segment.unlink()
        segment.forget()
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            raise
        space = os.statvfs(SHM)
        raise RingError(
            f"/dev/shm has {space.f_bavail * space.f_frsize >> 20} MiB free, {name[1:]} needs "
            f"{-(-size >> 20)} MiB: ask for a smaller ring, or mount -o remount,size=… /dev/shm"
        ) from None
    return segment


def _create_locked(name: str, size: int) -> Segment:
    """A new, empty object of that name, its owner lock ours."""
    while True:
        try:
            memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.ExistentialError:
            if not remove_if_dead(name, unfinished_s=0.0):
                raise RingError(
                    f"{name[1:]} is in use{_holder(name)}: end it first, or use another name"
                ) from None
            continue
        except posix_ipc.PermissionsError:
            raise RingError(f"{name[1:]} belongs to {_owner_of(name)}: use another name") from None
        os.set_inheritable(memory.fd, False)
        segment = Segment(name, memory.fd, size)
        # Between the two calls another creator may have taken our empty object for a dead one.
        if locks.acquire(segment.fd, LOCK_OWNER) and segment.is_linked():
            return segment
        segment.forget()


def remove_if_dead(name: str, *, unfinished_s: float = UNFINISHED_S) -> bool:
    """Remove the object if nobody owns or writes it. True when it is gone (or never was).

    Both locks are taken before the name is removed, and the name must still lead to the object they
    were taken on: two that remove at once, or one that re-creates meanwhile, cannot hurt each other.
    An object whose magic is missing may be a creator's at work: it must be `unfinished_s` old.
    """
    try:
        segment = open_segment(name)
    except FileNotFoundError:
        return True
    try:
        if not (locks.acquire(segment.fd, LOCK_OWNER) and locks.acquire(segment.fd, LOCK_WRITER)):
            return False
        if not os.pread(segment.fd, 8, 0).strip(b"\0"):
            age_s = time.time() - os.fstat(segment.fd).st_ctime
            if age_s < unfinished_s:
                return False
        segment.unlink()
        return True
    finally:
        segment.forget()


def _owner_of(name: str) -> str:
    try:
        uid = os.stat(SHM / name[1:]).st_uid
        return f"user {pwd.getpwuid(uid).pw_name}"
    except (FileNotFoundError, KeyError):
        return "another user"


def _holder(name: str) -> str:
    """` by process N`, as far as it can be told: an OFD lock has no pid, /proc tells who has it open."""
    path = os.path.realpath(SHM / name[1:])
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                if int(process.name) != os.getpid() and os.readlink(descriptor) == path:
                    return f" by process {process.name}"
    return ""
