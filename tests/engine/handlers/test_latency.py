from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Refused
from engine.handlers.latency import LATENCY, STAGES, handler, histograms
from rings.layout import FrameFlag
from tests.engine.handlers.batches import NOW_NS, Frame, closing, feed, fresh, gro, one, report, rxring, seed

STATISTICS = ("mean_ns", "stddev_ns", "min_ns", "max_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns")


def counts(found: dict[str, Any], key: str = "count") -> list[int]:
    return [found[stage][key] for stage in STAGES]


def test_each_stage_is_the_difference_of_its_two_times() -> None:
    before_ns = time.time_ns()
    kernel_ns = before_ns - 10_000_000
    sent_ns = kernel_ns - 777
    packet = rxring(0, scheduled_ns=sent_ns)
    found = report(handler, one(packet, kernel_ns=kernel_ns, socket_ns=4321))
    after_ns = time.time_ns()
    assert counts(found) == [1, 1, 1, 1]
    assert counts(found, "negative") == [0, 0, 0, 0]
    assert {found["network"][key] for key in STATISTICS if key != "stddev_ns"} == {777}
    assert found["socket"]["max_ns"] == 4321
    assert before_ns - kernel_ns - 4321 <= found["ring"]["max_ns"] <= after_ns - kernel_ns - 4321
    assert found["total"]["max_ns"] == found["ring"]["max_ns"] + 4321 + 777


def test_mean_and_deviation_of_known_differences() -> None:
    frames = [one(b"", socket_ns=value) for value in (2, 4, 4, 4, 5, 5, 7, 9)]
    found = report(handler, *frames)["socket"]
    assert found["mean_ns"] == 5.0
    assert found["stddev_ns"] == pytest.approx((32 / 7) ** 0.5, rel=1e-15)
    assert (found["min_ns"], found["max_ns"]) == (2, 9)
    assert (found["p50_ns"], found["p90_ns"], found["p99_ns"], found["p999_ns"]) == (4, 9, 9, 9)


def test_no_packet_is_null_and_not_zero() -> None:
    found = handler.report(fresh(handler)[0])
    for stage in STAGES:
        assert found[stage]["count"] == found[stage]["negative"] == 0
        assert [found[stage][key] for key in STATISTICS] == [None] * len(STATISTICS)


def test_the_report_is_json() -> None:
    json.dumps(report(handler, one(rxring(0)), one(b"")))


def test_latency_is_from_the_scheduled_time_and_not_from_the_late_sending() -> None:
    packet = rxring(0, scheduled_ns=NOW_NS - 500, sent_ns=NOW_NS - 100)
    assert report(handler, one(packet))["network"]["max_ns"] == 500


@pytest.mark.parametrize("size", [0, 1, 4, 16, 23])
def test_a_packet_too_short_for_its_stamps_time_counts_in_the_other_stages(size: int) -> None:
    assert counts(report(handler, one(rxring(0, size=size)))) == [0, 1, 1, 0]


@pytest.mark.parametrize("size", [24, 31, 32, 1472])
def test_a_stamp_is_used_as_soon_as_its_scheduled_time_fits(size: int) -> None:
    assert counts(report(handler, one(rxring(0, size=size)))) == [1, 1, 1, 1]


def test_closing_stamps_are_packets_too() -> None:
    assert counts(report(handler, one(closing(10)))) == [1, 1, 1, 1]


def test_packets_without_the_magic_have_no_sent_time() -> None:
    assert counts(report(handler, one(b"G" * 1316))) == [0, 1, 1, 0]


def test_without_stamps_nothing_is_read_from_the_payload() -> None:
    assert counts(report(handler, one(rxring(0)), stamp="none")) == [0, 1, 1, 0]


def test_the_seed_stamp_is_microseconds() -> None:
    found = report(handler, one(seed(NOW_NS // 1000 - 42)), one(seed(0, size=8)[:7]), stamp="seed")
    assert counts(found) == [1, 2, 2, 1]
    assert found["network"]["max_ns"] == 42_000


@pytest.mark.parametrize("time_us", [1 << 63, (1 << 64) - 1, 1 << 62, (1 << 62) // 1000])
def test_a_seed_stamp_that_is_no_time_does_not_wrap(time_us: int) -> None:
    assert counts(report(handler, one(seed(time_us)), stamp="seed")) == [0, 1, 1, 0]


@pytest.mark.parametrize("scheduled_ns", [-1, -(1 << 63), 1 << 62, (1 << 63) - 1])
def test_an_rxring_stamp_that_is_no_time_does_not_wrap(scheduled_ns: int) -> None:
    assert counts(report(handler, one(rxring(0, scheduled_ns=scheduled_ns)))) == [0, 1, 1, 0]


def test_a_time_of_1970_is_a_long_latency() -> None:
    found = report(handler, one(rxring(0, scheduled_ns=0)))["network"]
    assert found["max_ns"] == found["p999_ns"] == NOW_NS


def test_without_a_kernel_time_two_stages_are_unknown() -> None:
    frame = one(rxring(0), flags=int(FrameFlag.NO_KERNEL_TIME))
    assert counts(report(handler, frame)) == [0, 0, 1, 1]


def test_a_packet_received_before_the_kernel_had_it_is_negative() -> None:
    found = report(handler, one(rxring(0), flags=int(FrameFlag.NEGATIVE)))
    assert counts(found) == [1, 0, 0, 1]
    assert counts(found, "negative") == [0, 1, 0, 0]


def test_a_time_in_the_socket_beyond_the_descriptor_counts_with_the_longest_it_can_say() -> None:
    longest_ns = (1 << 32) - 1
    frame = one(rxring(0), socket_ns=longest_ns, flags=int(FrameFlag.SATURATED))
    found = report(handler, frame)
    assert counts(found) == [1, 1, 0, 1]
    assert found["socket"]["saturated"] == 1
    assert found["socket"]["max_ns"] == longest_ns


def test_flags_that_say_nothing_about_times_change_nothing() -> None:
    frame = one(rxring(0), flags=int(FrameFlag.TRUNCATED | FrameFlag.END))
    assert counts(report(handler, frame)) == [1, 1, 1, 1]


def test_every_segment_of_a_frame_is_a_packet_with_its_own_stamp() -> None:
    packets = [rxring(i, scheduled_ns=NOW_NS - i, size=100) for i in range(64)]
    found = report(handler, gro(*packets, rxring(64, scheduled_ns=NOW_NS - 64, size=24), socket_ns=9))
    assert counts(found) == [65] * 4
    assert found["network"]["mean_ns"] == 32.0
    assert found["socket"]["min_ns"] == found["socket"]["max_ns"] == 9


def test_a_last_segment_too_short_for_the_stamp() -> None:
    found = report(handler, gro(rxring(0, size=100), rxring(1, size=100), rxring(2, size=8)))
    assert counts(found) == [2, 3, 3, 2]


@given(
    st.lists(st.integers(-(1 << 34), 1 << 34) | st.integers(0, 1000), min_size=1, max_size=150),
    st.integers(16, 40),
    st.integers(0, 40),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 31),
    st.sampled_from(["none", "rxring", "seed"]),
)
def test_a_gro_frame_counts_as_its_packets_one_by_one(
    agos_ns: list[int], size: int, last: int, socket_ns: int, flags: int, stamp: str
) -> None:
    make = {"seed": lambda sent_ns, size: seed(sent_ns // 1000, size)}.get(
        stamp, lambda sent_ns, size: rxring(0, scheduled_ns=sent_ns, size=size)
    )
    sizes = [size] * (len(agos_ns) - 1) + [min(last, size) or size]
    packets = [make(NOW_NS - ago_ns, size)[:size] for ago_ns, size in zip(agos_ns, sizes, strict=True)]
    facts = {"socket_ns": socket_ns, "flags": flags}
    merged = report(handler, gro(*packets, **facts), stamp=stamp)
    apart = report(handler, *[one(packet, **facts) for packet in packets], stamp=stamp)
    for stage in ("network", "socket"):  # the others depend on when they were read
        assert merged[stage] == apart[stage]
    for key in ("count", "negative"):
        assert counts(merged, key) == counts(apart, key)


def test_the_packets_of_a_gro_frame_were_read_at_the_same_time() -> None:
    found = report(handler, gro(*[rxring(i, size=100) for i in range(100)]))
    assert found["ring"]["min_ns"] == found["ring"]["max_ns"]
    assert found["total"]["min_ns"] == found["total"]["max_ns"]


def test_gro_frames_among_others_keep_apart() -> None:
    """Packets that wait in rows are not those of a GRO frame that comes between."""
    frames = [one(rxring(i, scheduled_ns=NOW_NS - 5), socket_ns=1) for i in range(50)]
    frames.insert(10, gro(*[rxring(i, scheduled_ns=NOW_NS - 9) for i in range(70)], socket_ns=2))
    found = report(handler, *frames)
    assert found["network"]["mean_ns"] == (50 * 5 + 70 * 9) / 120
    assert found["socket"]["mean_ns"] == (50 * 1 + 70 * 2) / 120
    assert found["socket"]["p50_ns"] == 2
    assert counts(found) == [120] * 4


def test_read_is_taken_anew_within_a_batch() -> None:
    """One reading for a whole batch would give all its packets the same `ring`."""
    found = report(handler, *[one(b"")] * 5000)
    assert found["ring"]["min_ns"] < found["ring"]["max_ns"]


def test_differences_of_every_magnitude_in_one_row() -> None:
    """Rows take a fast way when all their differences are small: the other one must say the same."""
    differences = [*range(40), (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 60]
    packets = [one(rxring(0, scheduled_ns=NOW_NS - d)) for d in differences]
    found = report(handler, *packets)["network"]
    assert found["count"] == len(differences)
    assert found["mean_ns"] == sum(differences) / len(differences)
    assert (found["min_ns"], found["max_ns"]) == (0, 1 << 60)


frames = st.builds(
    Frame,
    packets=st.just([b""])
    | st.builds(
        lambda sequence, ago_ns, size: [rxring(sequence, scheduled_ns=NOW_NS - ago_ns, size=size)],
        st.integers(0, 1 << 60),
        st.integers(-(1 << 34), 1 << 34),
        st.integers(0, 64),
    ),
    socket_ns=st.integers(0, (1 << 32) - 1),
    flags=st.integers(0, 31),
)


@given(st.lists(frames, max_size=100), st.lists(frames, max_size=100))
def test_merging_is_the_same_as_all_packets_in_one(a: list[Frame], b: list[Frame]) -> None:
    first, second, both = fresh(handler), fresh(handler), fresh(handler)
    feed(handler, first, *a)
    feed(handler, second, *b)
    feed(handler, both, *a)
    feed(handler, both, *b)
    handler.merge(first[0], second[0])
    merged, whole = handler.report(first[0]), handler.report(both[0])
    for stage in ("network", "socket"):  # the others depend on when they were read
        assert merged[stage] == whole[stage]
    for key in ("count", "negative"):
        assert counts(merged, key) == counts(whole, key)


@given(st.lists(frames, min_size=1, max_size=150))
def test_every_packet_is_counted_in_a_stage_or_negative_or_unknown(batch: list[Frame]) -> None:
    state = fresh(handler)
    feed(handler, state, *batch)
    found = handler.report(state[0])
    for stage in STAGES:
        one_stage = found[stage]
        assert 0 <= one_stage["count"] + one_stage["negative"] <= len(batch)
        if one_stage["count"]:
            ranks = [one_stage[key] for key in ("min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns")]
            assert [0, *ranks] == sorted([0, *ranks])
    no_kernel_time = sum(frame.flags & 1 for frame in batch)
    assert found["socket"]["count"] + found["socket"]["negative"] == len(batch) - no_kernel_time
    assert state[0]["waiting"] == 0


def test_histograms_hold_every_sample() -> None:
    state = fresh(handler)
    feed(handler, state, *[one(b"", socket_ns=value) for value in (3, 3, 70_000)])
    buckets = histograms(state[0])["socket"]
    assert [count for _, _, count in buckets] == [2, 1]
    assert buckets[1][0] <= 70_000 <= buckets[1][1]


def test_an_argument_is_refused() -> None:
    with pytest.raises(Refused, match="latency takes no argument"):
        fresh(handler, argument="x")


def test_the_report_reads_a_copy_that_can_not_be_written() -> None:
    state = np.frombuffer(bytes(LATENCY.itemsize), LATENCY)
    assert handler.report(state[0])["total"]["count"] == 0
