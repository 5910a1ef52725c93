"""The writing end of a ring: reserve → describe → publish.

    reserve    make room for a batch. Raises `floor` past every frame that the batch may overwrite;
               refuses while a gating reader still needs one of them.
    (write)    payload bytes into the arena, `describe` for each frame.
    publish    one release store makes the batch visible, at once and whole.

Why nothing torn is read. A skipping reader copies, then looks at `floor`. We store `floor`, then fence,
then write: if a copy holds a byte that we wrote, its look sees a floor past that frame, and discards it.

Why no gating reader is overrun. `gate` is the lowest cursor of the gating readers when we last looked
(with none, the head at that time). It may be old, never too high: cursors only rise, and who joins
starts at a `published` that is at least the head of our last look (reader.activate). So we look again
only when the batch needs more than `gate` allows.

Whom we stop waiting for. A gating reader may have said how long it may hold us up without moving
(`demote_ns`). When that has passed, a CAS makes a skipping one of it, which it reads as anyway.

Why the dead do not stop us. Only when full, we ask the kernel whether the readers in the way still hold
their locks, and free the slot of one that does not by a CAS on the word we saw before asking.
"""

from __future__ import annotations

import os
from operator import index
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numba import carray

from rings import locks
from rings.atomics import (
    compare_and_swap,
    fence_release,
    fence_seq_cst,
    fetch_add_u32,
    load_acquire,
    load_relaxed,
    load_relaxed_u32,
    pointer,
    scratch,
    store_record,
    store_relaxed,
    store_relaxed_u32,
    store_release,
)
from rings.jit import compile_for, jit
from rings.layout import (
    ALIGN,
    DESCRIPTOR,
    LAYOUT_HASH,
    LINE,
    LOCK_READER,
    LOCK_WRITER,
    MAX_FRAME_BYTES,
    POLICY_SHIFT,
    READER,
    SOURCE,
    WRITER,
    Policy,
    SlotState,
    WriterState,
    offsets,
)
from rings.libc import fcntl, futex_wake_all, memmove, monotonic_ns, realtime_ns, sleep_ns
from rings.segment import RingError, duration_ns, in_children

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rings.ring import Ring

_PUBLISHED, _FLOOR, _WAKE, _STATE = offsets(WRITER, "published", "floor", "wake", "state")
_PACKETS, _BYTES = offsets(WRITER, "packets", "bytes")
_FULL_EVENTS, _FULL_NS, _HIGH_WATER = offsets(WRITER, "full_events", "full_ns", "high_water")
_CURSOR, _DEMOTE_NS = offsets(READER, "cursor", "demote_ns")
(_OFFSET,) = offsets(DESCRIPTOR, "offset")
_SLOT_BYTES = READER.itemsize
_FRAME_BYTES = DESCRIPTOR.itemsize
_SOURCE_BYTES = SOURCE.itemsize
_DEMOTED = (int(Policy.SKIP) - int(Policy.GATE)) << POLICY_SHIFT  # what makes a skipping reader's word
_LONGEST_LOOK_NS = 100_000_000  # between two looks while full: if it was longer, we were stopped, too
_FREE, _ACTIVE, _GATE = int(SlotState.FREE), int(SlotState.ACTIVE), int(Policy.GATE)
_RUNNING, _CLOSED = int(WriterState.RUNNING), int(WriterState.CLOSED)
_POLICY_SHIFT, _LINE, _ALIGN, _LOCK_READER = POLICY_SHIFT, LINE, ALIGN, LOCK_READER

_MAX_FLOW = (1 << 63) - 1
_SLICE_NS = 50_000_000  # of a wait for room: compiled code sees no signals

# The writer's private state. Addresses are of the sections in this process's mapping; `head`, `floor`
# and `gate` are sequences; positions are virtual arena bytes, which never wrap (offset = position & mask).
WRITER_STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "writer",
            "waiting",
            "slots",
            "descriptors",
            "sources",  # 0: the ring has none
            "arena",
            "frames",
            "arena_bytes",
            "readers",
            "lock_fd",
            "head",  # the next frame's sequence: what will be published next
            "number",  # the next packet's number
            "bytes",  # payload bytes written so far
            "position",  # where the next payload goes
            "floor",
            "floor_position",  # where the payload of frame `floor`, or of one before it, begins
            "gate",
            "full_since_ns",  # until when the wait is in `full_ns`; 0: not full
            "stalled_ns",  # how long it has been full, but for times in which we did not look
        )
    ],
    align=True,
)


@jit
def compiled_layout_hash():  # type: ignore[no-untyped-def]
    """The layout that the compiled code was made for: compared with the header at attach."""
    return np.uint64(LAYOUT_HASH)


@jit
def _position_of(w, sequence, position):  # type: ignore[no-untyped-def]
    """Where the payload of a live frame begins; `position` if it is the one to be written next.

    Live payloads lie within M − ALIGN bytes from `floor_position`, so the difference modulo M is it.
    """
    if sequence == w.head:
        return position
    at = w.descriptors + (sequence & (w.frames - 1)) * _FRAME_BYTES + _OFFSET
    offset = load_relaxed_u32(at) * _ALIGN
    return w.floor_position + ((offset - w.floor_position) & (w.arena_bytes - 1))


@jit
def reserve(w, frames, size):  # type: ignore[no-untyped-def]
    """Make room for up to `frames` frames and `size` contiguous arena bytes from `w.position` on.

    True: all frames below the new floor may be overwritten. False: a gating reader is in the way;
    nothing changed but the count of full events. Never more than frames − 1 and arena_bytes − ALIGN.
    """
    start = w.position
    if (start & (w.arena_bytes - 1)) + size > w.arena_bytes:
        start = (start | (w.arena_bytes - 1)) + 1  # would pass the end: begin again at offset 0
    floor = max(w.floor, w.head + frames + 1 - w.frames)
    position = w.floor_position
    overwritten_below = start + size + _ALIGN - w.arena_bytes
    if position < overwritten_below:  # else no need to fetch an old descriptor
        position = _position_of(w, floor, start)
        while position < overwritten_below and floor < w.head:
            floor += 1
            position = _position_of(w, floor, start)
    if floor > w.gate and not _look(w, floor):
        return False
    w.position = start
    w.floor_position = position
    if floor > w.floor:
        w.floor = floor
        store_relaxed(w.writer + _FLOOR, floor)
        fence_release()  # before any byte of the batch; pairs with the fence in reader.poll's copy
    return True


@jit
def _lowest_cursor(w):  # type: ignore[no-untyped-def]
    """The lowest cursor of the gating readers; the head where there is none."""
    lowest = w.head
    for i in range(w.readers):
        slot = w.slots + i * _SLOT_BYTES
        word = load_acquire(slot)
        if (word & 0xFF) == _ACTIVE and ((word >> _POLICY_SHIFT) & 0xFF) == _GATE:
            lowest = min(lowest, load_acquire(slot + _CURSOR))
    return lowest


@jit
def _look(w, floor):  # type: ignore[no-untyped-def]
    """Look at all cursors anew: may the floor rise to `floor`? Keeps account of the time it may not."""
    fence_seq_cst()  # our published before their words; pairs with the fence in reader.activate
    w.gate = _lowest_cursor(w)
    if w.gate < floor and (_evict_dead(w, floor) or _demote_stalled(w, floor)):
        w.gate = _lowest_cursor(w)
    if w.head - w.gate > load_relaxed(w.writer + _HIGH_WATER):
        store_relaxed(w.writer + _HIGH_WATER, w.head - w.gate)
    if w.gate < floor or w.full_since_ns != 0:
        _count_full(w)
    if w.gate >= floor:
        w.full_since_ns = 0
        w.stalled_ns = 0
    return w.gate >= floor


@jit
def _count_full(w):  # type: ignore[no-untyped-def]
    """The ring is full, or was until now: count the event once, and the time as it passes."""
    now_ns = monotonic_ns()
    if w.full_since_ns == 0:
        store_relaxed(w.writer + _FULL_EVENTS, load_relaxed(w.writer + _FULL_EVENTS) + 1)
    else:
        full_ns = now_ns - w.full_since_ns
        store_relaxed(w.writer + _FULL_NS, load_relaxed(w.writer + _FULL_NS) + full_ns)
        w.stalled_ns += min(full_ns, _LONGEST_LOOK_NS)
    w.full_since_ns = now_ns


@jit
def _evict_dead(w, floor):  # type: ignore[no-untyped-def]
    """Free the slots of gating readers below `floor` that hold their lock no more; was there one?"""
    evicted = False
    for i in range(w.readers):
        slot = w.slots + i * _SLOT_BYTES
        word = load_acquire(slot)  # before the lock: a successor raises the generation, and our CAS fails
        gating = (word & 0xFF) == _ACTIVE and ((word >> _POLICY_SHIFT) & 0xFF) == _GATE
        if gating and load_acquire(slot + _CURSOR) < floor and not _is_locked(w.lock_fd, _LOCK_READER + i):
            evicted |= compare_and_swap(slot, word, word - _ACTIVE + _FREE)
    return evicted


@jit
def _demote_stalled(w, floor):  # type: ignore[no-untyped-def]
    """Let the readers below `floor` skip that have held us up for as long as they may; was there one?"""
    demoted = False
    for i in range(w.readers):
        slot = w.slots + i * _SLOT_BYTES
        word = load_acquire(slot)
        gating = (word & 0xFF) == _ACTIVE and ((word >> _POLICY_SHIFT) & 0xFF) == _GATE
        demote_ns = load_acquire(slot + _DEMOTE_NS)
        if gating and 0 < demote_ns <= w.stalled_ns and load_acquire(slot + _CURSOR) < floor:
            demoted |= compare_and_swap(slot, word, word + _DEMOTED)
    return demoted


@jit
def _is_locked(fd, byte):  # type: ignore[no-untyped-def]
    """locks.held_by_other for compiled code."""
    flock = scratch()  # struct flock: type and whence (two shorts), start, length, pid
    store_relaxed(flock, 1)  # F_WRLCK, SEEK_SET
    store_relaxed(flock + 8, byte)
    store_relaxed(flock + 16, 1)
    store_relaxed(flock + 24, 0)
    if fcntl(fd, 36, flock) != 0:  # F_OFD_GETLK
        return True  # can't tell: nobody is evicted on a guess
    return (load_relaxed_u32(flock) & 0xFFFF) != 2  # F_UNLCK


@jit
def packets_in(length, segment):  # type: ignore[no-untyped-def]
    """How many packets a frame of `length` bytes holds, each of `segment` bytes but the last; 0: one."""
    return 1 if segment == 0 else max((length + segment - 1) // segment, 1)


@jit
def describe(w, index, number, time_ns, position, length, socket_ns, segment, flags):  # type: ignore[no-untyped-def]
    """Write the descriptor of frame `head + index`: (number, position) of the frame behind it.

    number: of its first packet; the batch begins with w.number. position: virtual, of its payload; a
    multiple of ALIGN, from w.position on. The other fields as in layout.DESCRIPTOR. Nothing of `w` is
    changed before `publish`: what is handed from call to call stays in registers.
    """
    return describe_in(table_of(w), index, number, time_ns, position, length, socket_ns, segment, flags)


@jit
def table_of(w):  # type: ignore[no-untyped-def]
    """What `describe` needs of `w`, which no publish changes but for the last, head: for `describe_in`."""
    return w.descriptors, w.frames - 1, w.arena_bytes - 1, w.head


@jit
def describe_in(  # type: ignore[no-untyped-def]
    table, index, number, time_ns, position, length, socket_ns, segment, flags
):
    """`describe`, for a tight loop over a batch: `table_of(w)`, taken before the loop, stays in registers.

    The compiler can't see that a descriptor is not `w`, so `describe` must read that anew for each.
    """
    descriptors, mask, arena_mask, head = table
    place = ((position & arena_mask) // _ALIGN) | (length << 32)
    words = (number, time_ns, place, socket_ns | (segment << 32) | (flags << 48))
    store_record(descriptors + ((head + index) & mask) * _FRAME_BYTES, words)
    return number + packets_in(length, segment), position + ((length + _ALIGN - 1) & -_ALIGN)


@jit
def describe_source(w, index, address, port_family_interface, flow):  # type: ignore[no-untyped-def]
    """Write the source record of frame `head + index`, of a ring that has them: words as in layout.SOURCE.

    address: two words.
    """
    at = w.sources + ((w.head + index) & (w.frames - 1)) * _SOURCE_BYTES
    store_record(at, (address[0], address[1], port_family_interface, flow))


@jit
def publish(w, count, number, position, size):  # type: ignore[no-untyped-def]
    """Make the `count` frames described since the last publish visible, and wake who sleeps.

    number, position: as the last `describe` gave them. size: payload bytes of the batch.
    """
    head = w.head + count
    # Readers find the number of packets before `published` in the descriptor that comes next.
    store_relaxed(w.descriptors + (head & (w.frames - 1)) * _FRAME_BYTES, number)
    w.head = head
    w.number = number
    w.position = position
    w.bytes += size
    store_relaxed(w.writer + _PACKETS, number)
    store_relaxed(w.writer + _BYTES, w.bytes)
    store_release(w.writer + _PUBLISHED, head)  # pairs with the acquire in reader.poll
    _wake(w)


@jit
def _wake(w):  # type: ignore[no-untyped-def]
    """Wake the sleepers, if there may be one.

    No wake is lost: the reader stores `waiting`, fences, looks at `published`; we store `published`,
    fence, look at `waiting`. One of the two sees the other. `waiting` is cleared before `wake` is
    raised: who sets it again after that has also seen the new `wake`, or will not sleep on the old.
    """
    fence_seq_cst()  # pairs with the fence in wait._sleep
    if load_relaxed_u32(w.waiting) != 0:
        store_relaxed_u32(w.waiting, 0)
        fetch_add_u32(w.writer + _WAKE, 1)
        futex_wake_all(w.writer + _WAKE)


@jit
def set_state(w, state):  # type: ignore[no-untyped-def]
    """Say RUNNING or CLOSED (after the last publish), and wake everyone to see it."""
    store_release(w.writer + _STATE, state)  # pairs with the acquire in reader.is_closed
    _wake(w)


@jit
def resume(w):  # type: ignore[no-untyped-def]
    """Take up where the last writer stopped: behind its last published frame, its floor kept.

    What it had reserved and not published lies beyond `published` and is forgotten. The positions are
    worked out from the descriptors, all of which are intact from `floor` to `published`.
    """
    w.head = load_acquire(w.writer + _PUBLISHED)
    w.floor = load_acquire(w.writer + _FLOOR)
    w.gate = w.floor
    w.bytes = load_relaxed(w.writer + _BYTES)
    w.number = load_relaxed(w.descriptors + (w.head & (w.frames - 1)) * _FRAME_BYTES)
    w.floor_position = 0
    w.position = 0
    if w.head > w.floor:
        first = w.descriptors + (w.floor & (w.frames - 1)) * _FRAME_BYTES
        w.floor_position = load_relaxed_u32(first + _OFFSET) * _ALIGN
        last = w.descriptors + ((w.head - 1) & (w.frames - 1)) * _FRAME_BYTES
        length = load_relaxed_u32(last + _OFFSET + 4)
        w.position = _position_of(w, w.head - 1, 0) + ((length + _ALIGN - 1) & -_ALIGN)
    store_relaxed(w.writer + _PACKETS, w.number)


@jit
def append(w, address, length, time_ns, flow=0):  # type: ignore[no-untyped-def]
    """Copy one packet of `length` bytes from `address` into the ring and publish it; False when full."""
    if not reserve(w, 1, length):
        return False
    memmove(w.arena + (w.position & (w.arena_bytes - 1)), address, length)
    if w.sources != 0:
        describe_source(w, 0, (0, 0), 0, flow)
    number, position = describe(w, 0, w.number, time_ns, w.position, length, 0, 0, 0)
    publish(w, 1, number, position, length)
    return True


@jit
def append_waiting(state, address, length, time_ns, deadline_ns, flow=0):  # type: ignore[no-untyped-def]
    """`append`, waiting for room until CLOCK_MONOTONIC `deadline_ns`. Times are the packet's, in ns."""
    w = state[0]
    while not append(w, address, length, time_ns if time_ns != 0 else realtime_ns(), flow):
        if monotonic_ns() >= deadline_ns:
            return False
        sleep_ns(50_000)
    return True


@jit
def _append_entry(record, address, length, time_ns, deadline_ns, flow):  # type: ignore[no-untyped-def]
    """`append_waiting` with the address of the record: numbers pass into compiled code faster than arrays."""
    state = carray(pointer(record), 1, WRITER_STATE)
    return append_waiting(state, address, length, time_ns, deadline_ns, flow)


@jit
def start_writing(state):  # type: ignore[no-untyped-def]
    w = state[0]
    resume(w)
    set_state(w, _RUNNING)


@jit
def finish_writing(state):  # type: ignore[no-untyped-def]
    set_state(state[0], _CLOSED)


def _as_bytes(payload: Any) -> memoryview | bytes:
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else b""  # what is empty can't be cast


class Writer:
    """The one writer of a ring. Also a context manager: leaving it closes the ring.

    Threads may share it: each packet is written whole. RingError where the ring has a living writer.
    `record` (WRITER_STATE, shape (1,)) is for compiled
    code: pass it on and use the functions of this module with `record[0]`.
    """

    def __init__(self, ring: Ring) -> None:
        if int(compiled_layout_hash()) != LAYOUT_HASH:
            raise RingError("compiled code of another version: empty the compile cache")
        self._ring = ring
        self._segment = ring.segment.reopen()  # a lock of our own needs a description of our own
        if not locks.acquire(self._segment.fd, LOCK_WRITER):
            self._segment.forget()
            raise RingError(f"ring {ring.name} has a writer: there can be only one")
        self._memory = np.frombuffer(self._segment.map(writable=True, ahead=True), np.uint8)
        base = self._memory.ctypes.data
        geometry = ring.geometry
        self.section: NDArray[Any] = self._memory[geometry.writer :][: WRITER.itemsize].view(WRITER)
        self.section["epoch"] += 1
        self.section["pid"] = os.getpid()
        self.record = np.zeros(1, WRITER_STATE)
        w = self.record[0]
        w["writer"] = base + geometry.writer
        w["waiting"] = base + geometry.waiting
        w["slots"] = base + geometry.slots
        w["descriptors"] = base + geometry.descriptors
        w["sources"] = base + geometry.source_records if geometry.sources else 0
        w["arena"] = base + geometry.arena
        w["frames"] = geometry.frames
        w["arena_bytes"] = geometry.arena_bytes
        w["readers"] = geometry.readers
        w["lock_fd"] = self._segment.fd
        start_writing(self.record)
        self._lock = RLock()
        # What is to be written goes through here: its address is known, and asking for one is slow.
        self._staging = np.zeros(MAX_FRAME_BYTES, np.uint8)
        self._staged = memoryview(self._staging.data)
        self._addresses = self.record.ctypes.data, self._staging.ctypes.data
        in_children(self, Writer._disown)

    @staticmethod
    def compile() -> None:
        """Compile what a writer runs, without running it."""
        state = np.zeros(1, WRITER_STATE)
        compile_for(compiled_layout_hash)
        compile_for(start_writing, state)
        compile_for(finish_writing, state)
        compile_for(_append_entry, 0, 0, 0, 0, 0, 0)

    def write(
        self,
        payload: bytes | bytearray | memoryview | NDArray[np.uint8],
        *,
        time_ns: int = 0,
        flow: int = 0,
        timeout_s: float | None = None,
    ) -> bool:
        """Publish one packet, waiting for gating readers to make room.

        payload: any contiguous buffer of 0 … 65,536 bytes. time_ns: CLOCK_REALTIME, 0 for now.
        flow: 0 … 2⁶³ − 1, for readers that share the work by it; the ring needs source records.
        timeout_s: how long to wait, None for as long as it takes; False if there was no room by then.
        """
        data = payload if isinstance(payload, bytes) else _as_bytes(payload)
        size, time_ns, flow = len(data), index(time_ns), index(flow)
        if size > self._ring.geometry.arena_bytes // 2:
            raise RingError(f"{size} bytes do not fit half the arena: make the ring larger")
        if size > MAX_FRAME_BYTES:
            raise RingError(f"{size} bytes do not fit a frame: give at most {MAX_FRAME_BYTES}")
        if flow != 0 and (not self._ring.geometry.sources or not 0 < flow <= _MAX_FLOW):
            raise RingError(f"flow {flow}: give 0 to {_MAX_FLOW}, to a ring created with sources=True")
        until_ns, end_ns = 0, None  # the first try waits for nothing
        while not self._try(data, size, time_ns, until_ns, flow):
            now_ns = int(monotonic_ns())
            end_ns = now_ns + duration_ns(timeout_s) if end_ns is None else end_ns
            if now_ns >= end_ns:
                return False
            until_ns = min(end_ns, now_ns + _SLICE_NS)
        return True

    def _try(self, data: memoryview | bytes, size: int, time_ns: int, until_ns: int, flow: int) -> bool:
        """Write it now, or by CLOCK_MONOTONIC `until_ns`; was there room?"""
        with self._lock:
            # It stays mapped while we write, though a signal handler may close us meanwhile.
            memory = self._memory
            self._check_open()
            self._staged[:size] = data
            written = bool(_append_entry(*self._addresses, size, time_ns, until_ns, flow))
            self._check_open()  # else it may have come behind the end, where nobody looks
            del memory
        return written

    def _check_open(self) -> None:
        if self._segment.fd < 0:
            raise RingError(f"this writer of ring {self._ring.name} is closed: take another")

    def close(self) -> None:
        """Say that nothing more comes: readers drain what is there, then end."""
        with self._lock:
            if self._segment.fd >= 0:
                finish_writing(self.record)
                self.abandon()

    def abandon(self) -> None:
        """Let go without closing the ring, as if this process had died: another writer may go on."""
        with self._lock:
            self.section = np.zeros(0, WRITER)
            self._memory = np.zeros(0, np.uint8)
            self._segment.forget()

    def _disown(self) -> None:
        """In a forked child. Compiled code may write on, but can't ask who is dead: it evicts none."""
        self._lock = RLock()  # a thread that had it is not in the child
        self._segment.close()
        self.record[0]["lock_fd"] = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
