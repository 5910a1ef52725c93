"""Interrupts: where each may come (the wish), where it does (the fact), and who has the last word.

smp_affinity_list is what was asked for, also while the kernel has not yet done it; the fact is
effective_affinity_list, mostly one CPU. A managed interrupt is the kernel's own to place: its files cannot be
written, which their mode shows, though not to root's access(2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.affinity.topology import ROOT, parse_kernel_list, read_text


@dataclass(frozen=True, slots=True)
class Irq:
    """actions: what handlers call themselves; none: nobody has asked for it yet. fact: None if not told."""

    number: int
    actions: tuple[str, ...]
    wish: tuple[int, ...]
    fact: tuple[int, ...] | None
    managed: bool


def wish_path(number: int, root: Path = ROOT) -> Path:
    return root / f"proc/irq/{number}/smp_affinity_list"


def read_irq(number: int, root: Path = ROOT) -> Irq | None:
    """None if there is no such interrupt."""
    path = wish_path(number, root)
    try:
        wish, mode = parse_kernel_list(path.read_text()), path.stat().st_mode
        actions = tuple(sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir()))
    except OSError:
        return None
    fact = read_text(path.parent / "effective_affinity_list")
    return Irq(number, actions, wish, None if fact is None else parse_kernel_list(fact), not mode & 0o222)


def irqs_of(name: str, root: Path = ROOT) -> tuple[Irq, ...]:
    """The interrupts of a network device, by number; () if it has none of its own."""
    numbers = _of_bus(root / "sys/class/net" / name / "device") or _by_action(name, root)
    return tuple(irq for number in sorted(numbers) if (irq := read_irq(number, root)) is not None)


def _of_bus(link: Path) -> list[int]:
    """Of the device behind it, or the first one above that has any; the PCI device is the last that counts,
    since those of the bridge above it are the bridge's own."""
    if not link.exists():
        return []
    device = link.resolve()
    for folder in (device, *device.parents):
        if (folder / "msi_irqs").is_dir():
            return [int(entry.name) for entry in (folder / "msi_irqs").iterdir()]
        if (line := read_text(folder / "irq")) and int(line) > 0:
            return [int(line)]
        if folder.name == "devices" or (folder / "subsystem").resolve().name == "pci":
            break
    return []


def _by_action(name: str, root: Path) -> list[int]:
    """On boards without PCI, drivers call their interrupts as the device is called: eth0, eth0-rx-0."""
    folders = [*root.glob(f"proc/irq/*/{name}"), *root.glob(f"proc/irq/*/{name}-*")]
    return [int(folder.parent.name) for folder in folders if folder.is_dir()]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of /proc/interrupts: how often, by CPU. `what`: chip and actions, as it stands there."""

    counts: dict[int, int]
    what: str


def parse_interrupts(text: str) -> dict[str, Row]:
    """/proc/interrupts by the name of the row: "38", "NMI". A column is a CPU that is online.

    Rows of one number for the whole machine (ERR, MIS) have no counts by CPU.
    """
    lines = text.splitlines()
    cpus = _columns(lines[0]) if lines else []
    rows = {}
    for line in lines[1:]:
        name, _, rest = line.partition(":")
        words = rest.split(maxsplit=len(cpus))
        counts = words[: len(cpus)]
        whole = len(counts) == len(cpus) and all(word.isdecimal() for word in counts)
        numbers = {cpu: int(word) for cpu, word in zip(cpus, counts, strict=True)} if whole else {}
        rows[name.strip()] = Row(numbers, "".join(words[len(cpus) :]) if whole else "")
    return rows


def arrived(irqs: Iterable[Irq], root: Path = ROOT) -> dict[int, Counter[int]]:
    """How often each has come since the boot, by CPU; one without a row is left out."""
    rows = parse_interrupts(read_text(root / "proc/interrupts") or "")
    return {irq.number: Counter(rows[str(irq.number)].counts) for irq in irqs if str(irq.number) in rows}


def parse_softirqs(text: str) -> dict[str, dict[int, int]]:
    """/proc/softirqs: how often each kind ran (not packets), by CPU; a column is a CPU that is possible."""
    lines = text.splitlines()
    cpus = _columns(lines[0]) if lines else []
    pairs = (line.partition(":") for line in lines[1:])
    return {
        name.strip(): dict(zip(cpus, map(int, counts.split()), strict=False)) for name, _, counts in pairs
    }


def _columns(head: str) -> list[int]:
    return [int(number) for number in re.findall(r"CPU(\d+)", head)]


def processes(root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """(pid, name) of every process, as far as this one can see."""
    for entry in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(entry.name), (entry / "comm").read_text(errors="replace").rstrip("\n")


def parent(pid: int, root: Path = ROOT) -> int | None:
    """Which process started it; None if it is gone."""
    stat = read_text(root / f"proc/{pid}/stat")
    return int(stat[stat.rindex(")") + 1 :].split()[1]) if stat else None


def irqbalance(root: Path = ROOT) -> int | None:
    """The process that puts interrupts elsewhere every ten seconds; None if none is seen."""
    return next((pid for pid, name in processes(root) if name == "irqbalance"), None)
