"""`rxring mirror`: bounces every packet, to a fixed place or back to whom it came from.

One socket receives. With `to`, a second one, connected, sends; without it the first sends, so that the
answer comes from where the packet went to. Packets are forwarded as they came, empty ones too, in order.
A packet that could not be forwarded is counted and not tried again; one that was cut is not forwarded.
It forwards what it has received once the socket is empty or a batch is full, whichever call received it.

At the end nothing more is let into the socket, and what stands in it is still forwarded, for as long as
that gets on; what then is left is counted as unforwarded.
"""

from __future__ import annotations

import errno as errors
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
import numpy as np

from engine import figures, spec
from engine.errors import Failed, Refused
from engine.net import address, sockets
from engine.net.libc import (
    EAGAIN,
    ECONNREFUSED,
    EINTR,
    ERRNOS,
    MMSGHDR,
    MSG_DONTWAIT,
    MSG_TRUNC,
    NAME_BYTES,
    POLLFD,
    POLLIN,
    Messages,
    poll,
    recvmmsg,
    recvmsg,
    sendmmsg,
)
from engine.net.role import (
    SLICE_NS,
    Stop,
    check_duration,
    check_range,
    connect,
    cpus_of,
    drive,
    error_lines,
    errors_by_name,
    limit_sends,
    pin_here,
)
from engine.net.sockets import ReceiveBuffer
from engine.spec import MAX_BATCH, Listen
from rings.jit import jit
from rings.libc import errno, monotonic_ns

_STALLED_SLICES = 6  # draining ends when so long (0.3 s) nothing could be forwarded
_BUFFER_BYTES = 65536
_GAP_BYTES = 192  # between buffers, lest their beginnings share cache sets
_MMSGHDR_BYTES = MMSGHDR.itemsize
_FATAL = (errors.EBADF, errors.EFAULT, errors.EINVAL, errors.ENOTSOCK)  # our own fault: they would not end

# Why the compiled loop came back.
_SLICE, _EMPTY, _BROKEN = 0, 1, 2

STATE = np.dtype(
    [
        # What is asked for.
        ("fd", "i8"),  # receives
        ("out_fd", "i8"),  # sends
        ("back", "i8"),  # to whom it came from
        ("batch", "i8"),
        ("one_by_one", "i8"),  # recvmsg instead of recvmmsg
        ("incoming", "i8"),  # address of the headers for recvmmsg
        ("outgoing", "i8"),  # and for sendmmsg
        ("poll", "i8"),  # address of a POLLFD
        ("draining", "i8"),  # come back once the socket is empty
        # What became of it.
        ("armed", "i8"),  # headers that the last call has changed
        ("received", "i8"),
        ("bytes", "i8"),
        ("calls", "i8"),
        ("truncated", "i8"),
        ("forwarded", "i8"),
        ("failed", "i8"),
        ("broken", "i8"),  # errno of the error that ended it
        ("errors", "i8", (ERRNOS,)),
    ],
    align=True,
)


class MirrorPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to bounce; the names of the flags. `rcvbuf` in bytes, `duration` in seconds."""

    listen: str
    to: str | None = None
    batch: int = 64
    receive: Literal["recvmmsg", "recvmsg"] = "recvmmsg"
    cpu: str | None = None
    rcvbuf: int | None = None
    duration: float | None = None

    def check(self) -> None:
        """Refused where it makes no sense."""
        self.place()
        if self.to is not None:
            address.parse_destination(self.to)
        check_range("batch", self.batch, 1, MAX_BATCH)
        check_range("rcvbuf", self.rcvbuf, 1, 1 << 31)
        check_duration(self.duration)
        cpus_of(self.cpu)

    def place(self) -> Listen:
        """Where to listen; port 0: any free one."""
        try:
            where = spec.listen(self.listen)
        except ValueError as error:
            raise Refused(f"--listen {error}") from None
        if where.scheme != "udp":
            raise Refused(f"--listen {where} is a stream: give udp://ADDR:PORT")
        return where


@jit
def _receive_one_by_one(s, incoming):  # type: ignore[no-untyped-def]
    """`_receive` with a call for each message. An error behind the first of them is left to the next time."""
    for i in range(s.batch):
        length = recvmsg(s.fd, s.incoming + i * _MMSGHDR_BYTES, MSG_DONTWAIT)
        if length < 0:
            return i if i > 0 else -errno()
        s.calls += 1
        incoming[i].length = length
    return s.batch


@jit
def _receive(s, incoming):  # type: ignore[no-untyped-def]
    """How many messages came; −errno if none did. Never waits."""
    for i in range(s.armed):
        incoming[i].name_length = NAME_BYTES
    if s.one_by_one != 0:
        taken = _receive_one_by_one(s, incoming)
    else:
        taken = np.int64(recvmmsg(s.fd, s.incoming, s.batch, MSG_DONTWAIT, 0))
        taken = taken if taken >= 0 else -errno()
        s.calls += 1 if taken >= 0 else 0
    if taken >= 0:
        s.armed = taken
    return taken


@jit
def _address(s, incoming, buffers, outgoing, payloads, taken):  # type: ignore[no-untyped-def]
    """Point the outgoing headers at what came; how many of them there are."""
    count = 0
    for i in range(taken):
        s.bytes += incoming[i].length
        if incoming[i].flags & MSG_TRUNC != 0:
            s.truncated += 1
            continue
        payloads[count].base = buffers[i].base
        payloads[count].length = incoming[i].length
        if s.back != 0:
            outgoing[count].name = incoming[i].name
            outgoing[count].name_length = incoming[i].name_length
        count += 1
    s.received += taken
    return count


@jit
def _forward(s, count):  # type: ignore[no-untyped-def]
    """Send the first `count` outgoing messages. If the way out is stuck, the rest has failed."""
    first = 0
    while first < count:
        taken = sendmmsg(s.out_fd, s.outgoing + first * _MMSGHDR_BYTES, count - first, 0)
        if taken > 0:
            s.forwarded += taken
            first += taken
            continue
        error = errno()
        s.errors[error] += 1
        if error in (EINTR, ECONNREFUSED):  # neither speaks of this packet
            continue
        lost = count - first if error == EAGAIN else 1
        s.failed += lost
        first += lost


@jit
def _mirror_slice(state, incoming, buffers, outgoing, payloads, until_ns):  # type: ignore[no-untyped-def]
    """Bounce until the time `until_ns`, a signal, or a lasting error; draining: until it is empty."""
    s = state[0]
    while True:
        now = monotonic_ns()
        if now >= until_ns:
            return _SLICE
        taken = _receive(s, incoming)
        if taken >= 0:
            _forward(s, _address(s, incoming, buffers, outgoing, payloads, taken))
        elif taken == -EAGAIN:
            if s.draining != 0:
                return _EMPTY
            if poll(s.poll, 1, (until_ns - now) // 1_000_000 + 1) < 0:
                return _SLICE
        else:
            s.errors[-taken] += 1
            if -taken in _FATAL:
                s.broken = -taken
                return _BROKEN


class Mirror:
    """A mirror's state, its sockets, and the memory that packets pass through."""

    def __init__(self, plan: MirrorPlan) -> None:
        self.plan = plan
        stride = _BUFFER_BYTES + _GAP_BYTES
        self.memory = np.empty(plan.batch * stride, np.uint8)
        self.incoming = Messages.prepare(plan.batch, names=True)
        self.buffers = self.incoming.iovecs.reshape(-1)
        self.buffers["base"] = self.memory.ctypes.data + np.arange(plan.batch) * stride
        self.buffers["length"] = _BUFFER_BYTES
        self.outgoing = Messages.prepare(plan.batch)
        self.payloads = self.outgoing.iovecs.reshape(-1)
        self.poll = np.array([(-1, POLLIN, 0)], POLLFD)
        self.state = np.zeros(1, STATE)
        s = self.state[0]
        s["fd"] = s["out_fd"] = -1
        s["batch"], s["back"], s["poll"] = plan.batch, plan.to is None, self.poll.ctypes.data
        s["one_by_one"] = plan.receive == "recvmsg"
        s["incoming"], s["outgoing"] = self.incoming.address, self.outgoing.address
        self.cpus: list[int] = []
        self.start_ns = self.stop_ns = self.told_ns = self.told_packets = 0
        self.dropped = self.after_stop = self.unforwarded = 0

    def prepare(self, stack: ExitStack) -> None:
        """Everything that takes time or may be refused; the sockets, which `stack` closes, at last."""
        warm()
        plan, s = self.plan, self.state[0]
        self.cpus = pin_here(cpus_of(plan.cpu))
        listen = plan.place()
        sock, self.rcvbuf = sockets.open_udp(listen, timestamps=False, rcvbuf=plan.rcvbuf)
        self.socket = stack.enter_context(sock)
        self.socket.setblocking(True)  # sends wait; receives are told not to, each time
        limit_sends(self.socket)
        self.drops = sockets.DropCount(self.socket)
        s["fd"] = s["out_fd"] = self.poll[0]["fd"] = sock.fileno()
        if plan.to is not None:
            out = stack.enter_context(connect(plan.to))
            s["out_fd"] = out.fileno()
        self.bound = sockets.bind_udp(self.socket, listen)
        self.joined = sockets.joined(listen)
        if plan.to is not None and _leads_back(out, self.bound):
            raise Refused(f"--to {plan.to} is where the mirror listens: give another address")

    def start(self) -> None:
        self.start_ns = self.stop_ns = self.told_ns = time.monotonic_ns()

    @property
    def end_ns(self) -> int | None:
        return None if self.plan.duration is None else self.start_ns + int(self.plan.duration * 1e9)

    def run_slice(self, until_ns: int) -> bool:
        """Bounce until then; may there be more?"""
        why = _mirror_slice(
            self.state, self.incoming.headers, self.buffers, self.outgoing.headers, self.payloads, until_ns
        )
        return bool(why == _SLICE)

    def drain(self) -> None:
        """Let nothing more in, forward what is there. Drops from now on are counted apart."""
        self.stop_ns = time.monotonic_ns()
        self.dropped = self.drops.read()
        sockets.cut_off(self.socket)
        self._forward_rest()
        self.after_stop = self.drops.read() - self.dropped
        self.socket.setblocking(False)
        self.unforwarded = sockets.discard(self.socket)[1]

    def _forward_rest(self) -> None:
        """Until the socket is empty, receiving is broken, or the way out is stuck."""
        s, stalled = self.state[0], 0
        s["draining"] = 1
        while stalled < _STALLED_SLICES:
            before = int(s["forwarded"])
            if not self.run_slice(time.monotonic_ns() + SLICE_NS):
                return
            stalled = 0 if s["forwarded"] > before else stalled + 1

    def counts(self) -> dict[str, int]:
        keys = ("received", "bytes", "forwarded", "truncated", "failed")
        return {key: int(self.state[0][key]) for key in keys}

    def ready(self) -> dict[str, Any]:
        return {
            "type": "ready",
            "pid": os.getpid(),
            "listen": f"udp://{address.format_address(self.bound)}",
            "port": self.bound[1],
            "to": self.plan.to,
            "joined": self.joined,
            "cpus": self.cpus,
            "rcvbuf": {"asked": self.rcvbuf.asked, "granted": self.rcvbuf.granted},
        }

    def interval(self) -> dict[str, Any]:
        now, received = time.monotonic_ns(), int(self.state[0]["received"])
        rate = (received - self.told_packets) / (now - self.told_ns) * 1e9
        self.told_ns, self.told_packets = now, received
        return {
            "type": "interval",
            "seconds": (now - self.start_ns) / 1e9,
            "packets_per_second": rate,
            **self.counts(),
            "socket_dropped": self.drops.read(),
        }

    def summary(self) -> dict[str, Any]:
        seconds = (self.stop_ns - self.start_ns) / 1e9
        counts, calls = self.counts(), int(self.state[0]["calls"])
        return {
            "type": "summary",
            "listen": self.plan.listen,
            "to": self.plan.to,
            "cpus": self.cpus,
            "seconds": seconds,
            "packets_per_second": counts["received"] / seconds if seconds else 0.0,
            "packets_per_call": counts["received"] / calls if calls else 0.0,
            **counts,
            "unforwarded": self.unforwarded,
            "socket_dropped": self.dropped,
            "after_stop": self.after_stop,
            "errors": errors_by_name(self.state[0]["errors"]),
        }


def _leads_back(out: socket.socket, bound: address.Address) -> bool:
    """Does the way out end where the mirror listens? To an address of its own, a host sends from that one."""
    to, own = out.getpeername(), out.getsockname()
    return to == bound or (to[1] == bound[1] and to[0] == own[0] and bound[0] in ("0.0.0.0", "::"))


def warm() -> None:
    """Compile everything, or load it from the cache, before any socket is open."""
    Mirror(MirrorPlan(listen="", batch=1)).run_slice(0)


def run(plan: MirrorPlan, emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Bounce as planned; the summary. `emit` gets every object of the output: ready, interval …, summary.

    END_SIGNALS end it in order. Refused before anything is received; Failed at the end.
    """
    plan.check()
    mirror = Mirror(plan)
    with Stop() as stop, ExitStack() as stack:
        stop.prepare(lambda: mirror.prepare(stack))
        mirror.start()
        if not stop.asked:
            emit(mirror.ready())
            drive(mirror.run_slice, stop, mirror.end_ns, lambda: emit(mirror.interval()))
            mirror.drain()
        summary = mirror.summary()
        emit(summary)
    broken = int(mirror.state[0]["broken"])
    if broken:
        raise Failed(f"cannot receive on {plan.listen}: {os.strerror(broken)}: start it again")
    return summary


def line(view: dict[str, Any]) -> str:
    """An object of the output, as a line for people."""
    if view["type"] == "ready":
        to = view["to"] or "whom it came from"
        said = f"mirrors {view['listen']} to {to}, cpu {figures.cpu_list(view['cpus'])}, pid {view['pid']}"
        buffer = ReceiveBuffer(**view["rcvbuf"])
        notes = [view["joined"]] if view["joined"] else []
        notes += [buffer.advice] if buffer.short else []
        return "; ".join([said, *notes])
    told = [figures.magnitude(view["packets_per_second"], "/s")]
    counted = ("received", "forwarded", "truncated", "failed", "unforwarded")
    told += [f"{figures.exact(view[key])} {key}" for key in counted if key in view]
    told += [f"{figures.exact(view['socket_dropped'])} dropped by the socket"]
    if view["type"] == "interval":
        return f"{figures.clock(view['seconds']).rjust(8)}  {', '.join(told)}"
    told += error_lines(view["errors"], view["to"])
    return f"mirrored for {figures.clock(view['seconds'])}: {', '.join(told)}"
