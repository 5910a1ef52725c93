"""What each CPU has done for the network since the boot."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.affinity.interrupts import parse_interrupts, parse_softirqs
from engine.affinity.topology import ROOT, online
from engine.net.counters import Softnet, parse_softnet


class Load(NamedTuple):
    """Of one CPU. interrupts: of devices, all of them. net_rx, net_tx: how often these softirqs ran.

    The others count packets (time_squeeze: how often a softirq had to stop with packets left), in 32 bits.
    """

    interrupts: int
    net_rx: int
    net_tx: int
    processed: int
    dropped: int
    time_squeeze: int
    received_rps: int

    def since(self, before: Load) -> Load:
        return Load(*((now - then) & 0xFFFFFFFF for now, then in zip(self, before, strict=True)))


def read(root: Path = ROOT) -> dict[int, Load]:
    """Of every CPU that is online."""
    cpus = online(root)
    runs = parse_softirqs((root / "proc/softirqs").read_text())
    packets = parse_softnet((root / "proc/net/softnet_stat").read_text(), cpus)
    rows = parse_interrupts((root / "proc/interrupts").read_text())
    of_devices = [row.counts for name, row in rows.items() if name.isdecimal()]
    loads = {}
    for cpu in cpus:
        counts = packets.get(cpu, Softnet())
        loads[cpu] = Load(
            interrupts=sum(row.get(cpu, 0) for row in of_devices),
            net_rx=runs.get("NET_RX", {}).get(cpu, 0),
            net_tx=runs.get("NET_TX", {}).get(cpu, 0),
            processed=counts.processed,
            dropped=counts.dropped,
            time_squeeze=counts.time_squeeze,
            received_rps=counts.received_rps,
        )
    return loads
