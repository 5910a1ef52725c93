"""What a stretch of time cost: each process's CPU time, interrupts' time, and which CPU handled the packets.

The kernel charges the work of an interrupt to whichever thread it came upon, unless it was built with
CONFIG_IRQ_TIME_ACCOUNTING: then a process's time has that in it, and what /proc/stat says of softirqs stands
beside it, not on top. A process's time is exact; that of softirqs is of clock ticks (bench/busy.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench import busy
from engine.affinity import interrupts, pinning, topology
from engine.affinity.topology import format_cpu_list
from engine.net.counters import parse_softnet

ELSEWHERE = 0.01  # of the packets: so many may be handled on another CPU than was asked for
_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Cost:
    """Since the boot, or between two moments. seconds: of the clock. threads_ns: of each process, all of its
    threads. packets: by the CPU whose softirqs handled them, of all devices of the machine. interrupts: of
    the devices asked for, by CPU."""

    seconds: float
    busy: dict[int, busy.Busy]
    threads_ns: dict[int, int]
    packets: dict[int, int]
    interrupts: dict[int, int]

    def since(self, before: Cost) -> Cost:
        return Cost(
            self.seconds - before.seconds,
            {cpu: times.since(before.busy[cpu]) for cpu, times in self.busy.items() if cpu in before.busy},
            {pid: ns - before.threads_ns.get(pid, 0) for pid, ns in self.threads_ns.items()},
            {cpu: (n - before.packets.get(cpu, n)) & _U32 for cpu, n in self.packets.items()},
            {cpu: n - before.interrupts.get(cpu, 0) for cpu, n in self.interrupts.items()},
        )

    @property
    def softirq_ns(self) -> float:
        """Of interrupts, on all CPUs."""
        return 1e9 * sum(times.softirq for times in self.busy.values())


def read(pids: Iterable[int], irqs: Sequence[int] = ()) -> Cost:
    """irqs: the numbers of a device's interrupts."""
    softnet = parse_softnet(Path("/proc/net/softnet_stat").read_text(), topology.online())
    rows = interrupts.parse_interrupts(Path("/proc/interrupts").read_text()) if irqs else {}
    counts: dict[int, int] = {}
    for irq in irqs:
        for cpu, count in rows[str(irq)].counts.items() if str(irq) in rows else ():
            counts[cpu] = counts.get(cpu, 0) + count
    return Cost(
        time.monotonic(),
        busy.read(),
        {pid: sum(_thread_times(pid)) for pid in pids},
        {cpu: counts.processed for cpu, counts in softnet.items()},
        counts,
    )


def _thread_times(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            yield int(path.read_text().split()[0])


def misplaced(who: str, pid: int, cpus: Iterable[int]) -> list[str]:
    """A sentence if a thread of the process may run elsewhere than on exactly these CPUs, or did last."""
    wanted = set(cpus)
    for thread in pinning.verify(pid):
        if set(thread.cpus) != wanted or thread.last_cpu not in wanted:
            may = f"runs on CPU {thread.last_cpu} and may on {format_cpu_list(thread.cpus)}"
            return [f"{who} {may}, not on {format_cpu_list(wanted)} as asked"]
    return []


def strayed(cost: Cost, cpu: int) -> list[str]:
    """A sentence if more than ELSEWHERE of the packets, or interrupts, were not handled on this CPU."""
    told = []
    for what, counts in (("packets (of all devices)", cost.packets), ("interrupts", cost.interrupts)):
        total, here = sum(counts.values()), counts.get(cpu, 0)
        if here < (1 - ELSEWHERE) * total:
            told.append(f"{total - here} of {total} {what} were handled elsewhere than on CPU {cpu} as asked")
    return told
