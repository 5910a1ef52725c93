"""Runs a command pinned, and knows afterwards where its threads have been.

It is started with the affinity and the priority already set, so whatever it makes inherits them. All its
processes are looked at again and again, those too that their parent has left behind: a thread that lets
itself run elsewhere is brought back, and that is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.affinity import memory, pinning
from engine.affinity.topology import parse_mask, read_text
from engine.errors import Refused

_LOOK_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_OF_TERMINALS = {signal.SIGINT, signal.SIGQUIT}
_SI_KERNEL = 0x80
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(slots=True)
class Thread:
    """One thread of the command, as last seen.

    cpus: where it was seen to run. allowed: where it may. migrations: from CPU to CPU; None on a kernel that
    does not count them. involuntary: how often it was switched out while it wanted to run on.
    """

    pid: int
    name: str = ""
    cpus: set[int] = field(default_factory=set)
    allowed: tuple[int, ...] = ()
    migrations: int | None = None
    involuntary: int = 0
    strayed: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """code: the command's, or 128 and the signal that ended it. seconds: how long it ran.

    involuntary: of all its threads and the children it waited for, also of those too short to be seen.
    """

    code: int
    seconds: float
    threads: dict[int, Thread]
    involuntary: int


def run(
    command: Sequence[str], cpus: Collection[int] | None, fifo: int | None = None, *, mlock: bool = False
) -> Ended:
    """Run it on these CPUs (None: where this process may run), with SCHED_FIFO at this priority if given.
    mlock: all memory of the command itself is kept in RAM.

    Refused, and not started, where that can't be had or there is no such command.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become our children
    began = time.monotonic()
    with _as_wanted(cpus, fifo):
        child = _start(command, mlock)
    threads: dict[int, Thread] = {}
    pidfd = os.pidfd_open(child.pid)
    try:
        with _signals_led_to(child):
            end = select.poll()
            end.register(pidfd, select.POLLIN)
            _look(threads, cpus)
            while not end.poll(_LOOK_S * 1000):
                _lead_on(child)
                _look(threads, cpus)
            _read(threads, child.pid, child.pid)  # not reaped yet: its first thread still has its counts
    finally:
        os.close(pidfd)
    status, usage = os.wait4(child.pid, 0)[1:]
    child.returncode = os.waitstatus_to_exitcode(status)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    return Ended(code, time.monotonic() - began, threads, usage.ru_nivcsw)


def _start(command: Sequence[str], mlock: bool) -> subprocess.Popen[bytes]:
    traced = memory.tracing() if mlock else None
    try:
        child = subprocess.Popen(command, close_fds=False, preexec_fn=traced)  # noqa: PLW1509 (no threads)
    except OSError as error:
        raise Refused(
            f"cannot run {command[0]!r}: {error.strerror}: look at its name and its rights"
        ) from None
    if mlock:
        try:
            code = memory.lock(child.pid)
        except OSError as error:
            code, why = -1, f"its start cannot be traced ({error.strerror}): leave out --mlock"
        else:
            why = f"mlockall: {pinning.why_no_lock(code)}"
        if code:
            child.kill()
            child.wait()
            raise Refused(f"cannot lock the memory of {command[0]}: {why}")
    return child


@contextlib.contextmanager
def _as_wanted(cpus: Collection[int] | None, fifo: int | None) -> Iterator[None]:
    """Be for a moment what the command is to be from its first instruction on."""
    mask, policy, param = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        if cpus is not None:
            pinning.pin(os.getpid(), cpus)
        if fifo is not None:
            pinning.set_fifo(os.getpid(), fifo)
        yield
    finally:
        if fifo is not None:
            os.sched_setscheduler(0, policy, param)
        os.sched_setaffinity(0, mask)


@contextlib.contextmanager
def _signals_led_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C reaches the command by the terminal; what is sent to us alone is sent on (`_lead_on`)."""
    before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in _FORWARDED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINALS)
    try:
        yield
    finally:
        while signal.sigtimedwait(_OF_TERMINALS, 0):
            pass  # it was for the command, which has ended
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def _lead_on(child: subprocess.Popen[bytes]) -> None:
    """Send on what a process has sent to us; what the kernel sends for a terminal, all there have got."""
    while came := signal.sigtimedwait(_OF_TERMINALS, 0):
        if came.si_code != _SI_KERNEL:
            child.send_signal(came.si_signo)


def _look(threads: dict[int, Thread], cpus: Collection[int] | None) -> None:
    """Look at every thread of every descendant, and bring back those that have left."""
    for pid in _descendants():
        for tid in _tasks(pid):
            thread = _read(threads, pid, tid)
            if thread and cpus is not None and not set(thread.allowed) <= set(cpus):
                thread.strayed += 1
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(tid, cpus)


def _descendants() -> list[int]:
    """All processes below this one."""
    found, todo = [], [os.getpid()]
    children = _children if Path("/proc/thread-self/children").exists() else _children_by_parent()
    while todo:
        found += (born := children(todo.pop()))
        todo += born
    return found


def _children(pid: int) -> list[int]:
    lists = (read_text(Path(f"/proc/{pid}/task/{tid}/children")) for tid in _tasks(pid))
    return [int(child) for children in lists for child in (children or "").split()]


def _children_by_parent() -> Callable[[int], list[int]]:
    """The same, of a kernel that has no such files (CONFIG_PROC_CHILDREN): every process is asked."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if stat := read_text(entry / "stat"):
            parents[int(entry.name)] = int(stat[stat.rindex(")") + 1 :].split()[1])
    return lambda pid: [child for child, parent in parents.items() if parent == pid]


def _tasks(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
    return []


def _read(threads: dict[int, Thread], pid: int, tid: int) -> Thread | None:
    """Bring what is known of a thread up to date; None if it has ended."""
    folder = Path(f"/proc/{pid}/task/{tid}")
    status, stat, sched = (read_text(folder / name) for name in ("status", "stat", "sched"))
    if status is None or stat is None:
        return None
    thread = threads.setdefault(tid, Thread(pid))
    thread.name = stat[stat.index("(") + 1 : stat.rindex(")")]
    thread.cpus.add(int(stat[stat.rindex(")") + 1 :].split()[36]))  # field 39 of proc(5)
    thread.allowed = parse_mask(status)
    thread.migrations, thread.involuntary = pinning.parse_switches(status, sched or "")
    return thread
