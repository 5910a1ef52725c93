"""The bytes of a ring: offsets, types, limits. Pure; the creator and every attacher use it.

A ring is one shared-memory object:

    header       what it is: magic, version, geometry, identity                readers: read-only
    writer       published · floor · epoch · state · wake · counters           readers: read-only
    ──────────────────────────────────────────────────────────────── page
    waiting      one flag: somebody sleeps on `wake`                           readers write
    reader[R]    word · cursor · two account records · name · join point       readers write
    ──────────────────────────────────────────────────────────────── page
    descriptors  N × 32 bytes, one for each frame                              readers: read-only
    sources      N × 32 bytes, optional: who sent it                           readers: read-only
    ──────────────────────────────────────────────────────────────── page
    arena        M bytes, 2^k: the payloads, packed                            readers: read-only

Words that different processes write stand LINE bytes apart: two cache lines, since the adjacent-line
prefetcher of x86 fetches them in pairs. Sections that are mapped with different rights begin on pages.

Sequences count frames, are 64-bit and never wrap; the index of frame s is s & (N − 1).
Everything is little-endian, as are the machines that numba compiles for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

ABI_VERSION = 1
MAGIC = int.from_bytes(b"RXRING\x00\x01", "little")
PAGE = 4096
LINE = 128
ALIGN = 16  # payloads begin on multiples of this; descriptors count offsets in it
MAX_FRAME_BYTES = 65536  # the largest receive: a maximal datagram, or a whole GRO frame
MAX_ARENA_BYTES = ALIGN << 32  # what a descriptor's u32 offset reaches
MAX_FRAMES = 1 << 32
MAX_READERS = 64
NAME_BYTES = 32
REFUSALS = 16  # counters for packets refused, by reason
ERRORS = 16  # counters for errors of the receive call, by kind


class WriterState(IntEnum):
    """What the writer says of itself. That it died without a word, its lock says."""

    RUNNING = 1
    CLOSED = 2


class SlotState(IntEnum):
    FREE = 0
    JOINING = 1
    ACTIVE = 2


class Policy(IntEnum):
    """What happens when a reader falls a whole ring behind: the writer waits, or laps it."""

    GATE = 0
    SKIP = 1


class FrameFlag(IntFlag):
    """Remarks on one frame."""

    NO_KERNEL_TIME = 1  # `time_ns` is when the receiver got it; `socket_ns` is 0
    SATURATED = 2  # received − kernel did not fit `socket_ns`
    NEGATIVE = 4  # received − kernel was negative: the clock was set
    TRUNCATED = 8  # the payload is only the beginning of the packet
    END = 16  # the last frame of a stream


HEADER = np.dtype(
    {
        "names": [
            "magic",
            "abi_version",
            "sources",
            "layout_hash",
            "frames",
            "arena_bytes",
            "readers",
            "uuid",
            "boot_id",
            "clock_offset_ns",
            "created_ns",
            "owner_pid",
        ],
        "formats": ["u8", "u4", "u4", "u8", "i8", "i8", "i8", "V16", "V16", "i8", "i8", "i8"],
        "offsets": [0, 8, 12, 16, 24, 32, 40, 48, 64, 80, 88, 96],
        "itemsize": PAGE,
    }
)

WRITER = np.dtype(
    {
        "names": [
            "published",
            "floor",
            "wake",
            "epoch",
            "state",
            "pid",
            "packets",
            "bytes",
            "frames",
            "calls",
            "full_events",
            "full_ns",
            "high_water",
            "lost_in_flight",
            "received",
            "overflowed",
            "moved",
            "stride",
            "cpu_ns",
            "refused",
            "errors",
        ],
        "formats": [
            "i8",
            "i8",
            "u4",
            *["i8"] * 16,
            (np.int64, (REFUSALS,)),
            (np.int64, (ERRORS,)),
        ],
        "offsets": [
            0,
            LINE,
            2 * LINE,
            *range(3 * LINE, 3 * LINE + 3 * 8, 8),
            *range(4 * LINE, 4 * LINE + 13 * 8, 8),
            5 * LINE,
            6 * LINE,
        ],
        "itemsize": PAGE,
    }
)

ACCOUNT = np.dtype(
    [("cursor", "i8"), ("packets", "i8"), ("delivered", "i8"), ("skipped", "i8"), ("passed", "i8")]
)

READER = np.dtype(
    {
        "names": [
            "word",
            "cursor",
            "accounts",
            "name",
            "joined_packets",
            "joined_frame",
            "pid",
            "restarts",
            "demote_ns",  # the writer waits so long for a gating reader that does not move; 0: for ever
        ],
        "formats": ["i8", "i8", (ACCOUNT, (2,)), f"S{NAME_BYTES}", *["i8"] * 5],
        "offsets": [0, LINE, 2 * LINE, 3 * LINE, *range(3 * LINE + 32, 3 * LINE + 72, 8)],
        "itemsize": 4 * LINE,
    }
)

DESCRIPTOR = np.dtype(
    [
        ("number", "u8"),  # of the frame's first packet, counted from 0 at the ring's creation
        ("time_ns", "i8"),  # kernel receive time, CLOCK_REALTIME
        ("offset", "u4"),  # of the payload in the arena, in ALIGN bytes
        ("length", "u4"),  # of the payload, bytes
        ("socket_ns", "u4"),  # received − kernel: how long it stood in the socket
        ("segment", "u2"),  # bytes of each packet of the frame, the last may be shorter; 0: one packet
        ("flags", "u2"),  # FrameFlag
    ]
)

SOURCE = np.dtype(  # as long as a DESCRIPTOR
    [
        ("address", "V16"),  # in network order; an IPv4 address stands in the first 4 bytes
        ("port", "u2"),
        ("family", "u2"),  # AF_INET, AF_INET6; 0: a writer without a network
        ("interface", "u4"),  # index of it, where the address has one (IPv6 with scope); else 0
        ("flow", "u8"),  # 63 bits: what comes from one source in order has one flow
    ]
)


def offsets(dtype: np.dtype[np.void], *names: str) -> tuple[int, ...]:
    """Byte offsets of fields, for code that works on addresses."""
    assert dtype.fields is not None
    return tuple(dtype.fields[name][1] for name in names)


# Lock bytes in the object, taken with OFD locks. They guard nothing in those bytes.
LOCK_OWNER = 0
LOCK_WRITER = 1
LOCK_JOIN = 2
LOCK_READER = 64  # + index

# A reader's word: state in bits 0–7, policy in bits 8–15, generation above. Changed by CAS only.
POLICY_SHIFT = 8
GENERATION_SHIFT = 16


def slot_word(state: SlotState, policy: Policy, generation: int) -> int:
    return int(state) | int(policy) << POLICY_SHIFT | generation << GENERATION_SHIFT


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Geometry:
    """How large a ring is, and where its sections begin (byte offsets in the object).

    frames: N, a power of two; N − 1 frames are held at most.
    arena_bytes: M, a power of two; up to M − 16 payload bytes are held.
    readers: R, how many may attach.
    sources: is there a source record for each frame?
    """

    frames: int
    arena_bytes: int
    readers: int = 16
    sources: bool = False

    def __post_init__(self) -> None:
        for what, value, least, most in (
            ("frames", self.frames, 2, MAX_FRAMES),
            ("arena_bytes", self.arena_bytes, ALIGN * 2, MAX_ARENA_BYTES),
        ):
            if value & (value - 1) or not least <= value <= most:
                raise ValueError(f"{what} is {value}: give a power of two from {least} to {most}")
        if not 1 <= self.readers <= MAX_READERS:
            raise ValueError(f"readers is {self.readers}: give 1 to {MAX_READERS}")

    @property
    def writer(self) -> int:
        return PAGE

    @property
    def waiting(self) -> int:
        return 2 * PAGE

    @property
    def slots(self) -> int:
        return self.waiting + LINE

    @property
    def descriptors(self) -> int:
        return round_up(self.slots + self.readers * READER.itemsize, PAGE)

    @property
    def source_records(self) -> int:
        return round_up(self.descriptors + self.frames * DESCRIPTOR.itemsize, PAGE)

    @property
    def arena(self) -> int:
        size = self.frames * SOURCE.itemsize if self.sources else 0
        return round_up(self.source_records + size, PAGE)

    @property
    def data_bytes(self) -> int:
        """What grows with the ring: all but a few pages of control words."""
        per_frame = DESCRIPTOR.itemsize + (SOURCE.itemsize if self.sources else 0)
        return self.arena_bytes + self.frames * per_frame

    @property
    def total_bytes(self) -> int:
        return round_up(self.arena + self.arena_bytes, PAGE)

    @staticmethod
    def fitting(size_bytes: int, *, readers: int = 16, sources: bool = False) -> Geometry:
        """The largest ring whose descriptors, source records and arena take at most `size_bytes`.

        At least one descriptor for each 128 bytes of arena: with packets of 100 bytes, descriptors
        and bytes run out at about the same time. A few pages of control words come on top.
        """
        arena = 1 << MAX_ARENA_BYTES.bit_length() - 1
        while arena >= 32 * 1024:
            for frames in (arena // 64, arena // 128):
                geometry = Geometry(frames, arena, readers, sources)
                if geometry.data_bytes <= size_bytes:
                    return geometry
            arena //= 2
        raise ValueError(f"a ring does not fit into {size_bytes} bytes: give at least 64KiB")


def _layout_hash() -> int:
    """A fingerprint of everything above that two processes must agree on."""
    parts: list[Any] = [ABI_VERSION, PAGE, LINE, ALIGN, MAX_FRAME_BYTES, POLICY_SHIFT, GENERATION_SHIFT]
    parts += [LOCK_OWNER, LOCK_WRITER, LOCK_JOIN, LOCK_READER]
    parts += [(kind.__name__, member.name, int(member)) for kind in _WORDS for member in kind]
    for dtype in _SHARED:
        assert dtype.fields is not None
        parts += [dtype.itemsize, str(sorted(dtype.fields.items()))]
    sample = Geometry(frames=256, arena_bytes=8192, readers=40, sources=True)
    parts += [sample.writer, sample.waiting, sample.slots, sample.descriptors, sample.source_records]
    parts += [sample.arena, sample.total_bytes]
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


_WORDS = (WriterState, SlotState, Policy, FrameFlag)
_SHARED = (HEADER, WRITER, ACCOUNT, READER, DESCRIPTOR, SOURCE)
LAYOUT_HASH = _layout_hash()
