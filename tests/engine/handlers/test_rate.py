from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Refused
from engine.handlers.rate import handler
from tests.engine.handlers.batches import NOW_NS, Frame, feed, fresh, gro, one, report

SECOND_NS = 1_000_000_000


def test_sizes_and_bytes_are_exact() -> None:
    sizes = [0, 1, 1316, 1316, 65_507, 65_536]
    found = report(handler, *[one(bytes(size)) for size in sizes])
    assert found["sizes"] == {"0": 1, "1": 1, "1316": 2, "65507": 1, "65536": 1}
    assert (found["packets"], found["bytes"]) == (len(sizes), sum(sizes))


def test_segments_are_packets() -> None:
    found = report(handler, gro(*[bytes(100)] * 64, bytes(30)), gro(bytes(8)))
    assert found["sizes"] == {"8": 1, "30": 1, "100": 64}


def test_the_rate_of_packets_that_come_one_by_one() -> None:
    frames = [one(bytes(50), kernel_ns=NOW_NS + i * SECOND_NS // 10) for i in range(11)]
    found = report(handler, *frames)
    assert found["packets_per_second"] == 10.0
    assert found["bytes_per_second"] == 500.0


def test_the_rate_of_packets_that_come_in_batches() -> None:
    """The first batch came before the time began to run."""
    frames = [one(bytes(10), kernel_ns=NOW_NS + i // 64 * SECOND_NS) for i in range(4 * 64)]
    assert report(handler, *frames)["packets_per_second"] == 64.0


def test_time_is_when_the_receiver_got_them() -> None:
    frames = [one(b"", kernel_ns=NOW_NS), one(b"", kernel_ns=NOW_NS, socket_ns=SECOND_NS // 2)]
    assert report(handler, *frames)["packets_per_second"] == 2.0


def test_no_rate_before_time_has_passed() -> None:
    for frames in ([], [one(b"x")], [one(b"x"), one(b"y")]):
        found = report(handler, *frames)
        assert found["packets_per_second"] is None
        assert found["bytes_per_second"] is None


def test_a_clock_that_goes_back_makes_no_negative_rate() -> None:
    frames = [one(b"x", kernel_ns=NOW_NS - i * SECOND_NS) for i in range(3)]
    assert report(handler, *frames)["packets_per_second"] == 1.0


frames = st.builds(
    Frame,
    packets=st.integers(0, 3).map(lambda size: [bytes(size)]),
    kernel_ns=st.integers(NOW_NS, NOW_NS + 3) | st.integers(0, 2 * NOW_NS),
)


@given(st.lists(frames, max_size=20), st.lists(frames, max_size=20))
def test_merging_is_the_same_as_all_packets_in_one(a: list[Frame], b: list[Frame]) -> None:
    first, second, both = fresh(handler), fresh(handler), fresh(handler)
    feed(handler, first, *a)
    feed(handler, second, *b)
    feed(handler, both, *a, *b)
    handler.merge(first[0], second[0])
    assert first == both
    assert handler.report(first[0]) == handler.report(both[0])


def test_an_argument_is_refused() -> None:
    with pytest.raises(Refused, match="rate takes no argument"):
        fresh(handler, argument="x")
