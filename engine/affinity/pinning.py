"""Pins processes to CPUs, and proves it.

Affinity belongs to threads, not to processes, and the kernel silently narrows a mask to what it allows.
So every thread in /proc/PID/task is set, and every one is read back, until a whole look finds none that
floats: a thread born meanwhile has inherited the mask of its maker, old or new.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.affinity import topology
from engine.affinity.topology import format_cpu_list, read_text
from engine.errors import Refused

_LOOKS = 100  # a process that bears unpinned threads faster than we look is given up
_POLICIES = {
    os.SCHED_OTHER: "other",
    os.SCHED_FIFO: "fifo",
    os.SCHED_RR: "rr",
    os.SCHED_BATCH: "batch",
    os.SCHED_IDLE: "idle",
    6: "deadline",
}
_CAP_IPC_LOCK, _CAP_SYS_NICE = 14, 23
_MCL_CURRENT, _MCL_FUTURE = 1, 2


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread as the kernel describes it. `priority`: 1 to 99 for fifo and rr, else 0."""

    tid: int
    name: str
    cpus: tuple[int, ...]
    last_cpu: int
    policy: str
    priority: int


def verify(pid: int) -> list[Thread]:
    """Every thread of the process and where it may run, read from the kernel; [] if there is none."""
    return [thread for tid in _thread_ids(pid) if (thread := _read_thread(pid, tid)) is not None]


def switches(pid: int) -> tuple[int | None, int]:
    """(migrations, involuntary) of all its threads that live, since each was born: how often they went from
    CPU to CPU, None on a kernel that does not count it; how often they were switched out while they wanted to
    run on."""
    counts = []
    for tid in _thread_ids(pid):
        status, sched = (read_text(Path(f"/proc/{pid}/task/{tid}/{name}")) for name in ("status", "sched"))
        counts.append(parse_switches(status or "", sched or ""))
    migrations = [count for count, _ in counts if count is not None]
    return sum(migrations) if migrations else None, sum(count for _, count in counts)


def parse_switches(status: str, sched: str) -> tuple[int | None, int]:
    """The same of one thread, from the text of its files in /proc; sched is "" where the kernel has none."""
    migrations = re.search(r"^se\.nr_migrations\s*:\s*(\d+)", sched, re.MULTILINE)
    involuntary = re.search(r"^nonvoluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    return int(migrations[1]) if migrations else None, int(involuntary[1]) if involuntary else 0


def is_stopped(pid: int) -> bool:
    """Is the process stopped by a signal (or a debugger), and will not move by itself?"""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat[stat.rindex(")") + 2] in "Tt"
    return False


def floating(threads: Iterable[Thread], cpus: Collection[int]) -> list[Thread]:
    """Those that may run elsewhere than on exactly these CPUs."""
    wanted = set(cpus)
    return [thread for thread in threads if set(thread.cpus) != wanted]


def pin(pid: int, cpus: Collection[int]) -> list[Thread]:
    """Pin every thread of the process, and those it bears meanwhile; what was read back from each.

    Refused, with the reason, where the machine does not allow it: then nothing is changed.
    The process must live in the cpuset of the caller, as its children do.
    """
    if reason := refusal(cpus):
        raise Refused(reason)
    wanted = set(cpus)
    for _ in range(_LOOKS):
        threads = verify(pid)
        if not threads:
            raise Refused(f"cannot pin process {pid}: it has ended")
        if not floating(threads, wanted):
            return threads
        for thread in floating(threads, wanted):
            _set_affinity(thread, wanted)
    stray = floating(verify(pid), wanted)
    raise Refused(
        f"cannot pin process {pid} to CPU {format_cpu_list(wanted)}: {_describe(stray)} will not stay: "
        "look for what else sets its affinity"
    )


def refusal(cpus: Collection[int]) -> str:
    """Why this process cannot be pinned to these CPUs of this machine; "" if it can."""
    return obstacle(cpus, topology.present(), topology.online(), topology.allowed(), topology.cpuset())


def obstacle(
    wanted: Collection[int],
    present: Collection[int],
    online: Collection[int],
    allowed: Collection[int],
    cpuset: Collection[int] = (),
) -> str:
    """Why a process that is allowed these CPUs cannot be pinned to the wanted ones; "" if it can.

    cpuset: where it is wider than what is allowed.
    """
    missing = sorted(set(wanted) - set(allowed))
    if wanted and not missing:
        return ""
    choice = f"choose from {format_cpu_list(allowed)}"
    if not wanted:
        return f"no CPU to pin to: {choice}"
    kinds = (
        ("does not exist", [cpu for cpu in missing if cpu not in present]),
        ("is offline", [cpu for cpu in missing if cpu in present and cpu not in online]),
        ("is outside the cpuset of this process", [c for c in missing if c in online and c not in cpuset]),
        ("is none that this process was started on (taskset)", [cpu for cpu in missing if cpu in cpuset]),
    )
    reasons = [f"CPU {format_cpu_list(cpus)} {what}" for what, cpus in kinds if cpus]
    return f"cannot pin: {', '.join(reasons)}: {choice}"


def set_fifo(pid: int, priority: int) -> None:
    """Give every thread of the process SCHED_FIFO at this priority, 1 to 99. Refused if it can't be had."""
    if not 1 <= priority <= 99:
        raise Refused(f"SCHED_FIFO has no priority {priority}: give 1 to 99")
    for _ in range(_LOOKS):
        threads = verify(pid)
        others = [t for t in threads if (t.policy, t.priority) != ("fifo", priority)]
        if threads and not others:
            return
        for thread in others:
            _set_scheduler(thread, priority)
    raise Refused(
        f"cannot give process {pid} SCHED_FIFO {priority}: it has ended or its threads will not keep it"
    )


def lock_memory() -> None:
    """Keep all memory of this process, now and later, in RAM (mlockall). Refused if it can't be had.

    Not inherited by a fork: each process calls it itself.
    """
    if ctypes.CDLL(None, use_errno=True).mlockall(_MCL_CURRENT | _MCL_FUTURE) == 0:
        return
    raise Refused(f"mlockall: {why_no_lock(ctypes.get_errno())}")


def why_no_lock(code: int) -> str:
    """What an errno of mlockall means, and what to do."""
    return (
        f"{os.strerror(code)}: it needs CAP_IPC_LOCK or RLIMIT_MEMLOCK above what the process maps "
        f"(now {_limit(resource.RLIMIT_MEMLOCK)} bytes): raise it with `ulimit -l`, or leave out --mlock"
    )


def _thread_ids(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return []


def _read_thread(pid: int, tid: int) -> Thread | None:
    """None if the thread has ended; a zombie has no place to run any more."""
    folder = Path(f"/proc/{pid}/task/{tid}")
    try:
        status, stat = (folder / "status").read_text(), (folder / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets and may hold anything; fields are numbered as in proc(5), from 1.
    fields = ["", *stat[: stat.index("(")].split(), "", *stat[stat.rindex(")") + 1 :].split()]
    if fields[3] in "ZX":
        return None
    return Thread(
        tid=tid,
        name=stat[stat.index("(") + 1 : stat.rindex(")")],
        cpus=topology.parse_mask(status),
        last_cpu=int(fields[39]),
        policy=_POLICIES.get(int(fields[41]), fields[41]),
        priority=int(fields[40]),
    )


def _set_affinity(thread: Thread, cpus: Collection[int]) -> None:
    try:
        os.sched_setaffinity(thread.tid, cpus)
    except ProcessLookupError:
        pass  # it ended meanwhile
    except OSError as error:
        raise Refused(
            f"cannot pin {_describe([thread])}: {error.strerror}: only your own processes can be pinned"
        ) from None


def _set_scheduler(thread: Thread, priority: int) -> None:
    try:
        os.sched_setscheduler(thread.tid, os.SCHED_FIFO, os.sched_param(priority))
    except ProcessLookupError:
        pass  # it ended meanwhile
    except PermissionError:
        raise Refused(_why_no_fifo(priority)) from None


def _why_no_fifo(priority: int) -> str:
    if _has_capability(_CAP_SYS_NICE):
        return (
            f"SCHED_FIFO {priority} is refused in spite of CAP_SYS_NICE, the cgroup has no real-time budget: "
            "set its cpu.rt_runtime_us, or leave out --fifo"
        )
    return (
        f"SCHED_FIFO {priority} needs CAP_SYS_NICE or RLIMIT_RTPRIO {priority} "
        f"(now {_limit(resource.RLIMIT_RTPRIO)}): raise it with `ulimit -r {priority}`, or leave out --fifo"
    )


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> number & 1)


def _limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _describe(threads: list[Thread]) -> str:
    return ", ".join(f"thread {t.tid} ({t.name}, CPU {format_cpu_list(t.cpus)})" for t in threads) or "it"
