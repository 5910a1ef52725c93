"""The hot loop for streams: poll → reserve → recvmmsg from one connection → describe → publish.

A frame is what came of one connection at once, at most CHUNK_BYTES; it holds no message of the sender's, only
the next bytes of its stream. Whose it is stands in its source record; a flow is a connection, numbered from 1
as they were accepted. The last frame of each has no bytes and the flag END; TRUNCATED as well where the
stream was broken off: by an error, or by the end of the run.

One call takes several frames of a connection. How many follows how much there was the last time: half of what
was asked for or less, and the next call asks for half. A call reserves no more than an eighth of the ring,
and consumers read no more than half of it at once: neither side ever runs in lockstep with the other.

Connections are accepted by the supervisor, which keeps them. A receiver may be killed at any instruction:
its successor finds in shared memory what the last call had taken, as in receiver.py, and goes on with the
streams. Nothing is lost: the bytes of a frame are moved nowhere, and the kernel wrote its length.
"""

from __future__ import annotations

import errno as errors
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from engine.ledger import ERROR_NAMES
from engine.net.libc import (
    EAGAIN,
    EINTR,
    IOVEC,
    MMSGHDR,
    MSG_DONTWAIT,
    POLLFD,
    Messages,
    poll,
    recvmmsg,
    shared_zeros,
)
from engine.net.receiver import FINISHED, SLICE, STOPPED
from rings.atomics import fence_release, load_acquire, load_relaxed, pointer, store_relaxed
from rings.jit import jit
from rings.layout import MAX_FRAME_BYTES, WRITER, FrameFlag, offsets
from rings.libc import errno, monotonic_ns, realtime_ns, sleep_ns, thread_cpu_ns
from rings.writer import describe, describe_source, publish, reserve

CONTROL = 4  # why `receive_streams` came back: the control socket has something; the others are receiver's
CHUNK_BYTES = MAX_FRAME_BYTES
MAX_CONNECTIONS = 1024  # of a receiver, at a time
LENGTHS, LENGTH_BYTES = 17, 16384  # how much a call brought: 16 bins of 16 KiB, and all that is more

# A row of the table goes round: the supervisor accepts (OPEN), the receiver ends it (ENDED), the supervisor
# closes it (FREE). The numbers of file descriptors differ between the two; they stand in memory of their own.
FREE, OPEN, ENDED = 0, 1, 2
CONNECTION = np.dtype(
    [
        (name, np.int64)
        for name in (
            "state",
            "flow",
            "address",  # as in layout.SOURCE: two words …
            "address_rest",
            "place",  # … port, family and interface as one
            "frames",  # that the next call asks for
            "left",  # bytes that are still to be taken, at the end of the run …
            "asked",  # … and whether it was asked once more after them
            "bytes",  # taken
        )
    ]
)

_CALLS, _FRAMES, _RECEIVED, _ERRORS = offsets(WRITER, "calls", "frames", "received", "errors")
_PUBLISHED, _CPU_NS = offsets(WRITER, "published", "cpu_ns")
_ERROR_CODES = np.array([getattr(errors, name) for name in ERROR_NAMES[:-1]], np.int64)
_NO_KERNEL_TIME, _END = int(FrameFlag.NO_KERNEL_TIME), int(FrameFlag.END)
_BROKEN = _END | int(FrameFlag.TRUNCATED)
_UNTOUCHED = -1
_POLLIN = 1
_POLL_MS = 50
_FULL_PAUSE_NS = 50_000
_NO_LIMIT = 1 << 62
# How far it has come, and what a successor does.
_IDLE = 0  # nothing is taken that is not published
_CALLING = 1  # publish what the call took, unless it is published already
_BREAKING = 2  # publish the end of the stream, unless it is published already
_LENGTHS, _LENGTH_BYTES, _OPEN, _ENDED = LENGTHS, LENGTH_BYTES, OPEN, ENDED

STREAM_STATE = np.dtype(
    [
        *(
            (name, np.int64)
            for name in (
                "connections",  # address of CONNECTION (MAX_CONNECTIONS,)
                "pollfds",  # address of POLLFD (1 + MAX_CONNECTIONS,): control socket, then each connection
                "rows",  # of the table that are in use, or were
                "turn",  # the row to begin with
                "headers",
                "iovecs",
                "batch",
                "chunk",  # bytes of a frame, at most
                "phase",
                "row",  # of the last call
                "start",  # virtual arena position of the call's first buffer
                "armed",  # how many buffers the call had
                "call_head",  # `published` when it was made
                "call_frames",  # frames before it
                "ended",  # a stream has: its connection is to be closed
                "cut_short",  # streams that are, at the end of the run, with bytes in their sockets
                "cpu_before_ns",
            )
        ),
        ("lengths", np.int64, (LENGTHS,)),  # calls by how much they brought
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class StreamReceiver:
    """A stream receiver's working memory, which the supervisor and each of its processes share.

    state: STREAM_STATE (1,). connections: CONNECTION (MAX_CONNECTIONS,). pollfds: POLLFD, of the process that
    is the receiver now.
    """

    state: NDArray[Any]
    connections: NDArray[Any]
    pollfds: NDArray[Any]
    messages: Messages

    @classmethod
    def prepare(cls, *, batch: int, arena_bytes: int) -> StreamReceiver:
        """For a ring with an arena of so many bytes; batch: frames of a call, at most."""
        state = shared_zeros(1, STREAM_STATE)
        connections = shared_zeros(MAX_CONNECTIONS, CONNECTION)
        pollfds = shared_zeros(1 + MAX_CONNECTIONS, POLLFD)
        pollfds["fd"], pollfds["events"] = -1, _POLLIN
        chunk = min(CHUNK_BYTES, arena_bytes // 16)
        count = max(min(batch, arena_bytes // 8 // chunk), 1)
        messages = Messages.prepare(count, iovecs=1, shared=True)
        rx = state[0]
        rx["connections"], rx["pollfds"] = connections.ctypes.data, pollfds.ctypes.data
        rx["headers"], rx["iovecs"] = messages.address, messages.iovecs.ctypes.data
        rx["batch"], rx["chunk"] = count, chunk
        return cls(state, connections, pollfds, messages)


@jit
def _connection(rx, row):  # type: ignore[no-untyped-def]
    return carray(pointer(rx.connections), MAX_CONNECTIONS, CONNECTION)[row]


@jit
def _enter(rx, phase):  # type: ignore[no-untyped-def]
    """As in receiver.py: a successor that sees the phase sees all that was stored before it."""
    fence_release()
    rx.phase = phase
    fence_release()


@jit
def _arm(rx, w, row, count):  # type: ignore[no-untyped-def]
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    iovecs = carray(pointer(rx.iovecs), rx.batch, IOVEC)
    buffer = w.arena + (w.position & (w.arena_bytes - 1))
    for i in range(count):
        iovecs[i].base = buffer
        iovecs[i].length = rx.chunk
        headers[i].flags = _UNTOUCHED
        headers[i].length = _UNTOUCHED
        buffer += rx.chunk
    rx.row = row
    rx.start = w.position
    rx.armed = count
    rx.call_head = w.head
    rx.call_frames = load_relaxed(w.writer + _FRAMES)
    _enter(rx, _CALLING)


@jit
def _finish(rx, w, count):  # type: ignore[no-untyped-def]
    """Publish the `count` frames that the last call took; one without bytes is the end of the stream."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    c = _connection(rx, rx.row)
    received_ns = realtime_ns()
    number, position, frames, size, ended = w.number, rx.start, 0, np.int64(0), False
    while frames < count:
        length = np.int64(headers[frames].length)
        flags = _NO_KERNEL_TIME | (_END if length == 0 else 0)
        describe_source(w, frames, (c.address, c.address_rest), c.place, c.flow)
        number, position = describe(
            w, frames, number, received_ns, rx.start + frames * rx.chunk, length, 0, 0, flags
        )
        frames += 1
        size += length
        if length == 0:
            ended = True
            break
    _settle(rx, w, frames)
    publish(w, frames, number, position, size)
    c.bytes += size
    c.left -= size
    if size > 0:
        rx.lengths[min((size - 1) // _LENGTH_BYTES, _LENGTHS - 1)] += 1
    if frames == count and count == rx.armed:
        c.frames = min(2 * count, rx.batch)
    elif 2 * frames <= rx.armed:
        c.frames = max(rx.armed // 2, 1)
    if ended:
        _end(rx, rx.row)
    _enter(rx, _IDLE)


@jit
def _end(rx, row):  # type: ignore[no-untyped-def]
    """A stream's last frame is published: let go of it, then say so. Then its row may be another's."""
    carray(pointer(rx.pollfds), 1 + MAX_CONNECTIONS, POLLFD)[1 + row].fd = -1
    rx.ended = 1
    fence_release()
    _connection(rx, row).state = _ENDED


@jit
def _settle(rx, w, frames):  # type: ignore[no-untyped-def]
    """Count the call's frames, once: from what there was before it."""
    store_relaxed(w.writer + _FRAMES, rx.call_frames + frames)
    store_relaxed(w.writer + _RECEIVED, rx.call_frames + frames)


@jit
def _break_off(rx, w, row):  # type: ignore[no-untyped-def]
    """The last frame of a stream that did not end by itself; False where the ring has no room for it."""
    if not reserve(w, 1, 0):
        return False
    c = _connection(rx, row)
    rx.row, rx.call_head, rx.call_frames = row, w.head, load_relaxed(w.writer + _FRAMES)
    _enter(rx, _BREAKING)
    describe_source(w, 0, (c.address, c.address_rest), c.place, c.flow)
    number, position = describe(w, 0, w.number, realtime_ns(), w.position, 0, 0, 0, _NO_KERNEL_TIME | _BROKEN)
    _settle(rx, w, 1)
    publish(w, 1, number, position, 0)
    _end(rx, row)
    _enter(rx, _IDLE)
    return True


@jit
def _receive_from(rx, w, row, fd):  # type: ignore[no-untyped-def]
    """One call, if the ring has room for what it may bring; was there?"""
    c = _connection(rx, row)
    count = max(c.frames, 1)
    if not reserve(w, count, count * rx.chunk):
        return False
    _arm(rx, w, row, count)
    taken = np.int64(recvmmsg(fd, rx.headers, count, MSG_DONTWAIT, 0))
    code = errno()
    if taken > 0:
        store_relaxed(w.writer + _CALLS, load_relaxed(w.writer + _CALLS) + 1)
        _finish(rx, w, taken)
        return True
    _enter(rx, _IDLE)
    if code in (EAGAIN, EINTR):
        return True
    kind = 0
    while kind < _ERROR_CODES.size and _ERROR_CODES[kind] != code:
        kind += 1
    counter = w.writer + _ERRORS + 8 * kind
    store_relaxed(counter, load_relaxed(counter) + 1)
    return _break_off(rx, w, row)


@jit
def _serve(rx, w, drain):  # type: ignore[no-untyped-def]
    """A call for each connection that has something, in turn; how many there were."""
    pollfds = carray(pointer(rx.pollfds), 1 + MAX_CONNECTIONS, POLLFD)
    served = 0
    for i in range(rx.rows):
        row = (rx.turn + i) % rx.rows
        p = pollfds[1 + row]
        c = _connection(rx, row)
        last = drain and c.left <= 0  # all that was to come; but that it was the end is seen only by asking
        if p.fd < 0 or p.revents == 0 or c.state != _OPEN or (last and c.asked != 0):
            continue
        if not _receive_from(rx, w, row, p.fd):
            rx.turn = row  # it is the first when there is room again
            sleep_ns(_FULL_PAUSE_NS)  # the sender is held up meanwhile: nothing is lost
            return served + 1
        served += 1
        if last:
            c.asked = 1
    rx.turn = (rx.turn + 1) % max(rx.rows, 1)
    return served


@jit
def receive_streams(rx_state, w_state, stop, deadline_ns, drain):  # type: ignore[no-untyped-def]
    """Receive from all connections until CLOCK_MONOTONIC `deadline_ns` (SLICE), or as receiver.receive.

    CONTROL: there is something on the control socket. drain: until each connection has given what was `left`.
    """
    rx, w = rx_state[0], w_state[0]
    pollfds = carray(pointer(rx.pollfds), 1 + MAX_CONNECTIONS, POLLFD)
    why = SLICE
    while monotonic_ns() < deadline_ns:
        if not drain and load_acquire(stop) != 0:
            why = STOPPED
            break
        ready = poll(rx.pollfds, 1 + rx.rows, 0 if drain else _POLL_MS)
        if ready > 0 and pollfds[0].revents != 0 and not drain:
            why = CONTROL
            break
        served = _serve(rx, w, drain) if ready > 0 else 0
        if drain and served == 0:
            why = FINISHED
            break
        if rx.ended != 0 and not drain:
            break  # the other side waits to hear it
    rx.ended = 0
    store_relaxed(w.writer + _CPU_NS, rx.cpu_before_ns + thread_cpu_ns())
    return why


@jit
def take_up_streams(rx_state, w_state):  # type: ignore[no-untyped-def]
    """A successor's first act: publish what its predecessor's last call had taken, unless that is done."""
    rx, w = rx_state[0], w_state[0]
    rx.cpu_before_ns = load_relaxed(w.writer + _CPU_NS) - thread_cpu_ns()
    published = load_relaxed(w.writer + _PUBLISHED) != rx.call_head
    if rx.phase == _CALLING and not published:
        headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
        taken = 0
        while taken < rx.armed and headers[taken].length != _UNTOUCHED:
            taken += 1
        if taken > 0:
            # Positions count anew after `resume`; offsets are the same.
            rx.start = w.position + ((rx.start - w.position) & (w.arena_bytes - 1))
            w.position = rx.start
            _finish(rx, w, taken)
    elif rx.phase == _CALLING:
        headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
        for i in range(rx.armed):
            if headers[i].length == 0:
                _end(rx, rx.row)
    elif rx.phase == _BREAKING:
        store_relaxed(w.writer + _FRAMES, rx.call_frames + (1 if published else 0))
        store_relaxed(w.writer + _RECEIVED, rx.call_frames + (1 if published else 0))
        if published:
            _end(rx, rx.row)
        else:
            _break_off(rx, w, rx.row)  # without room it stays open, and the next call finds it broken again
    _enter(rx, _IDLE)


@jit
def break_off_all(rx_state, w_state):  # type: ignore[no-untyped-def]
    """At the end of the run: mark the end of every stream that is open; how many found no room for it."""
    rx, w = rx_state[0], w_state[0]
    left = 0
    for row in range(rx.rows):
        c = _connection(rx, row)
        if c.state == _OPEN:
            rest = c.left
            if not _break_off(rx, w, row):
                left += 1
            elif rest > 0:
                rx.cut_short += 1
    return left


def lengths_by_name(counts: Any) -> dict[str, int]:
    """{"16384": 12, "more": 3}: how many calls were of at most so many bytes; the last bin is all above."""
    names = [*(str((i + 1) * LENGTH_BYTES) for i in range(LENGTHS - 1)), "more"]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def accept_into(rx: StreamReceiver, flow: int, source: tuple[int, int, int]) -> int:
    """The row of a new connection; −1 where there are too many. source: address (two words) and place."""
    free = np.flatnonzero(rx.connections["state"] == FREE)
    if not free.size:
        return -1
    row = int(free[0])
    c = rx.connections[row]
    c["flow"], c["frames"], c["left"], c["asked"], c["bytes"] = flow, 1, _NO_LIMIT, 0, 0
    c["address"], c["address_rest"], c["place"] = source
    c["state"] = OPEN
    rx.state[0]["rows"] = max(int(rx.state[0]["rows"]), row + 1)
    return row
