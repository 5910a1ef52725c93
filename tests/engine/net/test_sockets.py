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
from engine.net.libc import MAX_DATAGRAM_BYTES
from engine.net.sockets import (
    SO_BUSY_POLL,
    DropCount,
    ReceiveBuffer,
    bind_udp,
    cut_off,
    discard,
    open_udp,
    probe_udp,
    steer_by_cpu,
)
from engine.spec import Listen

RMEM_MAX = int(Path("/proc/sys/net/core/rmem_max").read_text())
NOBODY = 65534
LOOPBACK = Listen("udp", "127.0.0.1", 0)
LOOPBACK_6 = Listen("udp", "::1", 0)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    sock, _ = open_udp(LOOPBACK, timestamps=True, rcvbuf=None)
    bind_udp(sock, LOOPBACK)
    yield sock
    sock.close()


def at(host: str, port: int) -> Listen:
    return Listen("udp", host, port)


def send(to: socket.socket, payloads: list[bytes]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for payload in payloads:
            out.sendto(payload, to.getsockname())


def test_what_was_asked_for_and_what_was_granted() -> None:
    for asked in (100_000, 100_001, 4096):
        sock, buffer = open_udp(LOOPBACK, timestamps=False, rcvbuf=asked)
        assert buffer.asked == asked
        assert buffer.granted == sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert asked - 1 <= buffer.granted
        assert not buffer.short
        sock.close()
    sock, buffer = open_udp(LOOPBACK, timestamps=False, rcvbuf=None)
    assert buffer.asked is None
    assert not buffer.short
    sock.close()


def short_buffer() -> None:
    """The life of a process that may not force a larger one."""
    os.setgroups([])
    os.setresuid(NOBODY, NOBODY, NOBODY)
    asked = 4 * RMEM_MAX
    sock, buffer = open_udp(LOOPBACK, timestamps=True, rcvbuf=asked)
    assert buffer == ReceiveBuffer(asked, 2 * RMEM_MAX)
    assert buffer.short
    assert f"sysctl -w net.core.rmem_max={asked // 2} " in buffer.advice
    sock.close()


@needs_root
def test_a_short_buffer_names_the_sysctl_that_would_do(fork: Callable[..., Child]) -> None:
    assert fork(short_buffer).wait() == 0


def test_a_buffer_that_no_kernel_grants_is_refused() -> None:
    sock, _ = open_udp(LOOPBACK, timestamps=False, rcvbuf=1 << 20)
    sock.close()
    with pytest.raises(Refused, match="give at most 2147483646"):
        open_udp(LOOPBACK, timestamps=False, rcvbuf=1 << 31)


def test_nothing_arrives_before_it_is_bound() -> None:
    sock, _ = open_udp(LOOPBACK, timestamps=True, rcvbuf=None)
    assert sock.getsockname()[1] == 0
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    host, port = bind_udp(sock, at("localhost", 0))
    assert (host, port) == ("127.0.0.1", sock.getsockname()[1])
    sock.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:5000: no interface has this address: `ip addr`"),
        (
            "no-such-host.invalid",
            "cannot listen on no-such-host.invalid:5000: .* has no address .*: give an IPv4 address",
        ),
        ("a" * 70, "cannot listen on a+:5000: .* has no address .*: give an IPv4 address"),
    ],
)
def test_addresses_that_are_not_ours(host: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        probe_udp(at(host, 5000))


def test_who_holds_a_port(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    name = Path("/proc/self/comm").read_text().strip()
    words = f"cannot listen on 127.0.0.1:{port}: process {os.getpid()} ({name}) has the port: end it"
    with pytest.raises(Refused, match=re.escape(words)):
        probe_udp(at("127.0.0.1", port))
    with pytest.raises(Refused, match=f"process {os.getpid()} "):
        probe_udp(at("0.0.0.0", port))


def test_who_holds_a_port_of_ipv6() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as holder:
        holder.bind(("::1", 0))
        port = holder.getsockname()[1]
        words = f"cannot listen on [::1]:{port}: process {os.getpid()} ("
        with pytest.raises(Refused, match=re.escape(words)):
            probe_udp(at("::1", port))


def test_ipv6_is_ipv6_only() -> None:
    """Both can have the port, and a packet to the one never comes to the other."""
    six, _ = open_udp(at("::", 0), timestamps=False, rcvbuf=None)
    with six:
        port = bind_udp(six, at("::", 0))[1]
        four, _ = open_udp(at("0.0.0.0", port), timestamps=False, rcvbuf=None)
        with four, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            bind_udp(four, at("0.0.0.0", port))
            out.sendto(b"to IPv4", ("127.0.0.1", port))
            assert four.recv(100) == b"to IPv4"
            with pytest.raises(BlockingIOError):
                six.recv(100)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_on_one_device(host: str) -> None:
    where = Listen("udp", host, 0, {"interface": "lo"})
    sock, _ = open_udp(where, timestamps=False, rcvbuf=None)
    with sock:
        bind_udp(sock, where)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == b"lo\0"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Listen("udp", "0.0.0.0", 0, {"interface": "none0"}), "there is no device none0: there are lo"),
        (Listen("udp", "fe80::1%none0", 0), "there is no device none0: there are lo"),
    ],
)
def test_devices_that_are_not_there(where: Listen, words: str) -> None:
    with pytest.raises(Refused, match=words):
        probe_udp(where)


@pytest.mark.parametrize("where", [LOOPBACK, LOOPBACK_6], ids=["IPv4", "IPv6"])
def test_a_connected_socket_takes_packets_of_its_peer_only(where: Listen) -> None:
    sock, _ = open_udp(where, timestamps=False, rcvbuf=None)
    with (
        sock,
        socket.socket(sock.family, socket.SOCK_DGRAM) as peer,
        socket.socket(sock.family, socket.SOCK_DGRAM) as other,
    ):
        peer.bind((where.host, 0))
        host = f"[{where.host}]" if ":" in where.host else where.host
        bound = bind_udp(sock, where, f"{host}:{peer.getsockname()[1]}")
        peer.sendto(b"first", bound)
        other.sendto(b"of another", bound)
        peer.sendto(b"second", bound)
        assert [sock.recv(100) for _ in range(2)] == [b"first", b"second"]
        with pytest.raises(BlockingIOError):
            sock.recv(100)


def test_nothing_of_others_is_queued_before_the_socket_is_connected() -> None:
    """While it is bound and not connected yet, its filter drops what comes, and it counts that."""
    sock, _ = open_udp(LOOPBACK, timestamps=False, rcvbuf=None)
    drops = DropCount(sock)
    with sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:

        class Busy(socket.socket):
            """A packet of another comes just before it is connected."""

            def connect(self, peer: object) -> None:
                other.sendto(b"of another", self.getsockname())
                super().connect(peer)  # type: ignore[arg-type]

        with Busy(fileno=os.dup(sock.fileno())) as busy:
            busy.setblocking(False)
            bind_udp(busy, LOOPBACK, "127.0.0.1:9")
            with pytest.raises(BlockingIOError):
                busy.recv(100)
        assert drops.read() == 1


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("[::1]:5000", "are not both IPv4 or both IPv6"),
        ("239.1.1.1:5000", "packets come from a host, not from a group"),
        ("8.8.8.8:5000", "--connect 8.8.8.8:5000: Invalid argument: give an address that udp://127"),
        ("nowhere", "give HOST:PORT"),
    ],
)
def test_peers_that_cannot_be(to: str, words: str) -> None:
    sock, _ = open_udp(LOOPBACK, timestamps=False, rcvbuf=None)
    with sock, pytest.raises(Refused, match=words):
        bind_udp(sock, LOOPBACK, to)


@needs_root
def test_busy_polling() -> None:
    sock, _ = open_udp(LOOPBACK, timestamps=False, rcvbuf=None, busy_poll=50)
    with sock:
        assert sock.getsockopt(socket.SOL_SOCKET, SO_BUSY_POLL) == 50


def no_busy_polling() -> None:
    os.setgroups([])
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with pytest.raises(Refused, match="--busy-poll 50 needs CAP_NET_ADMIN: run it as root, or leave it out"):
        open_udp(LOOPBACK, timestamps=False, rcvbuf=None, busy_poll=50)


@needs_root
def test_busy_polling_is_not_for_everybody(fork: Callable[..., Child]) -> None:
    assert fork(no_busy_polling).wait() == 0


@pytest.mark.parametrize("where", [LOOPBACK, LOOPBACK_6], ids=["IPv4", "IPv6"])
def test_sockets_that_share_a_port_are_chosen_by_cpu(where: Listen, fork: Callable[..., Child]) -> None:
    """Loopback delivers on the sender's CPU."""
    first, _ = open_udp(where, timestamps=False, rcvbuf=None, share=True)
    second, _ = open_udp(where, timestamps=False, rcvbuf=None, share=True)
    with first, second:
        bound = bind_udp(first, where)
        with pytest.raises(Refused, match="has the port"):
            probe_udp(at(where.host, bound[1]))
        bind_udp(second, at(where.host, bound[1]))
        steer_by_cpu(first, 2)

        def send_from(cpu: int) -> None:
            os.sched_setaffinity(0, [cpu])
            for _ in range(20):  # flows, which would be spread without the filter
                with socket.socket(first.family, socket.SOCK_DGRAM) as out:
                    out.sendto(bytes([cpu]), bound)

        cpus = sorted(os.sched_getaffinity(0))[:2]
        for cpu in cpus:
            assert fork(send_from, cpu).wait() == 0
        for number, sock in enumerate((first, second)):
            for _ in range(20 * sum(cpu % 2 == number for cpu in cpus)):
                assert sock.recv(MAX_DATAGRAM_BYTES)[0] % 2 == number
            with pytest.raises(BlockingIOError):
                sock.recv(1)


def low_port() -> None:
    os.setgroups([])
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with pytest.raises(Refused, match="ports below 1024 need CAP_NET_BIND_SERVICE: take a higher one"):
        probe_udp(at("127.0.0.1", 7))


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
        probe_udp(at("127.0.0.1", port))
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
