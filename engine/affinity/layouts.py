"""Layouts: which CPU takes the interrupts, which receives, which process.

    same            the interrupt core is the receive core
    sibling         the receive core's hyperthread takes the interrupts
    split           different cores behind one last-level cache
    split-package   one package, another last-level cache
    cross-node      the interrupts at the device's memory node, receiving at another

A device without interrupts of its own (lo, veth, tun) has its packets handled on the CPU of whoever sends
them; there a one-bit RPS mask makes the interrupt core, and the sender pays for the hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.affinity import devices, interrupts, pinning, steering, topology
from engine.affinity.devices import Device
from engine.affinity.journal import Write
from engine.affinity.topology import (
    ROOT,
    Cpu,
    Topology,
    format_cpu_list,
    format_hex_mask,
    parse_cpu_list,
)
from engine.errors import Refused

_RELATIONS: dict[str, tuple[Callable[[Cpu, Cpu], bool], str]] = {
    # of the interrupt CPU and the receive CPU, and why there is no such pair
    "same": (lambda i, r: i.id == r.id, "there is no CPU"),
    "sibling": (lambda i, r: i.id != r.id and r.id in i.siblings, "no core has two threads (SMT)"),
    "split": (
        lambda i, r: r.id not in i.siblings and r.id in i.llc,
        "no two cores share a last-level cache",
    ),
    "split-package": (
        lambda i, r: i.package == r.package and r.id not in (*i.llc, *i.siblings),
        "no package has two last-level caches",
    ),
    "cross-node": (lambda i, r: i.node != r.node, "there is one memory node (NUMA)"),
}
NAMES = tuple(_RELATIONS)


@dataclass(frozen=True, slots=True)
class Layout:
    """CPUs of the roles. send: those that send, for the transmit queues (XPS). note: what is shared."""

    name: str
    interrupt: int
    receive: int
    process: tuple[int, ...]
    send: tuple[int, ...] = ()
    note: str = ""

    @property
    def cpus(self) -> list[int]:
        return sorted({self.interrupt, self.receive, *self.process, *self.send})

    def as_object(self) -> dict[str, object]:
        roles = {"interrupt": self.interrupt, "receive": self.receive, "process": list(self.process)}
        return {"layout": self.name, **roles, **({"send": list(self.send)} if self.send else {})}


def find(name: str, machine: Topology, device: Device | None = None) -> Layout:
    """The layout on this machine, near the device. Refused, with the reason, if it cannot be had."""
    pair = _pair(name, machine, machine.allowed, device)
    if pair is None:
        raise Refused(f"layout {name} cannot be had: {_why_not(name, machine, device)}")
    interrupt, receive = pair
    process, note = _process(machine, interrupt, receive)
    return Layout(name, interrupt.id, receive.id, process, note=note)


def _pair(name: str, machine: Topology, cpus: Iterable[int], device: Device | None) -> tuple[Cpu, Cpu] | None:
    """The best interrupt and receive CPU: at the device's node, and not the core of CPU 0, which does what
    nobody else does. Isolated ones are for receiving; there RPS cannot send anything."""
    related = _RELATIONS[name][0]
    node = device.node if device else None
    everyday = machine.by_id[0].siblings if 0 in machine.by_id else ()

    def far(cpu: Cpu) -> tuple[bool, bool, int]:
        return (node is not None and cpu.node != node, cpu.id in everyday, cpu.id)

    usable = sorted((machine.by_id[cpu] for cpu in cpus), key=far)
    receivers = sorted(usable, key=lambda cpu: cpu.id not in machine.isolated)
    takers = (cpu for cpu in usable if cpu.id not in machine.isolated)
    return next(((i, r) for i in takers for r in receivers if related(i, r)), None)


def _why_not(name: str, machine: Topology, device: Device | None) -> str:
    if _pair(name, machine, machine.online, device):
        return f"not among CPU {format_cpu_list(machine.allowed)}, which this process is allowed"
    if set(machine.online) <= set(machine.isolated):
        return "every CPU is isolated"
    return _RELATIONS[name][1]


def _process(machine: Topology, interrupt: Cpu, receive: Cpu) -> tuple[tuple[int, ...], str]:
    """CPUs for processing and, if they share something, a word on it: cores of their own that are as near
    to the receive CPU as can be, one thread of each."""
    busy = {*interrupt.siblings, *receive.siblings}
    free = [machine.by_id[cpu] for cpu in machine.allowed if cpu not in busy]
    cores = list({cpu.siblings: cpu for cpu in reversed(free)}.values())[::-1]
    for near in (
        [cpu.id for cpu in cores if cpu.id in receive.llc],
        [cpu.id for cpu in cores if (cpu.package, cpu.node) == (receive.package, receive.node)],
        [cpu.id for cpu in cores],
    ):
        if near:
            return tuple(sorted(near)), ""
    threads = [cpu for cpu in machine.allowed if cpu not in (interrupt.id, receive.id)]
    if threads:
        return tuple(threads), "processing shares a core with the interrupt or the receive CPU"
    if interrupt.id != receive.id:
        return (interrupt.id,), "processing shares the interrupt CPU: no other is left"
    return (receive.id,), "everything shares one CPU: no other is left"


# ── from a file ──────────────────────────────────────────────────────────────────────────────────────


class _File(msgspec.Struct, forbid_unknown_fields=True):
    interrupt: int | str
    receive: int | str
    process: int | str
    send: int | str = ""
    device: str | None = None


def read_file(path: Path) -> tuple[Layout, str | None]:
    """A layout of one's own, and the device if it names one. Refused where it makes no sense.

    interrupt = 2
    receive = 3
    process = "4-7"
    """
    if path.exists() and not path.is_file():
        raise Refused(f"{path} is no file: give one of {', '.join(NAMES)}, or a TOML file")
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File)
        interrupt, receive, process = (
            parse_cpu_list(str(role)) for role in (found.interrupt, found.receive, found.process)
        )
        send = parse_cpu_list(str(found.send)) if found.send != "" else ()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}: give one of {', '.join(NAMES)}, or a TOML file") from None
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        text = str(error)
        raise Refused(
            f"{path}: {text if ': ' in text else f'{text}: see `rxring pin apply --help`'}"
        ) from None
    if len(interrupt) != 1 or len(receive) != 1:
        raise Refused(f"{path}: interrupt and receive are one CPU each: give one, like 2")
    return Layout(path.stem, interrupt[0], receive[0], process, send), found.device


def choose(layout: str, device: str | None, root: Path = ROOT) -> tuple[Layout, Device]:
    """By name, near the device; or from a TOML file, which may name the device. Refused if there is none."""
    if layout in NAMES:
        if device is None:
            raise Refused(f"--device is missing: choose from {', '.join(devices.names(root))}")
        target = devices.read(device, root)
        return find(layout, topology.read(root), target), target
    chosen, named = read_file(Path(layout))
    device = device or named
    if device is None:
        raise Refused(f"{layout} names no device: write device = 'DEV', or give --device DEV")
    return chosen, devices.read(device, root)


# ── what it takes ────────────────────────────────────────────────────────────────────────────────────


def made_by(device: Device) -> str:
    """How its interrupt core is made: "irq", or "rps" for want of interrupts."""
    return "irq" if device.irqs else "rps"


def about(layout: Layout, device: Device, root: Path = ROOT) -> dict[str, object]:
    """What is to be known of it once it is applied. arrived: how often each interrupt had come until then."""
    counts = interrupts.arrived(device.packet_irqs, root)
    return {
        **layout.as_object(),
        "device": device.name,
        "interrupt_by": made_by(device),
        "arrived": {str(number): by_cpu.total() for number, by_cpu in counts.items()},
    }


def writes(layout: Layout, device: Device, root: Path = ROOT) -> list[Write]:
    """What realises it: interrupts, else RPS, on the interrupt CPU; nothing that moves packets on."""
    mask = format_hex_mask([layout.interrupt]) if made_by(device) == "rps" else "0"
    return [
        *(
            Write(interrupts.wish_path(irq.number, root), str(layout.interrupt))
            for irq in device.packet_irqs
            if not irq.managed  # those are there already, or an obstacle
        ),
        *(
            Write(steering.rps_path(device.name, q.number, root), mask)
            for q in device.rx
            if q.rps is not None
        ),
        *(Write(steering.rfs_path(device.name, q.number, root), "0") for q in device.rx if q.rfs),
        *(
            Write(steering.xps_path(device.name, queue.number, root), format_hex_mask([cpu]))
            for queue, cpu in zip(device.tx, _around(layout.send, len(device.tx)), strict=False)
        ),
    ]


def _around(cpus: Sequence[int], count: int) -> list[int]:
    return [cpus[i % len(cpus)] for i in range(count)] if cpus else []


def obstacles(layout: Layout, device: Device, machine: Topology, root: Path = ROOT) -> list[str]:
    """Why the machine will refuse it, as far as that can be foreseen; each says what to do."""
    cpuset = topology.cpuset(root) if root == ROOT else ()
    found = [pinning.obstacle(layout.cpus, machine.present, machine.online, machine.allowed, cpuset)]
    name, cpu = device.name, layout.interrupt
    if made_by(device) == "rps":
        if any(queue.rps is None for queue in device.rx):
            found.append(f"{name} has neither interrupts nor RPS here: choose another device")
        if cpu in machine.isolated:
            found.append(f"CPU {cpu} is isolated and RPS takes none of those: choose another for interrupts")
    else:
        if not device.packet_irqs:
            found.append(f"{name} has no interrupt in use: bring it up: ip link set {name} up")
        found += [
            f"interrupt {irq.number} ({', '.join(irq.actions)}) of {name} is managed, the kernel keeps it on "
            f"CPU {format_cpu_list(irq.fact or irq.wish)}: choose the layout after it, or another device"
            for irq in device.packet_irqs
            if irq.managed and (irq.fact or irq.wish) != (cpu,)
        ]
        if device.napi is not None:
            off = f"echo 0 > /sys/class/net/{name}/threaded"
            found.append(f"{name} is polled by threads, wherever its interrupts come: turn them off: {off}")
        if (pid := interrupts.irqbalance(root)) is not None:
            found.append(
                f"irqbalance (process {pid}) undoes it within ten seconds: stop it: systemctl stop irqbalance"
            )
    if layout.send and any(queue.xps is None for queue in device.tx):
        found.append(f"{name} has no transmit queues to choose from: leave out send")
    return [reason for reason in found if reason]
