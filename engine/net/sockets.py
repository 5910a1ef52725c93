"""The receiving socket: opened, set up, read back, and cut off cleanly at the end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from engine.errors import Refused
from engine.net.libc import CMSGHDR, MAX_DATAGRAM_BYTES, SO_MEMINFO, SOL_UDP, UDP_GRO

SO_TIMESTAMPNS = 35
SO_RCVBUFFORCE = 33
SO_ATTACH_FILTER = 26
_MOST_BUFFER_BYTES = (1 << 31) - 2  # twice the largest that setsockopt takes
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

    @property
    def advice(self) -> str:
        """What to do when it is short."""
        wanted = self.asked or self.granted
        return (
            f"the receive buffer is {self.granted} bytes, not {wanted}: "
            f"sysctl -w net.core.rmem_max={wanted // 2} (or CAP_NET_ADMIN) grants it"
        )


def open_udp(*, timestamps: bool, rcvbuf: int | None) -> tuple[socket.socket, ReceiveBuffer]:
    """An unbound IPv4 UDP socket, set up: nothing can arrive before `bind_udp`.

    Refused where no kernel grants `rcvbuf` bytes; where ours does not, the ReceiveBuffer says so.
    """
    if rcvbuf is not None and rcvbuf > _MOST_BUFFER_BYTES:
        raise Refused(f"a receive buffer of {rcvbuf} bytes: give at most {_MOST_BUFFER_BYTES}")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    if timestamps:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    if rcvbuf is not None:
        _ask_for_buffer(sock, rcvbuf)
    return sock, ReceiveBuffer(rcvbuf, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))


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


def bind_udp(sock: socket.socket, host: str, port: int) -> tuple[str, int]:
    """Bind; (address, port) as bound. Refused with the reason, and the holder's pid where it can be seen."""
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    except (socket.gaierror, UnicodeError) as error:
        raise Refused(f"cannot listen on {host}: {error}: give an IPv4 address of this machine") from None
    try:
        sock.bind(address)
    except OSError as error:
        what = f"cannot listen on {host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"{what}: {_port_holder(port)} has the port: end it, or take another") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise Refused(f"{what}: no interface has this address: `ip addr` lists them") from None
        if error.errno == errno.EACCES:
            raise Refused(f"{what}: ports below 1024 need CAP_NET_BIND_SERVICE: take a higher one") from None
        raise Refused(f"{what}: {error.strerror}: choose another address") from None
    bound = sock.getsockname()
    return str(bound[0]), int(bound[1])


def probe_udp(host: str, port: int) -> None:
    """Refused if `bind_udp` would be, before anything else is done. Nothing is left bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        bind_udp(sock, host, port)


def _port_holder(port: int) -> str:
    """Who holds a UDP port, from /proc: the socket's inode, then whose descriptor that is."""
    inodes = set()
    for line in Path("/proc/net/udp").read_text().splitlines()[1:]:
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
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes
    program = ctypes.create_string_buffer(drop_all)
    sock.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    )
