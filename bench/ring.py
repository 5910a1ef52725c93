"""The ring alone, against plain C loops of the same shape.

Processes on CPUs of their own, no sockets; every value is checked by who reads it.

The stream: one writes descriptors of 32 bytes in batches, the other checks every word of every one. Through
a ring that fits a core's cache, in batches of 1 to 256, and through a larger one: each batch costs a trip
between the CPUs, whatever it holds. To several readers, who share a CPU where there are not enough (their
parameters say so). With payloads of 100 and 1472 bytes, copied in by the writer and summed, every byte, by
the reader; and by a reader who is lapped (`skip`): what it was delivered and what it skipped must add up.

The round trip, both ends spinning: C with a descriptor and a published word each way; with the whole protocol
of a ring (floor, counters, fences, waiting flag, account, cursor), without and with a payload; and the least
that two CPUs can do, one word each way. That one says how near to each other the CPUs are (on a virtual
machine it may change while you look, so a run waits until they are near: bench/distance.py): all other
figures follow it, and so do the claims with no C beside them.

Publishing: one frame after the other, with nobody there to read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

import rings
from bench import native
from bench.distance import steady
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures, Setting
from rings.atomics import load_acquire, pause, pointer
from rings.jit import compile_for, jit
from rings.layout import WRITER, offsets
from rings.libc import memmove, monotonic_ns
from rings.reader import READER_STATE, Reader, poll, release
from rings.wait import SPIN, YIELD, wait
from rings.writer import WRITER_STATE, Writer, describe_in, publish, reserve, table_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLAIMS = (
    Claim("rxring", against="C", at_least=0.9),
    Claim("rxring", at_least=250),
    Claim("rxring, large", against="C, large", at_least=0.9),
    Claim("rxring, large", at_least=250),
    Claim("rxring, batch 1", against="C, batch 1", at_least=0.5),
    Claim("rxring, 2 readers", against="C, 2 readers", at_least=0.7),
    Claim("rxring, 100 bytes", against="C, 100 bytes", at_least=0.7),
    Claim("rxring, 100 bytes", at_least=60),
    Claim("rxring, 1472 bytes", against="C, 1472 bytes", at_least=0.9),
    Claim("rxring, 1472 bytes", at_least=10),
    Claim("rxring round trip", against="C round trip", at_most=1.5),
    Claim("rxring round trip", against="C round trip, protocol", at_most=1.5),
    Claim("rxring round trip, payload", against="C round trip, payload", at_most=1.2),
    Claim("rxring publish", against="C publish", at_most=3),
    Claim("rxring publish", at_most=15),
)

FRAMES = 16384
LENGTH = 128  # of a payload that nobody writes: a multiple of 16, so that offsets can be foretold
SHAPES = {  # frames of the ring, of a batch
    "": (FRAMES, 64),
    ", batch 1": (FRAMES, 1),
    ", batch 16": (FRAMES, 16),
    ", batch 256": (FRAMES, 256),
    ", large": (1 << 18, 256),
}
READERS = (2, 3)  # besides one
PAYLOADS = {100: FRAMES, 1472: 1024}  # bytes: frames of the ring
KINDS = 61  # payloads in turn: no power of two, so that a frame of the last lap is a wrong one
ARENA = 4 << 20  # room for twice the frames of each
_LENGTH, _SPIN, _KINDS = LENGTH, SPIN, KINDS
(_PUBLISHED,) = offsets(WRITER, "published")
_WARM = FRAMES  # round trips before those that count: every page of the rings has been touched
_WAIT_NS = 60_000_000_000  # longer than any run


def cases(setting: Setting) -> Iterator[Case]:
    count, rounds = ((1 << 24), 200_000) if setting.quick else ((1 << 26), 500_000)
    cpus = two_cpus()  # or refuse
    _compile()
    between = (_streams(count), _crowds(count), _payload_streams(count // 8), _round_trips(rounds))
    yield from steady(chain(*between), *cpus)
    yield from _publishing(count // 4)


def _streams(most: int) -> Iterator[Case]:
    first, second = two_cpus()
    for name, (frames, batch) in SHAPES.items():
        count = most if batch >= 64 else most // 8
        config = {"descriptors": count, "cpus": [first, second], "frames": frames, "batch": batch}

        def ours(frames: int = frames, batch: int = batch, count: int = count) -> Figures:
            return _rate(*_stream(frames, batch, count, first, [second]))

        yield Case(f"rxring{name}", "M/s", ours, config)
        yield _c_case(f"C{name}", "M/s", _rate, "ring", (frames, batch, count, first, second), config)


def _crowds(count: int) -> Iterator[Case]:
    frames, batch = SHAPES[""]
    for readers in READERS:
        writer_cpu, reader_cpus, shared = _places(readers)
        config = {"descriptors": count, "cpus": [writer_cpu, *reader_cpus], "readers_share_a_cpu": shared}
        config |= {"frames": frames, "batch": batch}

        def ours(writer_cpu: int = writer_cpu, reader_cpus: list[int] = reader_cpus) -> Figures:
            return _rate(*_stream(frames, batch, count, writer_cpu, reader_cpus))

        arguments = (frames, batch, count, writer_cpu, *reader_cpus)
        yield Case(f"rxring, {readers} readers", "M/s", ours, config)
        yield _c_case(f"C, {readers} readers", "M/s", _rate, "ring", arguments, config)


def _payload_streams(most: int) -> Iterator[Case]:
    first, second = two_cpus()
    for size, frames in PAYLOADS.items():
        count = most if size < 1000 else most // 4
        unit = "M/s" if size < 1000 else "GB/s"
        config = {"frames": frames, "batch": 64, "payloads": count, "cpus": [first, second]}

        def ours(policy: str, size: int = size, count: int = count) -> Callable[[], Figures]:
            return lambda: _payload_rate(size, *_payloads(size, 64, count, policy, first, second))

        def rate(count: float, seconds: float, wrong: float, size: int = size) -> Figures:
            return _payload_rate(size, count, seconds, wrong, count, 0)

        arguments = (frames, ARENA, 64, count, size, first, second)
        yield Case(f"rxring, {size} bytes", unit, ours("gate"), config)
        yield _c_case(f"C, {size} bytes", unit, rate, "payload", arguments, config)
        yield Case(f"rxring, {size} bytes, skip", unit, ours("skip"), config | {"policy": "skip"})


def _round_trips(rounds: int) -> Iterator[Case]:
    first, second = two_cpus()
    config = {"round_trips": rounds, "cpus": [first, second]}
    for name, payload in (("", False), (", payload", True)):

        def ours(payload: bool = payload) -> Figures:
            return _latency(*_trips(rounds, payload, first, second))

        yield Case(f"rxring round trip{name}", "ns", ours, config)
    kinds = {"": "ring", ", protocol": "protocol", ", payload": "payload", " of a word": "raw"}
    for name, kind in kinds.items():
        arguments = (kind, rounds, first, second)
        yield _c_case(f"C round trip{name}", "ns", _latency, "pingpong", arguments, config)


def _publishing(count: int) -> Iterator[Case]:
    cpu, _ = two_cpus()
    config = {"frames": FRAMES, "published": count, "cpu": cpu}
    yield Case("rxring publish", "ns", lambda: _latency(*_alone(count, cpu)), config)
    yield _c_case("C publish", "ns", _latency, "publish", (FRAMES, ARENA, count, LENGTH, cpu), config)


def _c_case(
    name: str,
    unit: str,
    figures: Callable[[float, float, float], Figures],
    program: str,
    arguments: tuple[str | int, ...],
    config: dict[str, Any],
) -> Case:
    return Case(name, unit, lambda: figures(*native.run(program, *arguments)), config, native.missing())


def _places(readers: int) -> tuple[int, list[int], bool]:
    """(CPU of the writer, those of the readers, do they share?)"""
    writer_cpu, *others = sorted(os.sched_getaffinity(0))
    shared = len(others) < readers
    return writer_cpu, [others[0]] * readers if shared else others[:readers], shared


def _rate(count: float, seconds: float, wrong: float) -> Figures:
    return {"value": count / seconds / 1e6, "seconds": seconds, "wrong": wrong, "ok": wrong == 0}


def _payload_rate(
    size: int, count: float, seconds: float, wrong: float, delivered: float, skipped: float
) -> Figures:
    """Of what was delivered; right only if that and what was skipped are all there was."""
    gigabytes = delivered * size / seconds / 1e9
    return {
        "value": delivered / seconds / 1e6 if size < 1000 else gigabytes,
        "gigabytes_per_second": gigabytes,
        "seconds": seconds,
        "wrong": wrong,
        "delivered": delivered,
        "skipped": skipped,
        "ok": wrong == 0 and delivered + skipped == count,
    }


def _latency(count: float, seconds: float, wrong: float) -> Figures:
    return {"value": seconds / count * 1e9, "seconds": seconds, "wrong": wrong, "ok": wrong == 0}


def _stream(
    frames: int, batch: int, count: int, writer_cpu: int, reader_cpus: list[int]
) -> tuple[int, float, int]:
    """(descriptors, seconds until the last reader had them, how many were wrong)."""
    strategy = SPIN if len(set(reader_cpus)) == len(reader_cpus) else YIELD
    with ExitStack() as stack:
        ring = create(stack, 0, frames)
        writer = stack.enter_context(ring.writer())
        readers = [stack.enter_context(ring.reader(name=f"{i}")) for i in range(len(reader_cpus))]
        reading = [
            Pinned(cpu, read_all, reader.record, count, strategy)
            for cpu, reader in zip(reader_cpus, readers, strict=True)
        ]
        writing = Pinned(writer_cpu, write_all, writer.record, batch, count)
        writing.result()
        results = [process.result() for process in reading]
    return count, max(ns for _, ns in results) / 1e9, sum(wrong for wrong, _ in results)


def _payloads(
    size: int, batch: int, count: int, policy: str, writer_cpu: int, reader_cpu: int
) -> tuple[int, float, int, int, int]:
    """(payloads, seconds, how many were wrong, delivered, skipped)."""
    source, sums = make_payloads(size)
    with ExitStack() as stack:
        writer, reader = _ring(stack, 0, PAYLOADS[size], ARENA, policy)
        reading = Pinned(reader_cpu, read_payloads, reader.record, count, sums, size)
        writing = Pinned(writer_cpu, write_payloads, writer.record, batch, count, source, size)
        writing.result()
        wrong, delivered, skipped, elapsed_ns = reading.result()
    return count, elapsed_ns / 1e9, wrong, delivered, skipped


def _trips(count: int, payload: bool, first_cpu: int, second_cpu: int) -> tuple[int, float, int]:
    """(round trips, seconds, how many frames were wrong)."""
    source, sums = make_payloads(LENGTH)
    size = LENGTH if payload else 0
    with ExitStack() as stack:
        there, back = _ring(stack, 0, FRAMES), _ring(stack, 1, FRAMES)
        other = Pinned(second_cpu, echo, there[1].record, back[0].record, count, source, sums, size)
        one = Pinned(first_cpu, ping, there[0].record, back[1].record, count, source, sums, size)
        wrong, elapsed_ns = one.result()
        wrong += other.result()
    return count, elapsed_ns / 1e9, wrong


def _alone(count: int, cpu: int) -> tuple[int, float, int]:
    """(frames, seconds, how many were wrong of those that are still there, or not published)."""
    with ExitStack() as stack:
        writer = stack.enter_context(create(stack, 0, FRAMES).writer())
        elapsed_ns, wrong = Pinned(cpu, publish_alone, writer.record, count).result()
    return count, elapsed_ns / 1e9, wrong


def create(stack: ExitStack, number: int, frames: int, arena_bytes: int = 0) -> rings.Ring:
    """A ring in which frames run out before bytes."""
    arena_bytes = arena_bytes or frames * 2 * LENGTH
    return stack.enter_context(
        rings.create(f"bench{os.getpid()}", number=number, frames=frames, arena_bytes=arena_bytes)
    )


def _ring(
    stack: ExitStack, number: int, frames: int, arena_bytes: int = 0, policy: str = "gate"
) -> tuple[Writer, Reader]:
    """Both ends of a ring, to be used in processes forked from this one."""
    ring = create(stack, number, frames, arena_bytes)
    return stack.enter_context(ring.writer()), stack.enter_context(ring.reader(policy=policy))


def make_payloads(size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """KINDS payloads of `size` bytes, a multiple of 4, and the sum of each as the reader makes it."""
    payloads = np.random.default_rng(1).integers(0, 256, (KINDS, size), np.uint8)
    return payloads, payloads.view(np.uint32).sum(axis=1, dtype=np.int64)


@jit
def _describe(descriptors, index, n, number, position, length):  # type: ignore[no-untyped-def]
    return describe_in(descriptors, index, number, n ^ 0x5555, position, length, n & 0xFFFF, 0, 0)


@jit
def differs(descriptor, n, arena_bytes):  # type: ignore[no-untyped-def]
    """1 if any word of the descriptor at this address is not that of frame n."""
    words = carray(pointer(descriptor), 4, np.int64)
    place = ((n * _LENGTH) & (arena_bytes - 1)) >> 4 | (_LENGTH << 32)
    difference = (words[0] ^ n) | (words[1] ^ n ^ 0x5555) | (words[2] ^ place) | (words[3] ^ (n & 0xFFFF))
    return 1 if difference != 0 else 0


@jit
def _sum(address, size):  # type: ignore[no-untyped-def]
    """The sum of `size` bytes, four at a time."""
    total = np.int64(0)
    for word in carray(pointer(address), size // 4, np.uint32):
        total += np.int64(word)
    return total


@jit
def _payload_differs(r, index, n, size, expected):  # type: ignore[no-untyped-def]
    """1 if frame n, at `index` of the batch, is not described so or its bytes have another sum."""
    words = carray(pointer(r.batch_descriptors + 32 * index), 4, np.int64)
    offset = (words[2] & 0xFFFFFFFF) * 16
    difference = (words[0] ^ n) | (words[1] ^ n ^ 0x5555) | (words[2] >> 32 ^ size)
    if (difference | (words[3] ^ (n & 0xFFFF))) != 0 or offset + size > r.arena_bytes:
        return 1
    return 1 if _sum(r.batch_arena + offset, size) != expected else 0


@jit
def write_all(writer_state, batch, count):  # type: ignore[no-untyped-def]
    w = writer_state[0]
    n = 0
    while n < count:
        if not reserve(w, batch, batch * _LENGTH):
            pause()
            continue
        number, position, descriptors = w.number, w.position, table_of(w)
        for index in range(batch):
            number, position = _describe(descriptors, index, n + index, number, position, _LENGTH)
        publish(w, batch, number, position, batch * _LENGTH)
        n += batch


@jit
def read_all(reader_state, count, strategy):  # type: ignore[no-untyped-def]
    """(how many were wrong, ns since the first was there)."""
    r = reader_state[0]
    n, wrong, arena_bytes = 0, 0, r.arena_bytes
    begin_ns = first_came(r)
    while n < count:
        frames = poll(r, r.max_frames)
        if frames == 0:
            if strategy == _SPIN:
                pause()
            else:
                wait(r, strategy, monotonic_ns() + _WAIT_NS)
            continue
        for index in range(frames):
            wrong += differs(r.batch_descriptors + 32 * index, n + index, arena_bytes)
        release(r, frames)
        n += frames
    return wrong, monotonic_ns() - begin_ns


@jit
def first_came(r):  # type: ignore[no-untyped-def]
    """Wait for the first frame; when it was there, CLOCK_MONOTONIC ns."""
    while not wait(r, _SPIN, monotonic_ns() + _WAIT_NS):
        pass
    return monotonic_ns()


@jit
def write_payloads(writer_state, batch, count, source, size):  # type: ignore[no-untyped-def]
    w = writer_state[0]
    stride = (size + 15) & -16
    n, kind = 0, 0
    while n < count:
        if not reserve(w, batch, batch * stride):
            pause()
            continue
        number, position, descriptors = w.number, w.position, table_of(w)
        for index in range(batch):
            address = w.arena + (position & (w.arena_bytes - 1))
            memmove(address, source.ctypes.data + kind * size, size)
            number, position = _describe(descriptors, index, n + index, number, position, size)
            kind = kind + 1 if kind + 1 < _KINDS else 0
        publish(w, batch, number, position, batch * size)
        n += batch


@jit
def read_payloads(reader_state, count, sums, size):  # type: ignore[no-untyped-def]
    """(how many were wrong, delivered, skipped, ns since the first was there)."""
    r = reader_state[0]
    wrong = 0
    begin_ns = first_came(r)
    while r.cursor < count:
        frames = poll(r, r.max_frames)
        if frames == 0:
            pause()
            continue
        kind = r.cursor % _KINDS
        for index in range(frames):
            wrong += _payload_differs(r, index, r.cursor + index, size, sums[kind])
            kind = kind + 1 if kind + 1 < _KINDS else 0
        release(r, frames)
    return wrong, r.delivered, r.skipped, monotonic_ns() - begin_ns


@jit
def _send(w, n, source, size):  # type: ignore[no-untyped-def]
    """Publish frame n; `size` bytes of payload are copied in, if any."""
    while not reserve(w, 1, _LENGTH):
        pause()
    if size > 0:
        memmove(w.arena + (w.position & (w.arena_bytes - 1)), source.ctypes.data + n % _KINDS * size, size)
    number, position = _describe(table_of(w), 0, n, w.number, w.position, _LENGTH)
    publish(w, 1, number, position, _LENGTH)


@jit
def _take(r, n, sums, size, deadline_ns):  # type: ignore[no-untyped-def]
    while poll(r, 1) == 0:
        wait(r, _SPIN, deadline_ns)
    if size > 0:
        return _payload_differs(r, 0, n, size, sums[n % _KINDS])
    return differs(r.batch_descriptors, n, r.arena_bytes)


@jit
def ping(writer_state, reader_state, count, source, sums, size):  # type: ignore[no-untyped-def]
    """(how many were wrong, ns)."""
    w, r = writer_state[0], reader_state[0]
    deadline_ns = monotonic_ns() + _WAIT_NS
    wrong, begin_ns = 0, 0
    for n in range(_WARM + count):
        if n == _WARM:
            begin_ns = monotonic_ns()
        _send(w, n, source, size)
        if n > 0:
            release(r, 1)  # only now: the answer goes first
        wrong += _take(r, n, sums, size, deadline_ns)
    return wrong, monotonic_ns() - begin_ns


@jit
def echo(reader_state, writer_state, count, source, sums, size):  # type: ignore[no-untyped-def]
    """How many were wrong."""
    r, w = reader_state[0], writer_state[0]
    wrong = 0
    deadline_ns = monotonic_ns() + _WAIT_NS
    for n in range(_WARM + count):
        wrong += _take(r, n, sums, size, deadline_ns)
        _send(w, n, source, size)
        release(r, 1)
    return wrong


@jit
def publish_alone(writer_state, count):  # type: ignore[no-untyped-def]
    """(ns, how many are wrong of the frames that are still there, or not published)."""
    w = writer_state[0]
    begin_ns = monotonic_ns()
    for n in range(count):
        reserve(w, 1, _LENGTH)  # nobody gates: there is always room
        number, position = _describe(table_of(w), 0, n, w.number, w.position, _LENGTH)
        publish(w, 1, number, position, _LENGTH)
    elapsed_ns = monotonic_ns() - begin_ns
    return elapsed_ns, abs(load_acquire(w.writer + _PUBLISHED) - count) + count_wrong(w)


@jit
def count_wrong(w):  # type: ignore[no-untyped-def]
    """How many of the frames that are still intact are not as they were described."""
    wrong = 0
    for n in range(w.floor, w.head):
        wrong += differs(w.descriptors + 32 * (n & (w.frames - 1)), n, w.arena_bytes)
    return wrong


def _compile() -> None:
    w: Any = np.zeros(1, WRITER_STATE)
    r: Any = np.zeros(1, READER_STATE)
    source, sums = make_payloads(LENGTH)
    compile_for(write_all, w, 0, 0)
    compile_for(read_all, r, 0, 0)
    compile_for(write_payloads, w, 0, 0, source, 0)
    compile_for(read_payloads, r, 0, sums, 0)
    compile_for(ping, w, r, 0, source, sums, 0)
    compile_for(echo, r, w, 0, source, sums, 0)
    compile_for(publish_alone, w, 0)
