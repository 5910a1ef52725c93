"""The stamp that a sender puts at the beginning of each packet's payload.

`rxring`, 32 bytes, little-endian, or as many of them as fit into the packet:

     0  magic "RXR1"      4  flow u32, bit 31: a closing stamp
     8  sequence u64: packets of this flow sent before; in a closing stamp: packets of this flow sent
    16  scheduled i64     24  sent i64: ns since the epoch, CLOCK_REALTIME

Every packet of a flow that reached the wire has the next sequence number: a failed send takes none.

`seed`, 8 bytes: microseconds since the epoch, u64 in the machine's byte order (S1's test program).
"""

from __future__ import annotations

from typing import Literal

import numba
import numpy as np

from rings.atomics import pointer, scratch, store_relaxed
from rings.jit import jit
from rings.libc import memmove

StampName = Literal["none", "rxring", "seed"]
NONE, RXRING, SEED = 0, 1, 2
KINDS: dict[StampName, int] = {"none": NONE, "rxring": RXRING, "seed": SEED}

MAGIC = int.from_bytes(b"RXR1", "little")
CLOSING = 1 << 31
CLOSING_BYTES = 16  # the least packet that can carry a closing stamp: flow and sequence must fit

# Packed on purpose: packets begin anywhere, and numba writes an unaligned record only if it is not `align`.
STAMP = np.dtype(
    [("magic", "<u4"), ("flow", "<u4"), ("sequence", "<u8"), ("scheduled_ns", "<i8"), ("sent_ns", "<i8")]
)
STAMP_BYTES = STAMP.itemsize
SEED_BYTES = 8


@jit
def _fill(address, flow, sequence, scheduled_ns, sent_ns):  # type: ignore[no-untyped-def]
    stamp = numba.carray(pointer(address), 1, STAMP)[0]
    stamp.magic = MAGIC
    stamp.flow = flow
    stamp.sequence = sequence
    stamp.scheduled_ns = scheduled_ns
    stamp.sent_ns = sent_ns


@jit
def write_rxring(address, room, flow, sequence, scheduled_ns, sent_ns):  # type: ignore[no-untyped-def]
    """Write an `rxring` stamp at any address; only its first `room` bytes if there are no more."""
    if room >= STAMP_BYTES:
        _fill(address, flow, sequence, scheduled_ns, sent_ns)
    else:
        whole = scratch()
        _fill(whole, flow, sequence, scheduled_ns, sent_ns)
        memmove(address, whole, room)


@jit
def write_seed(address, room, sent_ns):  # type: ignore[no-untyped-def]
    """Write a `seed` stamp at any address; only its first `room` bytes if there are no more."""
    whole = scratch()
    store_relaxed(whole, sent_ns // 1000)
    memmove(address, whole, min(room, SEED_BYTES))
