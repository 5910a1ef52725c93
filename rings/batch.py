"""What a reader takes at once: the frames in place, as numpy arrays that copy nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rings.layout import ALIGN, DESCRIPTOR, SOURCE
from rings.segment import RingError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rings.reader import Reader

# One entry for each packet: `offset` bytes into `Batch.arena`, `length` bytes, which frame it came in.
PACKET = np.dtype([("offset", "i8"), ("length", "i8"), ("frame", "i8")])


class Batch:
    """The frames of one poll, read-only, valid until the reader's next step.

    After that the attributes raise RingError. An array that was taken before is not revoked: a gating
    reader's will show later packets. Copy what you keep; `intact` tells whether a batch still holds.
    """

    def __init__(self, reader: Reader, frames: int) -> None:
        self._reader: Reader | None = reader
        r = reader.record[0]
        self.first = int(r["cursor"])  # sequence of the first frame
        self.frames = frames
        self._descriptors_at = int(r["batch_descriptors"])
        self._arena_at = int(r["batch_arena"])
        self._copied = self._arena_at != int(r["arena"])
        self._writer = reader.section

    def _live(self) -> Reader:
        if self._reader is None:
            raise RingError("this batch has ended: copy what you keep before the next step")
        return self._reader

    @property
    def descriptors(self) -> NDArray[Any]:
        """One DESCRIPTOR for each frame, shape (frames,)."""
        return self._live().view(self._descriptors_at, self.frames * DESCRIPTOR.itemsize).view(DESCRIPTOR)

    @property
    def sources(self) -> NDArray[Any] | None:
        """One SOURCE for each frame, shape (frames,): who sent it. None where the ring has none."""
        reader = self._live()
        r = reader.record[0]
        if not r["sources"]:
            return None
        # They lie as the descriptors do, those of a copy as the copied ones; all are of one length.
        kept = "copied_" if self._copied else ""
        address = int(r[f"{kept}sources"]) + self._descriptors_at - int(r[f"{kept}descriptors"])
        return reader.view(address, self.frames * SOURCE.itemsize).view(SOURCE)

    @property
    def packets(self) -> NDArray[Any]:
        """One PACKET for each packet, shape (len(batch),). With GRO a frame holds several."""
        self._live()
        return self._packets

    @cached_property
    def _packets(self) -> NDArray[Any]:
        descriptors = self.descriptors
        offset = descriptors["offset"].astype(np.int64) * ALIGN
        length = descriptors["length"].astype(np.int64)
        segment = descriptors["segment"].astype(np.int64)
        segment = np.where(segment == 0, np.maximum(length, 1), segment)
        count = np.maximum(-(-length // segment), 1)
        frame = np.repeat(np.arange(self.frames), count)
        within = (np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)) * segment[frame]
        packets = np.empty(frame.size, PACKET)
        packets["offset"] = offset[frame] - offset[0] + within
        packets["length"] = np.minimum(segment[frame], length[frame] - within)
        packets["frame"] = frame
        return packets

    @property
    def arena(self) -> NDArray[np.uint8]:
        """The bytes of the batch, from its first payload to the end of its last."""
        self._live()
        return self._arena

    @cached_property
    def _arena(self) -> NDArray[np.uint8]:
        first, last = self.descriptors[0], self.descriptors[-1]
        size = (int(last["offset"]) - int(first["offset"])) * ALIGN + int(last["length"])
        return self._live().view(self._arena_at + int(first["offset"]) * ALIGN, size)

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """Where each packet begins and ends in `arena`: plain numbers are ten times as fast as records."""
        begin, length = self.packets["offset"], self.packets["length"]
        return list(zip(begin.tolist(), (begin + length).tolist(), strict=True))

    def __len__(self) -> int:
        """How many packets."""
        return len(self.packets)

    def payload(self, i: int) -> NDArray[np.uint8]:
        """The bytes of packet i, shape (length,)."""
        self._live()
        begin, end = self._bounds[i]
        return self._arena[begin:end]

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        """The payloads of all packets."""
        for begin, end in self._bounds:
            self._live()
            yield self._arena[begin:end]

    @property
    def matrix(self) -> NDArray[np.uint8] | None:
        """All packets as one array, shape (len(batch), length); None if they are not alike, evenly laid."""
        packets = self.packets
        length = int(packets["length"][0])
        steps = np.diff(packets["offset"])
        step = int(steps[0]) if steps.size else length
        if (packets["length"] != length).any() or (steps != step).any():
            return None
        return np.lib.stride_tricks.as_strided(
            self.arena, shape=(packets.size, length), strides=(step, 1), writeable=False
        )

    @property
    def intact(self) -> bool:
        """Are the frames still those that were polled? Also to be asked of a batch that has ended.

        A copy (of a skipping reader) lasts until the reader's next step. In place, the writer may come
        as soon as the first frame is released.
        """
        if self._copied:
            return self._reader is not None
        return int(self._writer["floor"]) <= self.first

    def release(self, frames: int) -> None:
        """The first `frames` frames are done with, ahead of the others: the writer may have their place."""
        reader = self._live()
        released = self.frames - int(reader.record[0]["batch_frames"])
        reader.release(frames - released)

    def end(self) -> None:
        """Invalidate it."""
        self._reader = None
