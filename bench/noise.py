"""How much of its time a CPU is taken away from who works on it: by interrupts, other tasks, the hypervisor.

A loop that does nothing but read the clock, on every CPU at once. Between two readings lie some tens of
nanoseconds; where there lies more than a microsecond, somebody else had the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.pinned import Pinned
from rings.jit import compile_for, jit
from rings.libc import monotonic_ns

GAP_NS = 1_000
_SPIN_NS, _WARM_NS = 200_000_000, 2_000_000  # the first touches of memory after the fork are not noise
LOUD = 0.01  # of the time


@jit
def gaps(spin_ns, gap_ns):  # type: ignore[no-untyped-def]
    """(ns in gaps longer than gap_ns, the longest one, how many of them) within spin_ns."""
    lost, longest, count = 0, 0, 0
    last = monotonic_ns()
    end = last + spin_ns
    while last < end:
        now = monotonic_ns()
        gap = now - last
        if gap > gap_ns:
            lost += gap
            count += 1
            longest = max(longest, gap)
        last = now
    return lost, longest, count


def measure(cpus: Iterable[int]) -> list[dict[str, Any]]:
    """For each CPU, all spun on at once for 0.2 s: {cpu, lost (share of the time), longest_us, gaps}."""
    compile_for(gaps, 0, 0)
    spinning = [(cpu, Pinned(cpu, _spin)) for cpu in cpus]
    found = [(cpu, process.result()) for cpu, process in spinning]
    return [
        {"cpu": cpu, "lost": lost / _SPIN_NS, "longest_us": longest / 1e3, "gaps": count}
        for cpu, (lost, longest, count) in found
    ]


def _spin() -> tuple[int, int, int]:
    gaps(_WARM_NS, GAP_NS)
    lost, longest, count = gaps(_SPIN_NS, GAP_NS)
    return int(lost), int(longest), int(count)


def warning(when: str, noise: Iterable[dict[str, Any]]) -> str | None:
    """A sentence, where others take a CPU away for more than a hundredth of the time."""
    loud = [one for one in noise if one["lost"] > LOUD]
    if not loud:
        return None
    shares = " and ".join(f"CPU {one['cpu']} for {100 * one['lost']:.0f} % of the time" for one in loud)
    longest = max(one["longest_us"] for one in loud) / 1e3
    return f"{when} others had {shares}, up to {longest:.1f} ms at once: trust small differences less"
