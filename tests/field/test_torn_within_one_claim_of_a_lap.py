"""Case 21 (hale#148): a read was torn within one claim of a lap, where the check was off by one.

A ring of N descriptors holds N − 1 frames. Every lag around one and two laps, from every place in the ring,
with the writer idle and with a batch begun that it never publishes. What a writer does *during* a read:
tests/rings/test_interleavings.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ring_loops import put, reserve_only

import rings

N, M = 8, 1024


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
        wrote = sum(writer.write(bytes([i])) for i in range(lag))
        assert wrote == min(lag, N - 1)
        got = []
        while (batch := reader.poll()) is not None:
            got += [batch.payload(i).tobytes() for i in range(len(batch))]
        assert got == [bytes([i]) for i in range(wrote)]
        reader.close()
