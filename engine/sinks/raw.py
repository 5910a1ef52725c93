"""`dump=FILE`: the payloads of all packets, in order, and nothing between them.

The kernel takes the bytes straight from the arena (writev): of a frame its packets lie one behind the other.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numba import carray, types

from engine.errors import Failed, Refused
from engine.handlers.api import ON_BATCH, Handler, Options, packets_in, record_at
from engine.net.libc import EINTR, IOVEC
from rings.atomics import pointer
from rings.jit import callback, jit
from rings.layout import ALIGN, DESCRIPTOR
from rings.libc import errno

# ssize_t writev(int, const struct iovec *, int)
_writev = types.ExternalFunction("writev", types.int64(types.int32, types.int64, types.int32))

_IOVECS = 1024  # UIO_MAXIOV: the most that one call takes
_PATH_BYTES = 4096

DUMP = np.dtype(
    [
        ("fd", "i8"),  # 0: not open
        ("packets", "i8"),  # all of whose bytes are written
        ("bytes", "i8"),
        ("error", "i8"),  # errno
        ("file", "u1", (_PATH_BYTES,)),
        ("iovecs", IOVEC, (_IOVECS,)),
    ],
    align=True,
)
_IOVECS_AT = DUMP.fields["iovecs"][1]  # type: ignore[index]
_IOVEC_BYTES = IOVEC.itemsize


@jit
def _skip(iovecs, first, count, written):  # type: ignore[no-untyped-def]
    """The first of iovecs[first:count] that is not all written, cut to what is left of it."""
    while first < count and written >= iovecs[first].length:
        written -= iovecs[first].length
        first += 1
    if written > 0:
        iovecs[first].base += written
        iovecs[first].length -= written
    return first


@jit
def _write(s, iovecs_at, count):  # type: ignore[no-untyped-def]
    """Write the first `count` iovecs, however many calls that takes; 0, or errno."""
    first = 0
    while first < count:
        written = _writev(s.fd, iovecs_at + first * _IOVEC_BYTES, count - first)
        if written < 0:
            error = errno()
            if error != EINTR:
                return error
        else:
            s.bytes += written
            first = _skip(s.iovecs, first, count, written)
    return 0


@callback(ON_BATCH)
def _on_batch(state, frames, count, arena):  # type: ignore[no-untyped-def]
    s = record_at(state, DUMP)
    batch = carray(pointer(frames), count, DESCRIPTOR)
    used = 0
    packets = 0
    for i in range(count):
        s.iovecs[used].base = arena + np.int64(batch[i].offset) * ALIGN
        s.iovecs[used].length = batch[i].length
        used += 1
        packets += packets_in(batch[i])
        if used == _IOVECS or i == count - 1:
            s.error = _write(s, state + _IOVECS_AT, used)
            if s.error != 0:
                return s.error
            s.packets += packets
            used = 0
            packets = 0
    return 0


def _start(state: Any, options: Options) -> None:
    """Open the file, anew; after a restart of the consumer, to go on behind what is there.

    The packets of the batch that the consumer died in may then be in it twice: those that are written but
    not released are read again.
    """
    if not options.argument:
        raise Refused("dump needs a file to write to: give dump=FILE")
    path = os.fsencode(options.argument)
    again = os.O_APPEND if options.restarts else os.O_TRUNC
    try:
        # Without O_NONBLOCK a FIFO that nobody reads would hold us up here, for ever.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | again, 0o666)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Refused(f"dump={options.argument!r}: {reason}: give a file that can be written") from None
    os.set_blocking(fd, True)
    state["fd"] = fd
    state["error"] = 0
    state["file"] = np.frombuffer(path.ljust(_PATH_BYTES, b"\0"), np.uint8)


def _finish(state: Any) -> None:
    if state["fd"] == 0:
        return
    fd, state["fd"] = int(state["fd"]), 0
    try:
        os.close(fd)
    except OSError as error:
        state["error"] = error.errno
        raise Failed(f"dump={_file(state)}: {error.strerror}") from None


def _file(state: Any) -> str:
    return bytes(state["file"]).rstrip(b"\0").decode(errors="replace")


def _merge(into: Any, other: Any) -> None:
    """Sums; the file and the first error are those of `into`, if it has any."""
    into["packets"] += other["packets"]
    into["bytes"] += other["bytes"]
    for field in ("error", "file"):
        if not into[field].any():
            into[field] = other[field]


def _report(state: Any) -> dict[str, Any]:
    """packets and bytes that are written; file; error: why writing ended, or None."""
    error = int(state["error"])
    return {
        "bytes": int(state["bytes"]),
        "packets": int(state["packets"]),
        "file": _file(state),
        "error": os.strerror(error) if error else None,
    }


handler = Handler(DUMP, on_batch=_on_batch, merge=_merge, report=_report, start=_start, finish=_finish)
