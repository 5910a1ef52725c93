"""The receiving socket: opened, set up, bound and joined, read back, and cut off cleanly at the end.

It takes what it was asked for and nothing else. Linux by itself gives any socket the packets of every
multicast group that somebody on the machine has joined: IP_MULTICAST_ALL off ends that, and a socket for a
group is bound to the group's address, so that no unicast comes either. IPv6 sockets take IPv6 only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.errors import Refused
from engine.net import address
from engine.net.address import Address, format_address
from engine.net.libc import CMSGHDR, MAX_DATAGRAM_BYTES, SO_MEMINFO, SOL_UDP, UDP_GRO
from engine.spec import Listen

SO_TIMESTAMPNS = 35
SO_RCVBUFFORCE = 33
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
SO_BUSY_POLL = 46
SO_ATTACH_REUSEPORT_CBPF = 51
SO_PREFER_BUSY_POLL = 69
IP_MULTICAST_ALL, IPV6_MULTICAST_ALL = 49, 29
MCAST_JOIN_GROUP, MCAST_JOIN_SOURCE_GROUP = 42, 46
_MOST_BUFFER_BYTES = (1 << 31) - 2  # twice the largest that setsockopt takes
_ADVICE = "give an IPv4 address of this machine, or [IPv6]"
_MEMINFO_DROPS = 8  # index of the drop count among SO_MEMINFO's nine u32


@dataclass(frozen=True, slots=True)
class ReceiveBuffer:
    """Bytes of SO_RCVBUF: what was asked for (None: the default), what the kernel granted.

    As the kernel counts them, bookkeeping included; it doubles what a caller asks for, and so do we
    when we compare.
    """

    asked: int | None
    granted: int

    @property
    def short(self) -> bool:
        return self.asked is not None and self.granted < self.asked // 2 * 2

    def as_object(self) -> dict[str, int | None]:
        return {"asked": self.asked, "granted": self.granted}

    @property
    def advice(self) -> str:
        """What to do when it is short."""
        wanted = self.asked or self.granted
        return (
            f"the receive buffer is {self.granted} bytes, not {wanted}: "
            f"sysctl -w net.core.rmem_max={wanted // 2} (or CAP_NET_ADMIN) grants it"
        )


def check_buffer(what: str, size: int | None) -> None:
    """Refused where no kernel could grant it."""
    if size is not None and size > _MOST_BUFFER_BYTES:
        raise Refused(f"{what} of {size} bytes: give at most {_MOST_BUFFER_BYTES}")


def open_udp(
    listen: Listen,
    *,
    timestamps: bool,
    rcvbuf: int | None,
    share: bool = False,
    busy_poll: int | None = None,
) -> tuple[socket.socket, ReceiveBuffer]:
    """An unbound UDP socket of the address' family, set up: nothing can arrive before `bind_udp`.

    share: with other sockets of ours, which get a part of the packets each. busy_poll: microseconds for
    which a receive call asks the device itself.
    Refused where no kernel grants `rcvbuf` bytes; where ours does not, the ReceiveBuffer says so.
    """
    check_buffer("a receive buffer", rcvbuf)
    where = _resolve(listen)
    if share and address.is_multicast(where[0]):
        raise Refused(f"{listen}: each of several receivers would get every packet of a group: give one")
    family = address.family(where)
    with ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        except OSError as error:
            raise Refused(
                f"cannot listen on {_place(listen)}: {error.strerror}: this machine has no IPv6"
            ) from None
        sock.setblocking(False)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
        if timestamps:
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if busy_poll is not None:
            _ask_for_busy_poll(sock, busy_poll)
        if rcvbuf is not None:
            _ask_for_buffer(sock, rcvbuf)
        undo.pop_all()
    return sock, ReceiveBuffer(rcvbuf, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))


def _resolve(listen: Listen) -> Address:
    try:
        return address.resolve(listen.host, listen.port, listen.interface, advice=_ADVICE)
    except Refused as error:
        raise Refused(f"cannot listen on {_place(listen)}: {error}") from None


def _place(listen: Listen) -> str:
    return format_address((listen.host, listen.port))


def _ask_for_busy_poll(sock: socket.socket, microseconds: int) -> None:
    """Have receive calls ask the device, and the device wait with its interrupts as long as they do."""
    what = f"--busy-poll {microseconds}"
    for option, value in ((SO_BUSY_POLL, microseconds), (SO_PREFER_BUSY_POLL, 1)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, value)
        except PermissionError:
            raise Refused(f"{what} needs CAP_NET_ADMIN: run it as root, or leave it out") from None
        except OSError as error:
            if option == SO_PREFER_BUSY_POLL and error.errno == errno.ENOPROTOOPT:  # before Linux 5.11
                return
            raise Refused(f"{what}: {error.strerror}: this kernel can't, leave it out") from None


def ask_for_gro(sock: socket.socket) -> bool:
    """Let one receive bring many packets of one flow; False where the kernel (before 5.0) can't."""
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return False
    return True


def _ask_for_buffer(sock: socket.socket, size: int) -> None:
    """SO_RCVBUF, by force where we may. The kernel doubles the value for its bookkeeping: we halve it."""
    with contextlib.suppress(PermissionError):  # no CAP_NET_ADMIN: the capped one below, and said so
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size // 2)
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size // 2)


def bind_udp(sock: socket.socket, listen: Listen, connect: str | None = None) -> Address:
    """Bind, join the group if it is one, connect to HOST:PORT; the address as bound.

    connect: packets come from there only, and news that nobody is there (ICMP) are errors of a receive.
    Refused with the reason; where another process has the port, with its pid if that can be seen.
    """
    where = _resolve(listen)
    group = address.is_multicast(where[0])
    device = _device(listen, where) if group else listen.interface
    if group and len(where) == 4:
        where = address.resolve(listen.host, listen.port, device)
    if group:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others may listen to it, too
    if device is not None and (len(where) == 4 or not group):  # of an IPv4 group, joining there is enough
        _bind_to_device(sock, device)
    if connect is not None:
        cut_off(sock)  # until we are connected, anybody's packets would be queued
    _bind(sock, where, listen)
    if group and device is not None:
        _join(sock, where, listen.sources, device)
    if connect is not None:
        _connect(sock, connect, listen)
        sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    bound: Address = sock.getsockname()
    return bound


def _bind(sock: socket.socket, where: Address, listen: Listen) -> None:
    try:
        sock.bind(where)
    except OSError as error:
        what = f"cannot listen on {_place(listen)}"
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"{what}: {_port_holder(where[1])} has the port: end it, or take another") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise Refused(f"{what}: no interface has this address: `ip addr` lists them") from None
        if error.errno == errno.EACCES:
            raise Refused(f"{what}: ports below 1024 need CAP_NET_BIND_SERVICE: take a higher one") from None
        raise Refused(f"{what}: {error.strerror}: choose another address") from None


def _device(listen: Listen, where: Address) -> str:
    """Where a group is joined. Refused where nothing says it."""
    scope = listen.host.partition("%")[2]
    device = listen.interface or scope or address.route_device(where[0])
    if device is None:
        devices = address.device_names()
        raise Refused(f"cannot join {listen.host}: no route leads there: give ?interface=, of {devices}")
    address.device_index(device)
    return device


def joined(listen: Listen) -> str | None:
    """For people: on which device a group is joined where the routing table decides that, not they."""
    where = _resolve(listen)
    if not address.is_multicast(where[0]) or listen.interface or "%" in listen.host:
        return None
    return f"joined {listen.host} on {_device(listen, where)}"


def _bind_to_device(sock: socket.socket, device: str) -> None:
    address.device_index(device)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    except PermissionError:
        raise Refused(f"interface={device} needs CAP_NET_RAW before Linux 5.7: leave it out") from None


def _join(sock: socket.socket, where: Address, sources: tuple[str, ...], device: str) -> None:
    """Join a group on a device, for packets from anybody or from these sources."""
    level = socket.IPPROTO_IP if len(where) == 2 else socket.IPPROTO_IPV6
    group = struct.pack("I4x", address.device_index(device)) + _sockaddr(where[0])
    try:
        if not sources:
            sock.setsockopt(level, MCAST_JOIN_GROUP, group)
        for source in sources:
            sock.setsockopt(level, MCAST_JOIN_SOURCE_GROUP, group + _sockaddr(source))
    except OSError as error:
        advice = "look whether the device does multicast (`ip link`)"
        if error.errno == errno.ENOBUFS:
            advice = "give fewer sources, or raise net.ipv4.igmp_max_msf or net.ipv6.mld_max_msf"
        raise Refused(f"cannot join {where[0]} on {device}: {error.strerror}: {advice}") from None


def _sockaddr(host: str) -> bytes:
    """A struct sockaddr_storage."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    before = 4 if kind == socket.AF_INET else 8  # bytes of port and flow label
    raw = struct.pack("H", kind) + bytes(before - 2) + socket.inet_pton(kind, host)
    return raw.ljust(128, b"\0")


def _connect(sock: socket.socket, to: str, listen: Listen) -> None:
    what = f"--connect {to}"
    peer = address.resolve(*address.parse_host_port(to))
    if address.family(peer) != sock.family:
        raise Refused(f"{what} and {listen} are not both IPv4 or both IPv6: give two of a kind")
    if address.is_multicast(peer[0]):
        raise Refused(f"{what}: packets come from a host, not from a group: give the sender's address")
    try:
        sock.connect(peer)
    except OSError as error:
        raise Refused(f"{what}: {error.strerror}: give an address that {listen} can reach") from None


def probe_udp(listen: Listen) -> None:
    """Refused if `bind_udp` would be, before anything else is done. Nothing stays bound or joined."""
    sock, _ = open_udp(listen, timestamps=False, rcvbuf=None)
    with sock:
        bind_udp(sock, listen)


def steer_by_cpu(sock: socket.socket, receivers: int) -> None:
    """A packet goes to the socket whose number, in the order of binding, is the CPU that took it.

    With fewer receivers than CPUs, modulo. For the whole group of sockets that share the port.
    """
    # ld #cpu; mod #receivers; ret a
    program = [(0x20, 0xFFFF_F000 + 36), (0x94, receivers), (0x16, 0)]
    _attach(sock, SO_ATTACH_REUSEPORT_CBPF, program)


def _port_holder(port: int) -> str:
    """Who holds a UDP port, from /proc: the socket's inode, then whose descriptor that is."""
    inodes = set()
    for table in (Path("/proc/net/udp"), Path("/proc/net/udp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                if str(descriptor.readlink()) in inodes:
                    name = (process / "comm").read_text().strip()
                    return f"process {process.name} ({name})"
    return "another process"


class DropCount:
    """Packets (with GRO: frames) that a socket has dropped since it was opened: SO_MEMINFO, exact.

    The kernel's count is 32 bits wide and wraps: read it at least once in 2³² drops.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._total = 0

    def read(self) -> int:
        info = self._sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36)
        now = int(struct.unpack("9I", info)[_MEMINFO_DROPS])
        self._total += (now - self._total) & 0xFFFFFFFF
        return self._total


def discard(sock: socket.socket) -> tuple[int, int]:
    """Empty the queue; (frames, packets) that there were. For what there is no room for at the end."""
    frames = packets = 0
    buffer = bytearray(MAX_DATAGRAM_BYTES)
    with contextlib.suppress(BlockingIOError):
        while True:
            size, ancillary, _, _ = sock.recvmsg_into([buffer], 2 * socket.CMSG_SPACE(CMSGHDR.itemsize))
            segments = [data for level, kind, data in ancillary if (level, kind) == (SOL_UDP, UDP_GRO)]
            frames += 1
            packets += -(-size // struct.unpack("i", segments[0])[0]) if segments else 1
    return frames, packets


def cut_off(sock: socket.socket) -> None:
    """From now on nothing more is queued: a filter drops it, and the socket counts it as dropped."""
    _attach(sock, SO_ATTACH_FILTER, [(0x06, 0)])  # ret #0


def _attach(sock: socket.socket, option: int, program: list[tuple[int, int]]) -> None:
    """A classic BPF program of (code, k), without jumps."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", op, 0, 0, k) for op, k in program))
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
