"""Case 21 (hale#148): a read was torn within one claim of a lap, where the check was off by one.

A ring of N descriptors holds N − 1 frames. Every lag around one and two laps, from every place in the ring,
with the writer idle, with a batch begun that it never publishes, and with a writer that passes a part of
what is just being copied. All else that a writer may do during a read: tests/rings/test_interleavings.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ring_loops import put, reserve_only
from slow_motion import Stepper

import rings
from rings import reader as reader_module
from rings.layout import DESCRIPTOR
from rings.reader import Reader
from rings.writer import Writer

N, M = 8, 1024
NOTHING = 0xEE


def _fill(writer: object, head: int, frames: int) -> None:
    for sequence in range(head, head + frames):
        data = np.full(33, sequence % 251, np.uint8)
        assert put(writer.record, data, np.array([33]), np.zeros(1, np.int64))  # type: ignore[attr-defined]


@pytest.mark.parametrize("begun", [0, 1, 3, 7])
def test_every_lag_around_a_lap(name: str, begun: int) -> None:
    with rings.create(name, frames=N, arena_bytes=M) as ring, ring.writer() as writer:
        head = 0
        for start, lag in itertools.product(range(N), [*range(N + 3), 2 * N - 1, 2 * N, 2 * N + 1]):
            _fill(writer, head, start)
            head += start
            reader = ring.reader(name="one", policy="skip")
            _fill(writer, head, lag)
            if begun:
                assert reserve_only(writer.record, begun, 33 * begun)
            oldest = max(head, head + lag - (N - 1 - begun)) if begun else max(head, head + lag - (N - 1))
            head += lag
            sequence = min(oldest, head)
            while (batch := reader.poll()) is not None:
                assert batch.first == sequence
                for i in range(batch.frames):
                    assert batch.payload(i).tobytes() == bytes([sequence % 251]) * 33
                    sequence += 1
            assert sequence == head
            info = next(info for info in ring.readers() if info.name == "one")
            assert info.delivered + info.skipped == lag
            assert info.skipped == oldest - (head - lag)
            reader.close()


@pytest.mark.parametrize("lag", [N - 2, N - 1, N, N + 1])
def test_a_gate_stands_exactly_one_lap_behind(name: str, lag: int) -> None:
    with rings.create(name, frames=N, arena_bytes=M) as ring, ring.writer() as writer:
        reader = ring.reader()
        wrote = sum(writer.write(bytes([i]), timeout_s=0) for i in range(lag))
        assert wrote == min(lag, N - 1)
        got = []
        while (batch := reader.poll()) is not None:
            got += [batch.payload(i).tobytes() for i in range(len(batch))]
        assert got == [bytes([i]) for i in range(wrote)]
        reader.close()


@pytest.mark.parametrize("passed", [1, 2, 3, 4])
def test_a_writer_passes_a_part_of_what_is_being_copied(
    name: str, passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the reader's operations, in turn, it overwrites the oldest 1 to 4 of 4 frames.

    Until the descriptors are copied whole, the reader begins again. While the payload is copied, what was
    passed is left out and skipped, once, and the rest is delivered; where nothing is left, it begins again.
    """
    stepper = Stepper(monkeypatch, reader_module)
    places: list[str] = []
    for at in range(200):
        with rings.create(name, frames=N, arena_bytes=M) as ring, ring.writer() as writer:
            reader = ring.reader(policy="skip", max_frames=4)
            reader._copy[:] = NOTHING
            _fill(writer, 0, N - 1)

            def overwrite(writer: Writer = writer, reader: Reader = reader) -> None:
                places.append(_copying(reader))
                _fill(writer, N - 1, passed)

            stepper.arm(at, overwrite)
            batch = reader.poll()
            assert batch is not None
            if not stepper.happened:
                reader.close()
                break
            if places[-1] == "descriptors":
                assert (batch.first, batch.frames) == (passed, 4)
            elif places[-1] == "payload":
                assert (batch.first, batch.frames) == (passed, 4 - passed or 4)
            skipped = sequence = batch.first
            while batch is not None:
                assert batch.first == sequence
                for i in range(batch.frames):
                    assert batch.payload(i).tobytes() == bytes([sequence]) * 33
                    sequence += 1
                batch = reader.poll()
            (info,) = ring.readers()
            assert (info.skipped, info.delivered) == (skipped, N - 1 + passed - skipped)
            reader.close()
    assert places.count("descriptors") >= 3
    assert places.count("payload") == 2  # it is copied in three parts
    assert places[-1] == ""  # the last place was behind both


def _copying(reader: Reader) -> str:
    """What of 4 frames is not yet copied whole; "" where that cannot be told."""
    at = int(reader.record[0]["copied_arena"] - reader.record[0]["copied_descriptors"])
    descriptors = reader._copy[: 4 * DESCRIPTOR.itemsize].view(DESCRIPTOR)
    payload = reader._copy[at : at + 3 * 48 + 33]
    if (descriptors["length"] != 33).any():
        return "descriptors"
    return "payload" if payload[0] != NOTHING and payload[-1] == NOTHING else ""
