"""Machines that are not here: /proc and /sys as the kernel writes them there, below a folder.

Files are plain files, so what is written to one can be read back; nothing else moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.affinity.topology import format_cpu_list

SYSTEM = "sys/devices/system"


@dataclass(frozen=True)
class Place:
    """Where a CPU is. llc: the number of its last-level cache."""

    package: int
    llc: int
    core: int
    node: int


@dataclass(frozen=True)
class Tree:
    root: Path

    def write(self, path: str, text: object, mode: int = 0o644) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        file.chmod(mode)

    def read(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    def link(self, path: str, target: str) -> None:
        link, aim = self.root / path, self.root / target
        aim.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(aim)

    def cpus(
        self,
        places: Mapping[int, Place],
        *,
        allowed: Iterable[int],
        offline: Iterable[int] = (),
        isolated: Iterable[int] = (),
        caches: bool = True,
    ) -> None:
        online = [cpu for cpu in places if cpu not in set(offline)]
        self.write(f"{SYSTEM}/cpu/present", format_cpu_list(places))
        self.write(f"{SYSTEM}/cpu/online", format_cpu_list(online))
        self.write(f"{SYSTEM}/cpu/isolated", format_cpu_list(isolated))
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{format_cpu_list(allowed)}")
        self.write("proc/softirqs", _softirqs(list(places)))
        self.write("proc/net/softnet_stat", _softnet(online))
        self.write("proc/interrupts", _interrupts(online))
        for node in {places[cpu].node for cpu in places}:
            self.write(
                f"{SYSTEM}/node/node{node}/cpulist", _with(places, online, lambda p, n=node: p.node == n)
            )
        for cpu in online:
            self._cpu(f"{SYSTEM}/cpu/cpu{cpu}", places[cpu], places, online, caches)

    def _cpu(
        self, folder: str, at: Place, places: Mapping[int, Place], online: Sequence[int], caches: bool
    ) -> None:
        def core(p: Place) -> bool:
            return (p.package, p.core) == (at.package, at.core)

        self.write(f"{folder}/topology/physical_package_id", at.package)
        self.write(f"{folder}/topology/core_id", at.core)
        self.write(f"{folder}/topology/core_cpus_list", _with(places, online, core))
        same_package = _with(places, online, lambda p: p.package == at.package)
        self.write(f"{folder}/topology/package_cpus_list", same_package)
        if not caches:
            return
        shared = {
            (0, 1, "Data"): _with(places, online, core),
            (1, 1, "Instruction"): _with(places, online, core),
            (2, 2, "Unified"): _with(places, online, core),
            (3, 3, "Unified"): _with(places, online, lambda p: p.llc == at.llc),
        }
        for (index, level, kind), cpus in shared.items():
            self.write(f"{folder}/cache/index{index}/level", level)
            self.write(f"{folder}/cache/index{index}/type", kind)
            self.write(f"{folder}/cache/index{index}/shared_cpu_list", cpus)

    def device(
        self,
        name: str,
        *,
        rx: int = 1,
        tx: int = 1,
        rps: str = "0",
        at: str | None = None,
        driver: str = "",
        node: int = -1,
        virtio: str = "",
        irqs: Mapping[int, str] | None = None,
        index: int = 1,
    ) -> None:
        """at: its PCI device, below a bridge with interrupts of its own; virtio: the device between."""
        net = f"sys/class/net/{name}"
        self.write(f"{net}/ifindex", index)
        self.write(f"{net}/threaded", 0)
        for queue in range(rx):
            self.write(f"{net}/queues/rx-{queue}/rps_cpus", rps)
            self.write(f"{net}/queues/rx-{queue}/rps_flow_cnt", 0)
        for queue in range(tx):
            (self.root / f"{net}/queues/tx-{queue}").mkdir(parents=True)
            if tx > 1:
                self.write(f"{net}/queues/tx-{queue}/xps_cpus", rps)
        if at is None:
            return
        bridge = "sys/devices/pci0000:00/0000:00:01.0"
        self.link(f"{bridge}/subsystem", "sys/bus/pci")
        self.write(f"{bridge}/msi_irqs/9", "msix")
        device = f"{bridge}/{at}"
        self.link(f"{device}/subsystem", "sys/bus/pci")
        self.write(f"{device}/numa_node", node)
        self.write(f"{device}/irq", 0)
        for irq in irqs or {}:
            self.write(f"{device}/msi_irqs/{irq}", "msix")
        inner = f"{device}/{virtio}" if virtio else device
        if virtio:
            self.link(f"{inner}/subsystem", "sys/bus/virtio")
        self.link(f"{inner}/driver", f"sys/bus/drivers/{driver}")
        self.link(f"{net}/device", inner)

    def irq(self, number: int, action: str, wish: str, fact: str, *, managed: bool = False) -> None:
        folder = f"proc/irq/{number}"
        self.write(f"{folder}/smp_affinity_list", wish, 0o444 if managed else 0o644)
        self.write(f"{folder}/effective_affinity_list", fact, 0o444)
        if action:
            (self.root / folder / action).mkdir()

    def irq_moves(self, number: int, fact: str) -> None:
        """As the kernel does it once the next one comes."""
        path = f"proc/irq/{number}/effective_affinity_list"
        (self.root / path).unlink()
        self.write(path, fact, 0o444)

    def irq_comes(self, number: int) -> None:
        """Once more, to the first CPU."""
        path = self.root / "proc/interrupts"
        row = re.compile(rf"^( {number}: )(\d+)", re.MULTILINE)
        path.write_text(row.sub(lambda match: f"{match[1]}{int(match[2]) + 1}", path.read_text()))

    def process(self, pid: int, name: str, cpus: str = "0") -> None:
        self.write(f"proc/{pid}/comm", name)
        self.write(f"proc/{pid}/status", f"Name:\t{name}\nCpus_allowed_list:\t{cpus}")


def _with(places: Mapping[int, Place], online: Sequence[int], wanted: Callable[[Place], bool]) -> str:
    return format_cpu_list(cpu for cpu in online if wanted(places[cpu]))


def _softirqs(cpus: Sequence[int]) -> str:
    head = " ".join(f"CPU{cpu}" for cpu in cpus)
    rows = [
        f"{kind}: {' '.join(str(cpu + add) for cpu in cpus)}" for kind, add in (("NET_TX", 1), ("NET_RX", 9))
    ]
    return "\n".join([f"                    {head}", *rows])


def _interrupts(cpus: Sequence[int]) -> str:
    """Two of devices, which count the CPU's number and 5, and one that is none."""
    head = "           " + " ".join(f"CPU{cpu}" for cpu in cpus)
    rows = [(" 38", 0, "PCI-MSIX 1-edge eth0"), (" 39", 5, "PCI-MSIX 2-edge x"), ("LOC", 99, "Local timer")]
    return "\n".join(
        [
            head,
            *(f"{name}: {' '.join(str(c if n == 0 else n) for c in cpus)}  {what}" for name, n, what in rows),
        ]
    )


def _softnet(cpus: Sequence[int]) -> str:
    return "\n".join(" ".join(f"{w:08x}" for w in (100 + c, *[0] * 11, c, 0, 0)) for c in cpus)


def vm(root: Path) -> Tree:
    """Two cores that share everything, a virtio NIC with three interrupts, one of them of no queue."""
    tree = Tree(root)
    tree.cpus({cpu: Place(0, 0, cpu, 0) for cpu in range(2)}, allowed=range(2))
    tree.device("lo")
    irqs = {37: "virtio2-config", 38: "virtio2-input.0", 39: "virtio2-output.0"}
    tree.device("eth0", at="0000:00:03.0", virtio="virtio2", driver="virtio_net", irqs=irqs, index=2)
    for number, action in irqs.items():
        tree.irq(number, action, "0-1", "01"[number % 2])
    tree.irq(36, "virtio1-req.0", "0-1", "1", managed=True)
    tree.irq(9, "PCIe bwctrl", "0-1", "0")
    return tree


SERVER_OFFLINE = (5, 69, 40)


def server(root: Path) -> Tree:
    """Two sockets of 32 cores and 64 threads, a node each, eight cores to a cache; a core and a thread are
    offline, CPUs 24-31 isolated. A NIC of 8 queues at node 1, one interrupt of it managed, irqbalance runs.
    """
    tree = Tree(root)
    places = {}
    for cpu in range(128):
        package, core = cpu // 32 % 2, cpu % 32
        places[cpu] = Place(package, package * 4 + core // 8, core, package)
    allowed = [cpu for cpu in range(128) if cpu not in SERVER_OFFLINE]
    tree.cpus(places, allowed=allowed, offline=SERVER_OFFLINE, isolated=range(24, 32))
    zeros = ",".join(["00000000"] * 4)
    tree.device("lo", rps=zeros)
    irqs = {number: f"mlx5_comp{number - 100}" for number in range(100, 109)}
    tree.device(
        "eth0", rx=8, tx=8, rps=zeros, at="0000:81:00.0", driver="mlx5_core", node=1, irqs=irqs, index=2
    )
    for number, action in irqs.items():
        tree.irq(number, action, "32-39,41-63", str(32 + number % 8), managed=number == 108)
    tree.write("proc/sys/net/core/rps_sock_flow_entries", 32768)
    tree.process(812, "irqbalance")
    return tree


def arm(root: Path) -> Tree:
    """Four ARM cores without threads; the firmware tells neither caches nor package; a NIC on the board."""
    tree = Tree(root)
    places = {cpu: Place(-1, 0, cpu, 0) for cpu in range(4)}
    tree.cpus(places, allowed=range(4), caches=False)
    tree.device("eth0", rps="0")
    tree.link("sys/class/net/eth0/device", "sys/devices/platform/fd580000.ethernet")
    tree.irq(21, "eth0", "0-3", "0")
    tree.irq(22, "eth0-tx-0", "0-3", "0")
    tree.irq(23, "eth01", "0-3", "0")
    return tree


def container(root: Path) -> Tree:
    """Eight cores, of which the container is given 2 and 4; a veth."""
    tree = Tree(root)
    tree.cpus({cpu: Place(0, cpu // 4, cpu, 0) for cpu in range(8)}, allowed=(2, 4))
    tree.device("lo", rps="00")
    tree.device("eth0", rps="00", index=7)
    return tree
