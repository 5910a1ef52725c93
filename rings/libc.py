"""What a ring needs of the C library, callable from compiled code.

ExternalFunctions resolve from the process and, unlike ctypes pointers, survive numba's disk cache.
`syscall` and `fcntl` are variadic in C; integer arguments travel alike on x86-64 and aarch64 Linux.
"""

from __future__ import annotations

import platform

from numba import types

from rings.atomics import load_relaxed, load_relaxed_u32, scratch, store_relaxed
from rings.jit import jit

_i64, _i32 = types.int64, types.int32

clock_gettime = types.ExternalFunction("clock_gettime", _i32(_i32, _i64))
nanosleep = types.ExternalFunction("nanosleep", _i32(_i64, _i64))
sched_yield = types.ExternalFunction("sched_yield", _i32())
memmove = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))
fcntl = types.ExternalFunction("fcntl", _i32(_i32, _i32, _i64))
syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_errno_location = types.ExternalFunction("__errno_location", _i64())

CLOCK_REALTIME = 0
CLOCK_MONOTONIC = 1
CLOCK_THREAD_CPUTIME = 3

# linux/futex.h. Without FUTEX_PRIVATE_FLAG: waiter and waker are different processes.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 0x7FFFFFFF
_SYS_FUTEX_WAITV = 449  # since Linux 5.16, on every architecture
_FUTEX2_SIZE_U32 = 2


@jit
def errno():  # type: ignore[no-untyped-def]
    """errno of the last C call. Read it in the same function, before anything else is called."""
    return load_relaxed_u32(_errno_location())


@jit
def _clock_ns(clock):  # type: ignore[no-untyped-def]
    timespec = scratch()
    clock_gettime(clock, timespec)
    return load_relaxed(timespec) * 1_000_000_000 + load_relaxed(timespec + 8)


@jit
def realtime_ns():  # type: ignore[no-untyped-def]
    """CLOCK_REALTIME in ns since the epoch: the clock of the kernel's packet timestamps."""
    return _clock_ns(CLOCK_REALTIME)


@jit
def monotonic_ns():  # type: ignore[no-untyped-def]
    """CLOCK_MONOTONIC in ns: for deadlines and durations."""
    return _clock_ns(CLOCK_MONOTONIC)


@jit
def thread_cpu_ns():  # type: ignore[no-untyped-def]
    """CPU time of the calling thread in ns."""
    return _clock_ns(CLOCK_THREAD_CPUTIME)


@jit
def _fill_timespec(address, duration_ns):  # type: ignore[no-untyped-def]
    store_relaxed(address, duration_ns // 1_000_000_000)
    store_relaxed(address + 8, duration_ns % 1_000_000_000)


@jit
def sleep_ns(duration_ns):  # type: ignore[no-untyped-def]
    """Sleep; 0, or −1 when a signal cut it short."""
    timespec = scratch()
    _fill_timespec(timespec, duration_ns)
    return nanosleep(timespec, 0)


@jit
def futex_wait(address, expected, timeout_ns):  # type: ignore[no-untyped-def]
    """Sleep until a wake, if the u32 at `address` still holds `expected`; bounded by `timeout_ns`."""
    timespec = scratch()
    _fill_timespec(timespec, timeout_ns)
    return syscall(_SYS_FUTEX, address, _FUTEX_WAIT, expected, timespec, 0, 0)


@jit
def futex_wait_any(waiters, deadline_ns):  # type: ignore[no-untyped-def]
    """Sleep until a wake of any, if all still hold what is expected; until CLOCK_MONOTONIC `deadline_ns`.

    waiters: i8 (n, 3), n ≤ 128: expected value, address of a u32, and a word that is filled in here (together
    a struct futex_waitv). −1 at once before Linux 5.16.
    """
    for i in range(len(waiters)):
        waiters[i, 2] = _FUTEX2_SIZE_U32
    timespec = scratch()
    _fill_timespec(timespec, deadline_ns)
    return syscall(_SYS_FUTEX_WAITV, waiters.ctypes.data, len(waiters), 0, timespec, CLOCK_MONOTONIC, 0)


@jit
def futex_wake_all(address):  # type: ignore[no-untyped-def]
    """Wake everyone who waits on the u32 at `address`; how many there were."""
    return syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYONE, 0, 0, 0)
