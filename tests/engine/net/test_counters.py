"""The kernel's counters: its texts of all ages, netlink's bytes, and what wraps, goes and comes back."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Child
from hypothesis import given
from hypothesis import strategies as st
from runs import RXRING, Run

from engine.net.counters import (
    Device,
    Layers,
    Link,
    Reading,
    Softnet,
    Udp,
    choose_devices,
    devices_of,
    parse_addresses,
    parse_links,
    parse_snmp,
    parse_snmp6,
    parse_softnet,
    read_links,
)
from engine.net.libc import SOL_UDP, UDP_SEGMENT
from engine.net.sockets import DropCount

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
cpu_ids = st.lists(st.integers(0, 4095), unique=True, min_size=1, max_size=6).map(sorted)

# ── text ─────────────────────────────────────────────────────────────────────────────────────────────


@given(cpu_ids, st.sampled_from([9, 10, 11, 13, 15]), st.data())
def test_softnet_of_any_kernel_with_any_cpus(cpus: list[int], width: int, data: st.DataObject) -> None:
    rows = {cpu: data.draw(st.lists(u32, min_size=width, max_size=width)) for cpu in cpus}
    for cpu, row in rows.items():
        row[12:13] = [cpu] if width > 12 else []
    text = "".join(" ".join(f"{value:08x}" for value in row) + "\n" for row in rows.values())
    # With the column, it alone says which CPU that is; without, the list of those online.
    found = parse_softnet(text, [] if width > 12 else cpus)
    assert list(found) == cpus
    for cpu, row in rows.items():
        assert (found[cpu].processed, found[cpu].dropped, found[cpu].time_squeeze) == tuple(row[:3])
        assert found[cpu].received_rps == (row[9] if width > 9 else 0)
        assert found[cpu].flow_limit == (row[10] if width > 10 else 0)


NAMES = {
    "InDatagrams": "in_datagrams",
    "NoPorts": "no_ports",
    "InErrors": "in_errors",
    "RcvbufErrors": "rcvbuf_errors",
    "InCsumErrors": "in_csum_errors",
    "MemErrors": "mem_errors",
}
counts_by_name = st.dictionaries(st.sampled_from([*NAMES, "OutDatagrams", "IgnoredMulti", "NewName"]), u64)
BESIDE = "UdpLite: InErrors NoPorts\nUdpLite: 77 78\n"


@given(counts_by_name)
def test_udp_by_the_names_that_this_kernel_has_in_any_order(counts: dict[str, int]) -> None:
    expected = Udp(**{ours: counts.get(name, 0) for name, ours in NAMES.items()})
    lines = f"Udp: {' '.join(counts)}\nUdp: {' '.join(map(str, counts.values()))}\n"
    assert parse_snmp(f"Ip: Forwarding\nIp: 1\n{lines}{BESIDE}") == expected
    lines6 = "".join(f"Udp6{name:28}\t{count}\n" for name, count in counts.items())
    assert parse_snmp6(f"Ip6InReceives 3\n{lines6}UdpLite6InErrors 77\n") == expected


def test_what_a_kernel_does_not_count_is_zero() -> None:
    assert parse_snmp("") == parse_snmp(BESIDE) == parse_snmp6("Ip6InReceives 3\n") == Udp()
    assert parse_softnet("", [0, 1]) == {}


# ── netlink ──────────────────────────────────────────────────────────────────────────────────────────


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 1) + body + bytes(-len(body) % 4)


@given(
    st.lists(
        st.tuples(
            st.text("abcz.-_0189", min_size=1, max_size=15),
            st.integers(1, 1 << 30),
            st.booleans(),
            st.booleans(),
            st.lists(u64, min_size=24, max_size=25),
        ),
        max_size=4,
        unique_by=lambda link: link[0],
    )
)
def test_devices_of_netlink(links: list[tuple[str, int, bool, bool, list[int]]]) -> None:
    data = b""
    for name, index, up, loopback, numbers in links:
        head = struct.pack("=BxHiII", 0, 1, index, 0x1000 | up | loopback << 3, 0)
        statistics = attribute(23, struct.pack(f"={len(numbers)}Q", *numbers))
        data += message(16, head + attribute(3, name.encode() + b"\0") + attribute(1, b"mac") + statistics)
    found = parse_links(data + message(3, bytes(4)))
    assert list(found) == [link[0] for link in links]
    for name, index, up, loopback, n in links:
        device = Device(n[0], n[4], n[6], n[15], n[10], n[11], n[12], n[13], n[14])
        assert found[name] == Link(index, up, loopback, device)


def test_addresses_of_netlink() -> None:
    def address(family: int, index: int, *attributes: bytes) -> bytes:
        return message(20, struct.pack("=BBBBI", family, 24, 0, 0, index) + b"".join(attributes))

    four, peer = (socket.inet_pton(socket.AF_INET, a) for a in ("10.0.0.1", "10.0.0.2"))
    six = socket.inet_pton(socket.AF_INET6, "fe80::1")
    data = address(socket.AF_INET, 2, attribute(1, peer), attribute(2, four))
    data += address(socket.AF_INET6, 3, attribute(1, six)) + address(socket.AF_INET, 4)
    assert parse_addresses(data) == [("10.0.0.1", 2), ("fe80::1", 3)]


def test_an_error_of_netlinks_is_raised() -> None:
    with pytest.raises(PermissionError):
        parse_links(message(2, struct.pack("=i", -1) + bytes(16)))


def test_the_devices_are_those_of_this_namespace_with_their_counts() -> None:
    def received() -> dict[str, int]:
        lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
        return {(words := line.split())[0].rstrip(":"): int(words[2]) for line in lines}

    before, links, after = received(), read_links(), received()
    assert list(links) == list(before)
    for name, link in links.items():
        assert before[name] <= link.device.rx_packets <= after[name]
        assert link.index == socket.if_nametoindex(name)
    assert [name for name, link in links.items() if link.loopback] == ["lo"]


LINKS = {
    "lo": Link(1, True, True, Device()),
    "eth0": Link(2, True, False, Device()),
    "eth1": Link(7, False, False, Device()),
}
ADDRESSES = [("127.0.0.1", 1), ("::1", 1), ("10.0.0.1", 2), ("fe80::1", 2), ("10.0.1.1", 7)]


@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("127.0.0.1", {"lo"}),
        ("127.8.8.8", {"lo"}),
        ("::1", {"lo"}),
        ("10.0.0.1", {"eth0", "lo"}),  # what this machine sends to itself comes over lo
        ("::ffff:10.0.1.1", {"eth1", "lo"}),
        ("fe80::1%eth0", {"eth0", "lo"}),
        ("10.0.1.1", {"eth1", "lo"}),
        ("0.0.0.0", {"eth0", "lo"}),
        ("::", {"eth0", "lo"}),
        ("239.1.1.1", {"eth0", "lo"}),
        ("ff02::1", {"eth0", "lo"}),
    ],
)
def test_over_which_devices_packets_can_come(host: str, devices: set[str]) -> None:
    assert choose_devices(host, LINKS, ADDRESSES) == devices


def test_an_interface_that_was_named_is_the_one() -> None:
    assert devices_of("239.1.1.1", "eth7") == {"eth7"}
    assert devices_of("127.0.0.1") == {"lo"}


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────


def reading(
    nic: dict[str, Device] | None = None,
    softnet: dict[int, Softnet] | None = None,
    udp: Udp | None = None,
    udp6: Udp | None = None,
) -> Reading:
    return Reading(nic or {}, softnet or {}, udp or Udp(), udp6 or Udp())


@given(
    st.lists(u32, min_size=5, max_size=5),
    st.lists(st.tuples(st.lists(u32, min_size=5, max_size=5), st.booleans()), max_size=6),
)
def test_softnet_wraps_and_cpus_go_and_come_back(
    start: list[int], steps: list[tuple[list[int], bool]]
) -> None:
    """2³² packets are an hour; a CPU that is offline has no row, and keeps its counts."""
    true, seen, offline = list(start), list(start), [0] * 5
    layers = Layers(reading(softnet={3: Softnet(*start)}))
    for rise, online in steps:
        # What it counts while nobody looks must fit 32 bits, too.
        offline = [(a + b) & 0xFFFFFFFF if a + b < 1 << 32 else a for a, b in zip(offline, rise, strict=True)]
        true = [a + b for a, b in zip(seen, offline, strict=True)]
        if online:
            seen, offline = true, [0] * 5
        layers.update(reading(softnet={3: Softnet(*(v & 0xFFFFFFFF for v in true))} if online else {}))
        assert layers.softnet == {3: tuple(a - b for a, b in zip(seen, start, strict=True))}
    assert [row["cpu"] for row in layers.as_object()["softnet"]] == [3]


def test_counts_of_64_bits_rise_and_begin_anew_with_their_driver() -> None:
    layers = Layers(reading({"eth0": Device(5, rx_dropped=2)}, udp=Udp(in_errors=1 << 63)))
    layers.update(reading({"eth0": Device(9, rx_dropped=2)}, udp=Udp(in_errors=(1 << 63) + 4)))
    layers.update(reading({"eth0": Device(3, rx_dropped=1)}, udp=Udp(in_errors=(1 << 63) + 4)))
    assert layers.nic == {"eth0": Device(4 + 3, rx_dropped=1)}
    assert layers.udp == Udp(in_errors=4)


def test_devices_and_cpus_that_come_later_count_from_then() -> None:
    layers = Layers(reading({"lo": Device(1)}, {0: Softnet(1)}))
    layers.update(reading({"lo": Device(1), "eth1": Device(100)}, {0: Softnet(1), 5: Softnet(100)}))
    layers.update(reading({"eth1": Device(102)}, {5: Softnet(103)}))
    assert layers.nic == {"lo": Device(), "eth1": Device(2)}
    assert layers.softnet == {0: Softnet(), 5: Softnet(3)}
    layers.devices = frozenset(["eth1", "gone"])
    assert layers.nic == {"eth1": Device(2)}


@pytest.mark.parametrize(
    ("device", "softnet_dropped", "nic_dropped"),
    [
        (Device(rx_dropped=1079), 1079, 0),  # the same packets
        (Device(rx_dropped=1079), 1000, 79),
        (Device(rx_dropped=10), 1079, 0),  # most of softnet's are of other devices
        (Device(rx_missed_errors=7), 1079, 7),
        (Device(rx_errors=6, rx_crc_errors=4, rx_length_errors=2), 0, 6),  # one is in the other
        (Device(rx_missed_errors=5, rx_fifo_errors=5, rx_over_errors=5), 0, 5),  # the same event
    ],
)
def test_no_packet_is_counted_in_two_layers(device: Device, softnet_dropped: int, nic_dropped: int) -> None:
    layers = Layers(reading({"eth0": Device()}, {0: Softnet(), 1: Softnet()}))
    layers.update(reading({"eth0": device}, {0: Softnet(), 1: Softnet(dropped=softnet_dropped)}))
    assert (layers.nic_dropped, layers.softnet_dropped) == (nic_dropped, softnet_dropped)


def test_both_ip_versions_count() -> None:
    layers = Layers(reading())
    layers.update(
        reading(
            udp=Udp(no_ports=1, in_errors=10, rcvbuf_errors=5, in_csum_errors=1, mem_errors=2),
            udp6=Udp(in_errors=100, rcvbuf_errors=50, mem_errors=20),
        )
    )
    assert (layers.udp_errors, layers.udp_full) == (110, 77)


# ── the real thing, in a network namespace of its own ────────────────────────────────────────────────

CLONE_NEWNS, CLONE_NEWNET, MS_REC_PRIVATE = 0x00020000, 0x40000000, 0x44000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a network namespace")


def unshare_network() -> None:
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))


@contextlib.contextmanager
def small_socket(family: socket.AddressFamily, host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """(receiver, sender), the receiver with the smallest buffer there is."""
    with socket.socket(family, socket.SOCK_DGRAM) as rx, socket.socket(family, socket.SOCK_DGRAM) as tx:
        rx.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        rx.bind((host, 0))
        tx.connect(rx.getsockname())
        yield rx, tx


def other_namespace() -> None:
    """The life of a process whose network is empty, though /sys still shows the old one."""
    unshare_network()
    assert list(read_links()) == ["lo"]
    now = Reading.take()
    assert (now.udp, now.udp6) == (Udp(), Udp())
    layers = Layers(now)
    drops = []
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with small_socket(family, host) as (rx, tx):
            for _ in range(200):
                tx.send(b"x" * 1000)
            drops.append(DropCount(rx).read())
    layers.update()
    assert min(drops) > 0
    assert (layers.udp.in_errors, layers.udp6.in_errors) == tuple(drops)
    assert (layers.udp.rcvbuf_errors, layers.udp6.rcvbuf_errors) == tuple(drops)
    assert layers.nic["lo"].rx_packets >= 400


@pytest.mark.root
@needs_root
def test_devices_and_udp_are_of_the_namespace_of_this_process(fork: Callable[..., Child]) -> None:
    assert fork(other_namespace).wait() == 0


def crowded(name: str) -> None:
    """The life of a process in a network of 400 devices: more than a record of the status segment holds."""
    unshare_network()
    pairs = range(200)
    lines = [f"link add a{i} up type veth peer name b{i}\nlink set b{i} up\n" for i in pairs]
    subprocess.run(["ip", "-batch", "-"], input="".join(lines).encode(), check=True)
    with Run(name, "--every", "0.05", listen="udp://0.0.0.0:0") as run:
        for _ in range(2):
            view = run.await_interval()
            assert set(view["layers"]["nic"]) == {"lo", *(f"{end}{i}" for end in "ab" for i in pairs)}
        run.end()


@pytest.mark.root
@needs_root
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip, to make devices")
def test_many_devices_are_no_reason_to_end(name: str, fork: Callable[..., Child]) -> None:
    assert fork(crowded, name).wait(180) == 0  # it may have to compile


def steer_lo(cpu: int) -> None:
    """Have RPS give what comes over lo to that CPU."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
    assert libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0
    with open("/sys/class/net/lo/queues/rx-0/rps_cpus", "wb", buffering=0) as file:
        words = [(1 << cpu) >> shift & 0xFFFFFFFF for shift in range(cpu // 32 * 32, -1, -32)]
        file.write(",".join(f"{word:08x}" for word in words).encode())


def filter_slowly(sock: socket.socket) -> None:
    """Have the kernel spend about a microsecond on each packet for this socket, which gets none."""
    load, drop = struct.pack("HBBI", 0x30, 0, 0, 0), struct.pack("HBBI", 0x06, 0, 0, 0)
    program = ctypes.create_string_buffer(load * 800 + drop)
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 801, ctypes.addressof(program)))


def backlog_overflows(sender: int, slow: int) -> None:
    """Messages that the kernel cuts into packets at their socket, each through a long filter, on a CPU that
    is steered to: its backlog of whole messages overflows."""
    unshare_network()
    steer_lo(slow)
    os.sched_setaffinity(0, {sender})
    layers = Layers()
    with small_socket(socket.AF_INET, "127.0.0.1") as (rx, tx):
        filter_slowly(rx)
        messages, deadline = 0, time.monotonic() + 20
        while not layers.softnet_dropped and time.monotonic() < deadline:
            for _ in range(1000):
                tx.sendmsg([b"x" * 6400], [(SOL_UDP, UDP_SEGMENT, struct.pack("H", 100))])
            messages += 1000
            layers.update()
        while layers.nic["lo"].rx_packets + layers.nic["lo"].rx_dropped < messages:
            assert time.monotonic() < deadline, layers.as_object()
            layers.update()
    lo = layers.nic["lo"]
    assert lo.rx_dropped > 0
    assert lo.rx_packets + lo.rx_dropped == messages
    assert layers.softnet[slow].dropped >= lo.rx_dropped  # the machine's: others may have some
    assert layers.nic_dropped == 0


def run_behind_a_full_backlog(name: str, sender: int, slow: int) -> None:
    """A whole run in a network where others listen to all packets, and hold up the CPU that takes them."""
    unshare_network()
    steer_lo(slow)
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            tap = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
            filter_slowly(tap)
            tap.bind(("lo", 0x0800))
        run = stack.enter_context(Run(name, "--consumer", "rate", "--sender", f"{name}.s"))
        flags = ("--rate", "max", "--gso", "64", "--packets", "256000", "--cpu", str(sender))
        command = [*RXRING, "send", "--to", f"127.0.0.1:{run.port}", "--name", f"{name}.s", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = run.end()
    ledger, layers = summary["ledger"], summary["layers"]
    assert layers["nic"]["lo"]["rx_dropped"] > 0
    assert ledger["softnet_dropped"] >= layers["nic"]["lo"]["rx_dropped"]
    assert slow in [row["cpu"] for row in layers["softnet"] if row["dropped"]]
    assert ledger["nic_dropped"] == 0
    assert ledger["sent"] - ledger["received"] > 10 * ledger["softnet_dropped"]  # 64 packets each
    assert (ledger["residual"], ledger["balanced"], ledger["exact"]) == (0, True, False)


two_cpus_and_rps = [
    pytest.mark.root,
    needs_root,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
    pytest.mark.skipif(not Path("/sys/class/net/lo/queues/rx-0/rps_cpus").exists(), reason="needs RPS"),
]


@pytest.mark.parametrize("whole_run", [pytest.param(x, marks=two_cpus_and_rps) for x in (False, True)])
def test_a_full_backlog_is_counted_by_softnet_and_by_the_device_alike(
    name: str, whole_run: bool, fork: Callable[..., Child]
) -> None:
    sender, slow = sorted(os.sched_getaffinity(0))[:2]
    if whole_run:
        assert fork(run_behind_a_full_backlog, name, sender, slow).wait(180) == 0  # it may have to compile
    else:
        assert fork(backlog_overflows, sender, slow).wait() == 0
