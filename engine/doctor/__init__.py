"""What on this machine costs packets or microseconds, and the command that mends it. Changes nothing.

A check is a function of a Machine: files below a root (/ or a captured tree), and what the kernel answered
when it was asked. Its name is the id of its finding, underscores read as hyphens.

ok       as it should be                    bad      packets are lost, or a layout is undone
note     better otherwise, for some uses    unknown  not told to this user, or not here
"""

from __future__ import annotations

from engine.affinity.topology import ROOT
from engine.doctor import latency, memory, packets, placement
from engine.doctor.check import STATES, Finding
from engine.doctor.machine import Machine, ask

GROUPS = (packets.GROUP, latency.GROUP, placement.GROUP, memory.GROUP)


def examine(machine: Machine | None = None) -> list[Finding]:
    """All findings: groups with something bad first, in a group the bad first."""
    machine = machine or Machine(ROOT, ask())
    groups = [[check.examine(machine) for check in group.checks] for group in GROUPS]

    def rank(finding: Finding) -> int:
        return STATES.index(finding.state)

    groups.sort(key=lambda found: min(map(rank, found)))
    return [finding for found in groups for finding in sorted(found, key=rank)]
