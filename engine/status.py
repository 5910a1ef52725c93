"""The status segment: what every worker of an engine (or a sender) tells the outside.

One shared-memory object, `/rxring-UID-NAME-status`. Each worker has one record, which only it writes:
facts (a JSON object) and the raw state of its handler. Reading disturbs nobody.

    page 0       magic · version · workers · pid · what it is · stop word
    then         for each worker: name, sequence, and two copies {lengths, checksum, facts, state}

A record is double-buffered: the idle copy is filled, then the sequence is raised, whose lowest bit says
which copy is valid. A reader that is overtaken sees it by the checksum, on any memory order, and reads again.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec

from rings.layout import LINE, PAGE, round_up
from rings.segment import RingError, Segment, create_segment, object_name, open_segment

MAGIC = b"RXSTAT\x00\x01"
FACTS_BYTES = 64 * 1024
_HEADER = struct.Struct("<8sIIqq16s")  # magic, workers, -, pid, started ns, kind
_STOP_AT = LINE
_RECORDS_AT = PAGE
_RECORD = struct.Struct("<32sqqq")  # name, sequence, state capacity, offset of the first copy
_SEQUENCE_AT = 32  # of its 8 bytes in the record
_COPY = struct.Struct("<III4x")  # facts length, state length, checksum

# What the stop word says. Workers look at it in their loops.
RUN, STOP = 0, 1


def _checksum(body: bytes, facts_length: int) -> int:
    """A CRC that does not take a copy whose header is all zeros for one of nothing."""
    return zlib.crc32(body, facts_length + 1)


def _plain_data(value: Any) -> Any:
    """numpy's numbers and arrays, as a handler's report may hold them, as JSON's."""
    return value.tolist()


@dataclass(slots=True)
class Status:
    """A status segment, created (`Status.create`) or looked at from outside (`Status.open`)."""

    name: str
    kind: str
    pid: int
    started_ns: int
    workers: list[str]
    segment: Segment
    memory: memoryview
    owner: bool = False

    @classmethod
    def create(
        cls, name: str, *, kind: str, workers: list[str], state_bytes: list[int] | None = None
    ) -> Status:
        """Create it for these workers; `state_bytes`: how large each one's state is.

        RingError where a living engine or sender holds the name, or /dev/shm is full.
        """
        sizes = state_bytes or [0] * len(workers)
        copies = [round_up(_COPY.size + FACTS_BYTES + size, PAGE) for size in sizes]
        first = round_up(_RECORDS_AT + len(workers) * LINE, PAGE)
        offsets = [first + 2 * sum(copies[:i]) for i in range(len(workers))]
        segment = create_segment(object_name(name, "status"), first + 2 * sum(copies))
        memory = segment.map(writable=True)
        for i, worker in enumerate(workers):
            _RECORD.pack_into(memory, _RECORDS_AT + i * LINE, worker.encode(), 0, copies[i], offsets[i])
        started_ns = time.time_ns()
        _HEADER.pack_into(memory, 0, bytes(8), len(workers), 0, os.getpid(), started_ns, kind.encode())
        memory[0:8] = MAGIC
        return cls(name, kind, os.getpid(), started_ns, list(workers), segment, memory, owner=True)

    @classmethod
    def open(cls, name: str) -> Status:
        """Look at a running engine or sender. FileNotFoundError where there is none (or not yet).

        RingError where the object is another's, or of another version.
        """
        segment = open_segment(object_name(name, "status"))
        if segment.size < PAGE or os.pread(segment.fd, 8, 0) == bytes(8):
            segment.forget()
            raise FileNotFoundError(f"{name} is only starting")
        memory = segment.map(writable=False)
        magic, count, _, pid, started_ns, kind = _HEADER.unpack_from(memory, 0)
        if magic != MAGIC or segment.size < _RECORDS_AT + count * LINE:
            memory.release()
            segment.forget()
            raise RingError(f"the status of {name} is of another version: use the rxring that made it")
        workers = [
            _RECORD.unpack_from(memory, _RECORDS_AT + i * LINE)[0].rstrip(b"\0").decode(errors="replace")
            for i in range(count)
        ]
        return cls(
            name, kind.rstrip(b"\0").decode(errors="replace"), pid, started_ns, workers, segment, memory
        )

    def publish(self, worker: int, facts: dict[str, Any], state: bytes | memoryview = b"") -> None:
        """Replace the record of a worker, in its process; ValueError if it does not fit."""
        text = msgspec.json.encode(facts, enc_hook=_plain_data)
        body = text + bytes(state)
        _, sequence, size, first = _RECORD.unpack_from(self.memory, _RECORDS_AT + worker * LINE)
        if len(text) > FACTS_BYTES or len(body) > size - _COPY.size:
            raise ValueError(f"{len(text)} bytes of facts and {len(state)} of state do not fit a record")
        at = first + size * ((sequence + 1) & 1)
        self.memory[at + _COPY.size : at + _COPY.size + len(body)] = body
        _COPY.pack_into(self.memory, at, len(text), len(body) - len(text), _checksum(body, len(text)))
        self._store(_RECORDS_AT + worker * LINE + _SEQUENCE_AT, sequence + 1)

    def read(self, worker: int) -> tuple[dict[str, Any], bytes]:
        """The worker's facts and state as last published; ({}, b"") before the first time."""
        while True:
            _, sequence, size, first = _RECORD.unpack_from(self.memory, _RECORDS_AT + worker * LINE)
            if sequence == 0:
                return {}, b""
            at = first + size * (sequence & 1)
            facts_length, state_length, crc = _COPY.unpack_from(self.memory, at)
            length = facts_length + state_length
            if length <= size - _COPY.size:
                body = bytes(self.memory[at + _COPY.size : at + _COPY.size + length])
                if _checksum(body, facts_length) == crc:
                    return msgspec.json.decode(body[:facts_length]), body[facts_length:]

    @property
    def stop(self) -> int:
        value: int = struct.unpack_from("<q", self.memory, _STOP_AT)[0]
        return value

    @stop.setter
    def stop(self, value: int) -> None:
        self._store(_STOP_AT, value)

    def _store(self, at: int, value: int) -> None:
        """Store a word at once: struct's pack_into would show others a 0 before."""
        self.memory.cast("q")[at // 8] = value

    @property
    def stop_offset(self) -> int:
        """Where the stop word stands in `memory`, for compiled loops that watch it."""
        return _STOP_AT

    def disown(self) -> None:
        """A forked worker's copy: it keeps the memory, not the supervisor's lock."""
        os.close(self.segment.fd)
        self.segment.fd = -1
        self.owner = False

    def close(self) -> None:
        """Remove it, if we created it, and let go of it."""
        if self.owner:
            self.segment.unlink()
        self.memory.release()
        self.segment.forget()
