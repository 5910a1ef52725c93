from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rings
from rings import reader as reader_module
from rings.account import valid_account
from rings.layout import ACCOUNT, READER
from rings.ring import Ring


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=16, arena_bytes=4096, readers=1) as made:
        yield made


def _slot(cursor: int, *records: tuple[int, ...]) -> Any:
    slots = np.zeros(1, READER)
    slots["cursor"] = cursor
    for i, record in enumerate(records):
        slots["accounts"][0, i] = record
    return slots[0]


@pytest.mark.parametrize(
    "records", [[(7, 70, 1, 2, 3), (5, 50, 0, 0, 0)], [(9, 90, 0, 0, 0), (7, 70, 1, 2, 3)]]
)
def test_the_record_of_the_cursor_is_the_valid_one(records: list[tuple[int, ...]]) -> None:
    record = valid_account(_slot(7, *records))
    assert record.dtype == ACCOUNT
    assert record.tolist() == (7, 70, 1, 2, 3)


def test_it_is_a_copy() -> None:
    slot = _slot(0)
    record = valid_account(slot)
    slot["accounts"]["packets"] = 99
    assert int(record["packets"]) == 0


def test_an_account_that_moves_meanwhile_is_looked_at_again() -> None:
    """The reader stores its cursor between our two looks."""

    class Moving:
        looks = 0

        def __getitem__(self, field: str) -> Any:
            self.looks += field == "cursor"
            cursor = 5 if self.looks < 2 else 7
            return _slot(cursor, (5, 50, 0, 0, 0), (7, 70, 0, 0, 0))[field]

    assert valid_account(Moving()).tolist() == (7, 70, 0, 0, 0)


def _valid(slot: Any) -> list[int]:
    return [i for i, record in enumerate(slot["accounts"]) if int(record["cursor"]) == int(slot["cursor"])]


class _Stop(BaseException):
    """What SIGKILL is, at a place of our choice."""


def _stop_after(monkeypatch: pytest.MonkeyPatch, function: str) -> Callable[[], None]:
    real = getattr(reader_module, function)

    def stopped(*arguments: Any) -> None:
        real(*arguments)
        raise _Stop

    monkeypatch.setattr(reader_module, function, stopped)
    return monkeypatch.undo


@pytest.mark.parametrize("place", ["claim", "_start_account", "activate"])
@pytest.mark.parametrize("used", [False, True])
def test_a_reader_that_dies_while_it_joins_leaves_a_valid_account(
    ring: Ring, place: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ring.writer()
    writer.write(b"1")
    if used:
        with ring.reader(name="before") as before:
            writer.write(b"2")
            assert before.poll() is not None
    undo = _stop_after(monkeypatch, place)
    with pytest.raises(_Stop):
        ring.reader(name="joins")
    undo()
    assert _valid(ring.slots[0])
    for info in ring.readers():
        total = info.delivered + info.skipped + info.passed + info.unread + info.joined_packets
        assert total == ring.published()[1]
    with ring.reader(name="joins") as reader:
        writer.write(b"3")
        batch = reader.poll()
        assert batch is not None
        assert batch.payload(0).tobytes() == b"3"
        (info,) = ring.readers()
        assert (info.name, info.state, info.restarts) == ("joins", "active", 0)


def test_exactly_one_record_is_valid_after_joining_and_at_every_step(ring: Ring) -> None:
    """Two valid ones would let a look at one see the other's next step half-way."""
    writer = ring.writer()
    for policy in ("gate", "skip") * 3:
        with ring.reader(name=policy, policy=policy) as reader:
            for _ in range(5):
                assert len(_valid(ring.slots[0])) == 1
                writer.write(b"x")
                batch = reader.poll()
                assert batch is not None
                assert len(_valid(ring.slots[0])) == 1
                batch.release(1)
                assert len(_valid(ring.slots[0])) == 1


def test_the_place_of_one_who_left_does_not_show_in_the_next(ring: Ring) -> None:
    """Both at the same cursor: only the name tells them apart, and the account must go with it."""
    writer = ring.writer()
    with ring.reader(name="first") as first:
        for _ in range(3):
            writer.write(b"x")
            first.poll()
    (info,) = ring.readers()
    assert (info.name, info.state, info.delivered, info.unread) == ("first", "left", 3, 0)
    with ring.reader(name="second"):
        (info,) = ring.readers()
        assert (info.name, info.delivered, info.unread, info.joined_packets) == ("second", 0, 0, 3)
