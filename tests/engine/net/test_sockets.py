"""The receiving socket: what was asked of it, what it has, what it drops, and how it is cut off."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Child
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Refused
from engine.net.sockets import DropCount, ReceiveBuffer, bind_udp, cut_off, discard, open_udp, probe_udp

RMEM_MAX = int(Path("/proc/sys/net/core/rmem_max").read_text())
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    sock, _ = open_udp(timestamps=True, rcvbuf=None)
    bind_udp(sock, "127.0.0.1", 0)
    yield sock
    sock.close()


def send(to: socket.socket, payloads: list[bytes]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for payload in payloads:
            out.sendto(payload, to.getsockname())


def test_what_was_asked_for_and_what_was_granted() -> None:
    for asked in (100_000, 100_001, 4096):
        sock, buffer = open_udp(timestamps=False, rcvbuf=asked)
        assert buffer.asked == asked
        assert buffer.granted == sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert asked - 1 <= buffer.granted
        assert not buffer.short
        sock.close()
    sock, buffer = open_udp(timestamps=False, rcvbuf=None)
    assert buffer.asked is None
    assert not buffer.short
    sock.close()


def short_buffer() -> None:
    """The life of a process that may not force a larger one."""
    os.setgroups([])
    os.setresuid(NOBODY, NOBODY, NOBODY)
    asked = 4 * RMEM_MAX
    sock, buffer = open_udp(timestamps=True, rcvbuf=asked)
    assert buffer == ReceiveBuffer(asked, 2 * RMEM_MAX)
    assert buffer.short
    assert f"sysctl -w net.core.rmem_max={asked // 2} " in buffer.advice
    sock.close()


@needs_root
def test_a_short_buffer_names_the_sysctl_that_would_do(fork: Callable[..., Child]) -> None:
    assert fork(short_buffer).wait() == 0


def test_a_buffer_that_no_kernel_grants_is_refused() -> None:
    sock, _ = open_udp(timestamps=False, rcvbuf=1 << 20)
    sock.close()
    with pytest.raises(Refused, match="give at most 2147483646"):
        open_udp(timestamps=False, rcvbuf=1 << 31)


def test_nothing_arrives_before_it_is_bound() -> None:
    sock, _ = open_udp(timestamps=True, rcvbuf=None)
    assert sock.getsockname()[1] == 0
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    host, port = bind_udp(sock, "localhost", 0)
    assert (host, port) == ("127.0.0.1", sock.getsockname()[1])
    sock.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:5000: no interface has this address: `ip addr`"),
        ("no-such-host.invalid", "cannot listen on no-such-host.invalid: .*: give an IPv4 address"),
        ("a" * 70, "cannot listen on a+: .*: give an IPv4 address"),
    ],
)
def test_addresses_that_are_not_ours(host: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        probe_udp(host, 5000)


def test_who_holds_a_port(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    name = Path("/proc/self/comm").read_text().strip()
    words = f"cannot listen on 127.0.0.1:{port}: process {os.getpid()} ({name}) has the port: end it"
    with pytest.raises(Refused, match=re.escape(words)):
        probe_udp("127.0.0.1", port)
    with pytest.raises(Refused, match=f"process {os.getpid()} "):
        probe_udp("0.0.0.0", port)


def low_port() -> None:
    os.setgroups([])
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with pytest.raises(Refused, match="ports below 1024 need CAP_NET_BIND_SERVICE: take a higher one"):
        probe_udp("127.0.0.1", 7)


@needs_root
@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 1024,
    reason="this machine lets anyone have the low ports",
)
def test_a_port_that_is_not_for_us(fork: Callable[..., Child]) -> None:
    assert fork(low_port).wait() == 0


def test_a_probe_leaves_the_port_free() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for _ in range(3):
        probe_udp("127.0.0.1", port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", port))


def test_the_socket_counts_its_drops(bound: socket.socket) -> None:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 10_000)
    drops = DropCount(bound)
    assert drops.read() == 0
    send(bound, [b"x" * 100] * 500)
    dropped = drops.read()
    assert dropped > 0
    assert discard(bound) == (500 - dropped,) * 2
    assert discard(bound) == (0, 0)
    send(bound, [b"x" * 100] * 500)
    assert drops.read() + discard(bound)[0] == 1000 - (500 - dropped)


class FarSocket:
    """A socket whose 32-bit counter stands where it can't be driven within a test: 2³² drops away."""

    def __init__(self, drops: int) -> None:
        self.drops = drops

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return struct.pack("9I", *[7] * 8, self.drops & 0xFFFFFFFF)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=8))
def test_the_kernels_counter_wraps_ours_does_not(steps: list[int]) -> None:
    """Case 8 (envoy#7165): the counter is cumulative and 32 bits wide."""
    sock = FarSocket(0)
    count = DropCount(sock)  # type: ignore[arg-type]
    for step in steps:
        sock.drops += step
        assert count.read() == sock.drops


def test_queued_packets_of_any_length_are_discarded_and_counted(bound: socket.socket) -> None:
    send(bound, [b"", b"x", b"y" * 60_000, b""])
    assert discard(bound) == (4, 4)


def test_after_the_cut_nothing_is_queued_and_what_comes_is_counted(bound: socket.socket) -> None:
    drops = DropCount(bound)
    send(bound, [b"before"] * 3)
    cut_off(bound)
    send(bound, [b"after"] * 5)
    assert drops.read() == 5
    assert [bound.recv(10) for _ in range(3)] == [b"before"] * 3
    with pytest.raises(BlockingIOError):
        bound.recv(10)
