"""CLOCK_REALTIME against CLOCK_MONOTONIC: what lies between them, and whether somebody set the clock.

Packet times are CLOCK_REALTIME, since the kernel stamps with it; durations and deadlines are
CLOCK_MONOTONIC. NTP slews both alike, so their difference changes only when the clock is set.
"""

from __future__ import annotations

from rings.jit import jit
from rings.libc import monotonic_ns, realtime_ns

STEP_NS = 20_000  # two measurements differ by less, unless the clock was set between them
_TRIES = 8


@jit
def _measure():  # type: ignore[no-untyped-def]
    """(REALTIME − MONOTONIC, the most it may be wrong), ns; the tightest of some tries."""
    offset, doubt = 0, 1 << 62
    for _ in range(_TRIES):
        before = monotonic_ns()
        now = realtime_ns()
        after = monotonic_ns()
        if after - before < doubt:
            offset, doubt = now - (before + after) // 2, after - before
    return offset, doubt


@jit
def clock_offset_ns():  # type: ignore[no-untyped-def]
    """CLOCK_REALTIME − CLOCK_MONOTONIC in ns, right to about the duration of a clock read."""
    return _measure()[0]


@jit
def clock_step_ns(known_offset_ns):  # type: ignore[no-untyped-def]
    """By how many ns the clock was set since `known_offset_ns` was measured; 0: it was not."""
    offset, doubt = _measure()
    step = offset - known_offset_ns
    return step if abs(step) > STEP_NS + doubt else 0
