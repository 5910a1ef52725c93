"""Numbers as people read them: 1.53 M/s, 12.4 µs, 3.20 GB, 64MiB.

Every function takes None (not known) and gives "–" for it. Whole packets are shown whole (`exact`);
what is only a magnitude gets three significant digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from engine.affinity.topology import format_cpu_list

UNKNOWN = "–"
_DECIMAL = ("", "k", "M", "G", "T", "P")
_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_SIZE = re.compile(r"([0-9]{1,19})(B|kB|MB|GB|KiB|MiB|GiB)?")


def parse_size(text: str) -> int:
    """Bytes from "1500", "64MiB" (binary), "2MB" (decimal). ValueError otherwise."""
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _SIZE_UNITS[match[2] or ""] if match else 0
    if not 0 < size < 1 << 63:
        raise ValueError(f"{text!r} is no size: give bytes, like 1500, or a number with kB MB GB KiB MiB GiB")
    return size


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads as exactly this size."""
    for unit in ("GiB", "MiB", "KiB", "GB", "MB", "kB"):
        if size and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit}"
    return str(size)


def exact(count: int | None) -> str:
    """2,400,000: every digit, since every packet counts."""
    return UNKNOWN if count is None else f"{count:,}"


def magnitude(value: float | None, unit: str = "") -> str:
    """Three significant digits and a decimal prefix: 999, 12.4 k, 1.53 M/s, 160 Mbit/s."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    step, scaled = 0, abs(value)
    while scaled >= 999.5 and step < len(_DECIMAL) - 1:
        scaled, step = scaled / 1000, step + 1
    digits = _three_digits(scaled, whole=step == 0 and value == int(value))
    unit = _DECIMAL[step] + unit
    space = " " if unit and unit[0] != "/" else ""
    return f"{'-' if value < 0 else ''}{digits}{space}{unit}"


def duration(nanoseconds: float | None) -> str:
    """850 ns, 12.4 µs, 1.23 ms, 4.56 s."""
    if nanoseconds is None or not math.isfinite(nanoseconds):
        return UNKNOWN
    scaled, unit = abs(nanoseconds), "ns"
    for larger in ("µs", "ms", "s"):
        if scaled < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    sign = "-" if nanoseconds < 0 else ""
    return f"{sign}{_three_digits(scaled, whole=unit == 'ns' and scaled == int(scaled))} {unit}"


def clock(seconds: float) -> str:
    """How long a run has lasted: 12.3 s, 5 min 07 s, 3 h 02 min."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def percent(share: float) -> str:
    """Of a share between 0 and 1: 95.8 %, 4.12 %, <0.01 %."""
    if 0 < share < 0.0001:
        return "<0.01 %"
    return f"{_three_digits(100 * share, whole=share == 0)} %"


def cpu_list(cpus: Collection[int] | None) -> str:
    """0-3,8; "any" where nothing was pinned."""
    return format_cpu_list(cpus) if cpus else "any"


def _three_digits(value: float, *, whole: bool) -> str:
    if whole or value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
