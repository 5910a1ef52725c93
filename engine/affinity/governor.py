"""Frequency governors: how fast the kernel lets a CPU run when it has something to do.

One that saves power has clocked an idle CPU down, and the first packets after a pause are late. Virtual
machines have none: there the host decides.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from engine.affinity.journal import Write
from engine.affinity.topology import ROOT, read_text
from engine.errors import Refused


def _folder(cpu: int, root: Path) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"


def writes(name: str, cpus: Collection[int], root: Path = ROOT) -> list[Write]:
    """Give these CPUs this governor. Refused where one of them has no governors, or not this one."""
    found = []
    for cpu in sorted(cpus):
        folder = _folder(cpu, root)
        offered = read_text(folder / "scaling_available_governors")
        if offered is None:
            raise Refused(
                f"CPU {cpu} has no frequency governors here, the host decides: leave out --governor"
            )
        if name not in offered.split():
            raise Refused(f"CPU {cpu} has no governor {name!r}: choose from {', '.join(offered.split())}")
        found.append(Write(folder / "scaling_governor", name))
    return found
