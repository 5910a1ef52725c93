"""Batches laid by hand, as a ring holds them, for the tests of handlers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.handlers.api import Handler, Options, compiled
from engine.net.stamp import CLOSING, MAGIC, STAMP
from rings.layout import ALIGN, DESCRIPTOR

NOW_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Frame:
    """What one receive brought. `gro`: its packets are segments, of one length, the last maybe shorter."""

    packets: Sequence[bytes]
    kernel_ns: int = NOW_NS
    socket_ns: int = 0
    flags: int = 0
    gro: bool = False


def one(payload: bytes, **facts: int) -> Frame:
    return Frame([payload], **facts)


def gro(*packets: bytes, **facts: int) -> Frame:
    return Frame(packets, gro=True, **facts)


def lay(frames: Iterable[Frame], number: int = 0) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """(descriptors, arena); `number`: of the first packet. The arena ends with its last payload."""
    descriptors, arena = [], bytearray()
    for frame in frames:
        payload = b"".join(frame.packets)
        segment = len(frame.packets[0]) if frame.gro else 0
        arena += bytes(-len(arena) % ALIGN)
        place = len(arena) // ALIGN
        descriptors.append(
            (number, frame.kernel_ns, place, len(payload), frame.socket_ns, segment, frame.flags)
        )
        arena += payload
        number += len(frame.packets)
    room = np.zeros(len(arena) + ALIGN, np.uint8)
    begin = -room.ctypes.data % ALIGN
    laid = room[begin : begin + len(arena)]
    laid[:] = arena
    return np.array(descriptors, DESCRIPTOR), laid


def fresh(handler: Handler, **options: Any) -> NDArray[Any]:
    """A state, shape (1,), after `start`."""
    state = np.zeros(1, handler.dtype)
    handler.start(state[0], Options(**options))
    return state


on_batch_of = functools.cache(compiled)


def feed(handler: Handler, state: NDArray[Any], *frames: Frame, number: int = 0) -> int:
    """Hand one batch to the handler's compiled code; its answer."""
    descriptors, arena = lay(frames, number)
    code: int = on_batch_of(handler).ctypes(
        state.ctypes.data, descriptors.ctypes.data, len(descriptors), arena.ctypes.data
    )
    return code


def report(handler: Handler, *frames: Frame, **options: Any) -> dict[str, Any]:
    """What the handler reports after one batch of these frames."""
    state = fresh(handler, **options)
    assert feed(handler, state, *frames) == 0
    return handler.report(state[0])


def rxring(
    sequence: int, *, flow: int = 7, scheduled_ns: int = NOW_NS, sent_ns: int = 0, size: int = 32
) -> bytes:
    """A packet of `size` bytes with the rxring stamp, or as much of it as fits."""
    stamp = np.array((MAGIC, flow, sequence, scheduled_ns, sent_ns), STAMP).tobytes()
    return stamp[:size].ljust(size, b"\xa5")


def closing(sent: int, *, flow: int = 7, **facts: int) -> bytes:
    return rxring(sent, flow=flow | CLOSING, **facts)


def seed(sent_us: int, size: int = 100) -> bytes:
    return np.uint64(sent_us).tobytes().ljust(size, b"\0")
