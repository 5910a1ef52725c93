"""Stopping a forked process at every instruction, as a SIGKILL there would find its shared memory.

ptrace(2) lets the parent run a child one instruction at a time. What the child shares with us is then,
step by step, what it would have left behind had it been killed at that instruction.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from forked import Child

_TRACEME, _SINGLESTEP, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 9, 24, 0x4200, 0x420E
_TRACESYSGOOD, _EXITKILL = 1, 0x100000
_GETREGSET, _NT_PRSTATUS = 0x4204, 1
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_ENTRY, _EXIT = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

# Numbers of system calls by machine: poll(2) and clock_gettime(2), as the C library makes them.
_X86 = platform.machine() == "x86_64"
POLL = 7 if _X86 else 73
CLOCK_GETTIME = 228 if _X86 else 113
_PC_AT = 8 * (16 if _X86 else 32)  # in the general registers: rip, pc


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    answer: int = _libc.ptrace(request, pid, address, data)
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"ptrace request {request}")
    return answer


def traced(function: Callable[..., object], *arguments: object) -> None:
    """What the child does: let itself be traced, stop, run the function."""
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    function(*arguments)


def steps(child: Child, after: int, most: int = 1_000_000) -> Iterator[int]:
    """Run a `traced` child to the return of its first system call `after`, then instruction by instruction.

    Yields after each; the child stands still meanwhile. Until it ends, or at most `most` steps: then end it
    with child.kill(). Not within the vDSO, where nothing of ours changes: who reads the clock there begins
    again when the kernel has updated it meanwhile, and must not be slow.
    """
    assert _stop(child) == signal.SIGSTOP
    _ptrace(_SETOPTIONS, child.pid, 0, _TRACESYSGOOD | _EXITKILL)
    number = -1
    while True:
        _ptrace(_SYSCALL, child.pid)
        assert _stop(child) == _SYSCALL_STOP
        kind, called = _syscall(child.pid)
        if kind == _EXIT and number == after:
            break
        number = called if kind == _ENTRY else -1
    vdso = _vdso()
    for count in range(most):
        if _program_counter(child.pid) not in vdso:
            yield count
        _ptrace(_SINGLESTEP, child.pid)
        if _stop(child) is None:
            return


def _stop(child: Child) -> int | None:
    """Wait until it stands still: the signal that stopped it, None if it ended."""
    _, status = os.waitpid(child.pid, 0)
    if os.WIFSTOPPED(status):
        return os.WSTOPSIG(status)
    child.status = os.waitstatus_to_exitcode(status)
    return None


def _vdso() -> range:
    """Where it lies: for a forked child where it does for us."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[vdso]"):
            begin, end = line.split()[0].split("-")
            return range(int(begin, 16), int(end, 16))
    return range(0)


def _program_counter(pid: int) -> int:
    registers = ctypes.create_string_buffer(1024)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(registers), len(registers))  # struct iovec
    _ptrace(_GETREGSET, pid, _NT_PRSTATUS, ctypes.addressof(vector))
    return int(struct.unpack_from("Q", registers.raw, _PC_AT)[0])


def _syscall(pid: int) -> tuple[int, int]:
    """(_ENTRY or _EXIT, number of the system call at an entry): struct ptrace_syscall_info."""
    info = ctypes.create_string_buffer(88)
    _ptrace(_SYSCALL_INFO, pid, len(info), ctypes.addressof(info))
    return info.raw[0], struct.unpack_from("q", info.raw, 24)[0]
