"""`latency`: how long packets took, stage by stage.

    network   sent → kernel        socket   kernel → received
    ring      received → read      total    sent → read

`sent` is the scheduled time of the rxring stamp, so that a late sender shows; or the time of the seed
stamp. A packet whose stamp has no time counts in the other two stages only.

All packets of a GRO frame share the reading of the clock when it was taken: they differ in `sent` only, so
that `socket` and `ring` are counted once for all of them.

A difference below 0 is counted in `negative` and nowhere else. What the descriptor does not know is not
made up:
    NO_KERNEL_TIME   no `network`, no `socket`
    NEGATIVE         the receiver found received < kernel: `socket` negative, no `ring`
    SATURATED        it stood in the socket for 2³² − 1 ns or longer: `socket` counts it with that (and in
                     `saturated`), since leaving the worst out would flatter; no `ring`
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from engine.handlers import histogram, moments
from engine.handlers.api import (
    ON_BATCH,
    READ_EVERY,
    Handler,
    Options,
    packets_in,
    record_at,
    takes_no_argument,
)
from engine.net.stamp import KINDS, MAGIC, RXRING, SEED, SEED_BYTES, STAMP
from rings.atomics import pointer
from rings.jit import callback, jit
from rings.layout import ALIGN, DESCRIPTOR, FrameFlag
from rings.libc import realtime_ns

STAGES = ("network", "socket", "ring", "total")
PERCENTILES = {"p50_ns": 500, "p90_ns": 900, "p99_ns": 990, "p999_ns": 999}

# Differences wait in rows, one for each stage, until there are enough for a tight loop over each. Those of
# a GRO frame wait for nobody: it brings enough.
_ROW = 64
_ABSENT = -(1 << 63)  # in a row: not known of this packet
_SMALL = 1 << 32  # what moments.add_row takes
_FOREVER_NS = 1 << 62  # no time: 146 years after the epoch. Differences of times below it can't overflow

_NO_KERNEL_TIME = int(FrameFlag.NO_KERNEL_TIME)
_SATURATED = int(FrameFlag.SATURATED)
_NEGATIVE = int(FrameFlag.NEGATIVE)
_SCHEDULED_END = STAMP.fields["sent_ns"][1]  # type: ignore[index]

_SEED_STAMP = np.dtype([("sent_us", "=u8")])
STAGE = np.dtype(
    [("moments", moments.MOMENTS), ("negative", "i8"), ("buckets", "i8", (histogram.BUCKETS,))], align=True
)
LATENCY = np.dtype(
    [
        ("stamp", "i8"),
        ("saturated", "i8"),
        ("waiting", "i8"),  # entries of each row in use; 0 between batches
        ("rows", "i8", (len(STAGES), _ROW)),
        ("gro_rows", "i8", (2, _ROW)),  # of `network` and `total`
        *((stage, STAGE) for stage in STAGES),
    ],
    align=True,
)


@jit
def _sent_ns(kind, address, size):  # type: ignore[no-untyped-def]
    """When the packet there was sent by its own account; _ABSENT if it does not say."""
    sent_ns = np.int64(_ABSENT)
    if kind == RXRING and size >= _SCHEDULED_END:
        stamp = record_at(address, STAMP)
        if stamp.magic == MAGIC:
            sent_ns = stamp.scheduled_ns
    elif kind == SEED and size >= SEED_BYTES:
        sent_us = np.int64(record_at(address, _SEED_STAMP).sent_us)
        if 0 <= sent_us < _FOREVER_NS // 1000:
            sent_ns = sent_us * 1000
    return sent_ns if 0 <= sent_ns < _FOREVER_NS else np.int64(_ABSENT)


@jit
def _is_small(row, count):  # type: ignore[no-untyped-def]
    """Are all differences of a row known, not negative and below _SMALL?"""
    bits = np.int64(0)
    for i in range(count):
        bits |= row[i]
    return 0 <= bits < _SMALL


@jit
def _settle(stage, row, count):  # type: ignore[no-untyped-def]
    """Take the differences of one row into its stage, whatever they are."""
    if _is_small(row, count):
        moments.add_row(stage.moments, row, count)
        histogram.add_row(stage.buckets, row, count)
        return
    for i in range(count):
        difference_ns = row[i]
        if difference_ns >= 0:
            moments.add(stage.moments, difference_ns)
            stage.buckets[histogram.bucket(difference_ns)] += 1
        elif difference_ns != _ABSENT:
            stage.negative += 1


@jit
def _settle_two(one, its_row, other, others_row, count):  # type: ignore[no-untyped-def]
    """_settle for two stages.

    Packets of a batch fall into the same bucket again and again, and each increment waits for the one
    before it. So the usual case counts both stages in one loop: the waiting overlaps.
    """
    if _is_small(its_row, count) and _is_small(others_row, count):
        for i in range(count):
            one.buckets[histogram.bucket(its_row[i])] += 1
            other.buckets[histogram.bucket(others_row[i])] += 1
        moments.add_row(one.moments, its_row, count)
        moments.add_row(other.moments, others_row, count)
    else:
        _settle(one, its_row, count)
        _settle(other, others_row, count)


@jit
def _settle_rows(s):  # type: ignore[no-untyped-def]
    """Take the rows of frames of one packet into their stages."""
    _settle_two(s.network, s.rows[0], s.total, s.rows[3], s.waiting)
    _settle_two(s.socket, s.rows[1], s.ring, s.rows[2], s.waiting)
    s.waiting = 0


@jit
def _settle_repeated(stage, difference_ns, packets):  # type: ignore[no-untyped-def]
    """Take one difference into a stage for so many packets."""
    if difference_ns >= 0:
        moments.add_repeated(stage.moments, difference_ns, packets)
        stage.buckets[histogram.bucket(difference_ns)] += packets
    elif difference_ns != _ABSENT:
        stage.negative += packets


@jit
def _shared(frame, read_ns):  # type: ignore[no-untyped-def]
    """What all packets of a frame share, as far as its flags say that it is known: (kernel, socket, ring)."""
    flags = np.int64(frame.flags)
    kernel_ns = np.int64(frame.time_ns)
    socket_ns = np.int64(frame.socket_ns)
    ring_ns = read_ns - (kernel_ns + socket_ns)
    if flags & _NEGATIVE:
        socket_ns = np.int64(-1)
    if flags & (_NEGATIVE | _SATURATED):
        ring_ns = np.int64(_ABSENT)
    if flags & _NO_KERNEL_TIME:
        kernel_ns = np.int64(_ABSENT)
        socket_ns = np.int64(_ABSENT)
    return kernel_ns, socket_ns, ring_ns


@jit
def _since(sent_ns, then_ns):  # type: ignore[no-untyped-def]
    """From sent to then, where both are known."""
    return then_ns - sent_ns if sent_ns != _ABSENT and then_ns != _ABSENT else np.int64(_ABSENT)


@jit
def _put(s, frame, address, read_ns):  # type: ignore[no-untyped-def]
    """Let a frame of one packet wait in the rows."""
    kernel_ns, socket_ns, ring_ns = _shared(frame, read_ns)
    sent_ns = _sent_ns(s.stamp, address, np.int64(frame.length))
    i = s.waiting
    s.rows[0, i] = _since(sent_ns, kernel_ns)
    s.rows[1, i] = socket_ns
    s.rows[2, i] = ring_ns
    s.rows[3, i] = _since(sent_ns, read_ns)
    s.waiting = i + 1


@jit
def _take_gro(s, frame, address, packets, read_ns):  # type: ignore[no-untyped-def]
    """Take a GRO frame into the stages."""
    kernel_ns, socket_ns, ring_ns = _shared(frame, read_ns)
    _settle_repeated(s.socket, socket_ns, packets)
    _settle_repeated(s.ring, ring_ns, packets)
    kind, segment, left = s.stamp, np.int64(frame.segment), np.int64(frame.length)
    for begin in range(0, packets, _ROW):
        count = min(packets - begin, _ROW)
        for i in range(count):
            sent_ns = _sent_ns(kind, address, min(segment, left))
            s.gro_rows[0, i] = _since(sent_ns, kernel_ns)
            s.gro_rows[1, i] = _since(sent_ns, read_ns)
            address += segment
            left -= segment
        _settle_two(s.network, s.gro_rows[0], s.total, s.gro_rows[1], count)


@callback(ON_BATCH)
def _on_batch(state, frames, count, arena):  # type: ignore[no-untyped-def]
    s = record_at(state, LATENCY)
    batch = carray(pointer(frames), count, DESCRIPTOR)
    read_ns, reads_left = np.int64(0), 0
    for i in range(count):
        frame = batch[i]
        packets = packets_in(frame)
        address = arena + np.int64(frame.offset) * ALIGN
        if frame.segment != 0 or reads_left == 0:
            read_ns, reads_left = realtime_ns(), READ_EVERY
        reads_left -= 1
        if frame.flags & _SATURATED:
            s.saturated += packets
        if frame.segment != 0:
            _take_gro(s, frame, address, packets, read_ns)
        else:
            _put(s, frame, address, read_ns)
        if s.waiting == _ROW:
            _settle_rows(s)
    if s.waiting > 0:
        _settle_rows(s)
    return 0


def _start(state: Any, options: Options) -> None:
    takes_no_argument("latency", options)
    state["stamp"] = KINDS[options.stamp]


def _merge(into: Any, other: Any) -> None:
    into["saturated"] += other["saturated"]
    for name in STAGES:
        moments.merge(into[name]["moments"], other[name]["moments"])
        into[name]["negative"] += other[name]["negative"]
        into[name]["buckets"] += other[name]["buckets"]


def _report(state: Any) -> dict[str, Any]:
    """{network, socket, ring, total}: each {count, negative, mean_ns, …}; None where there is no sample."""
    report = {name: _report_stage(state[name]) for name in STAGES}
    report["socket"]["saturated"] = int(state["saturated"])
    return report


def _report_stage(stage: Any) -> dict[str, Any]:
    m = stage["moments"]
    report = {
        "count": int(m["count"]),
        "negative": int(stage["negative"]),
        "mean_ns": moments.mean(m),
        "stddev_ns": moments.stddev(m),
        "min_ns": None,
        "max_ns": None,
        **dict.fromkeys(PERCENTILES),
    }
    if report["count"]:
        least, most = int(m["least"]), int(m["most"])
        ranks = histogram.percentiles(stage["buckets"], tuple(PERCENTILES.values()), least, most)
        report |= {"min_ns": least, "max_ns": most, **dict(zip(PERCENTILES, ranks, strict=True))}
    return report


def histograms(state: Any) -> dict[str, list[tuple[int, int, int]]]:
    """For each stage its buckets that are not empty: (least ns, greatest ns, samples), ascending."""
    return {name: list(histogram.filled(state[name]["buckets"])) for name in STAGES}


handler = Handler(LATENCY, on_batch=_on_batch, merge=_merge, report=_report, start=_start)
