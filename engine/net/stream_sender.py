"""`rxring send --to tcp://HOST:PORT`: messages through one stream or several, and how long each send was.

A message is `size` bytes given to the kernel by one `send`, or by several where it takes only a part: what
is counted are messages, bytes and calls, and how many bytes each call gave away. Open loop, as sender.py:
message i is due at start + ⌊i / rate⌋. Streams take turns by message.

At the end each stream is closed for sending, and the other side is waited for: when it closes, it has all.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Literal

import msgspec
import numpy as np
from numba import types

from engine import figures
from engine.errors import Failed, Refused
from engine.net.libc import EAGAIN, EINTR, ERRNOS
from engine.net.role import (
    SLICE_NS,
    Stop,
    check_duration,
    check_range,
    cpus_of,
    drive,
    due_at,
    error_lines,
    errors_by_name,
    limit_sends,
    settle,
)
from engine.net.stream import LENGTH_BYTES, LENGTHS, lengths_by_name
from engine.net.stream_socket import connect_stream
from rings.atomics import pause
from rings.jit import jit
from rings.libc import errno, monotonic_ns, sleep_ns

MAX_MESSAGE_BYTES = 64 << 20
MAX_STREAMS = 1024
_SECOND_NS = 1_000_000_000
_SPIN_NS = 100_000  # a sleep may end so much too late: closer to a due time the loop spins
_NO_LIMIT = 1 << 62
_LAST_WORD_S = 5.0  # how long the other side is waited for at the end
_LENGTHS, _LENGTH_BYTES = LENGTHS, LENGTH_BYTES
_MSG_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_SLICE, _FINISHED, _BROKEN = 0, 1, 2

# ssize_t send(int, void *, size_t, int); −1 and errno when it fails.
_send = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.int64, types.int32))

STATE = np.dtype(
    [
        *(
            (name, np.int64)
            for name in (
                "rate",  # messages a second; 0: as fast as it goes
                "size",
                "limit",  # messages
                "payload",  # address of one message
                "start_ns",
                "messages",  # given away whole
                "part",  # bytes of the message at work that are given away
                "turn",
                "bytes",
                "calls",
                "most_late_ns",
                "last_ns",
                "broken",  # errno of the error that ended it
            )
        ),
        ("lengths", "i8", (LENGTHS,)),  # calls by how much they gave away
        ("errors", "i8", (ERRNOS,)),
    ],
    align=True,
)


class StreamPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to send; the names of the flags. Sizes in bytes, durations in seconds, rates in messages/s."""

    to: str
    size: int = 131_072
    rate: int | Literal["max"] = "max"
    flows: int = 1
    packets: int | None = None
    duration: float | None = None
    sndbuf: int | None = None
    cpu: str | None = None
    fifo: int | None = None
    mlock: bool = False

    def check(self) -> None:
        """Refused where it makes no sense."""
        check_range("size", self.size, 1, MAX_MESSAGE_BYTES)
        check_range("flows", self.flows, 1, MAX_STREAMS)
        check_range("packets", self.packets, 1, _NO_LIMIT)
        check_duration(self.duration)
        if self.rate != "max":
            check_range("rate", self.rate, 1, _SECOND_NS)
        cpus_of(self.cpu)


@jit
def _send_slice(state, fds, until_ns):  # type: ignore[no-untyped-def]
    """Send until the time `until_ns`, a signal, the last message, or an error."""
    s = state[0]
    while s.messages < s.limit:
        now = monotonic_ns()
        if now >= until_ns:
            return _SLICE
        late_ns = now - due_at(s.start_ns, s.rate, s.messages)
        if late_ns < 0 and s.part == 0:
            nap_ns = min(-late_ns, until_ns - now) - _SPIN_NS
            if nap_ns <= 0:
                pause()
            elif sleep_ns(nap_ns) != 0:
                return _SLICE
            continue
        taken = _send(fds[s.turn], s.payload + s.part, s.size - s.part, _MSG_NOSIGNAL)
        code = errno()
        s.calls += 1
        if taken < 0:
            if code in (EAGAIN, EINTR):  # the other side takes nothing at present
                return _SLICE
            s.errors[code] += 1
            s.broken = code
            return _BROKEN
        if s.part == 0 and s.rate != 0:
            s.most_late_ns = max(s.most_late_ns, late_ns)
        s.lengths[min(max(taken - 1, 0) // _LENGTH_BYTES, _LENGTHS - 1)] += 1
        s.bytes += taken
        s.part += taken
        s.last_ns = monotonic_ns()
        if s.part == s.size:
            s.part = 0
            s.messages += 1
            s.turn = s.turn + 1 if s.turn + 1 < len(fds) else 0
    return _FINISHED


class StreamSender:
    """A sender's state, its sockets, and the message."""

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self.state = np.zeros(1, STATE)
        self.fds = np.zeros(plan.flows, np.int64)
        self.payload = np.arange(plan.size).astype(np.uint8)
        self.sockets: list[socket.socket] = []
        self.cpus: list[int] = []
        self.granted: int | None = None  # bytes of the send buffer, as the kernel counts them
        self.unconfirmed = 0
        self.told = (0, 0)
        s = self.state[0]
        s["rate"] = 0 if plan.rate == "max" else plan.rate
        s["size"], s["limit"] = plan.size, plan.packets or _NO_LIMIT
        s["payload"] = self.payload.ctypes.data

    def prepare(self, stack: ExitStack) -> None:
        """Everything that takes time or may be refused; the connections, which `stack` closes, at last."""
        warm()
        self.cpus = settle(self.plan.cpu, self.plan.fifo, self.plan.mlock)
        for i in range(self.plan.flows):
            sock = stack.enter_context(connect_stream(self.plan.to, self.plan.sndbuf))
            limit_sends(sock)
            self.sockets.append(sock)
            self.fds[i] = sock.fileno()
            self.granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def start(self) -> None:
        s = self.state[0]
        s["start_ns"] = s["last_ns"] = time.monotonic_ns()
        self.told = (int(s["start_ns"]), 0)

    @property
    def end_ns(self) -> int | None:
        if self.plan.duration is None:
            return None
        return int(self.state[0]["start_ns"]) + int(self.plan.duration * 1e9)

    def run_slice(self, until_ns: int) -> bool:
        """Send until then; is there more to send?"""
        return bool(_send_slice(self.state, self.fds, until_ns) == _SLICE)

    def finish_message(self) -> None:
        """A message that was begun is given away whole, if the other side takes it."""
        s = self.state[0]
        limit, s["limit"] = int(s["limit"]), s["messages"] + (1 if s["part"] else 0)
        deadline_ns = time.monotonic_ns() + int(_LAST_WORD_S * 1e9)
        while time.monotonic_ns() < deadline_ns and self.run_slice(time.monotonic_ns() + SLICE_NS):
            pass
        s["limit"] = limit

    def close_streams(self) -> None:
        """Say the end, and wait until the other side has it all and closes too."""
        deadline = time.monotonic() + _LAST_WORD_S
        for sock in self.sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        for sock in self.sockets:
            try:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                closed = sock.recv(1) == b""
            except OSError:
                closed = False
            self.unconfirmed += not closed

    def ready(self) -> dict[str, Any]:
        return {"type": "ready", "pid": os.getpid(), "to": self.plan.to, "cpus": self.cpus}

    def counts(self) -> dict[str, int]:
        s = self.state[0]
        return {"sent": int(s["messages"]), "bytes": int(s["bytes"]), "calls": int(s["calls"])}

    def interval(self) -> dict[str, Any]:
        s, (told_ns, told_bytes) = self.state[0], self.told
        self.told = time.monotonic_ns(), int(s["bytes"])
        rate = (self.told[1] - told_bytes) / (self.told[0] - told_ns)
        seconds = (self.told[0] - int(s["start_ns"])) / 1e9
        return {"type": "interval", "seconds": seconds, "gigabytes_per_second": rate, **self.counts()}

    def summary(self) -> dict[str, Any]:
        """unconfirmed: streams that the other side did not close in its turn."""
        s = self.state[0]
        nanoseconds = max(int(s["last_ns"] - s["start_ns"]), 1)
        return {
            "type": "summary",
            "to": self.plan.to,
            "cpus": self.cpus,
            "seconds": nanoseconds / 1e9,
            "gigabytes_per_second": int(s["bytes"]) / nanoseconds,
            "messages_per_second": int(s["messages"]) / nanoseconds * 1e9,
            **self.counts(),
            "lengths": lengths_by_name(s["lengths"]),
            "errors": errors_by_name(s["errors"]),
            "late_ns": {"max": int(s["most_late_ns"]) if s["rate"] else None},
            "sndbuf": {"asked": self.plan.sndbuf, "granted": self.granted},
            "unconfirmed": self.unconfirmed,
        }

    def check_end(self) -> None:
        """Failed where the other side broke a stream off."""
        code = int(self.state[0]["broken"])
        if code:
            raise Failed(f"sending to {self.plan.to}: {os.strerror(code)}: the other side ended the stream")
        if self.unconfirmed:
            raise Failed(f"{self.plan.to} did not confirm the end of {self.unconfirmed} streams: look there")


def warm() -> None:
    """Compile everything, or load it from the cache, before any socket is open."""
    sender = StreamSender(StreamPlan(to="", size=1))
    sender.state[0]["limit"] = 0
    sender.run_slice(0)


def run(plan: StreamPlan, emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Send as planned; the summary. As sender.run."""
    plan.check()
    with Stop() as stop, ExitStack() as stack:
        sender = StreamSender(plan)
        stop.prepare(lambda: sender.prepare(stack))
        if not stop.asked:
            emit(sender.ready())
            sender.start()
            drive(sender.run_slice, stop, sender.end_ns, lambda: emit(sender.interval()))
            sender.finish_message()
            sender.close_streams()
        summary = sender.summary()
        emit(summary)
    sender.check_end()
    return summary


def line(view: dict[str, Any]) -> str:
    """An object of the output, as a line for people."""
    if view["type"] == "ready":
        return f"sends to {view['to']}, cpu {figures.cpu_list(view['cpus'])}, pid {view['pid']}"
    told = f"{view['gigabytes_per_second']:.2f} GB/s, {figures.exact(view['sent'])} messages"
    told += f", {figures.exact(view['bytes'])} bytes"
    if view["type"] == "interval":
        return f"{figures.clock(view['seconds']).rjust(8)}  {told}"
    lengths = ", ".join(
        f"{'' if most == 'more' else '≤ '}{most}: {figures.exact(count)}"
        for most, count in view["lengths"].items()
    )
    lines = [f"sent for {figures.clock(view['seconds'])}: {told}", *error_lines(view["errors"], view["to"])]
    return "\n".join([*lines, f"bytes a send: {lengths}"] if lengths else lines)


def refuse_what_streams_lack(flags: dict[str, Any]) -> None:
    """Flags of `send` that say nothing of a stream."""
    for flag in ("gso", "batch", "stamp", "send", "name"):
        if flags.get(flag) is not None:
            raise Refused(f"--{flag} is for packets: leave it out with tcp:// and smc://")
