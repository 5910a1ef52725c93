"""Is a layout what it claims to be? Masks are read back, threads looked at, and, with traffic, packets
counted where the kernel handles them.

What another program changes is found only by looking again: irqbalance takes ten seconds.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.affinity import devices, interrupts, journal, pinning, topology
from engine.affinity.devices import Device
from engine.affinity.journal import Journal
from engine.affinity.layouts import Layout
from engine.affinity.topology import ROOT, format_cpu_list, parse_kernel_list, read_text
from engine.errors import Refused
from engine.net.counters import parse_softnet

_PACKETS, _IN_FLIGHT, _PATIENCE_S = 1000, 10, 2.0
THERE = 0.99  # of others' packets, at least: one now and then is not steered, and stays where it came
_WATCH_S = 2.0  # how long packets of others are waited for
_WORKER = re.compile(r"rx:(?P<receiver>rx\d+$)?")  # how workers call themselves
_MOVED_BY = 2  # the interrupt that brings a new wish into effect still comes where the last ones came
_INCOMING_CPU = 49  # SO_INCOMING_CPU
_SOL_PACKET, _STATISTICS, _FANOUT, _IGNORE_OUTGOING = 263, 6, 18, 23  # and options of if_packet.h
_BY_CPU, _ETH_P_ALL = 2, 3


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    wanted: str
    found: str
    ok: bool


def applied(root: Path = ROOT) -> tuple[Layout, Journal]:
    """The layout applied last. Refused if there is none."""
    found = journal.journals(root)
    if not found:
        raise Refused("no layout is applied: `rxring pin apply LAYOUT --device DEV` applies one")
    last = found[-1]
    if last.owner is not None and not last.owner.lives(root):
        raise Refused(f"{last.whose} is dead: bring back what was there: rxring pin restore")
    if not last.complete:
        raise Refused("the last apply or restore did not come to its end: run `rxring pin restore`")
    about = last.about
    send = tuple(about.get("send", ()))
    layout = Layout(about["layout"], about["interrupt"], about["receive"], tuple(about["process"]), send)
    return layout, last


def read_back(layout: Layout, made: Journal, root: Path = ROOT) -> Iterator[Check]:
    """What was written still stands there, interrupts come where they were wished, nobody moves them.

    One that has hardly come since is where it was, and is right: it moves when it comes.
    """
    at_rest = _at_rest(made, root)
    for change in made.changes:
        found = read_text(Path(change.path))
        ok = found is not None and journal.equal(change.path, found, change.new)
        yield Check(change.path, change.new, "gone" if found is None else found, ok)
        if change.path.endswith("smp_affinity_list"):
            fact = read_text(Path(change.path).with_name("effective_affinity_list"))
            if fact is not None:
                irq = Path(change.path).parent
                there, rests = parse_kernel_list(fact) == (layout.interrupt,), irq.name in at_rest
                found = fact if there or not rests else f"{fact}, until it comes"
                yield Check(f"{irq}: in effect", str(layout.interrupt), found, there or rests)
    if made.about["interrupt_by"] == "irq":
        pid = interrupts.irqbalance(root)
        yield Check(
            "irqbalance", "not running", "not running" if pid is None else f"process {pid}", pid is None
        )


def _at_rest(made: Journal, root: Path) -> set[str]:
    """The interrupts (their numbers) of the layout that have hardly come since it was applied."""
    rows = interrupts.parse_interrupts(read_text(root / "proc/interrupts") or "")
    return {
        number
        for number, before in made.about.get("arrived", {}).items()
        if number in rows and sum(rows[number].counts.values()) - before < _MOVED_BY
    }


def engine_threads(layout: Layout, made: Journal | None = None) -> Iterator[Check]:
    """Every thread of every worker of engines in this network: of receivers, and of the others.

    Not those of an engine that runs by another layout than the one of this journal.
    """
    owners = {other.owner.pid for other in journal.journals() if other.owner and other != made}
    for pid, name in sorted(interrupts.processes()):
        match = _WORKER.match(name)
        if match and interrupts.parent(pid) in owners:
            continue
        threads = pinning.verify(pid) if match and journal.namespace(pid=pid) == journal.namespace() else []
        if match is None or not threads:
            continue
        wanted = (layout.receive,) if match["receiver"] else layout.process
        cpus = {cpu for thread in threads for cpu in thread.cpus}
        what = f"{name.removeprefix('rx:')} (process {pid}, {len(threads)} threads)"
        ok = cpus <= set(wanted)
        yield Check(what, format_cpu_list(wanted), format_cpu_list(cpus), ok)


# ── with traffic ─────────────────────────────────────────────────────────────────────────────────────


def traffic(layout: Layout, name: str) -> Iterator[Check]:
    """Packets over the device are handled on the interrupt CPU: ours over lo, else whatever comes."""
    device = devices.read(name)
    before = _counts(device)
    ran = _own_packets(layout.interrupt) if name == "lo" else _others_packets(name)
    after = _counts(device)
    what = f"packets of our own over {name}" if name == "lo" else f"packets over {name}"
    least, wanted = (1.0, "all") if name == "lo" else (THERE, f"{THERE:.0%}")
    ok = handled(ran, layout.interrupt, least)
    none = f"none came in {_WATCH_S:g} s, have somebody send"
    yield Check(what, f"{wanted} on {layout.interrupt}", _by_cpu(ran) if ran else none, ok)
    if not ran:
        return  # nothing to count
    yield from _risen(layout.interrupt, before, after, at_least=ran.get(layout.interrupt, 0))


def handled(ran: Mapping[int, int], cpu: int, share: float) -> bool:
    """Has this CPU had at least this share of the packets, counted by CPU? Not if there were none."""
    return ran.get(cpu, 0) >= max(share * sum(ran.values()), 1)


@dataclass(frozen=True, slots=True)
class _Counts:
    """softnet: packets of all devices; irqs: of this device, None if it has none of its own."""

    softnet: dict[int, int]
    irqs: Counter[int] | None


def _counts(device: Device) -> _Counts:
    irqs: Counter[int] = Counter()
    for by_cpu in interrupts.arrived(device.packet_irqs).values():
        irqs.update(by_cpu)
    softnet = parse_softnet(Path("/proc/net/softnet_stat").read_text(), topology.online())
    packets = {cpu: counts.processed for cpu, counts in softnet.items()}
    return _Counts(packets, irqs if device.packet_irqs else None)


def _risen(cpu: int, before: _Counts, after: _Counts, at_least: int) -> Iterator[Check]:
    """softnet counts all devices of the machine: others may have packets anywhere meanwhile."""
    softnet = {c: n - before.softnet.get(c, n) & 0xFFFFFFFF for c, n in after.softnet.items()}
    what, wanted = "softnet, with other devices' packets", f"{at_least} or more on {cpu}"
    yield Check(what, wanted, _by_cpu(softnet), softnet.get(cpu, 0) >= at_least)
    if before.irqs is not None and after.irqs is not None:
        irqs = {c: n - before.irqs[c] for c, n in after.irqs.items()}
        ok = not any(n for c, n in irqs.items() if c != cpu)
        yield Check("interrupts of the device", f"all on {cpu}", _by_cpu(irqs), ok)


def _others_packets(name: str) -> dict[int, int]:
    """What comes over the device for a while, by the CPU that handles it. Refused who may not tap it.

    A socket for each CPU taps the device, and the kernel gives a packet to that of the CPU it is on.
    """
    count = max(topology.online()) + 1
    with ExitStack() as stack:
        try:
            taps = [stack.enter_context(_tap(name, count)) for _ in range(count)]
        except OSError as error:
            raise Refused(
                f"the packets of {name} cannot be seen ({error.strerror}): run it with sudo"
            ) from None
        for tap in taps:
            _taken(tap)  # until all were there, some had what was others'
        time.sleep(_WATCH_S)
        return {cpu: packets for cpu, tap in enumerate(taps) if (packets := _taken(tap))}


def _taken(tap: socket.socket) -> int:
    """Packets since this was last asked."""
    packets: int = struct.unpack("II", tap.getsockopt(_SOL_PACKET, _STATISTICS, 8))[0]
    return packets


def _tap(name: str, count: int) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    try:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # packets are counted, not kept
        tap.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        tap.bind((name, _ETH_P_ALL))
        if count > 1:
            tap.setsockopt(_SOL_PACKET, _FANOUT, _BY_CPU << 16 | os.getpid() & 0xFFFF)
    except OSError:
        tap.close()
        raise
    return tap


def _by_cpu(counts: dict[int, int]) -> str:
    return ", ".join(f"{count} on {cpu}" for cpu, count in sorted(counts.items()) if count) or "none"


def _own_packets(cpu: int) -> dict[int, int]:
    """Of packets of a socket to itself over lo: how many softirqs of which CPU handled.

    They are sent from another CPU where there is one: else they would be handled here anyway.
    """
    ran: Counter[int] = Counter()
    failed: list[Refused] = []
    sender = threading.Thread(target=_send_to_ourselves, args=(cpu, ran, failed))
    sender.start()
    sender.join()
    if failed:
        raise failed[0]
    return ran


def _send_to_ourselves(cpu: int, ran: Counter[int], failed: list[Refused]) -> None:
    """A thread's life: affinity belongs to it alone, and ends with it."""
    with suppress(OSError):
        os.sched_setaffinity(0, set(topology.allowed()) - {cpu} or {cpu})
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            sock.connect(sock.getsockname())  # only a connected socket keeps the CPU
            sock.settimeout(_PATIENCE_S)
            for i in range(_PACKETS + _IN_FLIGHT):
                if i < _PACKETS:
                    sock.send(b"rxring pin verify")
                if i >= _IN_FLIGHT:
                    sock.recv(64)
                    ran[sock.getsockopt(socket.SOL_SOCKET, _INCOMING_CPU)] += 1
    except TimeoutError:
        failed.append(Refused("packets over lo do not come back: is it up? ip link set lo up"))
    except OSError as error:
        failed.append(Refused(f"nothing can be sent over lo ({error.strerror}): ip link set lo up"))
