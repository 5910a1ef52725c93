from __future__ import annotations

import errno
import signal
import time

import numpy as np
import pytest

from rings import libc
from rings.jit import jit


@jit
def _futex_wait(address, expected, timeout_ns):  # type: ignore[no-untyped-def]
    answer = libc.futex_wait(address, expected, timeout_ns)
    return answer, libc.errno()


@jit
def _bad_fcntl():  # type: ignore[no-untyped-def]
    answer = libc.fcntl(-1, 1, 0)
    return answer, libc.errno()


def test_clocks_are_the_kernels() -> None:
    before = time.clock_gettime_ns(time.CLOCK_REALTIME), time.monotonic_ns()
    ours = libc.realtime_ns(), libc.monotonic_ns()
    after = time.clock_gettime_ns(time.CLOCK_REALTIME), time.monotonic_ns()
    assert before[0] <= ours[0] <= after[0]
    assert before[1] <= ours[1] <= after[1]
    assert 0 < libc.thread_cpu_ns() <= time.thread_time_ns()


@pytest.mark.parametrize("duration_ns", [0, 1_000_000, 20_000_000])
def test_sleep_lasts(duration_ns: int) -> None:
    before = libc.monotonic_ns()
    assert libc.sleep_ns(duration_ns) == 0
    assert libc.monotonic_ns() - before >= duration_ns


def test_sleep_is_cut_short_by_a_signal() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert libc.sleep_ns(5_000_000_000) == -1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_futex_times_out() -> None:
    word = np.array([7], np.uint32)
    before = libc.monotonic_ns()
    assert _futex_wait(word.ctypes.data, 7, 10_000_000) == (-1, errno.ETIMEDOUT)
    assert libc.monotonic_ns() - before >= 10_000_000


def test_futex_does_not_sleep_on_another_value() -> None:
    word = np.array([8], np.uint32)
    assert _futex_wait(word.ctypes.data, 7, 10_000_000_000) == (-1, errno.EAGAIN)


def test_futex_takes_the_highest_value_as_unsigned() -> None:
    word = np.array([0xFFFFFFFF], np.uint32)
    assert _futex_wait(word.ctypes.data, 0xFFFFFFFF, 1_000_000) == (-1, errno.ETIMEDOUT)


def test_nobody_to_wake() -> None:
    word = np.zeros(1, np.uint32)
    assert libc.futex_wake_all(word.ctypes.data) == 0


def test_errno_is_of_the_last_call() -> None:
    assert _bad_fcntl() == (-1, errno.EBADF)
