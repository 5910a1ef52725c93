"""How busy CPUs are, as the kernel's clock tick sees it: with the work of processes, and with interrupts.

The work of an interrupt is nobody's. Without CONFIG_IRQ_TIME_ACCOUNTING the clock of whichever thread it
came upon runs on meanwhile, and charges it to that one. So it stands by itself here, by CPU, as /proc/stat
has it. Whatever a tick finds counts as a whole tick: of a second, some per cent are uncertain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")


class Busy(NamedTuple):
    """Of one CPU, seconds since the boot. own: of processes. softirq: of interrupts. stolen: by others of a
    machine that is virtual."""

    own: float
    softirq: float
    stolen: float

    def since(self, before: Busy) -> Busy:
        return Busy(*(now - then for now, then in zip(self, before, strict=True)))


def read() -> dict[int, Busy]:
    """Of every CPU that is online."""
    return dict(parse(_STAT.read_text()))


def parse(text: str) -> Iterator[tuple[int, Busy]]:
    """(CPU, its times) of the text of /proc/stat."""
    for line in text.splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _, _, irq, softirq, stolen = (int(word) / _TICKS_PER_S for word in words[:8])
            yield int(name[3:]), Busy(user + nice + system, irq + softirq, stolen)
