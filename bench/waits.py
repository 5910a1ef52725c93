"""What each way to wait costs: how long until the reader has a frame, and whose CPU time it takes.

One process publishes frames at a fixed pace, 20,000 and 200 a second, each with the time at which it was
written; a reader on another CPU waits for them by `spin`, `yield` or `block`. The figure is the median time
from the write until the reader has the frame; the 99th percentile, the maximum and the CPU time stand beside
it in result.json. The writer spins until a frame is due; its CPU time is that of publishing alone, so it
holds the wake-up that it pays for a sleeper. Two looks at the CPU clock are in it, for ours and for C.

Beside it C with nothing around it, at the same pace: a word that the reader spins on (the least, for `spin`)
and a futex that it sleeps on (the least, for `block`). At 200 a second the reader's CPU has had time to fall
asleep: then the wake-up is the machine's, not ours. From 64,000 a second on `block` naps instead, for up to
1 ms: late, but then no wake-up costs the writer anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

from bench import native
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.ring import LENGTH, create
from bench.runner import Case, Claim, Figures, Setting
from rings.atomics import pause, pointer
from rings.jit import compile_for, jit
from rings.libc import monotonic_ns, thread_cpu_ns
from rings.reader import READER_STATE, poll, release
from rings.wait import STRATEGIES, wait
from rings.writer import WRITER_STATE, describe, publish, reserve

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLAIMS = (
    Claim("spin, 20000/s", against="C word, 20000/s", at_most=2),
    Claim("spin, 200/s", against="C word, 200/s", at_most=2),
    Claim("block, 20000/s", against="C futex, 20000/s", at_most=1.2),
    Claim("block, 200/s", against="C futex, 200/s", at_most=1.2),
    Claim("block, 20000/s", against="C futex, 20000/s", figure="writer_cpu_ns", at_most=1.5),
    Claim("block, 200/s", figure="reader_share", at_most=0.05),
)

RATES = (20_000, 200)  # frames/s
FRAMES = 4096
_LENGTH = LENGTH
_LEAD_NS = 10_000_000  # the reader waits by then
_WAIT_NS = 60_000_000_000  # longer than any run


def cases(setting: Setting) -> Iterator[Case]:
    seconds = 0.5 if setting.quick else 3.0
    cpus = two_cpus()
    _compile()
    for rate in RATES:
        count, period_ns = int(rate * seconds), 1_000_000_000 // rate
        config = {"frames": count, "per_second": rate, "cpus": cpus}
        for strategy in STRATEGIES:

            def ours(strategy: str = strategy, count: int = count, period_ns: int = period_ns) -> Figures:
                return _figures(period_ns, *_hand_over(strategy, count, period_ns, *cpus))

            yield Case(f"{strategy}, {rate}/s", "µs", ours, config)
        for kind in ("word", "futex"):

            def plain(kind: str = kind, count: int = count, period_ns: int = period_ns) -> Figures:
                return _figures(period_ns, *native.run("handover", kind, count, period_ns, *cpus))

            yield Case(f"C {kind}, {rate}/s", "µs", plain, config, native.missing())


def _figures(
    period_ns: int,
    count: float,
    p50_ns: float,
    p99_ns: float,
    max_ns: float,
    wrong: float,
    reader_cpu_ns: float,
    writer_cpu_ns: float,
) -> Figures:
    return {
        "value": p50_ns / 1e3,
        "p99_us": p99_ns / 1e3,
        "max_us": max_ns / 1e3,
        "reader_cpu_ns": reader_cpu_ns / count,  # per frame
        "writer_cpu_ns": writer_cpu_ns / count,
        "reader_share": reader_cpu_ns / count / period_ns,  # of its CPU
        "wrong": wrong,
        "ok": wrong == 0,
    }


def _hand_over(
    strategy: str, count: int, period_ns: int, writer_cpu: int, reader_cpu: int
) -> tuple[float, ...]:
    """(frames, p50, p99, maximum of the latency in ns, wrong, CPU ns of the reader, of the writer)."""
    with ExitStack() as stack:
        ring = create(stack, 0, FRAMES)
        writer = stack.enter_context(ring.writer())
        reader = stack.enter_context(ring.reader(wait=strategy))
        reading = Pinned(reader_cpu, _take, reader.record, reader.strategy, count)
        writing = Pinned(writer_cpu, publish_paced, writer.record, count, period_ns)
        writer_cpu_ns = writing.result()
        *latency, wrong, reader_cpu_ns = reading.result()
    return (count, *latency, wrong, reader_cpu_ns, writer_cpu_ns)


def _take(reader_state: Any, strategy: int, count: int) -> tuple[float, ...]:
    latencies_ns: NDArray[np.int64] = np.zeros(count, np.int64)
    wrong, cpu_ns = take_paced(reader_state, strategy, latencies_ns)
    p50, p99 = np.percentile(latencies_ns, (50, 99))
    return float(p50), float(p99), int(latencies_ns.max()), wrong, cpu_ns


@jit
def publish_paced(writer_state, count, period_ns):  # type: ignore[no-untyped-def]
    """Publish a frame each `period_ns`; the CPU time that took, ns."""
    w = writer_state[0]
    due_ns, cpu_ns = monotonic_ns() + _LEAD_NS, 0
    for n in range(count):
        while monotonic_ns() < due_ns:
            pause()
        due_ns += period_ns
        before_ns = thread_cpu_ns()
        while not reserve(w, 1, _LENGTH):
            pause()
        number, position = describe(w, 0, w.number, monotonic_ns(), w.position, _LENGTH, n & 0xFFFF, 0, 0)
        publish(w, 1, number, position, _LENGTH)
        cpu_ns += thread_cpu_ns() - before_ns
    return cpu_ns


@jit
def take_paced(reader_state, strategy, latencies_ns):  # type: ignore[no-untyped-def]
    """Take as many frames as there is room for their latencies; (how many were wrong, CPU ns)."""
    r = reader_state[0]
    begin_ns = thread_cpu_ns()
    n, wrong = 0, 0
    while n < latencies_ns.size:
        wait(r, strategy, monotonic_ns() + _WAIT_NS)
        frames = poll(r, latencies_ns.size - n)
        now_ns = monotonic_ns()
        for index in range(frames):
            words = carray(pointer(r.batch_descriptors + 32 * index), 4, np.int64)
            latencies_ns[n] = now_ns - words[1]
            place = ((n * _LENGTH) & (r.arena_bytes - 1)) >> 4 | (_LENGTH << 32)
            difference = (words[0] ^ n) | (words[2] ^ place) | (words[3] ^ (n & 0xFFFF))
            wrong += 1 if difference != 0 or latencies_ns[n] < 0 or words[1] <= 0 else 0
            n += 1
        release(r, frames)
    return wrong, thread_cpu_ns() - begin_ns


def _compile() -> None:
    w: Any = np.zeros(1, WRITER_STATE)
    r: Any = np.zeros(1, READER_STATE)
    compile_for(publish_paced, w, 0, 0)
    compile_for(take_paced, r, 0, np.zeros(1, np.int64))
