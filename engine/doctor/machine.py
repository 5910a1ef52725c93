"""What checks look at: files below a root (/ or a captured tree), and what the kernel answered."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shlex
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from engine.affinity import devices, interrupts, topology
from engine.affinity.devices import Device
from engine.affinity.topology import Topology, parse_mask, read_text
from engine.errors import Refused
from engine.spec import UDP_BUFFER_BYTES

_SO_RCVBUFFORCE, _SOL_UDP, _UDP_GRO = 33, 17, 104
_FUTEX_WAITV = 449  # its number on every architecture of ours
_SIOCETHTOOL, _GGRO = 0x8946, 0x2B
CAPABILITIES = {"NET_ADMIN": 12, "NET_RAW": 13, "IPC_LOCK": 14, "SYS_NICE": 23}


@dataclass(frozen=True, slots=True)
class Asked:
    """What no file tells, in bytes. rcvbuf: granted of UDP_BUFFER_BYTES to anybody; forced: with
    CAP_NET_ADMIN, None without. no_gro: devices that have it off.
    """

    rcvbuf: int
    forced: int | None
    udp_gro: bool
    no_gro: tuple[str, ...]
    futex_waitv: bool
    shm_size: int
    shm_free: int
    is_root: bool


class Worker(NamedTuple):
    name: str
    cpu: int
    receives: bool


@dataclass(frozen=True)
class Machine:
    root: Path
    asked: Asked

    @cached_property
    def cpus(self) -> Topology:
        return topology.read(self.root)

    @cached_property
    def devices(self) -> list[Device]:
        return list(_devices(self.root))

    @cached_property
    def workers(self) -> list[Worker]:
        """Of the engines that run, those pinned to one CPU."""
        found = []
        for pid, name in interrupts.processes(self.root):
            if name.startswith("rx:"):
                with suppress(OSError):
                    cpus = parse_mask((self.root / f"proc/{pid}/status").read_text())
                    who = f"{name.removeprefix('rx:')} (process {pid})"
                    if len(cpus) == 1:
                        found.append(Worker(who, cpus[0], bool(re.fullmatch(r"rx:rx\d+", name))))
        return found

    @property
    def receivers(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.receives]

    @property
    def interrupt_cpus(self) -> dict[str, tuple[int, ...]]:
        """Where the packets' interrupts come, by device that has any."""
        found = {}
        for device in self.devices:
            cpus = {cpu for irq in device.packet_irqs for cpu in (irq.wish if irq.fact is None else irq.fact)}
            if cpus:
                found[device.name] = tuple(sorted(cpus))
        return found

    @property
    def container(self) -> bool:
        return any((self.root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))

    @property
    def kernel(self) -> tuple[int, int]:
        match = re.match(r"(\d+)\.(\d+)", read_text(self.root / "proc/sys/kernel/osrelease") or "")
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def text(self, path: str) -> str | None:
        return read_text(self.root / path)

    def sysctl(self, name: str) -> int | None:
        """None where this kernel, or this network namespace, has none."""
        text = self.text(f"proc/sys/{name.replace('.', '/')}")
        return int(text) if text else None

    def glob(self, pattern: str) -> dict[Path, str]:
        """The texts of all files that can be read."""
        found = {path: read_text(path) for path in sorted(self.root.glob(pattern))}
        return {path: text for path, text in found.items() if text is not None}

    def limit(self, name: str) -> tuple[float, float]:
        """Soft and hard, of a row of /proc/self/limits; infinite where there is none."""
        match = re.search(rf"^{name} +(\S+) +(\S+)", self.text("proc/self/limits") or "", re.MULTILINE)
        soft, hard = match.groups() if match else ("unlimited", "unlimited")
        return _limit(soft), _limit(hard)

    def has(self, capability: str) -> bool:
        match = re.search(r"^CapEff:\s*([0-9a-f]+)", self.text("proc/self/status") or "", re.MULTILINE)
        return bool(match and int(match[1], 16) >> CAPABILITIES[capability] & 1)

    def rxring_as_root(self, arguments: str) -> str:
        """sudo has a path of its own, on which a virtual environment is not."""
        return f"{'rxring' if self.asked.is_root else 'sudo $(command -v rxring)'} {arguments}"

    def as_root(self, command: str) -> str:
        """Needs root: by sudo, where we are not."""
        if self.asked.is_root:
            return command
        needs_shell = re.search(r"[|&;<>$*]", command)
        return f"sudo sh -c {shlex.quote(command)}" if needs_shell else f"sudo {command}"


def ask() -> Asked:
    """Put the questions to this kernel, by sockets that are closed again."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UDP_BUFFER_BYTES // 2)  # the kernel doubles it
        granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        return Asked(
            rcvbuf=granted,
            forced=_forced(sock),
            udp_gro=_takes_gro(sock),
            no_gro=tuple(name for name in devices.names() if not _gro_on(sock, name)),
            futex_waitv=_has_futex_waitv(),
            **_shm(),
            is_root=os.geteuid() == 0,
        )


def _forced(sock: socket.socket) -> int | None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, UDP_BUFFER_BYTES // 2)
    except PermissionError:
        return None
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def _takes_gro(sock: socket.socket) -> bool:
    with suppress(OSError):
        sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        return True
    return False


def _gro_on(sock: socket.socket, device: str) -> bool:
    """Also where the device does not say."""
    value = (ctypes.c_uint32 * 2)(_GGRO, 1)  # struct ethtool_value
    with suppress(OSError):
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))
    return bool(value[1])


def _has_futex_waitv() -> bool:
    """On no futex at all it answers EINVAL; ENOSYS or EPERM where it cannot be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_FUTEX_WAITV, None, 0, 0, None, 0)
    return ctypes.get_errno() == errno.EINVAL


def _shm() -> dict[str, int]:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return {"shm_size": 0, "shm_free": 0}
    return {"shm_size": shm.f_blocks * shm.f_frsize, "shm_free": shm.f_bavail * shm.f_frsize}


def _devices(root: Path) -> Iterator[Device]:
    for name in devices.names(root):
        with suppress(Refused):  # it has gone meanwhile
            yield devices.read(name, root)


def _limit(word: str) -> float:
    return float("inf") if word == "unlimited" else int(word)
