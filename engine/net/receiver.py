"""The hot loop: reserve → recvmmsg straight into the arena → describe → publish.

Each message of a call has two buffers: `stride` bytes in the arena, and behind them, privately, the rest
of a maximal datagram. `stride` follows the largest message of late, so the arena is dense: after the call
a message is moved down only where it would leave a hole of more than an eighth of its length. When a
message overflows its stride, that batch is put together privately and published frame by frame.

A receiver may be killed at any instruction. Its working memory is shared with the supervisor, so its
successor finds what the last call had taken from the socket: each header's length is UNTOUCHED before the
call, and the kernel fills it. What was taken and neither published nor refused is published now, where
the call's bytes are still as the kernel wrote them, and else counted as lost in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from engine.net.libc import (
    EAGAIN,
    EINTR,
    IOVEC,
    MMSGHDR,
    MSG_DONTWAIT,
    MSG_TRUNC,
    POLLIN,
    Messages,
    poll,
    recvmmsg,
    recvmsg,
    shared_zeros,
)
from engine.net.sockets import SO_TIMESTAMPNS
from rings.atomics import load_acquire, load_relaxed, pointer, scratch, store_relaxed
from rings.jit import jit
from rings.layout import ALIGN, MAX_FRAME_BYTES, REFUSALS, WRITER, FrameFlag, Geometry, offsets
from rings.libc import errno, memmove, monotonic_ns, realtime_ns, sleep_ns, thread_cpu_ns
from rings.writer import describe, publish, reserve

# Why a packet that left the socket was not published, in the order of the ring's `refused` counters.
REFUSED = ("truncated", "too_large", "ring_full")
TRUNCATED, TOO_LARGE, RING_FULL = range(3)
# What the receive call may answer and go on, in the order of the ring's `errors` counters; the last
# counts all others.
ERROR_NAMES = ("ECONNREFUSED", "ENOBUFS", "ENOMEM", "EHOSTUNREACH", "ENETUNREACH", "other")
_ERROR_CODES = np.array([111, 105, 12, 113, 101], np.int64)
_FATAL_CODES = np.array([9, 14, 22, 38, 88], np.int64)  # EBADF EFAULT EINVAL ENOSYS ENOTSOCK: our own fault

SLICE, STOPPED, FINISHED, FAILED = 0, 1, 2, 3  # why `receive` came back

_CALLS, _FRAMES, _REFUSED, _ERRORS = offsets(WRITER, "calls", "frames", "refused", "errors")
_OVERFLOWED, _MOVED, _STRIDE, _CPU_NS = offsets(WRITER, "overflowed", "moved", "stride", "cpu_ns")
_LOST_IN_FLIGHT, _PUBLISHED = offsets(WRITER, "lost_in_flight", "published")
_ALIGN, _OVERFLOW_BYTES, _REFUSALS = ALIGN, MAX_FRAME_BYTES, REFUSALS
_NO_KERNEL_TIME = int(FrameFlag.NO_KERNEL_TIME)
_SATURATED, _NEGATIVE = int(FrameFlag.SATURATED), int(FrameFlag.NEGATIVE)
_UNTOUCHED = -1
_CONTROL_BYTES = 64
_TIMESTAMP_BYTES = 32  # struct cmsghdr and a timespec
_TIMESTAMP_TYPE = 1 | SO_TIMESTAMPNS << 32  # its level and type, as one word
_FIRST_STRIDE = 2048
_LEAST_STRIDE = 64
_STRIDE_CALLS = 64  # after so many calls the stride may shrink
_FULL_PAUSE_NS = 50_000
_GRACE_NS = 300_000_000
_POLL_MS = 50
_IDLE, _CALLING, _FINISHING = 0, 1, 2

# The receiver's working memory, in a mapping that the supervisor and the next receiver share.
RECEIVER_STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "fd",
            "headers",
            "iovecs",
            "control",
            "overflow",  # address of batch × MAX_FRAME_BYTES
            "batch",
            "one_by_one",  # recvmsg instead of recvmmsg
            "timestamps",
            "packets_left",  # until the run has enough; −1: no end
            "stride",
            "largest",  # message since the stride was last looked at
            "calls_to_look",
            "short",  # the last call emptied the socket
            "phase",
            "start",  # virtual arena position of the call's first buffer
            "armed",  # how many buffers the call had
            "call_head",  # `published` when it was made
            "call_frames",  # all that calls had taken before it
            "call_refused",  # sum of all refused then
            "failure",  # errno that ended the loop
            "cpu_before_ns",  # CPU time of its predecessors, less this one's until it began
        )
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Receiver:
    """A receiver's working memory; the arrays are kept here because the state holds their addresses."""

    state: NDArray[Any]
    messages: Messages
    overflow: NDArray[np.uint8]

    @classmethod
    def prepare(
        cls, fd: int, *, batch: int, one_by_one: bool, timestamps: bool, packets: int | None
    ) -> Receiver:
        """For socket `fd` (non-blocking). `packets`: receive exactly so many."""
        messages = Messages.prepare(
            batch, iovecs=2, control_bytes=_CONTROL_BYTES if timestamps else 0, shared=True
        )
        overflow = shared_zeros((batch, MAX_FRAME_BYTES), np.uint8)
        state = shared_zeros(1, RECEIVER_STATE)
        rx = state[0]
        rx["fd"] = fd
        rx["headers"] = messages.address
        rx["iovecs"] = messages.iovecs.ctypes.data
        rx["control"] = messages.control.ctypes.data if timestamps else 0
        rx["overflow"] = overflow.ctypes.data
        rx["batch"] = batch
        rx["one_by_one"] = one_by_one
        rx["timestamps"] = timestamps
        rx["packets_left"] = -1 if packets is None else packets
        rx["stride"] = _FIRST_STRIDE
        rx["calls_to_look"] = 4
        rx["short"] = 1
        return cls(state, messages, overflow)


def largest_batch(geometry: Geometry) -> int:
    """The largest batch for a ring: an eighth of its frames, and of its bytes at the least stride."""
    return max(min(geometry.frames // 8, geometry.arena_bytes // 8 // 128), 1)


@jit
def _buffers(rx, w):  # type: ignore[no-untyped-def]
    """How many buffers the next call has: all strides together take at most an eighth of the arena."""
    count = min(rx.batch, max(w.arena_bytes // 8 // rx.stride, 1))
    if rx.packets_left >= 0:
        count = min(count, rx.packets_left)
    return 1 if rx.one_by_one != 0 else count


@jit
def _arm(rx, w, count):  # type: ignore[no-untyped-def]
    """Point the headers at their buffers, and clear what a former call left in them."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    iovecs = carray(pointer(rx.iovecs), 2 * rx.batch, IOVEC)
    buffer = w.arena + (w.position & (w.arena_bytes - 1))
    beyond = rx.overflow + rx.stride
    for i in range(count):
        iovecs[2 * i].base = buffer
        iovecs[2 * i].length = rx.stride
        iovecs[2 * i + 1].base = beyond
        iovecs[2 * i + 1].length = _OVERFLOW_BYTES - rx.stride
        headers[i].control_length = _CONTROL_BYTES * rx.timestamps
        headers[i].flags = _UNTOUCHED
        headers[i].length = _UNTOUCHED
        buffer += rx.stride
        beyond += _OVERFLOW_BYTES
    rx.start = w.position
    rx.armed = count
    rx.call_head = w.head
    rx.call_frames = load_relaxed(w.writer + _FRAMES)
    rx.call_refused = _sum_refused(w)
    rx.phase = _CALLING


@jit
def _sum_refused(w):  # type: ignore[no-untyped-def]
    total = 0
    for reason in range(_REFUSALS):
        total += load_relaxed(w.writer + _REFUSED + 8 * reason)
    return total


@jit
def _add(w, counter, value):  # type: ignore[no-untyped-def]
    """Raise a counter of the ring's writer section, which only we write."""
    store_relaxed(w.writer + counter, load_relaxed(w.writer + counter) + value)


@jit
def _kernel_time(rx, i, control_length, received_ns):  # type: ignore[no-untyped-def]
    """(kernel time, received − kernel, flags) of message i; without a timestamp, when we received it."""
    if rx.timestamps == 0 or control_length < _TIMESTAMP_BYTES:
        return received_ns, 0, _NO_KERNEL_TIME
    control = carray(pointer(rx.control + i * _CONTROL_BYTES), 4, np.int64)
    if control[1] != _TIMESTAMP_TYPE:
        return received_ns, 0, _NO_KERNEL_TIME
    kernel_ns = control[2] * 1_000_000_000 + control[3]
    socket_ns = received_ns - kernel_ns
    if socket_ns < 0:
        return kernel_ns, 0, _NEGATIVE
    if socket_ns > 0xFFFFFFFF:
        return kernel_ns, 0xFFFFFFFF, _SATURATED
    return kernel_ns, socket_ns, 0


@jit
def _finish(rx, w, count, received_ns, stop):  # type: ignore[no-untyped-def]
    """Publish what the last call took: `count` messages, in order, each or its refusal counted."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    for i in range(count):
        rx.largest = max(rx.largest, headers[i].length)
    rx.phase = _FINISHING
    store_relaxed(w.writer + _FRAMES, rx.call_frames + count)
    if rx.packets_left > 0:
        rx.packets_left -= count
    if rx.largest > rx.stride:
        _finish_privately(rx, w, count, received_ns, stop)
    else:
        source, target, frames, moved = rx.start, rx.start, 0, 0
        mask = w.arena_bytes - 1
        for i in range(count):
            length = np.int64(headers[i].length)
            if headers[i].flags & MSG_TRUNC:
                _add(w, _REFUSED + 8 * TRUNCATED, 1)
            else:
                if (source - target) * 8 > length:
                    memmove(w.arena + (target & mask), w.arena + (source & mask), length)
                    moved += 1
                else:
                    target = source
                time_ns, socket_ns, flags = _kernel_time(rx, i, headers[i].control_length, received_ns)
                describe(w, frames, time_ns, target, length, socket_ns, 0, flags)
                target = w.position
                frames += 1
            source += rx.stride
        publish(w, frames)
        if moved != 0:
            _add(w, _MOVED, moved)
    rx.phase = _IDLE
    _follow_largest(rx, w)


@jit
def _follow_largest(rx, w):  # type: ignore[no-untyped-def]
    """Let the stride grow at once, and shrink when the messages of the last calls were all smaller."""
    wanted = min((rx.largest + _ALIGN - 1) & -_ALIGN, max(w.arena_bytes // 8, _LEAST_STRIDE))
    rx.calls_to_look -= 1
    if wanted > rx.stride or rx.calls_to_look <= 0:
        rx.stride = min(max(wanted, _LEAST_STRIDE), _OVERFLOW_BYTES)
        rx.calls_to_look = _STRIDE_CALLS
        rx.largest = 0
        store_relaxed(w.writer + _STRIDE, rx.stride)


@jit
def _finish_privately(rx, w, count, received_ns, stop):  # type: ignore[no-untyped-def]
    """Put each message together in its overflow buffer, then publish one by one as space permits."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    _add(w, _OVERFLOWED, 1)
    for i in range(count):
        source = w.arena + ((rx.start & (w.arena_bytes - 1)) + i * rx.stride)
        memmove(rx.overflow + i * _OVERFLOW_BYTES, source, min(np.int64(headers[i].length), rx.stride))
    for i in range(count):
        length = np.int64(headers[i].length)
        if headers[i].flags & MSG_TRUNC:
            _add(w, _REFUSED + 8 * TRUNCATED, 1)
        elif length > w.arena_bytes // 2:
            _add(w, _REFUSED + 8 * TOO_LARGE, 1)
        elif not _await_room(w, length, stop):
            _add(w, _REFUSED + 8 * RING_FULL, 1)
        else:
            memmove(w.arena + (w.position & (w.arena_bytes - 1)), rx.overflow + i * _OVERFLOW_BYTES, length)
            time_ns, socket_ns, flags = _kernel_time(rx, i, headers[i].control_length, received_ns)
            describe(w, 0, time_ns, w.position, length, socket_ns, 0, flags)
            publish(w, 1)


@jit
def _await_room(w, length, stop):  # type: ignore[no-untyped-def]
    """Wait for room for one frame; after a stop only a moment longer, then give up."""
    give_up_ns = 0
    while not reserve(w, 1, length):
        now_ns = monotonic_ns()
        if load_acquire(stop) != 0:
            give_up_ns = now_ns + _GRACE_NS if give_up_ns == 0 else give_up_ns
            if now_ns >= give_up_ns:
                return False
        sleep_ns(_FULL_PAUSE_NS)
    return True


@jit
def _await_packets(rx, most_ms):  # type: ignore[no-untyped-def]
    """Sleep until the socket has something, bounded, so that the stop word is seen; has it?"""
    pollfd = scratch()
    store_relaxed(pollfd, rx.fd | (POLLIN << 32))
    return poll(pollfd, 1, most_ms) > 0


@jit
def _receive_batch(rx, w, stop):  # type: ignore[no-untyped-def]
    """One call, if the ring has room for what it may bring. False: the loop has to end, see rx.failure."""
    count = _buffers(rx, w)
    if not reserve(w, count, count * rx.stride):
        sleep_ns(_FULL_PAUSE_NS)  # the socket fills meanwhile, and the kernel counts what it drops
        return True
    _arm(rx, w, count)
    if rx.one_by_one != 0:
        taken = recvmsg(rx.fd, rx.headers, MSG_DONTWAIT)
        code = errno()
        if taken >= 0:
            carray(pointer(rx.headers), 1, MMSGHDR)[0].length = taken
            taken = 1
    else:
        taken = np.int64(recvmmsg(rx.fd, rx.headers, count, MSG_DONTWAIT, 0))
        code = errno()
    rx.short = 1 if taken < count else 0
    if taken > 0:
        _add(w, _CALLS, 1)
        _finish(rx, w, taken, realtime_ns(), stop)
        return True
    rx.phase = _IDLE
    if code in (EAGAIN, EINTR):
        return True
    if (code == _FATAL_CODES).any():
        rx.failure = code
        return False
    kind = 0
    while kind < _ERROR_CODES.size and _ERROR_CODES[kind] != code:
        kind += 1
    _add(w, _ERRORS + 8 * kind, 1)
    return True


@jit
def receive(rx_state, w_state, stop, deadline_ns, drain):  # type: ignore[no-untyped-def]
    """Receive until something says stop: why, as SLICE, STOPPED, FINISHED or FAILED.

    SLICE: CLOCK_MONOTONIC `deadline_ns` has come. STOPPED: the word at address `stop` is not 0.
    FINISHED: the packets asked for are there. FAILED: rx.failure has the errno.
    drain: the socket is cut off; go on over a stop, until it is empty (FINISHED).
    """
    rx, w = rx_state[0], w_state[0]
    why = SLICE
    while monotonic_ns() < deadline_ns:
        if rx.packets_left == 0:
            why = FINISHED
            break
        if drain:
            if rx.short != 0 and not _await_packets(rx, 0):
                why = FINISHED
                break
        elif load_acquire(stop) != 0:
            why = STOPPED
            break
        elif rx.short != 0 and not _await_packets(rx, _POLL_MS):
            continue
        if not _receive_batch(rx, w, stop):
            why = FAILED
            break
    store_relaxed(w.writer + _CPU_NS, rx.cpu_before_ns + thread_cpu_ns())
    return why


@jit
def take_up(rx_state, w_state, stop):  # type: ignore[no-untyped-def]
    """A successor's first act: settle what its predecessor's last call had taken. `resume` came before.

    Publishes it if the predecessor was killed before it touched the bytes, else counts it as lost.
    """
    rx, w = rx_state[0], w_state[0]
    rx.cpu_before_ns = load_relaxed(w.writer + _CPU_NS) - thread_cpu_ns()
    if rx.phase == _IDLE:
        return
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    taken, whole = 0, 0
    while taken < rx.armed and headers[taken].flags != _UNTOUCHED:
        whole += 1 if headers[taken].length != _UNTOUCHED else 0
        taken += 1
    if rx.phase == _CALLING and whole == taken:
        # Positions count anew after `resume`; offsets are the same.
        rx.start = w.position + ((rx.start - w.position) & (w.arena_bytes - 1))
        w.position = rx.start
        _finish(rx, w, taken, realtime_ns(), stop)
        return
    store_relaxed(w.writer + _FRAMES, rx.call_frames + taken)
    settled = load_relaxed(w.writer + _PUBLISHED) - rx.call_head + _sum_refused(w) - rx.call_refused
    _add(w, _LOST_IN_FLIGHT, taken - settled)
    rx.phase = _IDLE
