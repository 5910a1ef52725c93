"""Runs the ring's own code one shared-memory operation at a time, and does something in between.

The compiled functions of a module are replaced by the Python they were written in, and each atomic, fence
and memory copy in it by one that counts. At a chosen count an action runs: another process's work, or
this one's death. So every place of a protocol can be tried, where a stress test only hits some.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rings import atomics, libc
from rings.jit import jit


@jit
def _load(address):  # type: ignore[no-untyped-def]
    return atomics.load_acquire(address)


@jit
def _load_u32(address):  # type: ignore[no-untyped-def]
    return atomics.load_acquire_u32(address)


@jit
def _store(address, value):  # type: ignore[no-untyped-def]
    atomics.store_release(address, value)


@jit
def _store_u32(address, value):  # type: ignore[no-untyped-def]
    atomics.store_relaxed_u32(address, value)


@jit
def _swap(address, expected, wanted):  # type: ignore[no-untyped-def]
    return atomics.compare_and_swap(address, expected, wanted)


@jit
def _add_u32(address, value):  # type: ignore[no-untyped-def]
    return atomics.fetch_add_u32(address, value)


@jit
def _copy(target, source, size):  # type: ignore[no-untyped-def]
    libc.memmove(target, source, size)


@jit
def _now():  # type: ignore[no-untyped-def]
    return libc.monotonic_ns()


@jit
def _wake(address):  # type: ignore[no-untyped-def]
    return libc.futex_wake_all(address)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "load_acquire": _load,
    "load_relaxed": _load,
    "load_acquire_u32": _load_u32,
    "load_relaxed_u32": _load_u32,
    "store_release": _store,
    "store_relaxed": _store,
    "store_relaxed_u32": _store_u32,
    "compare_and_swap": _swap,
    "fetch_add_u32": _add_u32,
    "futex_wake_all": _wake,
    "fence_acquire": lambda: None,
    "fence_release": lambda: None,
    "fence_seq_cst": lambda: None,
}


class Died(BaseException):
    """SIGKILL, at a place of our choice."""


def die() -> None:
    raise Died


@functools.cache
def _structure(names: tuple[str, ...]) -> type[ctypes.Structure]:
    return type("Record", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_int64) for name in names]})


def as_record(array: Any) -> Any:
    """The first record of an array, its numbers attributes, as in compiled code."""
    return _structure(array.dtype.names).from_buffer(array)


def _records(argument: Any) -> Any:
    if isinstance(argument, np.ndarray) and argument.dtype.names:
        return [as_record(argument[i : i + 1]) for i in range(len(argument))]
    return argument


def flow_of(sequence: int, frames: int) -> int:
    """Of two frames that lie in one place of the ring, one flow is odd and the other even."""
    return sequence + sequence // frames


class Stepper:
    """`modules` in slow motion, as long as the test runs; `at` operations from now `action` runs, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.count = 0
        self.at = -1
        self.action: Callable[[], object] = lambda: None
        self._within = False
        slow = [
            (module, name, self._slow(name, value))
            for module in modules
            for name, value in vars(module).items()
        ]
        for module, name, value in slow:
            if value is not None:
                monkeypatch.setattr(module, name, value)

    def _slow(self, name: str, value: Any) -> Any:
        if name in _OPERATIONS:
            return self._counted(_OPERATIONS[name])
        if name == "pointer":
            return lambda address: ctypes.c_void_p(int(address))
        if name == "store_record":
            return self._store_record
        if name == "memmove":
            return self._copy
        if name == "monotonic_ns":
            return _now
        if name == "_is_locked":
            value(-1, 0)  # compiled before what it calls is replaced
            return None  # a system call: one operation, and its scratch is of the stack
        if hasattr(value, "py_func") and getattr(value, "__module__", "").startswith("rings."):
            return self._on_records(value.py_func)
        return None

    def arm(self, at: int, action: Callable[[], object]) -> None:
        self.count, self.at, self.action = 0, at, action

    @property
    def happened(self) -> bool:
        return self.count > self.at >= 0

    def _step(self) -> None:
        if self._within:
            return
        self.count += 1
        if self.count == self.at + 1:
            self._within = True
            try:
                self.action()
            finally:
                self._within = False

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: int) -> Any:
            self._step()
            return operation(*(int(a) for a in arguments))

        return counted

    def _copy(self, target: int, source: int, size: int) -> None:
        """In three parts, so that something can happen within a copy."""
        for begin, end in itertools.pairwise((0, size // 3, size // 2, size)):
            self._step()
            _copy(int(target) + begin, int(source) + begin, end - begin)

    def _store_record(self, address: int, words: tuple[int, ...]) -> None:
        """Word by word, as on a CPU that has no store so wide."""
        for place, word in enumerate(words):
            self._step()
            _store(int(address) + 8 * place, int(word))

    @staticmethod
    def _on_records(function: Callable[..., Any]) -> Callable[..., Any]:
        """Where a function takes an array of records, it gets them as compiled code has them."""

        def run(*arguments: Any) -> Any:
            return function(*(_records(a) for a in arguments))

        return run
