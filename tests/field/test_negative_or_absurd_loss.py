"""Case 9: a loss of 179 %; 0/2147483647; "10 sent, 0/1 lost"."""

from __future__ import annotations

import random

import pytest

from engine.handlers.gaps import WINDOW, handler
from tests.engine.handlers.batches import NOW_NS, closing, one, report, rxring


def sent(count: int, *, start_ns: int = NOW_NS, flow: int = 1, size: int = 32) -> list[bytes]:
    return [rxring(i, flow=flow, scheduled_ns=start_ns + i * 1000, size=size) for i in range(count)]


def loss(*packets: bytes) -> tuple[int, int]:
    """(lost, received); no count may be negative."""
    found = report(handler, *map(one, packets))
    assert min(found.values()) >= 0
    return found["lost"], found["received"]


@pytest.mark.parametrize("seed", range(5))
def test_reordered_on_the_way(seed: int) -> None:
    chance = random.Random(seed)
    packets = sent(5_000)
    packets = [packets[i] for i in sorted(range(5_000), key=lambda i: i + chance.randrange(200))]
    assert loss(*packets) == (0, 5_000)


def test_every_packet_twice() -> None:
    packets = [packet for packet in sent(5_000) for _ in range(2)]
    assert loss(*packets) == (0, 10_000)


def test_the_first_packet_comes_last() -> None:
    first, *others = sent(100)
    assert loss(*others, first) == (0, 100)


@pytest.mark.parametrize("count", [10, WINDOW - 1, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("orderly", [True, False])
def test_a_restarted_sender(count: int, orderly: bool) -> None:
    runs = []
    for run in range(4):
        start_ns = NOW_NS + run * 10**10
        runs += sent(count, start_ns=start_ns)
        runs += [closing(count, flow=1, scheduled_ns=start_ns + count * 1000)] * (3 if orderly else 0)
    assert loss(*runs) == (0, 4 * count)


def test_a_restarted_sender_whose_packets_are_too_short_for_a_time() -> None:
    assert loss(*sent(3 * WINDOW, size=16), *sent(3 * WINDOW, size=16)) == (0, 6 * WINDOW)


def test_a_sender_whose_clock_was_set_back_before_it_restarted() -> None:
    """Its packets look late: what can't be judged is not called lost."""
    lost, received = loss(*sent(3 * WINDOW), *sent(3 * WINDOW, start_ns=NOW_NS - 10**12))
    assert (lost, received) == (0, 6 * WINDOW)


def test_one_flow_id_for_several_senders() -> None:
    starts = [NOW_NS + i * 777_777 for i in range(3)]
    stream = sorted((start_ns + i * 1000, start_ns, i) for start_ns in starts for i in range(5_000))
    packets = [rxring(i, flow=1, scheduled_ns=time_ns) for time_ns, _, i in stream]
    assert loss(*packets) == (0, 15_000)


def test_ten_sent_one_arrived() -> None:
    assert loss(rxring(0, flow=1), closing(10, flow=1)) == (9, 1)


def test_a_number_that_is_no_number() -> None:
    garbage = [rxring(sequence, flow=1) for sequence in ((1 << 64) - 1, 1 << 63, (1 << 63) - 1)]
    assert loss(*sent(10), *garbage) == (0, 10)
