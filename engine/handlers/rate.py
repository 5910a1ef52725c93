"""`rate`: packets and bytes a second, and how many packets there were of each size.

Rates are of the time from the first to the last packet, by when their batches came out of the kernel.
Packets that came with the very first are not in them: they came before that time began to run, and with
batches of 64 a short run would look too fast. They are None until time has passed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.handlers.api import (
    ON_BATCH,
    Handler,
    Options,
    no_clock,
    packet_loop,
    record_at,
    takes_no_argument,
)
from rings.jit import callback
from rings.layout import MAX_FRAME_BYTES

RATE = np.dtype(
    [
        ("packets", "i8"),
        ("bytes", "i8"),
        ("first_ns", "i8"),
        ("last_ns", "i8"),
        ("first_packets", "i8"),  # received at first_ns
        ("first_bytes", "i8"),
        ("sizes", "i8", (MAX_FRAME_BYTES + 1,)),  # packets of each length
    ],
    align=True,
)


def _on_packet(s, payload, meta):  # type: ignore[no-untyped-def]
    received_ns = meta.received_ns
    if s.packets == 0 or received_ns < s.first_ns:
        s.first_ns = received_ns
        s.first_packets = 0
        s.first_bytes = 0
    if s.packets == 0 or received_ns > s.last_ns:
        s.last_ns = received_ns
    if received_ns == s.first_ns:
        s.first_packets += 1
        s.first_bytes += payload.size
    s.packets += 1
    s.bytes += payload.size
    s.sizes[min(payload.size, MAX_FRAME_BYTES)] += 1


_each_packet = packet_loop(_on_packet, no_clock)


@callback(ON_BATCH)
def _on_batch(state, frames, count, arena):  # type: ignore[no-untyped-def]
    _each_packet(record_at(state, RATE), frames, count, arena)
    return 0


def _start(state: Any, options: Options) -> None:
    takes_no_argument("rate", options)


def _merge(into: Any, other: Any) -> None:
    if other["packets"] == 0:
        return
    empty = into["packets"] == 0
    if empty or other["first_ns"] < into["first_ns"]:
        into["first_ns"] = other["first_ns"]
        into["first_packets"] = into["first_bytes"] = 0
    if empty or other["last_ns"] > into["last_ns"]:
        into["last_ns"] = other["last_ns"]
    if other["first_ns"] == into["first_ns"]:
        into["first_packets"] += other["first_packets"]
        into["first_bytes"] += other["first_bytes"]
    for field in ("packets", "bytes", "sizes"):
        into[field] += other[field]


def _report(state: Any) -> dict[str, Any]:
    """{packets_per_second, bytes_per_second, packets, bytes, sizes: {"LENGTH": packets}}, of payload."""
    seconds = (int(state["last_ns"]) - int(state["first_ns"])) / 1e9
    packets, size = int(state["packets"]), int(state["bytes"])
    sizes = state["sizes"]
    return {
        "packets_per_second": (packets - int(state["first_packets"])) / seconds if seconds else None,
        "bytes_per_second": (size - int(state["first_bytes"])) / seconds if seconds else None,
        "packets": packets,
        "bytes": size,
        "sizes": {str(length): int(sizes[length]) for length in np.flatnonzero(sizes)},
    }


handler = Handler(RATE, on_batch=_on_batch, merge=_merge, report=_report, start=_start)
