"""The reading end of a ring: poll → (work) → release.

    poll       the next frames, contiguous in memory: at most `max_frames` and `max_bytes`, half the ring
               each by default, so that reader and writer never run in lockstep.
    release    they are done with: the account first, then the cursor, which frees their place.

A gating reader works in place: the writer cannot pass its cursor. A skipping reader works on a copy,
taken so: copy the descriptors, fence, look at `floor`, drop what it has passed; then the same with the
payload bytes. What `floor` has not passed after the copy was not being written during it (writer.py).
Looking at `published` instead would not do: the writer writes before it publishes.

In place is also wrong for a gating reader that died and came back: while its slot was free, in its last
life or one before, the writer may have decided to pass its cursor. Until that has passed `protected`, the
head when it came back, it copies too.

Packets are counted, not frames. For each reader, at every moment and after any crash:

    delivered + skipped + passed + unread = packets published − packets when it joined

`unread` is looked up (number of the first packet at `published` − at the cursor), never a remainder.
The account is two records: the idle one is filled, then `cursor` is stored; the record whose cursor
equals it is the valid one. There is no moment without one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from operator import index
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rings import locks
from rings.account import valid_account
from rings.atomics import (
    compare_and_swap,
    fence_acquire,
    fence_release,
    fence_seq_cst,
    load_acquire,
    load_relaxed,
    load_relaxed_u32,
    store_relaxed,
    store_release,
)
from rings.batch import Batch
from rings.jit import compile_for, jit
from rings.layout import (
    ACCOUNT,
    DESCRIPTOR,
    GENERATION_SHIFT,
    LAYOUT_HASH,
    LOCK_JOIN,
    LOCK_READER,
    MAX_FRAME_BYTES,
    NAME_BYTES,
    PAGE,
    READER,
    SOURCE,
    WRITER,
    Policy,
    SlotState,
    WriterState,
    offsets,
    round_up,
    slot_word,
)
from rings.libc import memmove, monotonic_ns
from rings.ring import writer_state
from rings.segment import RingError, duration_ns, in_children
from rings.wait import STRATEGIES, wait
from rings.writer import compiled_layout_hash, packets_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rings.ring import Ring

_PUBLISHED, _FLOOR, _STATE = offsets(WRITER, "published", "floor", "state")
_CURSOR, _ACCOUNTS = offsets(READER, "cursor", "accounts")
_JOINED_PACKETS, _JOINED_FRAME = offsets(READER, "joined_packets", "joined_frame")
_OFFSET, _LENGTH, _SEGMENT = offsets(DESCRIPTOR, "offset", "length", "segment")
(_FLOW,) = offsets(SOURCE, "flow")
_ACCOUNT_BYTES = ACCOUNT.itemsize
_FRAME_BYTES = DESCRIPTOR.itemsize
_SOURCE_BYTES = SOURCE.itemsize
_ALIGN_SHIFT = 4  # descriptors count offsets in 16 bytes
_BLOCK_SHIFT = 6
BLOCK_FRAMES = 1 << _BLOCK_SHIFT  # what the members of a split take in turn
MAX_SPLIT = 64
_CLOSED = int(WriterState.CLOSED)
NEVER = (1 << 62) - 1  # `protected` of a reader that always copies
_SLICE_NS = 50_000_000  # of a wait: compiled code sees no signals
_MOST_DEMOTE_S = 1e9
_JOIN_S = 2.0  # a join takes microseconds: who holds the lock so long is stopped

# The reader's private state. Addresses are of this process's mappings; the slot lies in the only part
# that is mapped writable. Numbers and packets count packets, all else frames.
READER_STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "writer",
            "waiting",
            "slot",
            "descriptors",
            "sources",  # 0: the ring has none
            "arena",
            "frames",
            "arena_bytes",
            "cursor",
            "packets",  # number of the first packet at the cursor
            "delivered",
            "skipped",
            "passed",
            "account",  # which of the two records is idle
            "protected",  # from here on the writer cannot pass us
            "max_frames",
            "max_bytes",
            "copy_frames",  # the same for batches that are copied
            "copy_bytes",
            "copied_descriptors",
            "copied_sources",
            "copied_arena",
            "batch_frames",
            "batch_descriptors",  # address of the first descriptor of the batch
            "batch_arena",  # payload of a frame: here + offset × 16
            "batch_end_number",  # of the first packet after the batch
            "split",  # members that share the work, 1: nobody else
            "member",  # which of them we are
            "by_flow",  # each takes whole flows; else blocks of frames in turn
            "nap_since_ns",
            "nap_cursor",
        )
    ],
    align=True,
)


@jit
def _descriptor(r, sequence):  # type: ignore[no-untyped-def]
    return r.descriptors + (sequence & (r.frames - 1)) * _FRAME_BYTES


@jit
def _keep_account(r, cursor):  # type: ignore[no-untyped-def]
    """Move the cursor, with the account that belongs to it."""
    fence_release()  # the last cursor before we fill the record that was valid until then
    at = r.slot + _ACCOUNTS + r.account * _ACCOUNT_BYTES
    store_relaxed(at, cursor)
    store_relaxed(at + 8, r.packets)
    store_relaxed(at + 16, r.delivered)
    store_relaxed(at + 24, r.skipped)
    store_relaxed(at + 32, r.passed)
    r.account = 1 - r.account
    r.cursor = cursor
    # After all reads of the frames it frees and after the account; pairs with the acquire in
    # writer._lowest_cursor, and with that of whoever reads the account.
    store_release(r.slot + _CURSOR, cursor)


@jit
def number_at(r, sequence):  # type: ignore[no-untyped-def]
    """Number of the first packet at `sequence` (floor ≤ sequence ≤ published); −1 if overtaken."""
    number = load_relaxed(_descriptor(r, sequence))
    fence_acquire()  # pairs with the fence in writer.reserve
    return number if load_relaxed(r.writer + _FLOOR) <= sequence else -1


@jit
def _skip_to_floor(r):  # type: ignore[no-untyped-def]
    """Go to the oldest intact frame; what lies between is skipped, to the packet."""
    while True:
        floor = load_acquire(r.writer + _FLOOR)
        if floor <= r.cursor:
            return
        number = number_at(r, floor)
        if number >= 0:
            r.skipped += number - r.packets
            r.packets = number
            _keep_account(r, floor)


@jit
def _pass_others(r, most):  # type: ignore[no-untyped-def]
    """Go past what is the other members', as far as it is published; how many frames, `most` being enough,
    are then our own."""
    if r.split == 1:
        return r.frames
    return _pass_flows(r, most) if r.by_flow != 0 else _pass_blocks(r)


@jit
def _source(r, sequence):  # type: ignore[no-untyped-def]
    return r.sources + (sequence & (r.frames - 1)) * _SOURCE_BYTES


@jit
def _pass_flows(r, most):  # type: ignore[no-untyped-def]
    """`_pass_others` where flow f is member f mod N's."""
    while True:
        published = load_acquire(r.writer + _PUBLISHED)
        last = min(published, r.cursor + r.max_frames)  # a long way is gone in steps: the writer may wait
        ours = r.cursor
        while ours < last and load_relaxed(_source(r, ours) + _FLOW) % r.split != r.member:
            ours += 1
        end, last = ours, min(last, ours + most)  # what is not taken now is looked at again
        while end < last and load_relaxed(_source(r, end) + _FLOW) % r.split == r.member:
            end += 1
        number = load_relaxed(_descriptor(r, ours))
        fence_acquire()  # all that before the look; pairs with the fence in writer.reserve
        if load_relaxed(r.writer + _FLOOR) > r.cursor:
            _skip_to_floor(r)
            continue
        if ours > r.cursor:
            r.passed += number - r.packets
            r.packets = number
            _keep_account(r, ours)
        if end > ours or ours == published:
            return end - ours


@jit
def _pass_blocks(r):  # type: ignore[no-untyped-def]
    """`_pass_others` where block b, of BLOCK_FRAMES frames, is member b mod N's."""
    while True:
        block = r.cursor >> _BLOCK_SHIFT
        blocks = (r.member - block) % r.split  # until the next of ours
        if blocks == 0:
            return ((block + 1) << _BLOCK_SHIFT) - r.cursor
        end = min((block + blocks) << _BLOCK_SHIFT, load_acquire(r.writer + _PUBLISHED))
        if end <= r.cursor:
            return 0
        number = number_at(r, end)
        if number < 0:  # lapped meanwhile; never where the writer waits for us
            _skip_to_floor(r)
            continue
        r.passed += number - r.packets
        r.packets = number
        _keep_account(r, end)


@jit
def _contiguous(r, first, count, max_bytes):  # type: ignore[no-untyped-def]
    """How many of `count` descriptors from address `first` have payloads in one piece of `max_bytes`.

    Offsets rise within a batch but where the arena begins again at 0. Halving may stop short of the
    exact place: the rest is the next batch.
    """
    begin = load_relaxed_u32(first + _OFFSET)
    while count > 1:
        last = first + (count - 1) * _FRAME_BYTES
        offset = load_relaxed_u32(last + _OFFSET)
        if offset >= begin:
            size = ((offset - begin) << _ALIGN_SHIFT) + load_relaxed_u32(last + _OFFSET + 4)
            if size <= max_bytes:
                break
        count >>= 1
    return count


@jit
def _end_number(first, count):  # type: ignore[no-untyped-def]
    """Number of the first packet behind `count` descriptors from address `first`.

    Worked out from the last of them. It stands in the next descriptor, too, but that is the one which the
    writer is about to fill: each look would take its cache line away from him.
    """
    last = first + (count - 1) * _FRAME_BYTES
    length, segment = load_relaxed_u32(last + _LENGTH), load_relaxed_u32(last + _SEGMENT) & 0xFFFF
    return load_relaxed(last) + packets_in(length, segment)


@jit
def poll(r, most):  # type: ignore[no-untyped-def]
    """The next batch, of at most `most` frames: how many there are, 0 if none is published.

    Sets r.batch_descriptors, r.batch_arena, r.batch_frames. Valid until `release`.
    """
    if r.cursor < r.protected:
        return _poll_copy(r, most)
    own = _pass_others(r, most)
    count = load_acquire(r.writer + _PUBLISHED) - r.cursor  # pairs with the release in writer.publish
    count = min(count, most, own, r.max_frames, r.frames - (r.cursor & (r.frames - 1)))
    if count > 0:
        first = _descriptor(r, r.cursor)
        count = _contiguous(r, first, count, r.max_bytes)
        r.batch_descriptors = first
        r.batch_arena = r.arena
        r.batch_end_number = _end_number(first, count)
    r.batch_frames = count
    return count


@jit
def _poll_copy(r, most):  # type: ignore[no-untyped-def]
    """`poll` for a reader that the writer may overtake."""
    while True:
        _skip_to_floor(r)
        own = _pass_others(r, min(most, r.copy_frames))
        count = load_acquire(r.writer + _PUBLISHED) - r.cursor
        count = min(count, most, own, r.copy_frames, r.frames - (r.cursor & (r.frames - 1)))
        r.batch_frames = max(count, 0)
        if count <= 0:
            return 0
        copied = r.copied_descriptors
        memmove(copied, _descriptor(r, r.cursor), count * _FRAME_BYTES)
        if r.sources != 0:
            memmove(r.copied_sources, _source(r, r.cursor), count * _SOURCE_BYTES)
        fence_acquire()  # the copy before the look; pairs with the fence in writer.reserve
        if load_relaxed(r.writer + _FLOOR) > r.cursor:
            continue  # only intact descriptors tell how much to copy
        count = _contiguous(r, copied, count, r.copy_bytes)
        end_number = _end_number(copied, count)
        begin = load_relaxed_u32(copied + _OFFSET) << _ALIGN_SHIFT
        last = copied + (count - 1) * _FRAME_BYTES
        end = (load_relaxed_u32(last + _OFFSET) << _ALIGN_SHIFT) + load_relaxed_u32(last + _OFFSET + 4)
        memmove(r.copied_arena, r.arena + begin, end - begin)
        fence_acquire()  # as above
        overtaken = load_relaxed(r.writer + _FLOOR) - r.cursor
        if overtaken >= count:
            continue
        if overtaken > 0:
            number = load_relaxed(copied + overtaken * _FRAME_BYTES)
            r.skipped += number - r.packets
            r.packets = number
            _keep_account(r, r.cursor + overtaken)
            copied += overtaken * _FRAME_BYTES
            count -= overtaken
        r.batch_descriptors = copied
        r.batch_arena = r.copied_arena - begin
        r.batch_end_number = end_number
        r.batch_frames = count
        return count


@jit
def release(r, count):  # type: ignore[no-untyped-def]
    """The first `count` frames of the batch are handled; the rest of it stays valid."""
    if count <= 0:
        return
    number = r.batch_end_number
    if count < r.batch_frames:
        number = load_relaxed(r.batch_descriptors + count * _FRAME_BYTES)
    r.delivered += number - r.packets
    r.packets = number
    r.batch_descriptors += count * _FRAME_BYTES
    r.batch_frames -= count
    _keep_account(r, r.cursor + count)


@jit
def is_closed(r):  # type: ignore[no-untyped-def]
    """Has the writer said that nothing more comes? Ask before the poll whose 0 is to be the last."""
    return load_acquire(r.writer + _STATE) == _CLOSED  # pairs with the release in writer.set_state


@jit
def claim(slot, expected, wanted):  # type: ignore[no-untyped-def]
    """Take a slot whose word is still `expected`."""
    return compare_and_swap(slot, expected, wanted)


@jit
def activate(state, word, fresh):  # type: ignore[no-untyped-def]
    """Become ACTIVE with `word`. A fresh reader starts at the head.

    The writer looks at us only from ACTIVE on, and may by then have decided, from a look before it, to
    overwrite anything below its head of that moment. So `published` is loaded after the fence: it is
    at least that head. The cursor stored before may lie below the floor; the writer then sees no space.
    """
    r = state[0]
    store_release(r.slot, word)
    fence_seq_cst()  # pairs with the fence in writer._look
    while True:
        published = load_acquire(r.writer + _PUBLISHED)
        if r.protected != NEVER:
            r.protected = published
        if not fresh:
            return
        r.packets = number_at(r, published)
        if r.packets >= 0:
            store_relaxed(r.slot + _JOINED_PACKETS, r.packets)
            store_relaxed(r.slot + _JOINED_FRAME, published)
            if published != r.cursor:  # two records of one cursor would both be valid
                _keep_account(r, published)
            return


@jit
def _poll_entry(state, most):  # type: ignore[no-untyped-def]
    closed = is_closed(state[0])
    count = poll(state[0], most)
    return -1 if count == 0 and closed else count


@jit
def _release_entry(state, count):  # type: ignore[no-untyped-def]
    release(state[0], count)


@jit
def _wait_entry(state, strategy, deadline_ns):  # type: ignore[no-untyped-def]
    return wait(state[0], strategy, deadline_ns)


class Reader:
    """A reader of a ring. Also a context manager, an iterator and an async iterator of batches.

        for batch in reader:
            for i in range(len(batch)):
                handle(batch.payload(i))

    A batch is valid until the next step. Iteration ends when the writer has closed the ring and all is
    read. RingError where the name is held by a living reader, or no slot is free.

    name: up to 32 bytes; the name of a reader that died takes up its place, counts and all.
    policy: "gate", the writer waits for this reader; "skip", it is lapped and told how much it lost.
    wait: "block" sleeps, "yield" gives up its slice, "spin" burns its core.
    max_frames, max_bytes: the largest batch; by default, and at most, half the ring.
    demote_s: with "gate": once the writer has waited so long for this reader without a move of it, it is a
    "skip" reader. It copies from the start, as those do.
    split, member: this is member 0 … split − 1 of so many that share the work; what it leaves to the others
    it counts as `passed`.
    by: "block", each handles every split-th block of BLOCK_FRAMES frames; "flow", every flow f with
    f mod split == member, in order (the ring needs source records).
    `record` (READER_STATE, shape (1,)) is for compiled code: poll(record[0], …) and so on. It may be given:
    the readers of several rings stand in one array for `wait_any`.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        name: str | None = None,
        policy: str = "gate",
        wait: str = "block",
        max_frames: int | None = None,
        max_bytes: int | None = None,
        split: int = 1,
        member: int = 0,
        by: str = "block",
        demote_s: float | None = None,
        record: NDArray[Any] | None = None,
    ) -> None:
        if int(compiled_layout_hash()) != LAYOUT_HASH:
            raise RingError("compiled code of another version: empty the compile cache")
        if policy not in ("gate", "skip"):
            raise RingError(f"policy {policy!r}: use gate or skip")
        if wait not in STRATEGIES:
            raise RingError(f"wait {wait!r}: use block, yield or spin")
        split, member = index(split), index(member)
        if not 0 <= member < split <= MAX_SPLIT:
            raise RingError(
                f"member {member} of {split}: give a split of 1 to {MAX_SPLIT} and 0 ≤ member < split"
            )
        if by not in ("block", "flow"):
            raise RingError(f"by {by!r}: use block or flow")
        if by == "flow" and not ring.geometry.sources:
            raise RingError(
                f"ring {ring.name} does not say whose its frames are: create it with sources=True"
            )
        if demote_s is not None and (policy != "gate" or not 0 < demote_s < _MOST_DEMOTE_S):
            raise RingError(f"demote_s {demote_s}: give seconds greater than 0, with policy gate")
        self.name = f"reader-{os.getpid()}" if name is None else name
        if not 1 <= len(self.name.encode()) <= NAME_BYTES or "\0" in self.name:
            raise RingError(f"reader name {self.name!r}: use 1 to {NAME_BYTES} bytes")
        geometry = ring.geometry
        self._ring = ring
        self._demote_ns = 0 if demote_s is None else max(int(demote_s * 1e9), 1)
        self._policy = Policy.GATE if policy == "gate" else Policy.SKIP
        self.strategy = STRATEGIES[wait]
        self._segment = ring.segment.reopen()
        self._memory = np.frombuffer(self._segment.map(writable=False, ahead=True), np.uint8)
        shared_at, shared_bytes = geometry.waiting, geometry.descriptors - geometry.waiting
        self._shared = np.frombuffer(
            self._segment.map(writable=True, offset=shared_at, length=shared_bytes), np.uint8
        )
        self._slots: NDArray[Any] = self._shared[geometry.slots - shared_at :][
            : geometry.readers * READER.itemsize
        ].view(READER)
        frames = max(min(index(max_frames or geometry.frames // 2), geometry.frames // 2), 1)
        size = max(min(index(max_bytes or geometry.arena_bytes // 2), geometry.arena_bytes // 2), 0)
        # The copy: small enough for the caches. A frame that is larger than `copy_bytes` comes alone.
        copy_frames, copy_bytes = min(frames, 1024), min(size, 4 * MAX_FRAME_BYTES)
        descriptors_bytes = round_up(copy_frames * DESCRIPTOR.itemsize, PAGE)
        sources_bytes = round_up(copy_frames * SOURCE.itemsize, PAGE) if geometry.sources else 0
        control_bytes = descriptors_bytes + sources_bytes
        self._copy = np.zeros(control_bytes + max(copy_bytes, MAX_FRAME_BYTES), np.uint8)
        self.record = np.zeros(1, READER_STATE) if record is None else record
        self.section: Any = self._memory[geometry.writer :][: WRITER.itemsize].view(WRITER)[0]
        base, r = self._memory.ctypes.data, self.record[0]
        r["writer"] = base + geometry.writer
        r["waiting"] = self._shared.ctypes.data
        r["descriptors"] = base + geometry.descriptors
        r["sources"] = base + geometry.source_records if geometry.sources else 0
        r["arena"] = base + geometry.arena
        r["frames"] = geometry.frames
        r["arena_bytes"] = geometry.arena_bytes
        r["max_frames"] = frames
        r["max_bytes"] = size
        r["split"], r["member"], r["by_flow"] = split, member, by == "flow"
        r["copy_frames"] = copy_frames
        r["copy_bytes"] = copy_bytes
        r["copied_descriptors"] = self._copy.ctypes.data
        r["copied_sources"] = self._copy.ctypes.data + descriptors_bytes
        r["copied_arena"] = self._copy.ctypes.data + control_bytes
        self._batch: Batch | None = None
        self._lock = RLock()
        self._open = True
        in_children(self, Reader._disown)
        try:
            self._index = self._join()
        except BaseException:
            self._open = False
            self._let_go()
            raise

    @staticmethod
    def compile() -> None:
        """Compile what a reader runs, without running it."""
        state = np.zeros(1, READER_STATE)
        compile_for(claim, np.int64(0), 0, 0)
        compile_for(_start_account, state)
        compile_for(activate, state, 0, True)
        compile_for(_poll_entry, state, 0)
        compile_for(_release_entry, state, 0)
        compile_for(_wait_entry, state, 0, 0)

    # Joining, leaving -------------------------------------------------------------------------------

    def _join(self) -> int:
        """Take a slot: lock its byte first, then CAS its word. Joins are made one at a time."""
        fd = self._segment.fd
        if not locks.acquire_within(fd, LOCK_JOIN, _JOIN_S):
            raise RingError(f"another reader has been joining {self._ring.name} for {_JOIN_S:.0f} s: end it")
        try:
            for index in self._candidates():
                if locks.acquire(fd, LOCK_READER + index):
                    self._take(index)
                    return index
        finally:
            locks.release(fd, LOCK_JOIN)
        raise RingError(
            f"all {len(self._slots)} reader slots of {self._ring.name} are taken: create it with more"
        )

    def _candidates(self) -> list[int]:
        """Slots to try: the one of our name; else free ones, then those of the dead, longest unused first."""
        names = [bytes(name) for name in self._slots["name"]]
        mine = self.name.encode()
        if mine in names:
            index = names.index(mine)
            if locks.held_by_other(self._segment.fd, LOCK_READER + index):
                raise RingError(f"reader {self.name!r} of {self._ring.name} lives: use another name")
            return [index]
        free = [i for i, word in enumerate(self._slots["word"]) if word & 0xFF == SlotState.FREE]
        free.sort(key=lambda i: (names[i] != b"", self._slots["pid"][i] != 0))
        return free + [i for i in range(len(self._slots)) if i not in free]

    def _take(self, index: int) -> None:
        slot, r = self._slots[index], self.record[0]
        r["slot"] = self._slots.ctypes.data + index * READER.itemsize
        died = bytes(slot["name"]) == self.name.encode() and int(slot["pid"]) != 0
        while True:
            word = int(slot["word"])
            generation = (word >> GENERATION_SHIFT) + 1
            active = slot_word(SlotState.ACTIVE, self._policy, generation)
            joining = slot_word(SlotState.JOINING, self._policy, generation)
            # A dead reader's slot that was not freed stays ACTIVE under our hands: the writer keeps
            # looking at its cursor.
            stays = died and word == slot_word(SlotState.ACTIVE, self._policy, generation - 1)
            if claim(r["slot"], word, active if stays else joining):
                break  # else the writer freed it this moment; it does so only once
        if died:
            self._take_over(slot)
        else:
            self._begin(slot)
        slot["demote_ns"] = self._demote_ns
        r["protected"] = NEVER if self._policy is Policy.SKIP or self._demote_ns else 0
        activate(self.record, active, not died)
        slot["pid"] = os.getpid()

    def _begin(self, slot: Any) -> None:
        """A fresh account. The cursor is `published` of now; `activate` moves it to that of then."""
        slot["pid"] = 0
        slot["name"] = self.name.encode()
        slot["restarts"] = 0
        r = self.record[0]
        r["delivered"] = r["skipped"] = r["passed"] = 0
        r["account"] = _idle_record(slot)
        _start_account(self.record)

    def _take_over(self, slot: Any) -> None:
        """The account of the dead reader of our name."""
        slot["restarts"] += 1
        record = valid_account(slot)
        r = self.record[0]
        for name in ("cursor", "packets", "delivered", "skipped", "passed"):
            r[name] = record[name]
        r["account"] = _idle_record(slot)

    def close(self) -> None:
        """Leave: the slot is free, its account stays to be read until another takes the slot."""
        with self._lock:
            if self._open:
                self._end_batch()
                self._open = False
                slot = self._slots[self._index]
                word = int(slot["word"])
                slot["pid"] = 0
                claim(self.record[0]["slot"], word, word - SlotState.ACTIVE + SlotState.FREE)
                self._let_go()

    def _disown(self) -> None:
        """In a forked child: it must not leave the ring in our name. Compiled code may read on (`record`)."""
        self._lock = RLock()  # a thread that had it is not in the child
        self._open = False
        self._segment.close()

    def _let_go(self) -> None:
        self.section = None
        self._memory = self._shared = np.zeros(0, np.uint8)
        self._slots = np.zeros(0, READER)
        self._segment.forget()

    def _check_open(self) -> None:
        if not self._open:
            raise RingError(f"reader {self.name!r} is closed: attach another")

    # Reading ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ "live", "orphaned" (the writer died, its restart may come) or "closed"."""
        self._check_open()
        return writer_state(self.section, self._segment.fd)

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """`size` bytes at an address of the batch: of the ring, or of our copy. Read-only."""
        self._check_open()
        for memory in (self._memory, self._copy):
            at = address - memory.ctypes.data
            if 0 <= at <= memory.size - size:
                bytes_ = memory[at : at + size]
                bytes_.flags.writeable = False
                return bytes_
        raise RingError("this batch has ended: its reader was closed")

    def release(self, frames: int) -> int:
        """Release the next `frames` frames of the current batch; how many there were."""
        with self._lock:
            self._check_open()
            memory = self._memory, self._shared  # stay mapped, though a signal handler may close us meanwhile
            count = min(index(frames), int(self.record[0]["batch_frames"]))
            _release_entry(self.record, count)
            del memory
        return max(count, 0)

    def poll(self, most: int | None = None) -> Batch | None:
        """The next batch of at most `most` frames, or None if nothing is there now. Ends the last one.

        StopIteration when the writer has closed the ring and all is read.
        """
        most = NEVER if most is None else min(index(most), NEVER)
        if most < 1:
            raise RingError(f"a poll of {most} frames: ask for at least 1")
        with self._lock:
            self._check_open()
            memory = self._memory, self._shared  # as in release
            self._end_batch()
            count = _poll_entry(self.record, most)
            del memory
            if count > 0 and self._open:
                self._batch = Batch(self, count)
            batch = self._batch
        if count < 0:
            raise StopIteration
        return batch

    def wait(self, timeout_s: float) -> bool:
        """Wait, in this reader's way, until something can be polled or the writer closed the ring.

        False after `timeout_s`. Waits in slices: Ctrl-C is seen between two.
        """
        self._check_open()
        # Our mappings stay while these look at them, though another thread may close the reader.
        with self._memory.data, self._shared.data:
            now_ns = int(monotonic_ns())
            end_ns = now_ns + duration_ns(timeout_s)
            while not _wait_entry(self.record, self.strategy, min(end_ns, now_ns + _SLICE_NS)):
                now_ns = int(monotonic_ns())
                if now_ns >= end_ns or not self._open:
                    return False
            return True

    def _check_hope(self) -> None:
        """RingError where nothing can come any more: the writer died, and no other could find the ring."""
        if self.state == "orphaned" and not self._segment.is_linked():
            raise RingError(f"ring {self._ring.name} was removed, and its writer died without closing it")

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.end()
            _release_entry(self.record, int(self.record[0]["batch_frames"]))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while True:
            batch = self.poll()
            if batch is not None:
                return batch
            if not self.wait(1.0):
                self._check_hope()

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        while True:
            try:
                batch = self.poll()
            except StopIteration:
                raise StopAsyncIteration from None
            if batch is not None:
                return batch
            if not await asyncio.to_thread(self.wait, 0.1):
                self._check_hope()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@jit
def _start_account(state):  # type: ignore[no-untyped-def]
    """A first account at the present head; the record of the slot's last user then belongs to no cursor."""
    r = state[0]
    while True:
        published = load_acquire(r.writer + _PUBLISHED)
        r.packets = number_at(r, published)
        if r.packets >= 0:
            _keep_account(r, published)
            fence_release()  # not before the new one is valid
            store_relaxed(r.slot + _ACCOUNTS + r.account * _ACCOUNT_BYTES, -1)
            return


def _idle_record(slot: Any) -> int:
    """Which of the account records does not belong to the cursor?"""
    return 1 if slot["accounts"][0]["cursor"] == slot["cursor"] else 0
