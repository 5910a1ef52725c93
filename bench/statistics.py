"""What the statistics alone cost a packet: compiled handlers over GRO frames that lie in memory.

Frames of 64 packets of 100 bytes, with stamps, laid as a ring holds them: few enough for a core's second
cache, and ("large") too many for it. Nothing is received, nothing waits. `one stage` is a handler that counts
packets and bytes, and keeps mean, deviation, least, most and histogram of `network`; `all four` is `latency`
as it is, also ("no GRO") over frames of one packet. Beside them the same one stage in C, and a plain sum over
the same bytes, taken as words of 8: what it costs to look at them once. All statistics are compared with
numpy's, in every run. The figure is that of the fastest of many passes: what else happens on the machine
makes a pass slower, never faster.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

from bench import native
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures, Setting
from engine.handlers import histogram, latency, moments
from engine.handlers.api import ON_BATCH, Handler, Options, no_clock, packet_loop, payload_as, record_at
from engine.net.stamp import MAGIC, STAMP
from rings.atomics import pointer
from rings.jit import callback, compile_for, jit
from rings.layout import ALIGN, DESCRIPTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLAIMS = (
    Claim("one stage", at_most=6),
    Claim("all four", at_most=15),
    Claim("one stage", against="sum", at_most=5),
    Claim("all four", against="sum", at_most=12.5),
    Claim("one stage", against="C, one stage", at_most=2),
    Claim("all four, no GRO", at_most=15),
    Claim("all four, large", at_most=15),
    Claim("all four, large", against="sum, large", at_most=12.5),
)

PACKETS, SIZE = 64, 100  # of a frame; bytes of a packet
FRAMES, MANY_FRAMES = 48, 1024  # 0.3 and 6.6 MB: a second cache has 0.5 to 2 MB
_ROW = 64


# ── one stage


STATE = np.dtype(
    [("bytes", "i8"), ("waiting", "i8"), ("row", "i8", (_ROW,)), ("stage", latency.STAGE)], align=True
)


@jit
def _settle(s):  # type: ignore[no-untyped-def]
    moments.add_row(s.stage.moments, s.row, s.waiting)
    histogram.add_row(s.stage.buckets, s.row, s.waiting)
    s.waiting = 0


def _on_packet(s, payload, meta):  # type: ignore[no-untyped-def]
    stamp = payload_as(payload, STAMP)
    if stamp.magic == MAGIC:
        s.row[s.waiting] = meta.kernel_ns - stamp.scheduled_ns
        s.waiting += 1
    s.bytes += payload.size
    if s.waiting == _ROW:
        _settle(s)


_each_packet = packet_loop(_on_packet, no_clock)


@callback(ON_BATCH)
def _on_batch(state, frames, count, arena):  # type: ignore[no-untyped-def]
    s = record_at(state, STATE)
    _each_packet(s, frames, count, arena)
    if s.waiting > 0:
        _settle(s)
    return 0


ONE_STAGE = Handler(STATE, on_batch=_on_batch)


# ── frames


@dataclass(frozen=True)
class Frames:
    """descriptors and arena as in a ring; sent_ns (frames, packets): what the stamps say."""

    descriptors: NDArray[Any]
    arena: NDArray[np.uint8]
    sent_ns: NDArray[np.int64]

    @property
    def packets(self) -> int:
        return self.sent_ns.size

    @property
    def network_ns(self) -> NDArray[np.int64]:
        """Of each packet."""
        differences: NDArray[np.int64] = self.descriptors["time_ns"][:, None] - self.sent_ns
        return differences.ravel()

    @property
    def socket_ns(self) -> NDArray[np.int64]:
        return np.repeat(self.descriptors["socket_ns"].astype(np.int64), self.sent_ns.shape[1])


def lay(frames: int, per_frame: int = PACKETS) -> Frames:
    """Frames that came just now: each packet 5 to 60 µs on its way, 1 to 200 µs in the socket."""
    random = np.random.default_rng(7)
    length = per_frame * SIZE
    stride = -(-length // ALIGN) * ALIGN
    kernel_ns = time.time_ns() - 1_000_000 + np.arange(frames)
    sent_ns = kernel_ns[:, None] - random.integers(5_000, 60_000, (frames, per_frame))
    stamps = np.zeros((frames, per_frame), STAMP)
    stamps["magic"], stamps["flow"] = MAGIC, 1
    stamps["sequence"] = np.arange(frames * per_frame).reshape(frames, per_frame)
    stamps["scheduled_ns"] = stamps["sent_ns"] = sent_ns
    room = np.full(frames * stride + ALIGN, 0xA5, np.uint8)
    arena = room[-room.ctypes.data % ALIGN :][: frames * stride]
    packets = arena.reshape(frames, stride)[:, :length].reshape(frames, per_frame, SIZE)
    packets[:, :, : STAMP.itemsize] = stamps.view(np.uint8).reshape(frames, per_frame, -1)
    descriptors = np.zeros(frames, DESCRIPTOR)
    descriptors["number"] = np.arange(frames) * per_frame
    descriptors["time_ns"], descriptors["socket_ns"] = kernel_ns, random.integers(1_000, 200_000, frames)
    descriptors["offset"], descriptors["length"] = np.arange(frames) * (stride // ALIGN), length
    descriptors["segment"] = SIZE if per_frame > 1 else 0
    return Frames(descriptors, arena, sent_ns)


# ── the cases

Way = Callable[[Frames, float, int], Figures]
_C_PER_SECOND = 200_000_000  # packets, about


def cases(setting: Setting) -> Iterator[Case]:
    seconds = 0.1 if setting.quick else 1.0
    cpu = two_cpus()[0]
    compile_for(sum_of, 0, 0)
    ways: dict[str, tuple[Way, str]] = {
        "one stage": (_one_stage, ""),
        "all four": (_all_four, ""),
        "sum": (_sum, ""),
        "C, one stage": (_c, native.missing()),
    }
    base = {"size": SIZE, "seconds": seconds, "cpu": cpu}
    for frames, suffix in ((FRAMES, ""), (MANY_FRAMES, ", large")):
        parameters = base | {"frames": frames, "packets": PACKETS}
        for name, (way, skip) in ways.items():

            def run(way: Way = way, frames: int = frames) -> Figures:
                return way(lay(frames), seconds, cpu)

            yield Case(f"{name}{suffix}", "ns", run, parameters, skip)

    def one_by_one() -> Figures:
        return _all_four(lay(FRAMES * PACKETS, 1), seconds, cpu)

    yield Case("all four, no GRO", "ns", one_by_one, base | {"frames": FRAMES * PACKETS, "packets": 1})


def _one_stage(frames: Frames, seconds: float, cpu: int) -> Figures:
    best_ns, passes, state = Pinned(cpu, _handle, ONE_STAGE, frames, seconds).result()
    right = is_right(state["stage"], frames.network_ns, passes)
    return _figures(best_ns, frames, passes, right and state["bytes"] == frames.packets * SIZE * passes)


def _all_four(frames: Frames, seconds: float, cpu: int) -> Figures:
    best_ns, passes, state = Pinned(cpu, _handle, latency.handler, frames, seconds).result()
    return _figures(best_ns, frames, passes, are_right(state, frames, passes))


def _sum(frames: Frames, seconds: float, cpu: int) -> Figures:
    words = frames.arena.view(np.int64)
    best_ns, passes, total = Pinned(cpu, _sum_up, words, seconds).result()
    return _figures(best_ns, frames, passes, total == int(words.sum()) * passes % 2**64)


def _c(frames: Frames, seconds: float, cpu: int) -> Figures:
    passes = max(int(seconds * _C_PER_SECOND) // frames.packets, 1)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("descriptors", "arena")]
        frames.descriptors.tofile(files[0])
        frames.arena.tofile(files[1])
        best_ns, *found = native.run("statistics", *map(str, files), passes, cpu)
    network_ns = frames.network_ns
    check = int((buckets_of(network_ns) * np.arange(histogram.BUCKETS)).sum())
    once = (frames.packets, frames.packets * SIZE, int(network_ns.sum()), check)
    expected = [passes * total for total in once] + [int(network_ns.min()), int(network_ns.max())]
    return _figures(best_ns, frames, passes, found == expected)


def _figures(best_ns: float, frames: Frames, passes: int, right: bool) -> Figures:
    return {"value": best_ns / frames.packets, "passes": passes, "ok": bool(right)}


def _handle(handler: Handler, frames: Frames, seconds: float) -> tuple[int, int, Any]:
    """(ns of the fastest pass of the handler over the frames, passes, state)."""
    state: Any = np.zeros(1, handler.dtype)
    handler.start(state[0], Options())
    on_batch: Any = handler.on_batch
    call = on_batch.ctypes  # each look takes a microsecond, as that at an array's address
    descriptors, arena = frames.descriptors, frames.arena
    arguments = (state.ctypes.data, descriptors.ctypes.data, len(descriptors), arena.ctypes.data)
    best_ns, passes = _passes(lambda: call(*arguments), seconds)
    return best_ns, passes, state[0]


def _sum_up(words: NDArray[np.int64], seconds: float) -> tuple[int, int, int]:
    totals: list[int] = []
    address, count = words.ctypes.data, len(words)
    best_ns, passes = _passes(lambda: totals.append(sum_of(address, count)), seconds)
    return best_ns, passes, sum(totals) % 2**64


@jit
def sum_of(address, count):  # type: ignore[no-untyped-def]
    words = carray(pointer(address), count, np.int64)
    total = np.int64(0)
    for i in range(count):
        total += words[i]
    return total


def _passes(once: Callable[[], Any], seconds: float) -> tuple[int, int]:
    """(ns of the fastest, how many)."""
    best_ns, passes = 1 << 62, 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin_ns = time.perf_counter_ns()
        once()
        best_ns, passes = min(best_ns, time.perf_counter_ns() - begin_ns), passes + 1
    return best_ns, passes


# ── right answers


def buckets_of(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many samples each bucket holds, from the buckets' bounds."""
    bounds = [histogram.bounds(i) for i in range(histogram.BUCKETS)]
    found = np.zeros(histogram.BUCKETS, np.int64)
    holding = [i for i, (low, high) in enumerate(bounds) if low <= high]
    upper = np.array([bounds[i][1] for i in holding], np.uint64)
    places, counts = np.unique(np.searchsorted(upper, samples.astype(np.uint64)), return_counts=True)
    found[np.array(holding)[places]] = counts
    return found


def is_right(stage: Any, samples: NDArray[np.int64], passes: int) -> bool:
    """Has a stage seen these samples `passes` times, and says of them what numpy says?"""
    m, n = stage["moments"], len(samples) * passes
    deviation = float(samples.std()) * (n / (n - 1)) ** 0.5
    return bool(
        (m["count"], m["least"], m["most"], stage["negative"]) == (n, samples.min(), samples.max(), 0)
        and moments.mean(m) == int(samples.sum()) / len(samples)
        and np.isclose(moments.stddev(m) or 0.0, deviation, rtol=1e-9)
        and (stage["buckets"] == buckets_of(samples) * passes).all()
    )


def are_right(state: Any, frames: Frames, passes: int) -> bool:
    """network and socket as numpy has them. When packets were read it does not know: but of these times, too,
    each packet counts once in each stage, and the stages add up to the total."""
    sums = {name: int(state[name]["moments"]["total"][0]) for name in latency.STAGES}  # far below 2⁶⁴
    packets = frames.packets * passes
    return (
        is_right(state["network"], frames.network_ns, passes)
        and is_right(state["socket"], frames.socket_ns, passes)
        and all(state[name]["moments"]["count"] == packets for name in latency.STAGES)
        and all(state[name]["buckets"].sum() == packets for name in latency.STAGES)
        and sums["network"] + sums["socket"] + sums["ring"] == sums["total"]
    )
