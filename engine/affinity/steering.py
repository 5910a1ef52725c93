"""Steering in software: which CPU the kernel hands a queue's packets to.

RPS  rps_cpus of a receive queue: packets are spread over these CPUs by flow; none: they stay where they came.
     With one CPU it is an interrupt core for devices that have no interrupt (lo, veth, tun).
RFS  rps_flow_cnt: flows remembered, so that packets go to the CPU where their socket is read.
XPS  xps_cpus of a transmit queue: which CPUs send through it; only devices of several queues have it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.affinity.topology import ROOT, parse_hex_mask, read_text


@dataclass(frozen=True, slots=True)
class RxQueue:
    """rps: None on a kernel without it. rfs: flows remembered, 0: off."""

    number: int
    rps: tuple[int, ...] | None
    rfs: int


@dataclass(frozen=True, slots=True)
class TxQueue:
    """xps: None if it cannot be set, as with a single queue."""

    number: int
    xps: tuple[int, ...] | None


def _queues(device: str, root: Path) -> Path:
    return root / "sys/class/net" / device / "queues"


def rps_path(device: str, queue: int, root: Path = ROOT) -> Path:
    return _queues(device, root) / f"rx-{queue}" / "rps_cpus"


def rfs_path(device: str, queue: int, root: Path = ROOT) -> Path:
    return _queues(device, root) / f"rx-{queue}" / "rps_flow_cnt"


def xps_path(device: str, queue: int, root: Path = ROOT) -> Path:
    return _queues(device, root) / f"tx-{queue}" / "xps_cpus"


def rx_queues(device: str, root: Path = ROOT) -> tuple[RxQueue, ...]:
    return tuple(
        RxQueue(number, _mask(folder / "rps_cpus"), int(read_text(folder / "rps_flow_cnt") or 0))
        for number, folder in _numbered(_queues(device, root), "rx")
    )


def tx_queues(device: str, root: Path = ROOT) -> tuple[TxQueue, ...]:
    return tuple(
        TxQueue(number, _mask(folder / "xps_cpus"))
        for number, folder in _numbered(_queues(device, root), "tx")
    )


def rfs_entries(root: Path = ROOT) -> int:
    """Flows that RFS remembers for all devices together; 0: it is off, whatever queues say."""
    return int(read_text(root / "proc/sys/net/core/rps_sock_flow_entries") or 0)


def _mask(path: Path) -> tuple[int, ...] | None:
    text = read_text(path)
    return None if text is None else parse_hex_mask(text)


def _numbered(folder: Path, kind: str) -> list[tuple[int, Path]]:
    found = (re.fullmatch(rf"{kind}-(\d+)", path.name) for path in folder.glob(f"{kind}-*"))
    return sorted((int(match[1]), folder / match[0]) for match in found if match)
