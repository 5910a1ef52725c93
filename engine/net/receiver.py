"""The hot loop: reserve → recvmmsg straight into the arena → describe → publish.

Each message of a call has two buffers: `stride` bytes in the arena, and behind them, privately, the rest
of a maximal datagram. `stride` follows the largest message of late, so the arena is dense: after the call
a message is moved down only where it would leave a hole of more than an eighth of its length. When a
message overflows its stride, that batch is put together privately and published frame by frame, as the
ring has room; nothing else is received meanwhile.

With GRO one message brings up to 64 KiB of equal packets of one flow, and its ancillary data their size. It
becomes one frame, with a `segment`; what is counted are packets. Such a frame is never cut, nor too large:
the buffers hold a maximal one, and a ring whose arena does not is received into without GRO.

A receiver may be killed at any instruction. Its working memory is shared with the supervisor, so its
successor finds what the last call had taken from the socket: each header's flags are UNTOUCHED before the
call, and the kernel fills them. `phase` says how far it had come with that; every step from one phase to
the next can be made again. Only packets that were being moved within the arena are lost, and counted.
"""

from __future__ import annotations

import errno as errors
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from engine.ledger import ERROR_NAMES, REFUSED
from engine.net.libc import (
    EAGAIN,
    EINTR,
    IOVEC,
    MMSGHDR,
    MSG_DONTWAIT,
    MSG_TRUNC,
    NAME_BYTES,
    POLLIN,
    SOL_UDP,
    UDP_GRO,
    Messages,
    poll,
    recvmmsg,
    recvmsg,
    shared_zeros,
)
from engine.net.sockets import SO_TIMESTAMPNS
from rings.atomics import (
    fence_release,
    load_acquire,
    load_relaxed,
    load_relaxed_u32,
    pause,
    pointer,
    scratch,
    store_relaxed,
)
from rings.jit import jit
from rings.layout import ALIGN, MAX_FRAME_BYTES, REFUSALS, WRITER, FrameFlag, offsets
from rings.libc import errno, memmove, monotonic_ns, realtime_ns, sleep_ns, thread_cpu_ns
from rings.writer import describe, describe_source, publish, reserve

TRUNCATED, TOO_LARGE, RING_FULL = range(len(REFUSED))
_ERROR_CODES = np.array([getattr(errors, name) for name in ERROR_NAMES[:-1]], np.int64)
_FATAL_CODES = np.array([9, 14, 22, 38, 88], np.int64)  # EBADF EFAULT EINVAL ENOSYS ENOTSOCK: our own fault

SLICE, STOPPED, FINISHED, FAILED = 0, 1, 2, 3  # why `receive` came back

_CALLS, _FRAMES, _RECEIVED, _REFUSED, _ERRORS = offsets(
    WRITER, "calls", "frames", "received", "refused", "errors"
)
_OVERFLOWED, _MOVED, _STRIDE, _CPU_NS = offsets(WRITER, "overflowed", "moved", "stride", "cpu_ns")
_LOST_IN_FLIGHT, _PUBLISHED = offsets(WRITER, "lost_in_flight", "published")
_ALIGN, _OVERFLOW_BYTES, _REFUSALS, _NAME_BYTES = ALIGN, MAX_FRAME_BYTES, REFUSALS, NAME_BYTES
_AF_INET, _AF_INET6 = int(socket.AF_INET), int(socket.AF_INET6)
_NO_KERNEL_TIME = int(FrameFlag.NO_KERNEL_TIME)
_SATURATED, _NEGATIVE = int(FrameFlag.SATURATED), int(FrameFlag.NEGATIVE)
_GOLDEN = np.uint64(
    0x9E37_79B9_7F4A_7C15
)  # 2⁶⁴ / φ, odd: spreads what lies close (Knuth's multiplicative hashing)
_UNTOUCHED = -1
CONTROL_BYTES = 64  # takes both kinds of ancillary data that we ask for, and no third
_CMSG_BYTES = 16  # struct cmsghdr
_TIMESTAMP_BYTES = _CMSG_BYTES + 16  # with a timespec
_TIMESTAMP_TYPE = 1 | SO_TIMESTAMPNS << 32  # its level and type, as one word
_GRO_TYPE = SOL_UDP | UDP_GRO << 32
_MOST_SEGMENT = 0xFFFF  # what a descriptor can say
_FIRST_STRIDE = 2048
_LEAST_STRIDE = 64
_STRIDE_CALLS = 64  # after so many calls the stride may shrink
_FULL_PAUSE_NS = 50_000
_POLL_MS = 50
_NO_END = (1 << 62) - 1
# How far it has come with what a call took, and what a successor does with it.
_IDLE = 0  # nothing is taken that is not published, refused or counted as lost
_CALLING = 1  # the bytes are as the kernel wrote them: publish them, unless they are published already
_MOVING = 2  # some are being moved in the arena: lost, but for those that are published
_PRIVATE = 3  # each message is whole in its overflow buffer: go on with the first that is not settled
_SETTLING = 4  # `lost` is what the ring's count is to be

# The receiver's working memory, in a mapping that the supervisor and the next receiver share.
RECEIVER_STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "fd",
            "headers",
            "iovecs",
            "control",
            "names",  # address of batch × NAME_BYTES, 0: nobody asks who sent what
            "overflow",  # address of batch × MAX_FRAME_BYTES
            "batch",
            "one_by_one",  # recvmsg instead of recvmmsg
            "spin",  # ask again and again instead of sleeping on an empty socket
            "control_bytes",  # room for ancillary data, 0: none is asked for
            "gro",
            "packets",  # how many to receive
            "room",  # bytes for one message, arena and overflow buffer together
            "stride",
            "largest",  # message since the stride was last looked at
            "calls_to_look",
            "short",  # the last call emptied the socket
            "phase",
            "lost",  # in flight, all together
            "start",  # virtual arena position of the call's first buffer
            "armed",  # how many buffers the call had
            "call_head",  # `published` when it was made
            "call_frames",  # all that calls had taken before it
            "call_received",  # the same in packets
            "call_refused",  # sum of all refused then
            "taken",  # how many messages it brought, in phase PRIVATE
            "received_ns",  # when it came back, in phase PRIVATE
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
        cls,
        fd: int,
        *,
        batch: int,
        one_by_one: bool,
        timestamps: bool,
        gro: bool = False,
        sources: bool = False,
        spin: bool = False,
        packets: int | None,
        room: int = MAX_FRAME_BYTES,
    ) -> Receiver:
        """For socket `fd` (non-blocking).

        batch: at most an eighth of the ring's frames. sources: has the ring source records?
        spin: never sleep on an empty socket, ask it again and again.
        packets: receive exactly so many; with GRO, end with the call that brings the last of them.
        room: bytes that a message may have, a multiple of ALIGN from 2048 to MAX_FRAME_BYTES; longer ones
        are refused as truncated.
        """
        control_bytes = CONTROL_BYTES if timestamps or gro else 0
        messages = Messages.prepare(batch, iovecs=2, names=sources, control_bytes=control_bytes, shared=True)
        overflow = shared_zeros((batch, MAX_FRAME_BYTES), np.uint8)
        state = shared_zeros(1, RECEIVER_STATE)
        rx = state[0]
        rx["fd"] = fd
        rx["headers"] = messages.address
        rx["iovecs"] = messages.iovecs.ctypes.data
        rx["control"] = messages.control.ctypes.data
        rx["control_bytes"] = control_bytes
        rx["names"] = messages.names.ctypes.data if sources else 0
        rx["gro"] = gro
        rx["overflow"] = overflow.ctypes.data
        rx["batch"] = batch
        rx["one_by_one"] = one_by_one
        rx["spin"] = spin
        rx["packets"] = _NO_END if packets is None else packets
        rx["room"] = room
        rx["stride"] = _FIRST_STRIDE
        rx["calls_to_look"] = 4
        rx["short"] = 1
        return cls(state, messages, overflow)


@jit
def _buffers(rx, w):  # type: ignore[no-untyped-def]
    """How many buffers the next call has: all strides together take at most an eighth of the arena."""
    count = min(rx.batch, max(w.arena_bytes // 8 // rx.stride, 1), _packets_left(rx, w))
    return 1 if rx.one_by_one != 0 else count


@jit
def _packets_left(rx, w):  # type: ignore[no-untyped-def]
    """How many are still to be received; those lost in flight don't count."""
    return rx.packets - load_relaxed(w.writer + _RECEIVED) + load_relaxed(w.writer + _LOST_IN_FLIGHT)


@jit
def _enter(rx, phase):  # type: ignore[no-untyped-def]
    """Come into a phase: a successor that sees it sees all that was stored before, and nothing from after.

    It looks only when we are dead, so the order in which the compiler stores is all that matters.
    """
    fence_release()
    rx.phase = phase
    fence_release()


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
        iovecs[2 * i + 1].length = rx.room - rx.stride
        headers[i].name_length = _NAME_BYTES if rx.names != 0 else 0
        headers[i].control_length = rx.control_bytes
        headers[i].flags = _UNTOUCHED
        headers[i].length = _UNTOUCHED
        buffer += rx.stride
        beyond += _OVERFLOW_BYTES
    rx.start = w.position
    rx.armed = count
    rx.call_head = w.head
    rx.call_frames = load_relaxed(w.writer + _FRAMES)
    rx.call_received = load_relaxed(w.writer + _RECEIVED)
    rx.call_refused = _sum_refused(w)
    _enter(rx, _CALLING)


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
def _ancillary(rx, i, header):  # type: ignore[no-untyped-def]
    """(kernel time, −1 without; segment, 0 for one packet) of message i, whose header this is."""
    kernel_ns, segment = np.int64(-1), np.int64(0)
    at = rx.control + i * CONTROL_BYTES
    end = at + header.control_length
    while at + _CMSG_BYTES < end:
        control = carray(pointer(at), 4, np.int64)
        size, kind = control[0], control[1]
        if kind == _TIMESTAMP_TYPE and size >= _TIMESTAMP_BYTES:
            kernel_ns = control[2] * 1_000_000_000 + control[3]
        elif kind == _GRO_TYPE:
            segment = control[2] & 0xFFFFFFFF  # an int
        at += max((size + 7) & -8, _CMSG_BYTES)
    if segment >= header.length or segment > _MOST_SEGMENT:
        segment = np.int64(0)
    return kernel_ns, segment


@jit
def _kernel_time(kernel_ns, received_ns):  # type: ignore[no-untyped-def]
    """(time, received − kernel, flags) for a descriptor; without a kernel time, when we received it."""
    if kernel_ns < 0:
        return received_ns, 0, _NO_KERNEL_TIME
    socket_ns = received_ns - kernel_ns
    if socket_ns < 0:
        return kernel_ns, 0, _NEGATIVE
    if socket_ns > 0xFFFFFFFF:
        return kernel_ns, 0xFFFFFFFF, _SATURATED
    return kernel_ns, socket_ns, 0


@jit
def describe_message(rx, w, index, number, position, i, received_ns):  # type: ignore[no-untyped-def]
    """`writer.describe` message i of the last call, which lies at `position`, as frame `head + index`."""
    header = carray(pointer(rx.headers), rx.batch, MMSGHDR)[i]
    kernel_ns, segment = _ancillary(rx, i, header)
    time_ns, socket_ns, flags = _kernel_time(kernel_ns, received_ns)
    length = np.int64(header.length)
    if rx.names != 0:
        _describe_sender(rx, w, index, i)
    return describe(w, index, number, time_ns, position, length, socket_ns, segment, flags)


@jit
def _describe_sender(rx, w, index, i):  # type: ignore[no-untyped-def]
    """`writer.describe_source` who sent message i, by its sockaddr_in or sockaddr_in6."""
    at = rx.names + i * _NAME_BYTES
    word = load_relaxed(at)
    family = word & 0xFFFF
    port = (word >> 8 & 0xFF00) | (word >> 24 & 0xFF)
    address = (word >> 32 & 0xFFFF_FFFF, np.int64(0))
    interface = np.int64(0)
    if family == _AF_INET6:
        address = (load_relaxed(at + 8), load_relaxed(at + 16))
        interface = np.int64(load_relaxed_u32(at + 24))
    elif family != _AF_INET:
        family, port, address = np.int64(0), np.int64(0), (np.int64(0), np.int64(0))
    place = port | family << 16 | interface << 32
    describe_source(w, index, address, place, _flow(address, place))


@jit
def _flow(address, place):  # type: ignore[no-untyped-def]
    """A flow of 63 bits, each of which depends on all of these words."""
    mixed = np.uint64(0)
    for word in (address[0], address[1], place):
        mixed = (mixed ^ np.uint64(word)) * _GOLDEN
        mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed >> np.uint64(1))


@jit
def _packets(rx, first, end):  # type: ignore[no-untyped-def]
    """How many packets there are in messages `first` … `end` − 1 of the last call."""
    if rx.gro == 0:
        return max(end - first, 0)
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    packets = 0
    for i in range(first, end):
        _, segment = _ancillary(rx, i, headers[i])
        packets += 1 if segment == 0 else (np.int64(headers[i].length) + segment - 1) // segment
    return packets


@jit
def _settled(rx, w):  # type: ignore[no-untyped-def]
    """How many messages of the last call are published or refused (none of several packets is)."""
    published = load_relaxed(w.writer + _PUBLISHED) - rx.call_head
    return published + _sum_refused(w) - rx.call_refused


@jit
def _finish(rx, w, count, received_ns):  # type: ignore[no-untyped-def]
    """Publish what the last call took: `count` messages, in order, each or its refusal counted."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    store_relaxed(w.writer + _FRAMES, rx.call_frames + count)
    store_relaxed(w.writer + _RECEIVED, rx.call_received + _packets(rx, 0, count))
    largest = np.int64(0)
    for i in range(count):
        largest = max(largest, headers[i].length)
    rx.largest = max(rx.largest, largest)
    if largest > rx.stride:
        _assemble(rx, w, count, received_ns)
        _publish_private(rx, w)
    else:
        _publish_batch(rx, w, count, received_ns)
        _enter(rx, _IDLE)
    _follow_largest(rx, w)


@jit
def _publish_batch(rx, w, count, received_ns):  # type: ignore[no-untyped-def]
    """Publish messages that lie in the arena as a whole, moved down where they would leave holes."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    source, target, frames, moved = rx.start, rx.start, 0, 0
    number, size = w.number, np.int64(0)
    mask = w.arena_bytes - 1
    for i in range(count):
        length = np.int64(headers[i].length)
        if not headers[i].flags & MSG_TRUNC:
            if (source - target) * 8 > length:
                if moved == 0:
                    _enter(rx, _MOVING)
                memmove(w.arena + (target & mask), w.arena + (source & mask), length)
                moved += 1
            else:
                target = source
            number, target = describe_message(rx, w, frames, number, target, i, received_ns)
            size += length
            frames += 1
        source += rx.stride
    publish(w, frames, number, target, size)
    if frames < count:
        _add(w, _REFUSED + 8 * TRUNCATED, count - frames)
    if moved != 0:
        _add(w, _MOVED, moved)


@jit
def _follow_largest(rx, w):  # type: ignore[no-untyped-def]
    """Let the stride grow at once, and shrink when the messages of the last calls were all smaller."""
    wanted = min((rx.largest + _ALIGN - 1) & -_ALIGN, max(w.arena_bytes // 8, _LEAST_STRIDE))
    rx.calls_to_look -= 1
    if wanted > rx.stride or rx.calls_to_look <= 0:
        rx.stride = min(max(wanted, _LEAST_STRIDE), rx.room)
        rx.calls_to_look = _STRIDE_CALLS
        rx.largest = 0
        store_relaxed(w.writer + _STRIDE, rx.stride)


@jit
def _assemble(rx, w, count, received_ns):  # type: ignore[no-untyped-def]
    """Put each message together in its overflow buffer: the arena is then free for them one by one."""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    for i in range(count):
        source = w.arena + ((rx.start & (w.arena_bytes - 1)) + i * rx.stride)
        memmove(rx.overflow + i * _OVERFLOW_BYTES, source, min(np.int64(headers[i].length), rx.stride))
    rx.taken = count
    rx.received_ns = received_ns
    _add(w, _OVERFLOWED, 1)
    _enter(rx, _PRIVATE)


@jit
def _publish_private(rx, w):  # type: ignore[no-untyped-def]
    """Publish assembled messages as far as the ring has room; was there room for all?"""
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    for i in range(_settled(rx, w), rx.taken):
        length = np.int64(headers[i].length)
        if headers[i].flags & MSG_TRUNC:
            _add(w, _REFUSED + 8 * TRUNCATED, 1)
        elif length > w.arena_bytes // 2:
            _add(w, _REFUSED + 8 * TOO_LARGE, 1)
        elif not reserve(w, 1, length):
            return False
        else:
            memmove(w.arena + (w.position & (w.arena_bytes - 1)), rx.overflow + i * _OVERFLOW_BYTES, length)
            number, position = describe_message(rx, w, 0, w.number, w.position, i, rx.received_ns)
            publish(w, 1, number, position, length)
    _enter(rx, _IDLE)
    return True


@jit
def await_packets(rx, most_ms):  # type: ignore[no-untyped-def]
    """Sleep until the socket has something, bounded, so that the stop word is seen; has it?"""
    pollfd = scratch()
    store_relaxed(pollfd, rx.fd | (POLLIN << 32))
    return poll(pollfd, 1, most_ms) > 0


@jit
def _receive_batch(rx, w):  # type: ignore[no-untyped-def]
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
        _finish(rx, w, taken, realtime_ns())
        return True
    _enter(rx, _IDLE)
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
        if not drain and load_acquire(stop) != 0:
            why = STOPPED
            break
        if rx.phase == _PRIVATE:
            if not _publish_private(rx, w):
                sleep_ns(_FULL_PAUSE_NS)
            continue
        if _packets_left(rx, w) <= 0:
            why = FINISHED
            break
        if rx.short != 0 and rx.spin != 0 and not drain:
            pause()
        elif rx.short != 0 and not await_packets(rx, 0 if drain else _POLL_MS):
            if drain:
                why = FINISHED
                break
            continue
        if not _receive_batch(rx, w):
            why = FAILED
            break
    store_relaxed(w.writer + _CPU_NS, rx.cpu_before_ns + thread_cpu_ns())
    return why


@jit
def take_up(rx_state, w_state):  # type: ignore[no-untyped-def]
    """A successor's first act: settle what its predecessor's last call had taken. `resume` came before.

    What is whole is published, now or by `receive`; the rest is counted as lost. May be killed, too.
    """
    rx, w = rx_state[0], w_state[0]
    rx.cpu_before_ns = load_relaxed(w.writer + _CPU_NS) - thread_cpu_ns()
    if rx.phase in (_CALLING, _MOVING):
        headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
        taken, whole = 0, 0
        while taken < rx.armed and headers[taken].flags != _UNTOUCHED:
            whole += 1 if headers[taken].length != _UNTOUCHED else 0
            taken += 1
        settled = _settled(rx, w)
        if rx.phase == _CALLING and settled == 0 and whole == taken:
            # Positions count anew after `resume`; offsets are the same.
            rx.start = w.position + ((rx.start - w.position) & (w.arena_bytes - 1))
            w.position = rx.start
            _finish(rx, w, taken, realtime_ns())
        else:
            store_relaxed(w.writer + _FRAMES, rx.call_frames + taken)
            store_relaxed(w.writer + _RECEIVED, rx.call_received + _packets(rx, 0, taken))
            rx.lost = load_relaxed(w.writer + _LOST_IN_FLIGHT) + _packets(rx, settled, taken)
            _enter(rx, _SETTLING)
    if rx.phase == _SETTLING:
        store_relaxed(w.writer + _LOST_IN_FLIGHT, rx.lost)
        _enter(rx, _IDLE)


@jit
def give_up(rx_state, w_state):  # type: ignore[no-untyped-def]
    """At the end: what was taken and found no room in the ring is refused."""
    rx, w = rx_state[0], w_state[0]
    if rx.phase == _PRIVATE:
        _add(w, _REFUSED + 8 * RING_FULL, _packets(rx, _settled(rx, w), rx.taken))
        _enter(rx, _IDLE)
