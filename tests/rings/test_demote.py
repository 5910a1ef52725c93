"""A gating reader that may hold the writer up for so long and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import rings
from rings import RingError
from rings.reader import Reader
from rings.ring import Ring

FRAMES = 16


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=FRAMES, arena_bytes=4096) as made:
        yield made


def fill(ring: Ring, writer: rings.writer.Writer, first: int) -> int:
    """Write until there is no room; the next number."""
    while writer.write(first.to_bytes(4, "little"), timeout_s=0):
        first += 1
    return first


def take(reader: Reader) -> list[int]:
    numbers: list[int] = []
    while (batch := reader.poll()) is not None:
        numbers += [int.from_bytes(batch.payload(i).tobytes(), "little") for i in range(len(batch))]
    return numbers


def test_who_does_not_move_for_so_long_is_lapped_and_counts_what_it_missed(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("slow", demote_s=0.05) as slow, ring.reader("other") as other:
        began = time.monotonic()
        written = fill(ring, writer, 0)
        assert written == FRAMES - 1
        assert take(other) == list(range(written))
        assert {info.policy for info in ring.readers()} == {"gate"}
        assert writer.write(written.to_bytes(4, "little"), timeout_s=20)
        assert time.monotonic() - began >= 0.05
        assert {info.name: info.policy for info in ring.readers()} == {"slow": "skip", "other": "gate"}
        for n in range(written + 1, 100):
            assert writer.write(n.to_bytes(4, "little"), timeout_s=0)
            assert take(other)[-1:] == [n]
        numbers = take(slow)
        assert numbers == list(range(100 - len(numbers), 100))
        info = ring.readers()[0]
        assert (info.delivered, info.skipped, info.unread) == (len(numbers), 100 - len(numbers), 0)


def test_who_moves_a_little_is_waited_for(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("slow", demote_s=0.2) as slow:
        written, end = fill(ring, writer, 0), time.monotonic() + 0.5
        while time.monotonic() < end:
            slow.poll(1)
            written = fill(ring, writer, written)
        assert ring.readers()[0].policy == "gate"
        assert ring.readers()[0].skipped == 0


def test_without_it_a_gate_is_waited_for(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("slow"):
        fill(ring, writer, 0)
        assert not writer.write(b"", timeout_s=0.3)
        assert ring.readers()[0].policy == "gate"


def test_a_pause_of_the_writers_own_is_no_stall(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("slow", demote_s=0.4):
        fill(ring, writer, 0)
        time.sleep(0.5)  # nobody looked
        assert not writer.write(b"", timeout_s=0)
        assert ring.readers()[0].policy == "gate"


def test_a_successor_gates_again(ring: Ring) -> None:
    with ring.writer() as writer:
        slow = ring.reader("slow", demote_s=0.01)
        fill(ring, writer, 0)
        assert writer.write(b"", timeout_s=20)
        slow.close()
        with ring.reader("slow", demote_s=0.01):
            assert ring.readers()[0].policy == "gate"


@pytest.mark.parametrize(
    ("policy", "demote_s"), [("skip", 1.0), ("gate", 0.0), ("gate", -1.0), ("gate", 1e10)]
)
def test_what_makes_no_sense_is_refused(ring: Ring, policy: str, demote_s: float) -> None:
    with pytest.raises(RingError, match="give seconds greater than 0, with policy gate"):
        ring.reader(policy=policy, demote_s=demote_s)
