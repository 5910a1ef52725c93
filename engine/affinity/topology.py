"""Which CPUs there are, how they are related, and which of them this process may use.

present   built into the machine          online   running now
cpuset    online and within the cpuset of this process: what the kernel would let it be pinned to
allowed   those of them that it was started on (by taskset, or a service): what it may be pinned to
mask      what a thread is pinned to now
isolated  kept free of what nobody pins there (isolcpus=)

Parsers are apart from reading, and what is read is below a root: / or a captured tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_CPU = 4095  # ids may have holes, and reach far above the count of CPUs
ROOT = Path("/")
_SYSTEM = "sys/devices/system/cpu"
_ITEM = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_MASK = re.compile(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8})*")
_STARTED_ON = os.sched_getaffinity(0)  # before this process has pinned anything of itself


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU that is online. Groups of CPUs hold those online only, and itself.

    llc: those it shares its last-level cache with. siblings: the threads of its core. node: of memory.
    """

    id: int
    package: int
    llc: tuple[int, ...]
    core: int
    siblings: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The CPUs of a machine and what a process may use of them, all ascending."""

    cpus: tuple[Cpu, ...]
    present: tuple[int, ...]
    online: tuple[int, ...]
    allowed: tuple[int, ...]
    isolated: tuple[int, ...]

    @property
    def offline(self) -> tuple[int, ...]:
        return tuple(cpu for cpu in self.present if cpu not in self.online)

    @property
    def by_id(self) -> dict[int, Cpu]:
        return {cpu.id: cpu for cpu in self.cpus}


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The ids in a list like "0-3,8", in the order written. ValueError for anything else.

    Strict: no blanks, no descending range, no CPU named twice, no id above MAX_CPU, not empty.
    """
    cpus: list[int] = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last <= MAX_CPU:
            raise ValueError(f"{text!r} is no CPU list: write ids from 0 to {MAX_CPU}, like 2 or 0-3,8")
        cpus += range(first, last + 1)
        if len(cpus) > MAX_CPU + 1:
            break  # some are named twice, however much follows
    if len(set(cpus)) < len(cpus):
        raise ValueError(f"CPU list {text!r} names a CPU twice: name each once")
    return tuple(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Ids as the shortest list, ascending; "" for none. `parse_cpu_list` reads it back."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def parse_kernel_list(text: str) -> tuple[int, ...]:
    """The ids in a file of the kernel: a list and a newline; an empty one names none."""
    text = text.strip()
    return parse_cpu_list(text) if text else ()


def parse_mask(status: str) -> tuple[int, ...]:
    """The CPUs that a thread may run on now, from the text of its /proc/.../status."""
    match = re.search(r"^Cpus_allowed_list:(.*)$", status, re.MULTILINE)
    if match is None:
        raise ValueError("no Cpus_allowed_list in it: this is no thread's status")
    return parse_kernel_list(match[1])


def parse_hex_mask(text: str) -> tuple[int, ...]:
    """The CPUs in a mask like "00000001,0000000f": groups of 32 bits, the last one has CPU 0.

    ValueError for anything else, 0x and groups of more than 8 digits, as the kernel has it.
    """
    text = text.strip()
    if not _MASK.fullmatch(text):
        raise ValueError(f"{text!r} is no CPU mask: write groups of up to 8 hex digits, like 1,0000000f")
    groups = [int(group, 16) for group in reversed(text.split(","))]
    return tuple(
        32 * i + bit for i, group in enumerate(groups) if group for bit in range(32) if group >> bit & 1
    )


def format_hex_mask(cpus: Iterable[int]) -> str:
    """The shortest mask the kernel takes on a machine that has these CPUs; "0" for none."""
    mask = sum(1 << cpu for cpu in set(cpus))
    groups = [mask >> shift & 0xFFFFFFFF for shift in range(0, max(mask.bit_length(), 1), 32)]
    first, *others = reversed(groups)
    return ",".join([f"{first:x}", *(f"{group:08x}" for group in others)])


def read_text(path: Path) -> str | None:
    """What stands in a file of the kernel; None where this machine has none, or it cannot tell."""
    with suppress(OSError):
        return path.read_text().strip()
    return None


def present(root: Path = ROOT) -> tuple[int, ...]:
    return parse_kernel_list((root / _SYSTEM / "present").read_text())


def online(root: Path = ROOT) -> tuple[int, ...]:
    return parse_kernel_list((root / _SYSTEM / "online").read_text())


def isolated(root: Path = ROOT) -> tuple[int, ...]:
    return parse_kernel_list(read_text(root / _SYSTEM / "isolated") or "")


def mask() -> tuple[int, ...]:
    """What the calling thread is pinned to now."""
    return parse_mask(Path("/proc/thread-self/status").read_text())


def allowed(root: Path = ROOT) -> tuple[int, ...]:
    """What this process may be pinned to: who started it on some CPUs did not mean the others."""
    within = cpuset(root)
    started_on = set(within if root != ROOT else _STARTED_ON)
    return tuple(cpu for cpu in within if cpu in started_on) or within  # none: its cpuset was changed


def cpuset(root: Path = ROOT) -> tuple[int, ...]:
    """What the calling thread could be pinned to: the CPUs online within its cpuset.

    Files of cgroups say it in too many ways, so the kernel is asked: it cuts a mask of all CPUs down to
    what it allows. The thread's own mask is put back at once. A captured tree has only the mask.
    """
    if root != ROOT:
        return parse_mask((root / "proc/self/status").read_text())
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(MAX_CPU + 1))
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    finally:
        os.sched_setaffinity(0, before)


def read(root: Path = ROOT) -> Topology:
    """All of it."""
    running = online(root)
    nodes = _nodes(root)
    cpus = tuple(_read_cpu(root / _SYSTEM / f"cpu{cpu}", cpu, nodes.get(cpu, 0)) for cpu in running)
    return Topology(cpus, present(root), running, allowed(root), isolated(root))


def _nodes(root: Path) -> dict[int, int]:
    """The memory node of each CPU; {} on a kernel that knows of none."""
    return {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
        for cpu in parse_kernel_list(path.read_text())
    }


def _read_cpu(folder: Path, cpu: int, node: int) -> Cpu:
    def number(name: str) -> int:
        return max(int(read_text(folder / "topology" / name) or 0), 0)  # -1: not known

    def group(*names: str) -> tuple[int, ...]:
        """By its new name or, before Linux 5.3, its old one."""
        found = (read_text(folder / "topology" / name) for name in names)
        return parse_kernel_list(next((text for text in found if text), str(cpu)))

    package = group("package_cpus_list", "core_siblings_list")
    return Cpu(
        id=cpu,
        package=number("physical_package_id"),
        llc=_last_cache(folder) or package,
        core=number("core_id"),
        siblings=group("core_cpus_list", "thread_siblings_list"),
        node=node,
    )


def _last_cache(folder: Path) -> tuple[int, ...]:
    """Who shares the cache of the highest level; () where the firmware describes none."""
    levels = {
        int(level): parse_kernel_list(shared)
        for index in (folder / "cache").glob("index[0-9]*")
        if (level := read_text(index / "level")) and (shared := read_text(index / "shared_cpu_list"))
        if read_text(index / "type") != "Instruction"
    }
    return levels[max(levels)] if levels else ()
