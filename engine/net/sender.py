"""`rxring send`: stamped UDP packets, at a given rate or as fast as the kernel takes them.

Open loop: packet i is due at start + ⌊i / rate⌋, whatever became of those before it. A sender that fell
behind sends what is due as fast as it can; nothing is left out, and how late each packet was is shown.
A message of several packets (GSO) goes when its last packet is due.

Flows are connected sockets, each with its own source port and sequence numbers. They take turns by call;
a call brings the messages of one flow, `batch` is about a whole round of all of them.

A send that fails is counted and not repeated, and its packets take no sequence number: what is numbered
was given to the wire, so a gap that a receiver sees is a loss on the way. An error that speaks of an
earlier packet (ECONNREFUSED), of a full queue or of a signal fails nothing: the message goes again.

At the end each flow is closed by stamps that say how many packets it had (`stamp.CLOSING`), three times
over since they may be lost. `sent` counts every packet that was given to the wire, these included, for a
receiver counts them too; `closing` says how many of them were such stamps.
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

from engine import figures
from engine.errors import Failed, Refused
from engine.handlers import histogram
from engine.handlers.histogram import add_row
from engine.net import address
from engine.net.clock import clock_offset_ns, clock_step_ns
from engine.net.libc import (
    EAGAIN,
    ECONNREFUSED,
    EINTR,
    ERRNOS,
    MAX_DATAGRAM_BYTES,
    MAX_SEGMENTS,
    MAX_SEND_MESSAGES,
    MMSGHDR,
    Messages,
    sendmmsg,
    sendmsg,
)
from engine.net.role import (
    ADVICE,
    SLICE_NS,
    Stop,
    check_duration,
    check_range,
    connect,
    cpus_of,
    drive,
    due_at,
    error_lines,
    errors_by_name,
    settle,
)
from engine.net.stamp import (
    CLOSING,
    CLOSING_BYTES,
    KINDS,
    MAGIC,
    RXRING,
    SEED,
    SEED_BYTES,
    STAMP,
    STAMP_BYTES,
    StampName,
    write_rxring,
    write_seed,
)
from engine.status import Status
from rings.atomics import pause
from rings.jit import jit
from rings.libc import errno, monotonic_ns, sleep_ns
from rings.segment import RingError

MAX_RATE = 1_000_000_000
MAX_FLOWS = 16384
_SECOND_NS = 1_000_000_000
_SPIN_NS = 100_000  # a sleep may end so much too late: closer to a due time the loop spins
_CLOSING_ROUNDS = 3
_CLOSING_PAUSE_S = 0.01
_CLOSING_LIMIT_S = 0.5
_NO_LIMIT = 1 << 62
_MMSGHDR_BYTES = MMSGHDR.itemsize

# What a send answers when the datagram was dropped on the way to the device, or has no way there now.
_PASSING = (
    errors.ENOBUFS,
    errors.ENOMEM,
    errors.EPERM,
    errors.ENETUNREACH,
    errors.EHOSTUNREACH,
    errors.ENETDOWN,
)

# Why the compiled loop came back.
_SLICE, _FINISHED, _BROKEN = 0, 1, 2

STATE = np.dtype(
    [
        # What is asked for.
        ("rate", "i8"),  # packets a second; 0: as fast as it goes
        ("size", "i8"),  # of a packet, bytes
        ("segments", "i8"),  # packets in a message
        ("burst", "i8"),  # messages in a call, at most
        ("limit", "i8"),  # packets
        ("stamp", "i8"),
        ("one_by_one", "i8"),  # sendmsg instead of sendmmsg
        ("messages", "i8"),  # address of the first header
        ("start_ns", "i8"),  # when packet 0 is due, CLOCK_MONOTONIC
        ("offset_ns", "i8"),  # CLOCK_REALTIME − CLOCK_MONOTONIC
        # What became of it.
        ("next", "i8"),  # the packet whose turn it is, in the schedule
        ("turn", "i8"),  # the flow whose turn it is
        ("sent", "i8"),
        ("frames", "i8"),
        ("calls", "i8"),
        ("failed", "i8"),
        ("least_late_ns", "i8"),
        ("most_late_ns", "i8"),
        ("last_ns", "i8"),  # when the last call came back, CLOCK_MONOTONIC
        ("broken", "i8"),  # errno of the error that ended it
        ("errors", "i8", (ERRNOS,)),
    ],
    align=True,
)
FLOW = np.dtype([("fd", "i8"), ("sequence", "i8")])


class SendPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to send; the names of the flags. Sizes in bytes, durations in seconds, rates in packets/s."""

    to: str
    name: str | None = None
    size: int = 256
    rate: int | Literal["max"] = "max"
    batch: int = 64
    gso: int | Literal["off"] = "off"
    flows: int = 1
    packets: int | None = None
    duration: float | None = None
    cpu: str | None = None
    stamp: StampName = "rxring"
    send: Literal["sendmmsg", "sendmsg"] = "sendmmsg"
    fifo: int | None = None
    mlock: bool = False

    def check(self) -> None:
        """Refused where it makes no sense."""
        address.parse_destination(self.to)
        check_range("size", self.size, 0, MAX_DATAGRAM_BYTES)
        check_range("batch", self.batch, 1, MAX_SEND_MESSAGES)
        check_range("flows", self.flows, 1, MAX_FLOWS)
        check_range("packets", self.packets, 1, _NO_LIMIT)
        check_duration(self.duration)
        if self.rate != "max":
            check_range("rate", self.rate, 1, MAX_RATE)
        if self.gso != "off":
            check_range("gso", self.gso, 1, MAX_SEGMENTS)
            if not 1 <= self.size * self.gso <= MAX_DATAGRAM_BYTES:
                raise Refused(
                    f"--gso {self.gso} with --size {self.size} makes messages of {self.size * self.gso} "
                    f"bytes: give a product from 1 to {MAX_DATAGRAM_BYTES}"
                )
        cpus_of(self.cpu)

    @property
    def segments(self) -> int:
        return 1 if self.gso == "off" else self.gso

    @property
    def limit(self) -> int:
        """Packets to send; those of a paced run's duration are known beforehand."""
        limit = self.packets or _NO_LIMIT
        if self.duration is not None and self.rate != "max":
            # In whole nanoseconds: 1.1 × 100 is more than 110.
            limit = min(limit, -(-round(self.duration * _SECOND_NS) * self.rate // _SECOND_NS))
        return limit

    @property
    def closes(self) -> bool:
        """Are the flows closed by stamps?"""
        return self.stamp == "rxring" and self.size >= CLOSING_BYTES

    @property
    def note(self) -> str | None:
        """What whoever reads the stamps should know: a stamp that does not fit is cut."""
        needed = {"none": 0, "rxring": STAMP_BYTES, "seed": SEED_BYTES}[self.stamp]
        if self.size >= needed:
            return None
        return f"packets of {self.size} bytes carry no whole {self.stamp} stamp: {needed} are needed"


@jit
def _stamp_message(s, flow, sequence, first, packets, sent_ns, address, late_ns):  # type: ignore[no-untyped-def]
    """Stamp the packets of one message, schedule numbers `first` and on; note how late each is."""
    for k in range(packets):
        due_ns = sent_ns if s.rate == 0 else due_at(s.start_ns, s.rate, first + k)
        late_ns[k] = sent_ns - due_ns
        if s.stamp == RXRING:
            write_rxring(address, s.size, flow, sequence + k, due_ns + s.offset_ns, sent_ns + s.offset_ns)
        elif s.stamp == SEED:
            write_seed(address, s.size, sent_ns + s.offset_ns)
        address += s.size


@jit
def _prepare(s, flows, iovecs, packets, late_ns):  # type: ignore[no-untyped-def]
    """Stamp the messages that are due, for the flow whose turn it is; how many they are."""
    index, sequence, count = s.next, flows[s.turn].sequence, 0
    while count < s.burst and index < s.limit:
        several = min(s.segments, s.limit - index)
        now = monotonic_ns()
        if due_at(s.start_ns, s.rate, index + several - 1) > now:
            break
        _stamp_message(s, s.turn, sequence, index, several, now, iovecs[count].base, late_ns[count])
        iovecs[count].length = several * s.size
        packets[count] = several
        index += several
        sequence += several
        count += 1
    return count


@jit
def _send(s, fd, count):  # type: ignore[no-untyped-def]
    """How many of `count` prepared messages the kernel took; −errno if it took none."""
    if s.one_by_one == 0:
        s.calls += 1
        taken = sendmmsg(fd, s.messages, count, 0)
        return np.int64(taken) if taken > 0 else -errno()
    for i in range(count):
        s.calls += 1
        if sendmsg(fd, s.messages + i * _MMSGHDR_BYTES, 0) < 0:
            return i if i > 0 else -errno()
    return count


@jit
def _account(s, flows, packets, late_ns, lateness, taken):  # type: ignore[no-untyped-def]
    """Book the first `taken` messages as sent; with a schedule, how late each of their packets was."""
    for i in range(taken):
        if s.rate != 0:
            add_row(lateness, late_ns[i], packets[i])
            s.most_late_ns = max(s.most_late_ns, late_ns[i, 0])
            s.least_late_ns = min(s.least_late_ns, late_ns[i, packets[i] - 1])
        flows[s.turn].sequence += packets[i]
        s.next += packets[i]
        s.sent += packets[i]
    s.frames += taken


@jit
def _send_slice(state, flows, iovecs, packets, late_ns, lateness, until_ns):  # type: ignore[no-untyped-def]
    """Send until the time `until_ns`, a signal, the last packet, or an error that will not pass."""
    s = state[0]
    while s.next < s.limit:
        now = monotonic_ns()
        if now >= until_ns:
            return _SLICE
        due_ns = due_at(s.start_ns, s.rate, min(s.next + s.segments, s.limit) - 1)
        if due_ns > now:
            nap_ns = min(due_ns, until_ns) - now - _SPIN_NS
            if nap_ns <= 0:
                pause()
            elif sleep_ns(nap_ns) != 0:
                return _SLICE
            continue
        taken = _send(s, flows[s.turn].fd, _prepare(s, flows, iovecs, packets, late_ns))
        s.last_ns = monotonic_ns()
        if taken < 0:
            error = -taken
            s.errors[error] += 1
            if error == EINTR:
                return _SLICE
            if error in (EAGAIN, ECONNREFUSED):
                continue
            s.failed += packets[0]
            if error not in _PASSING:
                s.broken = error
                return _BROKEN
            s.next += packets[0]
        else:
            _account(s, flows, packets, late_ns, lateness, taken)
        s.turn = s.turn + 1 if s.turn + 1 < len(flows) else 0
    return _FINISHED


class Sender:
    """A sender's state, its sockets, and the memory from which the kernel takes the packets."""

    def __init__(self, plan: SendPlan, status: Status | None = None) -> None:
        self.plan, self.status = plan, status
        burst = max(1, plan.batch // plan.flows)
        self.state = np.zeros(1, STATE)
        self.flows = np.zeros(plan.flows, FLOW)
        self.messages = Messages.prepare(burst)
        self.iovecs = self.messages.iovecs.reshape(-1)
        # Of each message prepared: how many packets it has, and how late each of them is.
        self.packets = np.zeros(burst, np.int64)
        self.late_ns = np.zeros((burst, plan.segments), np.int64)
        self.lateness = np.zeros(histogram.BUCKETS, np.int64)
        # The payload counts up from 0 in every packet; stamps are written over its beginning.
        self.pattern = np.arange(plan.size).astype(np.uint8)
        self.payload = np.empty((burst, plan.segments, plan.size), np.uint8)
        self.iovecs["base"] = self.payload.ctypes.data + np.arange(burst) * self.payload[0].nbytes
        s = self.state[0]
        s["rate"] = 0 if plan.rate == "max" else plan.rate
        s["size"], s["segments"], s["burst"], s["limit"] = plan.size, plan.segments, burst, plan.limit
        s["stamp"], s["one_by_one"] = KINDS[plan.stamp], plan.send == "sendmsg"
        s["messages"], s["least_late_ns"] = self.messages.address, _NO_LIMIT
        self.sockets: list[socket.socket] = []
        self.cpus: list[int] = []
        self.closing = 0
        self.clock_steps = 0
        self.told_ns = self.told_packets = 0

    def prepare(self, stack: ExitStack) -> None:
        """Everything that takes time or may be refused; the sockets, which `stack` closes, at last."""
        warm()
        self.cpus = settle(self.plan.cpu, self.plan.fifo, self.plan.mlock)
        self.payload[:] = self.pattern  # touched first here, on the CPU that it is for
        segment = self.plan.size if self.plan.segments > 1 else 0
        for flow in range(self.plan.flows):
            self.sockets.append(stack.enter_context(connect(self.plan.to, segment)))
            self.flows[flow]["fd"] = self.sockets[flow].fileno()

    def start(self) -> None:
        """Packet 0 is due now."""
        s = self.state[0]
        s["offset_ns"] = clock_offset_ns()
        s["start_ns"] = s["last_ns"] = self.told_ns = time.monotonic_ns()

    @property
    def end_ns(self) -> int | None:
        """When the time is up. A paced run's packets are numbered; it may still send what was due."""
        if self.plan.duration is None:
            return None
        grace_ns = 0 if self.plan.rate == "max" else SLICE_NS
        return int(self.state[0]["start_ns"]) + int(self.plan.duration * 1e9) + grace_ns

    def run_slice(self, until_ns: int) -> bool:
        """Send until then; is there more to send?"""
        s = self.state[0]
        step_ns = clock_step_ns(int(s["offset_ns"]))
        if step_ns != 0:
            s["offset_ns"] += step_ns
            self.clock_steps += 1
        why = _send_slice(
            self.state, self.flows, self.iovecs, self.packets, self.late_ns, self.lateness, until_ns
        )
        self.publish("sending")
        return bool(why == _SLICE)

    def close_flows(self) -> None:
        """Send the closing stamps; each round a little later, lest all meet the same full queue."""
        deadline = time.monotonic() + _CLOSING_LIMIT_S
        for turn in range(_CLOSING_ROUNDS if self.plan.closes else 0):
            if turn:
                time.sleep(_CLOSING_PAUSE_S)
            for flow, sock in enumerate(self.sockets):
                if time.monotonic() < deadline:
                    self._send_closing(flow, sock)

    def _send_closing(self, flow: int, sock: socket.socket) -> None:
        s, now = self.state[0], time.time_ns()
        stamp = np.array((MAGIC, flow | CLOSING, self.flows[flow]["sequence"], now, now), STAMP).tobytes()
        packet = stamp[: self.plan.size] + self.pattern[STAMP_BYTES:].tobytes()
        for _ in range(2):  # the first may only bring the news that an earlier packet was refused
            try:
                sock.send(packet)
            except OSError as error:
                s["errors"][error.errno] += 1
            else:
                self.closing += 1
                return
        s["failed"] += 1

    def counts(self) -> dict[str, int]:
        s = self.state[0]
        sent = int(s["sent"]) + self.closing
        return {
            "sent": sent,
            "closing": self.closing,
            "bytes": sent * self.plan.size,
            "frames": int(s["frames"]) + self.closing,
            "failed": int(s["failed"]),
        }

    def publish(self, state: str) -> None:
        """Tell the outside, where the sender has a name."""
        if self.status is not None:
            self.status.publish(0, {"state": state, "to": self.plan.to, **self.counts()})

    def ready(self) -> dict[str, Any]:
        plan = self.plan
        return {"type": "ready", "name": plan.name, "pid": os.getpid(), "to": plan.to, "cpus": self.cpus}

    def interval(self) -> dict[str, Any]:
        s, now = self.state[0], time.monotonic_ns()
        rate = (int(s["sent"]) - self.told_packets) / (now - self.told_ns) * 1e9
        self.told_ns, self.told_packets = now, int(s["sent"])
        seconds = (now - int(s["start_ns"])) / 1e9
        return {"type": "interval", "seconds": seconds, "packets_per_second": rate, **self.counts()}

    def summary(self) -> dict[str, Any]:
        """Of a paced run, the last packet's share of the time counts: 10 packets at 10/s take 1 s."""
        s = self.state[0]
        nanoseconds = int(s["last_ns"] - s["start_ns"])
        if s["rate"] > 0:
            nanoseconds = max(nanoseconds, int(s["next"]) * _SECOND_NS // int(s["rate"]))
        return {
            "type": "summary",
            "name": self.plan.name,
            "to": self.plan.to,
            "cpus": self.cpus,
            "seconds": nanoseconds / 1e9,
            "packets_per_second": int(s["sent"]) / nanoseconds * 1e9 if nanoseconds else 0.0,
            **self.counts(),
            "calls": int(s["calls"]),
            "errors": errors_by_name(s["errors"]),
            "late_ns": self._late_ns(),
            "clock_steps": self.clock_steps,
        }

    def _late_ns(self) -> dict[str, int | None]:
        """How long after they were due packets were sent; without a schedule none is late or in time."""
        if not self.lateness.any():
            return {"p50": None, "p99": None, "max": None}
        least, most = int(self.state[0]["least_late_ns"]), int(self.state[0]["most_late_ns"])
        p50, p99 = histogram.percentiles(self.lateness, (500, 990), least, most)
        return {"p50": p50, "p99": p99, "max": most}

    def check_end(self) -> None:
        """Failed where an error ended it, or nothing could be sent at all."""
        s = self.state[0]
        if s["broken"] == 0 and (s["sent"] > 0 or s["failed"] == 0):
            return
        code = int(s["broken"] or np.argmax(s["errors"]))
        raise Failed(f"cannot send to {self.plan.to}: {os.strerror(code)}: {ADVICE.get(code, ADVICE[0])}")


def warm() -> None:
    """Compile everything, or load it from the cache, before any socket is open."""
    sender = Sender(SendPlan(to="", size=0, batch=1))
    sender.state[0]["limit"] = 0
    sender.start()
    sender.run_slice(0)


def run(plan: SendPlan, emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Send as planned; the summary. `emit` gets every object of the output: ready, interval …, summary.

    END_SIGNALS end it in order. Refused before anything is sent; Failed at the end.
    """
    plan.check()
    with Stop() as stop, ExitStack() as stack:
        sender = Sender(plan, _announce(plan.name, stack))
        sender.publish("starting")
        stop.prepare(lambda: sender.prepare(stack))
        if not stop.asked:
            emit(sender.ready())
            sender.start()
            drive(sender.run_slice, stop, sender.end_ns, lambda: emit(sender.interval()))
            sender.close_flows()
        sender.publish("done")
        summary = sender.summary()
        emit(summary)
    sender.check_end()
    return summary


def _announce(name: str | None, stack: ExitStack) -> Status | None:
    """The status segment of a sender that has a name, until `stack` ends."""
    if name is None:
        return None
    try:
        status = Status.create(name, kind="sender", workers=["sender"])
    except RingError as error:
        raise Refused(str(error)) from None
    stack.callback(status.close)
    return status


def line(view: dict[str, Any]) -> str:
    """An object of the output, as a line for people."""
    if view["type"] == "ready":
        return f"sends to {view['to']}, cpu {figures.cpu_list(view['cpus'])}, pid {view['pid']}"
    packets = f"{figures.exact(view['sent'] - view['closing'])} packets"
    if view["closing"]:
        packets += f" + {figures.exact(view['closing'])} closing"
    told = [figures.magnitude(view["packets_per_second"], "/s"), packets]
    told += [f"{figures.exact(view['failed'])} failed"]
    if view["type"] == "interval":
        return f"{figures.clock(view['seconds']).rjust(8)}  {', '.join(told)}"
    late = view["late_ns"]
    if late["max"] is not None:
        told += ["late " + " ".join(f"{key} {figures.duration(value)}" for key, value in late.items())]
    told += error_lines(view["errors"], view["to"])
    return f"sent for {figures.clock(view['seconds'])}: {', '.join(told)}"
