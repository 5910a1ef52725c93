"""How a reader waits for the next batch: three strategies with one promise.

`wait` returns True as soon as something is published beyond the cursor or the writer has closed the
ring, False at the deadline or when a signal arrived.

    spin    looks without rest: the fastest, and takes its core
    yield   looks, and lets others run between two looks
    block   sleeps. While packets flow fast it only naps: for every wake-up the writer would pay with a
            system call, 7–14 % of its rate. When they do not, it arms the futex, and is woken at once.

`wait_any` does the same for the readers of several rings at once. Before Linux 5.16, or where a container
forbids it, a thread cannot sleep on several futexes: then `block` naps for a millisecond at a time.
"""

from __future__ import annotations

import numpy as np

from rings.atomics import (
    fence_seq_cst,
    load_acquire,
    load_acquire_u32,
    pause,
    store_relaxed_u32,
)
from rings.jit import jit
from rings.layout import WRITER, WriterState, offsets
from rings.libc import errno, futex_wait, futex_wait_any, monotonic_ns, sched_yield, sleep_ns

BLOCK, YIELD, SPIN = 0, 1, 2
STRATEGIES = {"block": BLOCK, "yield": YIELD, "spin": SPIN}

_PUBLISHED, _WAKE, _STATE = offsets(WRITER, "published", "wake", "state")
_CLOSED = int(WriterState.CLOSED)
_LOOKS = 256  # between two looks at the clock
_LONGEST_SLEEP_NS = 100_000_000  # then the caller looks at the stop word and whether the writer lives
_LONGEST_NAP_NS = 1_000_000
_WORTH_A_NAP = 64  # frames that a nap must bring: below 64,000 a second each is worth waking for
_EPERM, _ENOSYS = 1, 38
_A_BATCH = 4  # frames: fewer came since the last wait, so each is awaited by somebody


@jit
def _ready(r):  # type: ignore[no-untyped-def]
    return load_acquire(r.writer + _PUBLISHED) > r.cursor or load_acquire(r.writer + _STATE) == _CLOSED


@jit
def _spin(r, deadline_ns):  # type: ignore[no-untyped-def]
    while True:
        for _ in range(_LOOKS):
            if _ready(r):
                return True
            pause()
        if monotonic_ns() >= deadline_ns:
            return False


@jit
def _yield(r, deadline_ns):  # type: ignore[no-untyped-def]
    while True:
        if _ready(r):
            return True
        if monotonic_ns() >= deadline_ns:
            return False
        sched_yield()


@jit
def _sleep(r, deadline_ns):  # type: ignore[no-untyped-def]
    """Sleep on the futex word. writer._wake has the argument why no wake is lost."""
    expected = load_acquire_u32(r.writer + _WAKE)
    store_relaxed_u32(r.waiting, 1)
    fence_seq_cst()  # pairs with the fence in writer._wake
    if not _ready(r):
        timeout_ns = min(deadline_ns - monotonic_ns(), _LONGEST_SLEEP_NS)
        if timeout_ns > 0:
            futex_wait(r.writer + _WAKE, expected, timeout_ns)
    return _ready(r)


@jit
def _nap_ns(r, now_ns):  # type: ignore[no-untyped-def]
    """How long to nap: so long that, at the pace since the last wait, it brings a fair batch; 0: not at all.

    A nap lets at most an eighth of the ring fill.
    """
    frames, elapsed_ns = r.cursor - r.nap_cursor, now_ns - r.nap_since_ns
    r.nap_cursor, r.nap_since_ns = r.cursor, now_ns
    nap_ns = min(_LONGEST_NAP_NS, (r.frames >> 3) * elapsed_ns // max(frames, 1))
    flowing = frames >= _A_BATCH and frames * nap_ns >= _WORTH_A_NAP * elapsed_ns
    return nap_ns if flowing else 0


@jit
def _block(r, deadline_ns):  # type: ignore[no-untyped-def]
    """Nap while packets flow; then sleep for real."""
    now_ns = monotonic_ns()
    nap_ns = _nap_ns(r, now_ns)
    napping = nap_ns > 0 and now_ns + nap_ns < deadline_ns
    if napping and (sleep_ns(nap_ns) != 0 or _ready(r)):
        return _ready(r)
    return _sleep(r, deadline_ns)


@jit
def wait(r, strategy, deadline_ns):  # type: ignore[no-untyped-def]
    """Wait in the way of `strategy` until CLOCK_MONOTONIC `deadline_ns`; is there something?"""
    if strategy == SPIN:
        return _spin(r, deadline_ns)
    if strategy == YIELD:
        return _yield(r, deadline_ns)
    return _block(r, deadline_ns)


@jit
def _any_ready(readers):  # type: ignore[no-untyped-def]
    """Is there something in one of the rings, or are all of them closed?"""
    closed = 0
    for i in range(len(readers)):
        r = readers[i]
        # As in reader.is_closed: what is published before the end is seen after it.
        closed += load_acquire(r.writer + _STATE) == _CLOSED
        if load_acquire(r.writer + _PUBLISHED) > r.cursor:
            return True
    return closed == len(readers)


@jit
def _sleep_any(readers, deadline_ns):  # type: ignore[no-untyped-def]
    """`_sleep` on the futex words of several rings."""
    waiters = np.empty((len(readers), 3), np.int64)
    for i in range(len(readers)):
        r = readers[i]
        waiters[i, 0] = load_acquire_u32(r.writer + _WAKE)
        waiters[i, 1] = r.writer + _WAKE
        store_relaxed_u32(r.waiting, 1)
    fence_seq_cst()  # pairs with the fence in writer._wake, of each ring
    if not _any_ready(readers):
        now_ns = monotonic_ns()
        until_ns = min(deadline_ns, now_ns + _LONGEST_SLEEP_NS)
        if until_ns > now_ns and futex_wait_any(waiters, until_ns) < 0 and errno() in (_EPERM, _ENOSYS):
            sleep_ns(min(until_ns - now_ns, _LONGEST_NAP_NS))
    return _any_ready(readers)


@jit
def wait_any(readers, strategy, deadline_ns):  # type: ignore[no-untyped-def]
    """`wait` for the readers of several rings, READER_STATE (n,): for any of them, or the end of all.

    All of them must stay open meanwhile. A sleep lasts 100 ms at most, whatever the deadline: look again.
    """
    if len(readers) == 1:
        return wait(readers[0], strategy, deadline_ns)
    if strategy != BLOCK:
        while not _any_ready(readers):
            if monotonic_ns() >= deadline_ns:
                return False
            if strategy == YIELD:
                sched_yield()
            else:
                pause()
        return True
    now_ns, nap_ns = monotonic_ns(), _LONGEST_NAP_NS + 1
    for i in range(len(readers)):
        flowing_ns = _nap_ns(readers[i], now_ns)
        if flowing_ns > 0:
            nap_ns = min(nap_ns, flowing_ns)  # where packets flow fastest
    napping = nap_ns <= _LONGEST_NAP_NS and now_ns + nap_ns < deadline_ns
    if napping and (sleep_ns(nap_ns) != 0 or _any_ready(readers)):
        return _any_ready(readers)
    return _sleep_any(readers, deadline_ns)
