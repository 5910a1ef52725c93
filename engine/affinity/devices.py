"""Network devices: where they are, their queues, interrupts and steering. Devices are those of the network
namespace that /sys was mounted in: that of this process, unless it left it by `unshare` or `nsenter` alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.affinity import interrupts, steering
from engine.affinity.interrupts import Irq
from engine.affinity.steering import RxQueue, TxQueue
from engine.affinity.topology import ROOT, parse_mask, read_text
from engine.errors import Refused

_SIOCETHTOOL, _GCOALESCE = 0x8946, 0x0E
_USECS, _FRAMES, _ADAPTIVE, _WORDS = 1, 2, 10, 23  # of struct ethtool_coalesce


@dataclass(frozen=True, slots=True)
class Coalescing:
    """What the device waits for before it interrupts: microseconds, frames; adaptive: as it likes."""

    rx_usecs: int
    rx_frames: int
    adaptive: bool


@dataclass(frozen=True, slots=True)
class NapiThread:
    """A thread of the kernel that polls the device in place of softirqs, and where it may run."""

    pid: int
    name: str
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """node: of memory, None if it is near none. napi: None while softirqs do the work."""

    name: str
    driver: str | None
    node: int | None
    rx: tuple[RxQueue, ...]
    tx: tuple[TxQueue, ...]
    irqs: tuple[Irq, ...]
    napi: tuple[NapiThread, ...] | None
    coalescing: Coalescing | None

    @property
    def packet_irqs(self) -> tuple[Irq, ...]:
        """Those somebody handles, but for the ones that only tell of a changed configuration."""
        return tuple(irq for irq in self.irqs if irq.actions and not all(map(_of_config, irq.actions)))


def _of_config(action: str) -> bool:
    return action.endswith("-config")  # of virtio


def names(root: Path = ROOT) -> list[str]:
    return sorted(path.name for path in (root / "sys/class/net").glob("*") if (path / "queues").is_dir())


def read(name: str, root: Path = ROOT) -> Device:
    """Refused if there is no such device."""
    if name not in names(root):
        raise Refused(f"no network device {name!r}: choose from {', '.join(names(root)) or 'none'}")
    folder = root / "sys/class/net" / name
    driver = folder / "device/driver"
    return Device(
        name=name,
        driver=driver.resolve().name if driver.exists() else None,
        node=_node(folder / "device"),
        rx=steering.rx_queues(name, root),
        tx=steering.tx_queues(name, root),
        irqs=interrupts.irqs_of(name, root),
        napi=_napi_threads(name, root) if read_text(folder / "threaded") == "1" else None,
        coalescing=_coalescing(name) if root == ROOT else None,
    )


def read_all(root: Path = ROOT) -> list[Device]:
    return [read(name, root) for name in names(root)]


def _node(link: Path) -> int | None:
    """Of the device behind it, or of the first above that knows; -1 there: it is near none."""
    device = link.resolve()
    found = (read_text(folder / "numa_node") for folder in (device, *device.parents) if link.exists())
    node = int(next((text for text in found if text is not None), -1))
    return None if node < 0 else node


def _napi_threads(name: str, root: Path) -> tuple[NapiThread, ...]:
    threads = []
    for pid, comm in interrupts.processes(root):
        if comm.startswith(f"napi/{name}-"):
            with suppress(OSError):
                cpus = parse_mask((root / f"proc/{pid}/status").read_text())
                threads.append(NapiThread(pid, comm, cpus))
    return tuple(sorted(threads, key=lambda thread: thread.pid))


def _coalescing(name: str) -> Coalescing | None:
    """None where the device has none."""
    words = (ctypes.c_uint32 * _WORDS)(_GCOALESCE)
    request = struct.pack("16sP16x", name.encode(), ctypes.addressof(words))  # struct ifreq
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            fcntl.ioctl(sock, _SIOCETHTOOL, request)
    except OSError:
        return None
    return Coalescing(words[_USECS], words[_FRAMES], bool(words[_ADAPTIVE]))
