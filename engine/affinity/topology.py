"""Which CPUs there are, and which of them this process may use. Parsers are apart from reading.

present   built into the machine          online   running now
allowed   online and within the cpuset of this process: what it can be pinned to
mask      what a thread is pinned to now, always a part of allowed
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

MAX_CPU = 4095  # ids may have holes, and reach far above the count of CPUs
_SYSTEM = Path("/sys/devices/system/cpu")
_ITEM = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


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


def present() -> tuple[int, ...]:
    return parse_kernel_list((_SYSTEM / "present").read_text())


def online() -> tuple[int, ...]:
    return parse_kernel_list((_SYSTEM / "online").read_text())


def mask() -> tuple[int, ...]:
    """What the calling thread is pinned to now."""
    return parse_mask(Path("/proc/thread-self/status").read_text())


def allowed() -> tuple[int, ...]:
    """What the calling thread could be pinned to: the CPUs online within its cpuset.

    Files of cgroups say it in too many ways, so the kernel is asked: it cuts a mask of all CPUs down to
    what it allows. The thread's own mask is put back at once.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(MAX_CPU + 1))
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    finally:
        os.sched_setaffinity(0, before)
