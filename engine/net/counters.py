"""What the kernel counts below and beside our sockets: devices, the CPUs' backlogs, UDP. Parsers are pure.

Whose counts: devices and UDP are of the network namespace of this process, softnet is of the whole machine,
all namespaces together. None is ours alone. Devices are asked of netlink, since /sys/class/net shows the
namespace of whoever mounted it: after `unshare -n`, still that of before.

What counts a lost packet, and what counts it again (the kernel's struct rtnl_link_stats64, net/core/dev.c,
net/ipv4/udp.c):

    rx_missed_errors   lost: the device found no buffer; hardware only
    rx_errors          lost: bad packets; rx_length_, rx_crc_ and rx_frame_errors are in it already
    rx_over_, rx_fifo_errors   events, which many drivers have in rx_missed_errors or rx_errors, too
    rx_dropped         lost behind the device: a driver without memory, a protocol that nobody speaks, and
                       each packet that softnet counts as dropped
    softnet dropped    lost: a CPU's backlog was full, or its flow limit reached
    InErrors           all that UDP dropped. RcvbufErrors, MemErrors and InCsumErrors are in it, and what
                       sockets count as their own drops, those of their filters, too. NoPorts is not

Measured on Linux 6.18: of 3000 GSO messages over lo to a CPU that RPS had chosen and that was slow, softnet
counted 1079 as dropped, rx_dropped of lo the very same 1079, and rx_packets of lo the other 1921. A message
was one, however many packets it held.

So a device has lost `Device.lost`, and rx_dropped tells something new only beyond what softnet dropped.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.affinity import topology

_U32 = 0xFFFFFFFF


class Device(NamedTuple):
    """Packets that a device received, and did not; the kernel's names. 64 bits each."""

    rx_packets: int = 0
    rx_errors: int = 0
    rx_dropped: int = 0
    rx_missed_errors: int = 0
    rx_length_errors: int = 0
    rx_over_errors: int = 0
    rx_crc_errors: int = 0
    rx_frame_errors: int = 0
    rx_fifo_errors: int = 0

    @property
    def lost(self) -> int:
        """Packets lost before the stack saw them; rx_dropped, which is behind it, comes on top."""
        return self.rx_missed_errors + self.rx_errors


class Softnet(NamedTuple):
    """Of one CPU: packets, and how often its time was up (time_squeeze). 32 bits each: they wrap."""

    processed: int = 0
    dropped: int = 0
    time_squeeze: int = 0
    received_rps: int = 0
    flow_limit: int = 0


class Udp(NamedTuple):
    """Of one IP version, packets (in_datagrams: those that were read). 64 bits each."""

    in_datagrams: int = 0
    no_ports: int = 0
    in_errors: int = 0
    rcvbuf_errors: int = 0
    in_csum_errors: int = 0
    mem_errors: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """A device: its index, and how it is."""

    index: int
    up: bool
    loopback: bool
    device: Device


_UDP_NAMES = ("InDatagrams", "NoPorts", "InErrors", "RcvbufErrors", "InCsumErrors", "MemErrors")
_CPU_COLUMN = 12


# ── text of /proc/net ────────────────────────────────────────────────────────────────────────────────


def parse_softnet(text: str, online: Sequence[int]) -> dict[int, Softnet]:
    """/proc/net/softnet_stat by CPU: hexadecimal, a row for each that is online; 9 to 15 columns, as old as
    the kernel is. Before column 13 came, which is the CPU's id, rows follow the list of those online.
    """
    rows = [[int(word, 16) for word in line.split()] for line in text.splitlines() if line.strip()]
    cpus = [row[_CPU_COLUMN] for row in rows] if all(len(r) > _CPU_COLUMN for r in rows) else online
    return {cpu: Softnet(*row[:3], *row[9:11]) for cpu, row in zip(cpus, rows, strict=False)}


def parse_snmp(text: str) -> Udp:
    """The Udp lines of /proc/net/snmp; 0 for what this kernel does not count."""
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("Udp:")]
    return _udp(dict(zip(*lines, strict=True)) if len(lines) == 2 else {})


def parse_snmp6(text: str) -> Udp:
    """The Udp6 lines of /proc/net/snmp6, which has one name a line."""
    pairs = (line.split() for line in text.splitlines() if line.startswith("Udp6"))
    return _udp({pair[0].removeprefix("Udp6"): pair[1] for pair in pairs if len(pair) == 2})


def _udp(found: Mapping[str, str]) -> Udp:
    return Udp(*(int(found.get(name, 0)) for name in _UDP_NAMES))


# ── netlink ──────────────────────────────────────────────────────────────────────────────────────────

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWLINK, _RTM_GETLINK, _RTM_NEWADDR, _RTM_GETADDR = 16, 18, 20, 22
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ANSWER_BYTES = 1 << 16  # the kernel sends at most half of that at once
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_IFLA_IFNAME, _IFLA_STATS64, _IFA_ADDRESS, _IFA_LOCAL = 3, 23, 1, 2
_STATISTICS = (0, 4, 6, 15, 10, 11, 12, 13, 14)  # of Device's fields among rtnl_link_stats64's u64


def parse_links(messages: bytes) -> dict[str, Link]:
    """The devices in an answer to RTM_GETLINK, by name."""
    links = {}
    for kind, body in _messages(messages):
        if kind == _RTM_NEWLINK:
            index, flags = struct.unpack_from("=iI", body, 4)  # struct ifinfomsg
            found = dict(_attributes(body[16:]))
            numbers = found.get(_IFLA_STATS64, bytes(128))
            device = Device(*(struct.unpack_from("=Q", numbers, 8 * i)[0] for i in _STATISTICS))
            name = found[_IFLA_IFNAME].rstrip(b"\0").decode(errors="replace")
            links[name] = Link(index, bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK), device)
    return links


def parse_addresses(messages: bytes) -> list[tuple[str, int]]:
    """(address, index of the device that has it) in an answer to RTM_GETADDR."""
    addresses = []
    for kind, body in _messages(messages):
        if kind == _RTM_NEWADDR:
            family, _, _, _, index = struct.unpack_from("=BBBBI", body)  # struct ifaddrmsg
            found = dict(_attributes(body[8:]))
            packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)  # of a tunnel, the latter is the peer's
            if packed is not None:
                addresses.append((socket.inet_ntop(family, packed), index))
    return addresses


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, body) of each netlink message. OSError for an error of the kernel's."""
    while len(data) >= 16:
        size, kind = struct.unpack_from("=IH", data)
        if kind == _NLMSG_ERROR and (code := struct.unpack_from("=i", data, 16)[0]):
            raise OSError(-code, os.strerror(-code))
        yield kind, data[16:size]
        data = data[max(size + 3 & ~3, 16) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:size]  # without the flags for nesting and byte order
        data = data[max(size + 3 & ~3, 4) :]


def _dump(kind: int) -> bytes:
    """All of the kernel's answer to a request for everything of that kind."""
    answer = b""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as netlink:
        netlink.send(struct.pack("=IHHIIB3x", 20, kind, _DUMP, 1, 0, socket.AF_UNSPEC))
        while True:
            block = netlink.recv(_ANSWER_BYTES)
            answer += block
            if any(found == _NLMSG_DONE for found, _ in _messages(block)):
                return answer


def read_links() -> dict[str, Link]:
    """The devices of this process's network namespace."""
    return parse_links(_dump(_RTM_GETLINK))


def devices_of(host: str, interface: str | None = None) -> frozenset[str]:
    """Over which devices packets to a bound address can come.

    Over the one that has the address, and over lo, which takes what this machine sends to itself. Over any
    that is up, if no single one has it: a wildcard, or a group joined on an interface of the kernel's choice.
    """
    if interface is not None:
        return frozenset([interface])
    return choose_devices(host, read_links(), parse_addresses(_dump(_RTM_GETADDR)))


def choose_devices(
    host: str, links: Mapping[str, Link], addresses: Collection[tuple[str, int]]
) -> frozenset[str]:
    """The same, of these devices and addresses."""
    wanted = _plain(host)
    holders = {index for address, index in addresses if _plain(address) == wanted}
    loopbacks = {name for name, link in links.items() if link.loopback}
    names = {name for name, link in links.items() if link.index in holders}
    if names or wanted.is_loopback:
        return frozenset(names | loopbacks)
    return frozenset(name for name, link in links.items() if link.up)


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Reading:
    """All of it at one moment, as the kernel has it."""

    nic: Mapping[str, Device]
    softnet: Mapping[int, Softnet]
    udp: Udp
    udp6: Udp

    @classmethod
    def take(cls) -> Reading:
        net = Path("/proc/self/net")
        udp6 = Udp()
        with suppress(FileNotFoundError):  # a kernel without IPv6
            udp6 = parse_snmp6((net / "snmp6").read_text())
        return cls(
            {name: link.device for name, link in read_links().items()},
            parse_softnet((net / "softnet_stat").read_text(), topology.online()),
            parse_snmp((net / "snmp").read_text()),
            udp6,
        )


class Layers:
    """What was counted since this was made, up to the last `update`; of the devices that are meant.

    Devices and CPUs that come later count from when they are seen; what those that go had counted stays.
    The 32-bit counts of softnet are right if updated at least once in 2³² packets of a CPU: an hour at
    1 M packets/s. A device whose driver begins anew counts on from there.
    """

    def __init__(self, now: Reading | None = None) -> None:
        self._last = now or Reading.take()
        self._nic = {name: Device() for name in self._last.nic}
        self.devices: frozenset[str] | None = None  # those meant; None: all
        self.softnet = {cpu: Softnet() for cpu in self._last.softnet}
        self.udp, self.udp6 = Udp(), Udp()

    def update(self, now: Reading | None = None) -> None:
        last, now = self._last, now or Reading.take()
        _add(self._nic, last.nic, now.nic)
        _add(self.softnet, last.softnet, now.softnet, _U32)
        self.udp = Udp(*_grown(self.udp, last.udp, now.udp))
        self.udp6 = Udp(*_grown(self.udp6, last.udp6, now.udp6))
        self._last = Reading({**last.nic, **now.nic}, {**last.softnet, **now.softnet}, now.udp, now.udp6)

    @property
    def nic(self) -> dict[str, Device]:
        meant = self._nic if self.devices is None else self.devices
        return {name: self._nic[name] for name in sorted(self._nic) if name in meant}

    @property
    def nic_dropped(self) -> int:
        """What the devices lost, without what softnet's count has already."""
        nic = self.nic.values()
        dropped = sum(device.rx_dropped for device in nic)
        return sum(device.lost for device in nic) + max(dropped - self.softnet_dropped, 0)

    @property
    def softnet_dropped(self) -> int:
        return sum(cpu.dropped for cpu in self.softnet.values())

    @property
    def udp_errors(self) -> int:
        """All that UDP dropped, of both IP versions."""
        return self.udp.in_errors + self.udp6.in_errors

    @property
    def udp_full(self) -> int:
        """Those of them for which a buffer or memory was full."""
        return sum(udp.rcvbuf_errors + udp.mem_errors for udp in (self.udp, self.udp6))

    def as_object(self) -> dict[str, Any]:
        """As the JSON of a run has it."""
        return {
            "nic": {name: device._asdict() for name, device in self.nic.items()},
            "softnet": [{"cpu": cpu, **self.softnet[cpu]._asdict()} for cpu in sorted(self.softnet)],
            "udp": self.udp._asdict(),
            "udp6": self.udp6._asdict(),
        }


Key = TypeVar("Key", str, int)
Counts = TypeVar("Counts", Device, Softnet)


def _add(
    total: dict[Key, Counts], last: Mapping[Key, Counts], now: Mapping[Key, Counts], wraps: int = 0
) -> None:
    for key, counts in now.items():
        kind = type(counts)
        total[key] = kind(*_grown(total.get(key, kind()), last.get(key, counts), counts, wraps))


def _grown(
    total: tuple[int, ...], last: tuple[int, ...], now: tuple[int, ...], wraps: int = 0
) -> Iterator[int]:
    """Each sum and what its counter rose by since. One that fell has wrapped, or else begun anew."""
    for sum_, before, count in zip(total, last, now, strict=True):
        rise = count - before
        yield sum_ + (rise & wraps if wraps else rise if rise >= 0 else count)
