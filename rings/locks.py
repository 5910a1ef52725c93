"""Liveness by open-file-description locks.

Who holds the lock on a byte is alive; the kernel frees it at death, SIGKILL included, and keeps it over
SIGSTOP. No pids that are reused, no time-outs. Such a lock belongs to the open file description, so:

- everyone takes a lock on a description that he opened himself;
- a forked child shares its parent's descriptions and would keep the parent's locks alive: it closes
  them first thing (`Segment.forget`).

The byte offsets lie anywhere in the object; a lock does not touch the byte. fcntl(2), F_OFD_SETLK.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

F_OFD_GETLK = 36
F_OFD_SETLK = 37
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_F_WRLCK, _F_UNLCK = 1, 2
_LOOK_S = 0.0005


def flock(byte: int, kind: int = _F_WRLCK) -> bytes:
    """`struct flock` for one byte, also for compiled code that asks with F_OFD_GETLK."""
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def acquire(fd: int, byte: int) -> bool:
    """Take the lock on `byte`; False if another description holds it."""
    try:
        fcntl.fcntl(fd, F_OFD_SETLK, flock(byte))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def acquire_within(fd: int, byte: int, seconds: float) -> bool:
    """Take the lock on `byte`; False if another holds it all that time."""
    end = time.monotonic() + seconds
    while not acquire(fd, byte):
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_S)
    return True


def release(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, F_OFD_SETLK, flock(byte, _F_UNLCK))


def held_by_other(fd: int, byte: int) -> bool:
    """Does another open file description hold the lock on `byte`?"""
    answer: bytes = fcntl.fcntl(fd, F_OFD_GETLK, flock(byte))
    return bool(_FLOCK.unpack(answer)[0] != _F_UNLCK)
