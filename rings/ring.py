"""A ring as its users see it: create, attach, look at, remove."""

from __future__ import annotations

import atexit
import operator
import os
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rings import locks
from rings.layout import (
    ABI_VERSION,
    ALIGN,
    DESCRIPTOR,
    HEADER,
    LAYOUT_HASH,
    LOCK_OWNER,
    LOCK_READER,
    LOCK_WRITER,
    MAGIC,
    POLICY_SHIFT,
    READER,
    WRITER,
    Geometry,
    Policy,
    SlotState,
    WriterState,
)
from rings.segment import (
    RingError,
    Segment,
    check_name,
    create_segment,
    find,
    in_children,
    object_name,
    open_segment,
    remove_if_dead,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rings.reader import Reader
    from rings.writer import Writer

DEFAULT_BYTES = 40 << 20  # 32 MiB of arena: 100 ms at 1 M packets/s of 100 bytes, and into 64 MB of /dev/shm
ATTACH_S = 5.0  # how long an attacher waits for a creator at work


def boot_id() -> bytes:
    """The kernel's id of this boot: shared memory does not outlive it, but a copied file might."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def clock_offset_ns() -> int:
    """CLOCK_REALTIME − CLOCK_MONOTONIC."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """One reader's slot as it stands. Counts are packets, but `lag`, which is frames."""

    name: str
    index: int
    policy: str
    state: str  # "active", "dead" (it died, its slot waits), "left"
    holds: bool  # its slot is taken: if it gates, what it has not read is kept for it
    pid: int
    restarts: int
    cursor: int
    lag: int
    delivered: int
    skipped: int
    passed: int
    unread: int
    joined_packets: int


@dataclass(frozen=True, slots=True)
class RingInfo:
    """A ring as `rings.list` found it."""

    name: str
    number: int
    size_bytes: int
    owned: bool  # does its creator live?
    written: bool  # does it have a living writer?
    pid: int  # of the creator
    readable: bool  # of this version, and finished


class Ring:
    """A ring, mapped read-only. From `create` (then owned by this process) or `attach`."""

    def __init__(self, segment: Segment, name: str, number: int, *, owner: bool) -> None:
        self.segment = segment
        self.name = name
        self.number = number
        self._owner = owner
        self._memory: NDArray[Any] = np.frombuffer(segment.map(writable=False), np.uint8)
        if owner:
            _owned[self] = os.getpid()
            in_children(self, Ring._disown)
        header = self._memory[: HEADER.itemsize].view(HEADER)[0]
        self.geometry = _geometry(header)
        self.header = header

    @property
    def counters(self) -> Any:
        """The writer's section (WRITER), live: published, packets, bytes, full_events …"""
        self._check_open()
        return self._memory[self.geometry.writer :][: WRITER.itemsize].view(WRITER)[0]

    @property
    def slots(self) -> NDArray[Any]:
        """The readers' slots (READER), live, read-only."""
        self._check_open()
        size = self.geometry.readers * READER.itemsize
        return self._memory[self.geometry.slots :][:size].view(READER)

    @property
    def state(self) -> str:
        """ "live", "orphaned" (the writer died or has not come yet) or "closed"."""
        return writer_state(self.counters, self.segment.fd)

    def reader(self, name: str | None = None, **options: Any) -> Reader:
        """Attach a reader: see `rings.reader.Reader` for the options."""
        from rings.reader import Reader  # imports numba, which looking at a ring does not need

        self._check_open()
        return Reader(self, name=name, **options)

    def writer(self) -> Writer:
        """Become the ring's writer."""
        from rings.writer import Writer

        self._check_open()
        return Writer(self)

    def first_packet(self, sequence: int) -> int:
        """Number of the first packet at `sequence`, for floor ≤ sequence ≤ published."""
        at = self.geometry.descriptors + (sequence & (self.geometry.frames - 1)) * DESCRIPTOR.itemsize
        return int(self._memory[at : at + 8].view(np.int64)[0])

    def published(self) -> tuple[int, int]:
        """(frames, packets) published so far, of one moment."""
        while True:
            frames = int(self.counters["published"])
            packets = self.first_packet(frames)
            if int(self.counters["floor"]) <= frames:  # else the number may be that of a later lap
                return frames, packets

    def behind(self, cursor: int) -> tuple[int, int]:
        """(frames, arena bytes) between a cursor and the head, as far as they are still there."""
        published, floor = int(self.counters["published"]), int(self.counters["floor"])
        first = max(cursor, floor)
        if first >= published:
            return 0, 0
        table = self._memory[self.geometry.descriptors :][: self.geometry.frames * DESCRIPTOR.itemsize]
        oldest, newest = table.view(DESCRIPTOR)[np.array([first, published - 1]) & (self.geometry.frames - 1)]
        begin, end = int(oldest["offset"]) * ALIGN, int(newest["offset"]) * ALIGN + int(newest["length"])
        return published - first, (end - begin) & (self.geometry.arena_bytes - 1)

    def readers(self) -> list[ReaderInfo]:
        """Every slot that has been used, with its account."""
        from rings.account import valid_account

        infos = []
        for index, slot in enumerate(self.slots):
            if not bytes(slot["name"]):
                continue
            record = valid_account(slot)
            frames, packets = self.published()
            word, counts = int(slot["word"]), [int(record[n]) for n in ("delivered", "skipped", "passed")]
            alive = locks.held_by_other(self.segment.fd, LOCK_READER + index)
            left = word & 0xFF == SlotState.FREE and int(slot["pid"]) == 0
            infos.append(
                ReaderInfo(
                    name=bytes(slot["name"]).decode(errors="replace"),
                    index=index,
                    policy=Policy(word >> POLICY_SHIFT & 0xFF).name.lower(),
                    state="left" if left else "active" if alive else "dead",
                    holds=word & 0xFF == SlotState.ACTIVE,
                    pid=int(slot["pid"]),
                    restarts=int(slot["restarts"]),
                    cursor=int(record["cursor"]),
                    lag=frames - int(record["cursor"]),
                    delivered=counts[0],
                    skipped=counts[1],
                    passed=counts[2],
                    unread=packets - int(record["packets"]),
                    # Until something is counted, the join point is where the account stands.
                    joined_packets=int(slot["joined_packets"]) if any(counts) else int(record["packets"]),
                )
            )
        return infos

    def _check_open(self) -> None:
        if self.segment.fd < 0:
            raise RingError(f"this ring {self.name} is closed: attach it anew")

    def _disown(self) -> None:
        """In a forked child: it may look on, but owns nothing, and does not keep the owner's lock alive."""
        self._owner = False
        if self.segment.fd >= 0:
            fresh = self.segment.reopen()
            os.dup2(fresh.fd, self.segment.fd, inheritable=False)
            fresh.close()

    def close(self) -> None:
        """Let go of it; the owner also removes it. Who has it mapped keeps it until he closes."""
        if self._owner and self.segment.fd >= 0:
            self.segment.unlink()
        self.forget()

    def forget(self) -> None:
        """Let go of it without removing it (a forked child's first act: it must not hold our locks)."""
        self._memory = np.zeros(0, np.uint8)
        self.header = None
        self.segment.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_owned: weakref.WeakKeyDictionary[Ring, int] = weakref.WeakKeyDictionary()  # and the process that owns it


@atexit.register
def _remove_owned() -> None:
    """A process that ends takes the rings that it owns with it."""
    for ring, pid in list(_owned.items()):
        if pid == os.getpid():
            ring.close()


def writer_state(section: Any, fd: int) -> str:
    """ "live", "orphaned" or "closed", of the writer's section (WRITER) and a descriptor of the ring."""
    if section["state"] == WriterState.CLOSED:
        return "closed"
    return "live" if locks.held_by_other(fd, LOCK_WRITER) else "orphaned"


def create(
    name: str,
    *,
    number: int = 0,
    size_bytes: int = DEFAULT_BYTES,
    frames: int | None = None,
    arena_bytes: int | None = None,
    readers: int = 16,
    sources: bool = False,
) -> Ring:
    """Create ring `number` of `name`, owned by this process until it closes it or ends.

    Its size is `size_bytes`, or `frames` and `arena_bytes` (powers of two). RingError where a living
    owner holds the name, /dev/shm is full, or the geometry is not possible; nothing is left behind.
    """
    number = operator.index(number)
    try:
        if frames is None and arena_bytes is None:
            geometry = Geometry.fitting(size_bytes, readers=readers, sources=sources)
        else:
            geometry = Geometry(frames or 0, arena_bytes or 0, readers, sources)
    except ValueError as error:
        raise RingError(str(error)) from None
    segment = create_segment(object_name(name, number), geometry.total_bytes)
    memory = np.frombuffer(segment.map(writable=True), np.uint8)
    header = memory[: HEADER.itemsize].view(HEADER)
    header["abi_version"] = ABI_VERSION
    header["layout_hash"] = LAYOUT_HASH
    header["frames"], header["arena_bytes"] = geometry.frames, geometry.arena_bytes
    header["readers"], header["sources"] = geometry.readers, geometry.sources
    header["uuid"], header["boot_id"] = np.void(uuid.uuid4().bytes), np.void(boot_id())
    header["clock_offset_ns"], header["created_ns"] = clock_offset_ns(), time.time_ns()
    header["owner_pid"] = os.getpid()
    header["magic"] = MAGIC  # last: attachers wait for it
    del header, memory
    segment.unmap()  # the owner looks, like everyone; only the writer writes
    return Ring(segment, name, number, owner=True)


def attach(name: str, number: int | None = None, *, timeout_s: float = ATTACH_S) -> Ring:
    """Open ring `number` of `name`; it may be left out where there is only one.

    RingError where there is none, or it is of another version or boot.
    """
    if number is None:
        number = _only_number(name)
    number = operator.index(number)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            segment = open_segment(object_name(name, number))
        except FileNotFoundError:
            raise RingError(f"no ring {name!r}: `rxring rings ls` lists them") from None
        # Size 0 and magic 0 mean "not yet": its creator may be at work.
        magic = os.pread(segment.fd, 8, 0)
        if segment.size >= HEADER.itemsize and magic.strip(b"\0"):
            break
        segment.forget()
        if time.monotonic() > deadline:
            raise RingError(f"ring {name!r} was never finished: `rxring rings gc` removes it")
        time.sleep(0.001)
    try:
        _check(segment, name, magic)
        return Ring(segment, name, number, owner=False)
    except BaseException:
        segment.forget()
        raise


def _only_number(name: str) -> int:
    numbers = [found.part for found in find() if found.name == name and found.part.isdigit()]
    if len(numbers) > 1:
        raise RingError(
            f"{name!r} has rings {', '.join(numbers)}: say which, and read them all for all packets"
        )
    return int(numbers[0]) if numbers else 0


def _geometry(header: Any) -> Geometry:
    frames, arena_bytes, readers = (int(header[name]) for name in ("frames", "arena_bytes", "readers"))
    return Geometry(frames, arena_bytes, readers, bool(header["sources"]))


def _check(segment: Segment, name: str, magic: bytes) -> None:
    header = np.frombuffer(os.pread(segment.fd, HEADER.itemsize, 0), HEADER)[0]
    if int.from_bytes(magic, "little") != MAGIC:
        raise RingError(f"{segment.object[1:]} is not a ring: remove it, or use another name")
    if (int(header["abi_version"]), int(header["layout_hash"])) != (ABI_VERSION, LAYOUT_HASH):
        raise RingError(f"ring {name!r} is of another version of rxring: use the one that made it")
    if bytes(header["boot_id"]) != boot_id():
        raise RingError(f"ring {name!r} is of another boot: `rxring rings gc` removes it")
    try:
        geometry = _geometry(header)
    except ValueError as error:
        raise RingError(f"ring {name!r} has an impossible geometry ({error}): remove it") from None
    if segment.size != geometry.total_bytes:
        raise RingError(
            f"ring {name!r} is {segment.size} bytes, its geometry says {geometry.total_bytes}: remove it"
        )


def list_rings() -> list[RingInfo]:
    """This user's rings, living and dead."""
    infos = []
    for found in find():
        if not found.part.isdigit():
            continue
        try:
            segment = open_segment(found.object)
        except FileNotFoundError:
            continue
        try:
            head = os.pread(segment.fd, HEADER.itemsize, 0).ljust(HEADER.itemsize, b"\0")
            header = np.frombuffer(head, HEADER)[0]
            readable = int(header["magic"]) == MAGIC and int(header["layout_hash"]) == LAYOUT_HASH
            infos.append(
                RingInfo(
                    name=found.name,
                    number=int(found.part),
                    size_bytes=segment.size,
                    owned=locks.held_by_other(segment.fd, LOCK_OWNER),
                    written=locks.held_by_other(segment.fd, LOCK_WRITER),
                    pid=int(header["owner_pid"]),
                    readable=readable,
                )
            )
        finally:
            segment.forget()
    return infos


def remove(name: str) -> list[str]:
    """Remove the dead objects of `name`; their names. RingError where one lives, or there is none."""
    check_name(name)
    objects = [found.object for found in find() if found.name == name]
    if not objects:
        raise RingError(f"no ring {name!r}: `rxring rings ls` lists them")
    for object_ in objects:
        if not remove_if_dead(object_, unfinished_s=0.0):
            raise RingError(f"{object_[1:]} is in use: end its engine first")
    return [object_[1:] for object_ in objects]


def collect() -> list[str]:
    """Remove this user's objects that have neither owner nor writer; their names."""
    return [found.object[1:] for found in find() if remove_if_dead(found.object)]
