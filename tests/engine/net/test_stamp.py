import struct
import sys
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.net import stamp

i63 = st.integers(0, (1 << 63) - 1)


def written(room: int, shift: int, write: Any, *values: int) -> bytes:
    """What a stamp function makes of the `room` bytes at any address; nothing else has changed."""
    memory = np.full(64, 0xEE, np.uint8)
    write(memory.ctypes.data + shift, room, *values)
    found = memory.tobytes()
    taken = min(room, 40)
    assert found[:shift] == b"\xee" * shift
    assert found[shift + taken :] == b"\xee" * (64 - shift - taken)
    return found[shift : shift + taken]


@given(
    room=st.integers(0, 40),
    shift=st.integers(0, 15),
    flow=st.integers(0, (1 << 32) - 1),
    sequence=i63,
    scheduled=st.integers(-(1 << 63), (1 << 63) - 1),
    sent=st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_rxring_is_as_the_contract_says(
    room: int, shift: int, flow: int, sequence: int, scheduled: int, sent: int
) -> None:
    found = written(room, shift, stamp.write_rxring, flow, sequence, scheduled, sent)
    whole = b"RXR1" + struct.pack("<IQqq", flow, sequence, scheduled, sent)
    assert found == (whole + b"\xee" * 8)[:room]


@given(room=st.integers(0, 40), shift=st.integers(0, 15), sent=i63)
def test_seed_is_native_microseconds(room: int, shift: int, sent: int) -> None:
    found = written(room, shift, stamp.write_seed, sent)
    whole = (sent // 1000).to_bytes(8, sys.byteorder)
    assert found == (whole + b"\xee" * 32)[:room]


def test_the_dtype_reads_what_is_written() -> None:
    memory = np.zeros(stamp.STAMP_BYTES, np.uint8)
    stamp.write_rxring(memory.ctypes.data, 32, 3 | stamp.CLOSING, 5, 7, 11)
    assert memory.view(stamp.STAMP)[0].tolist() == (stamp.MAGIC, 3 | 1 << 31, 5, 7, 11)
    assert stamp.STAMP_BYTES == 32
    assert stamp.STAMP.fields["scheduled_ns"][1] == stamp.CLOSING_BYTES
