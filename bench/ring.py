"""The ring alone, against a plain C loop of the same shape.

Two processes on two CPUs, one writes descriptors of 32 bytes in batches, the other checks every word of
every one. No sockets, no payloads. Twice: through a ring that fits a core's cache, and in larger batches
through a larger one: each batch costs a trip between the CPUs, whatever it holds. Then the round trip,
both ends spinning: a descriptor and a published word each way; and the least that two CPUs can do, one
word each way. That one says how near to each other the CPUs are (on a virtual machine it may change while
you look): all other figures follow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from numba import carray

import rings
from bench import native
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures
from rings.atomics import pause, pointer
from rings.jit import compile_for, jit
from rings.libc import monotonic_ns
from rings.reader import READER_STATE, Reader, poll, release
from rings.wait import SPIN, wait
from rings.writer import WRITER_STATE, Writer, describe, publish, reserve

CLAIMS = (
    Claim("rxring", against="C", at_least=0.7),
    Claim("rxring, large", against="C, large", at_least=0.7),
    Claim("rxring, large", at_least=200),
    Claim("rxring round trip", against="C round trip", at_most=1.5),
)

FRAMES = 16384
LENGTH = 128  # of a payload that nobody writes: a multiple of 16, so that offsets can be foretold
SHAPES = {"": (FRAMES, 64), ", large": (1 << 18, 256)}  # frames of the ring, of a batch
_LENGTH, _SPIN = LENGTH, SPIN
_WARM = FRAMES  # round trips before those that count: every page of the rings has been touched
_WAIT_NS = 60_000_000_000  # longer than any run


def cases(quick: bool) -> Iterator[Case]:
    count = (1 << 24) if quick else (1 << 27)
    rounds = 200_000 if quick else 1_000_000
    first, second = two_cpus()
    _compile()
    stream = {"descriptors": count, "cpus": [first, second]}
    trip = {"round_trips": rounds, "cpus": [first, second]}

    def ours(frames: int, batch: int) -> Callable[[], Figures]:
        return lambda: _rate(*_stream(frames, batch, count, first, second))

    def c_stream(frames: int, batch: int) -> Callable[[], Figures]:
        return lambda: _rate(*native.run("ring", frames, batch, count, first, second))

    def c_trip(kind: str) -> Callable[[], Figures]:
        return lambda: _latency(*native.run("pingpong", kind, rounds, first, second))

    for name, (frames, batch) in SHAPES.items():
        config = stream | {"frames": frames, "batch": batch}
        yield Case(f"rxring{name}", "M/s", ours(frames, batch), config)
        yield Case(f"C{name}", "M/s", c_stream(frames, batch), config, native.missing())
    yield Case("rxring round trip", "ns", lambda: _latency(*_trips(rounds, first, second)), trip)
    yield Case("C round trip", "ns", c_trip("ring"), trip, native.missing())
    yield Case("C round trip of a word", "ns", c_trip("raw"), trip, native.missing())


def _rate(count: float, seconds: float, wrong: float) -> Figures:
    return {"value": count / seconds / 1e6, "seconds": seconds, "wrong": wrong, "ok": wrong == 0}


def _latency(count: float, seconds: float, wrong: float) -> Figures:
    return {"value": seconds / count * 1e9, "seconds": seconds, "wrong": wrong, "ok": wrong == 0}


def _stream(frames: int, batch: int, count: int, writer_cpu: int, reader_cpu: int) -> tuple[int, float, int]:
    """(descriptors, seconds, how many were wrong)."""
    with ExitStack() as stack:
        writer, reader = _ring(stack, 0, frames)
        reading = Pinned(reader_cpu, read_all, reader.record, count)
        writing = Pinned(writer_cpu, write_all, writer.record, batch, count)
        writing.result()
        wrong, elapsed_ns = reading.result()
    return count, elapsed_ns / 1e9, wrong


def _trips(count: int, first_cpu: int, second_cpu: int) -> tuple[int, float, int]:
    """(round trips, seconds, how many descriptors were wrong)."""
    with ExitStack() as stack:
        there, back = _ring(stack, 0, FRAMES), _ring(stack, 1, FRAMES)
        other = Pinned(second_cpu, echo, there[1].record, back[0].record, count)
        one = Pinned(first_cpu, ping, there[0].record, back[1].record, count)
        wrong, elapsed_ns = one.result()
        wrong += other.result()
    return count, elapsed_ns / 1e9, wrong


def _ring(stack: ExitStack, number: int, frames: int) -> tuple[Writer, Reader]:
    """Both ends of a ring, to be used in processes forked from this one."""
    ring = stack.enter_context(
        rings.create(f"bench{os.getpid()}", number=number, frames=frames, arena_bytes=frames * 2 * LENGTH)
    )
    return stack.enter_context(ring.writer()), stack.enter_context(ring.reader())


@jit
def _describe(w, index, n, number, position):  # type: ignore[no-untyped-def]
    return describe(w, index, number, n ^ 0x5555, position, _LENGTH, n & 0xFFFF, 0, 0)


@jit
def _wrong(descriptor, n, arena_bytes):  # type: ignore[no-untyped-def]
    """1 if any word of the descriptor at this address is not that of frame n."""
    words = carray(pointer(descriptor), 4, np.int64)
    place = ((n * _LENGTH) & (arena_bytes - 1)) >> 4 | (_LENGTH << 32)
    difference = (words[0] ^ n) | (words[1] ^ n ^ 0x5555) | (words[2] ^ place) | (words[3] ^ (n & 0xFFFF))
    return 1 if difference != 0 else 0


@jit
def write_all(writer_state, batch, count):  # type: ignore[no-untyped-def]
    w = writer_state[0]
    n = 0
    while n < count:
        if not reserve(w, batch, batch * _LENGTH):
            pause()
            continue
        number, position = w.number, w.position
        for index in range(batch):
            number, position = _describe(w, index, n + index, number, position)
        publish(w, batch, number, position, batch * _LENGTH)
        n += batch


@jit
def read_all(reader_state, count):  # type: ignore[no-untyped-def]
    """(how many were wrong, ns since the first was there)."""
    r = reader_state[0]
    n, wrong, arena_bytes = 0, 0, r.arena_bytes
    while not wait(r, _SPIN, monotonic_ns() + _WAIT_NS):
        pass
    begin_ns = monotonic_ns()
    while n < count:
        frames = poll(r, r.max_frames)
        if frames == 0:
            pause()
            continue
        for index in range(frames):
            wrong += _wrong(r.batch_descriptors + 32 * index, n + index, arena_bytes)
        release(r, frames)
        n += frames
    return wrong, monotonic_ns() - begin_ns


@jit
def _send(w, n):  # type: ignore[no-untyped-def]
    while not reserve(w, 1, _LENGTH):
        pause()
    number, position = _describe(w, 0, n, w.number, w.position)
    publish(w, 1, number, position, _LENGTH)


@jit
def _take(r, n, deadline_ns):  # type: ignore[no-untyped-def]
    while poll(r, 1) == 0:
        wait(r, _SPIN, deadline_ns)
    return _wrong(r.batch_descriptors, n, r.arena_bytes)


@jit
def ping(writer_state, reader_state, count):  # type: ignore[no-untyped-def]
    """(how many were wrong, ns)."""
    w, r = writer_state[0], reader_state[0]
    deadline_ns = monotonic_ns() + _WAIT_NS
    wrong, begin_ns = 0, 0
    for n in range(_WARM + count):
        if n == _WARM:
            begin_ns = monotonic_ns()
        _send(w, n)
        if n > 0:
            release(r, 1)  # only now: the answer goes first
        wrong += _take(r, n, deadline_ns)
    return wrong, monotonic_ns() - begin_ns


@jit
def echo(reader_state, writer_state, count):  # type: ignore[no-untyped-def]
    """How many were wrong."""
    r, w = reader_state[0], writer_state[0]
    wrong = 0
    deadline_ns = monotonic_ns() + _WAIT_NS
    for n in range(_WARM + count):
        wrong += _take(r, n, deadline_ns)
        _send(w, n)
        release(r, 1)
    return wrong


def _compile() -> None:
    w: Any = np.zeros(1, WRITER_STATE)
    r: Any = np.zeros(1, READER_STATE)
    compile_for(write_all, w, 0, 0)
    compile_for(read_all, r, 0)
    compile_for(ping, w, r, 0)
    compile_for(echo, r, w, 0)
