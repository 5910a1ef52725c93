"""What the sender and the mirror have in common: one process, one compiled loop, ended in order."""

from __future__ import annotations

import errno as errors
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

from engine import figures
from engine.affinity import pinning
from engine.affinity.topology import parse_cpu_list
from engine.errors import Refused
from engine.net import address
from engine.net.address import Destination
from engine.net.libc import SOL_UDP, UDP_SEGMENT
from engine.signals import END_SIGNALS
from rings.jit import jit

SLICE_NS = 50_000_000  # a compiled loop comes back this often
_INTERVAL_NS = _SECOND_NS = 1_000_000_000
_SLICE_TIMEVAL = struct.pack("@ll", 0, SLICE_NS // 1000)


class _Interrupted(BaseException):
    """A signal came while everything was still being prepared."""


class Stop:
    """Within `with Stop() as stop:` the first of END_SIGNALS sets `asked`, the next ends the process.

    A SIGHUP never is that next one: of a terminal that closes, shell and kernel both tell.
    """

    def __init__(self) -> None:
        self.asked = False
        self._breaks_off = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, self._ask) for number in END_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def prepare(self, steps: Callable[[], None]) -> None:
        """Run `steps`; the signal breaks them off, for compiling takes long and looks at nothing."""
        with suppress(_Interrupted):
            self._breaks_off = True
            if not self.asked:
                steps()
            self._breaks_off = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for other, handler in self._before.items():
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else handler)
        if self._breaks_off:
            raise _Interrupted


@jit
def due_at(start_ns, rate, index):  # type: ignore[no-untyped-def]
    """start + ⌊index × 10⁹ / rate⌋, the second's part apart: the product would pass 64 bits. 0: at once."""
    if rate == 0:
        return start_ns
    return start_ns + index // rate * _SECOND_NS + index % rate * _SECOND_NS // rate


def drive(
    run_slice: Callable[[int], bool], stop: Stop, end_ns: int | None, each_second: Callable[[], None]
) -> None:
    """Run a compiled loop slice by slice, until it is finished, `stop` is asked, or `end_ns` has come.

    run_slice(until_ns): go on until then (CLOCK_MONOTONIC), or a little longer; is there more to do?
    """
    tell_ns = time.monotonic_ns() + _INTERVAL_NS
    while not stop.asked:
        now = time.monotonic_ns()
        if now >= tell_ns:
            each_second()
            tell_ns += _INTERVAL_NS
        until_ns = now + SLICE_NS if end_ns is None else min(now + SLICE_NS, end_ns)
        if until_ns <= now or not run_slice(until_ns):
            return


# What to do when sending fails for good, by errno; 0: anything else.
ADVICE = {
    0: "look at the route, and at what filters it",
    errors.EMFILE: "each flow is an open file, raise the limit with `ulimit -n`, or take fewer --flows",
    errors.ENOPROTOOPT: "this kernel cannot cut messages into packets, leave out --gso",
    errors.EMSGSIZE: "the packets are larger than the path takes, give a smaller --size",
    errors.EINVAL: "with --gso a packet must fit the MTU, and older kernels take 64 a message",
    errors.EIO: "the device cannot cut messages into packets, leave out --gso",
    errors.EAFNOSUPPORT: "this machine has no IPv6, give an IPv4 address",
    errors.EACCES: "it is a broadcast address, give that of a host or a multicast group",
}


def limit_sends(sock: socket.socket) -> None:
    """A send waits for room at most as long as a slice lasts, then says EAGAIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE_TIMEVAL)


def connect(to: str, segment: int = 0) -> socket.socket:
    """A UDP socket connected to HOST:PORT, whose sends wait at most for a slice. Refused without.

    segment: if not 0, the kernel cuts each message into packets of so many bytes (GSO).
    """
    destination = address.parse_destination(to)
    where = address.resolve(destination.host, destination.port, destination.interface)
    with ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(address.family(where), socket.SOCK_DGRAM))
            limit_sends(sock)
            if segment:
                sock.setsockopt(SOL_UDP, UDP_SEGMENT, segment)
            _choose_link(sock, destination)
            sock.connect(where)
        except OSError as error:
            advice = ADVICE.get(error.errno or 0, ADVICE[0])
            if address.is_multicast(where[0]) and error.errno == errors.ENETUNREACH:
                advice = f"give {to}?interface=, of {address.device_names()}"
            raise Refused(f"cannot send to {to}: {error.strerror}: {advice}") from None
        undo.pop_all()
        return sock


def _choose_link(sock: socket.socket, destination: Destination) -> None:
    """Of multicast: by which device, and how far."""
    ipv6 = sock.family == socket.AF_INET6
    if destination.interface is not None:
        index = address.device_index(destination.interface)
        if ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        else:  # struct ip_mreqn: group, address, index
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("8xi", index))
    if destination.ttl is not None:
        if ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, destination.ttl)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, destination.ttl)


def pin_here(cpus: Iterable[int] | None) -> list[int]:
    """Pin this process; the CPUs it got, [] if none were asked for."""
    if cpus is None:
        return []
    return list(pinning.pin(os.getpid(), list(cpus))[0].cpus)


def settle(cpu: str | None, fifo: int | None, mlock: bool) -> list[int]:
    """Pin this process, give it its priority, lock its memory, as flags say; the CPUs it got."""
    cpus = pin_here(cpus_of(cpu))
    if fifo is not None:
        pinning.set_fifo(os.getpid(), fifo)
    if mlock:
        pinning.lock_memory()
    return cpus


def cpus_of(flag: str | None) -> tuple[int, ...] | None:
    """The CPUs of a --cpu flag. Refused if it is no list."""
    try:
        return None if flag is None else parse_cpu_list(flag)
    except ValueError as error:
        raise Refused(str(error)) from None


def check_range(flag: str, value: int | None, least: int, most: int) -> None:
    """Refused if a flag's value is there and lies outside."""
    if value is not None and not least <= value <= most:
        raise Refused(f"--{flag} {value}: give {least} to {most}")


def check_duration(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= 1e9:
        raise Refused(f"--duration {seconds}: give seconds above 0")


def errors_by_name(counters: Any) -> dict[str, int]:
    """{"ENOBUFS": 12}: of counters that are indexed by errno, those above 0."""
    return {errors.errorcode.get(i, str(i)): int(count) for i, count in enumerate(counters) if count}


def error_lines(counts: dict[str, int], to: str | None) -> list[str]:
    """Errors by name, for people."""
    return [
        f"nobody listens on {to} (refused {figures.exact(count)} times)"
        if name == "ECONNREFUSED"
        else f"{name} {figures.exact(count)} times"
        for name, count in counts.items()
    ]
