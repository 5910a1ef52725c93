"""Case 2: the route of a multicast group came up late, and what was sent before was reported as loss."""

from __future__ import annotations

from engine.handlers.gaps import handler
from tests.engine.handlers.batches import closing, one, report, rxring


def test_a_late_multicast_route() -> None:
    arrived = [one(rxring(sequence)) for sequence in range(1_000, 3_000)]
    found = report(handler, *arrived, one(closing(3_000)))
    assert found["before_first"] == 1_000
    assert found["lost"] == 0


def test_a_stream_of_which_only_the_end_arrived() -> None:
    found = report(handler, one(rxring(999_999)))
    assert (found["before_first"], found["lost"], found["received"]) == (999_999, 0, 1)


def test_what_is_lost_after_the_first_packet_is_loss() -> None:
    arrived = [one(rxring(sequence)) for sequence in range(1_000, 3_000) if sequence % 10]
    found = report(handler, *arrived)
    assert (found["before_first"], found["lost"]) == (1_001, 199)
