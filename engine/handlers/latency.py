"""`latency`: how long packets took, stage by stage.

    network   sent → kernel        socket   kernel → received
    ring      received → read      total    sent → read

`sent` is the scheduled time of the rxring stamp, so that a late sender shows; or the time of the seed
stamp. A packet whose stamp has no time counts in the other two stages only.

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

from engine.handlers import histogram, moments
from engine.handlers.api import (
    ON_BATCH,
    Handler,
    Options,
    packet_loop,
    payload_as,
    record_at,
    takes_no_argument,
)
from engine.net.stamp import KINDS, MAGIC, RXRING, SEED, SEED_BYTES, STAMP
from rings.jit import callback, jit
from rings.layout import FrameFlag
from rings.libc import realtime_ns

STAGES = ("network", "socket", "ring", "total")
PERCENTILES = {"p50_ns": 500, "p90_ns": 900, "p99_ns": 990, "p999_ns": 999}

# Differences wait in rows, one for each stage, until there are enough for a tight loop over each.
_ROW = 64
_ABSENT = -(1 << 63)  # in a row: not known of this packet
_SMALL = 1 << 32  # what moments.add_row takes
_FOREVER_NS = 1 << 62  # no time: 146 years after the epoch. Differences of times below it can't overflow

_NO_KERNEL_TIME = int(FrameFlag.NO_KERNEL_TIME)
_SATURATED = int(FrameFlag.SATURATED)
_NEGATIVE = int(FrameFlag.NEGATIVE)
_UNKNOWN = _NO_KERNEL_TIME | _SATURATED | _NEGATIVE
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
        *((stage, STAGE) for stage in STAGES),
    ],
    align=True,
)


@jit
def _sent_ns(kind, payload):  # type: ignore[no-untyped-def]
    """When the packet was sent by its own account; _ABSENT if it does not say."""
    sent_ns = np.int64(_ABSENT)
    if kind == RXRING and payload.size >= _SCHEDULED_END:
        stamp = payload_as(payload, STAMP)
        if stamp.magic == MAGIC:
            sent_ns = stamp.scheduled_ns
    elif kind == SEED and payload.size >= SEED_BYTES:
        sent_us = np.int64(payload_as(payload, _SEED_STAMP).sent_us)
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
def _settle_all(s):  # type: ignore[no-untyped-def]
    """Take all rows into their stages.

    Packets of a batch fall into the same bucket again and again, and each increment waits for the one
    before it. So the usual case counts four stages in one loop: the waiting overlaps.
    """
    count = s.waiting
    network, socket, ring, total = s.rows[0], s.rows[1], s.rows[2], s.rows[3]
    if (
        _is_small(network, count)
        and _is_small(socket, count)
        and _is_small(ring, count)
        and _is_small(total, count)
    ):
        for i in range(count):
            s.network.buckets[histogram.bucket(network[i])] += 1
            s.socket.buckets[histogram.bucket(socket[i])] += 1
            s.ring.buckets[histogram.bucket(ring[i])] += 1
            s.total.buckets[histogram.bucket(total[i])] += 1
        moments.add_row(s.network.moments, network, count)
        moments.add_row(s.socket.moments, socket, count)
        moments.add_row(s.ring.moments, ring, count)
        moments.add_row(s.total.moments, total, count)
    else:
        _settle(s.network, network, count)
        _settle(s.socket, socket, count)
        _settle(s.ring, ring, count)
        _settle(s.total, total, count)
    s.waiting = 0


@jit
def _withdraw_unknown(s, i, meta):  # type: ignore[no-untyped-def]
    """Of packet i of the rows, take back what its flags say is not known."""
    if meta.flags & _NEGATIVE:
        s.rows[1, i] = -1
        s.rows[2, i] = _ABSENT
    if meta.flags & _SATURATED:
        s.saturated += 1
        s.rows[2, i] = _ABSENT
    if meta.flags & _NO_KERNEL_TIME:
        s.rows[0, i] = _ABSENT
        s.rows[1, i] = _ABSENT


def _on_packet(s, payload, meta):  # type: ignore[no-untyped-def]
    i = s.waiting
    sent_ns = _sent_ns(s.stamp, payload)
    if sent_ns != _ABSENT:
        s.rows[0, i] = meta.kernel_ns - sent_ns
        s.rows[3, i] = meta.read_ns - sent_ns
    else:
        s.rows[0, i] = _ABSENT
        s.rows[3, i] = _ABSENT
    s.rows[1, i] = meta.received_ns - meta.kernel_ns
    s.rows[2, i] = meta.read_ns - meta.received_ns
    if meta.flags & _UNKNOWN:
        _withdraw_unknown(s, i, meta)
    s.waiting = i + 1
    if s.waiting == _ROW:
        _settle_all(s)


_each_packet = packet_loop(_on_packet, realtime_ns)


@callback(ON_BATCH)
def _on_batch(state, frames, count, arena):  # type: ignore[no-untyped-def]
    s = record_at(state, LATENCY)
    _each_packet(s, frames, count, arena)
    if s.waiting > 0:
        _settle_all(s)
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
