"""Locks the memory of a command that is just being started.

mlockall(2) is forgotten at every exec, so nobody can do it for a command but the command itself. It is made
to: stopped by ptrace(2) before its first instruction, it runs two of ours, the system call and a breakpoint;
then these and the registers are put back, and it begins. Its children begin unlocked, as after any fork.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import Refused

_TRACEME, _PEEKTEXT, _POKETEXT, _CONT, _DETACH, _GETREGSET, _SETREGSET = 0, 1, 4, 7, 17, 0x4204, 0x4205
_NT_PRSTATUS = 1
_ALL_NOW_AND_LATER = 3  # MCL_CURRENT | MCL_FUTURE
_WORD = 8


@dataclass(frozen=True, slots=True)
class _Machine:
    """code: a system call, a breakpoint. Places among the registers: program counter, number of the call,
    its first argument, its answer. mlockall: its number. before: what the kernel itself keeps of a call, to
    be -1: none is to be made again."""

    code: bytes
    registers: int
    pc: int
    number: int
    argument: int
    answer: int
    mlockall: int
    before: int | None


_MACHINES = {
    "x86_64": _Machine(
        b"\x0f\x05\xcc", 27, pc=16, number=10, argument=14, answer=10, mlockall=151, before=15
    ),
    "aarch64": _Machine(
        b"\x01\0\0\xd4\0\0\x20\xd4", 34, pc=32, number=8, argument=0, answer=0, mlockall=230, before=None
    ),
}


def tracing() -> Callable[[], None]:
    """What the child calls between fork and exec, for `lock` to find it stopped. Refused where we can't."""
    if platform.machine() not in _MACHINES:
        raise Refused(f"--mlock is not known on {platform.machine()}: leave it out")
    libc = _libc()  # loaded here: the child is to do nothing but this
    return lambda: None if libc.ptrace(_TRACEME, 0, 0, 0) == 0 else os._exit(127)


def lock(pid: int) -> int:
    """Lock the memory of a child that stopped at its exec, and let it go: 0.

    Or the errno of mlockall: then it stays stopped, to be killed before it has done anything. OSError if it
    cannot be traced.
    """
    _await_trap(pid)
    machine, libc = _MACHINES[platform.machine()], _libc()

    def ask(request: int, address: int, data: int) -> int:
        ctypes.set_errno(0)
        answer: int = libc.ptrace(request, pid, address, data)
        if answer == -1 and ctypes.get_errno():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return answer

    def registers(request: int, values: list[int]) -> list[int]:
        block = ctypes.create_string_buffer(struct.pack(f"{machine.registers}Q", *values))
        vector = ctypes.create_string_buffer(struct.pack("PN", ctypes.addressof(block), len(block) - 1))
        ask(request, _NT_PRSTATUS, ctypes.addressof(vector))
        return list(struct.unpack_from(f"{machine.registers}Q", block))

    before = registers(_GETREGSET, [0] * machine.registers)
    at = before[machine.pc]
    text = ask(_PEEKTEXT, at, 0)
    ours = machine.code + struct.pack("q", text)[len(machine.code) :]
    ask(_POKETEXT, at, struct.unpack("q", ours)[0])

    call = list(before)
    if machine.before is not None:
        call[machine.before] = (1 << 64) - 1
    call[machine.number], call[machine.argument] = machine.mlockall, _ALL_NOW_AND_LATER
    registers(_SETREGSET, call)
    ask(_CONT, 0, 0)
    _await_trap(pid)
    answer = registers(_GETREGSET, call)[machine.answer]
    if answer >= (1 << 64) - 4095:
        return (1 << 64) - answer

    ask(_POKETEXT, at, text)
    registers(_SETREGSET, before)
    ask(_DETACH, 0, 0)
    return 0


def _await_trap(pid: int) -> None:
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
        raise OSError(0, "something else stopped it")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    return libc
