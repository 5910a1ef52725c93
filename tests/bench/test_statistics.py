"""The experiment `statistics` in small: each way is right, and what is not is noticed."""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from bench import native, statistics
from bench.statistics import ONE_STAGE, PACKETS, SIZE, Frames, Way, lay
from engine.handlers import histogram, latency
from engine.handlers.api import packets_in
from engine.net.stamp import STAMP
from rings.layout import ALIGN

CPU = min(os.sched_getaffinity(0))
FRAMES = 5
without_cc = pytest.mark.skipif(native.missing() != "", reason=native.missing())
WAYS = [statistics._one_stage, statistics._all_four, pytest.param(statistics._c, marks=without_cc)]


@pytest.fixture
def frames() -> Frames:
    return lay(FRAMES)


@pytest.mark.parametrize("way", [*WAYS, statistics._sum])
def test_each_way_is_right(way: Way, frames: Frames) -> None:
    figures = way(frames, 0.001, CPU)
    assert figures["ok"]
    assert figures["value"] > 0
    assert figures["passes"] > 0


def test_frames_of_one_packet_are_counted_as_well() -> None:
    assert statistics._all_four(lay(FRAMES, 1), 0.001, CPU)["ok"]


@pytest.mark.parametrize("way", WAYS)
def test_a_time_that_is_wrong_by_one_nanosecond_is_noticed(way: Way, frames: Frames) -> None:
    sent_ns = frames.sent_ns.copy()
    sent_ns[FRAMES - 1, PACKETS - 1] -= 1
    assert not way(dataclasses.replace(frames, sent_ns=sent_ns), 0.001, CPU)["ok"]


def test_a_wrong_sum_is_noticed(frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "sum_of", lambda address, count: 7)
    assert not statistics._sum(frames, 0.001, CPU)["ok"]


@pytest.mark.parametrize("stage", latency.STAGES)
@pytest.mark.parametrize("field", ["count", "total", "buckets"])
def test_a_wrong_figure_of_any_stage_is_noticed(stage: str, field: str, frames: Frames) -> None:
    _, passes, state = statistics._handle(latency.handler, frames, 0.001)
    assert statistics.are_right(state, frames, passes)
    record: Any = state[stage] if field == "buckets" else state[stage]["moments"]
    if field == "count":
        record[field] += 1
    else:
        record[field][0] += 1
    assert not statistics.are_right(state, frames, passes)


@pytest.mark.parametrize("field", ["least", "most", "squares"])
def test_a_wrong_figure_of_one_stage_is_noticed(field: str, frames: Frames) -> None:
    _, passes, state = statistics._handle(ONE_STAGE, frames, 0.001)
    assert statistics.is_right(state["stage"], frames.network_ns, passes)
    state["stage"]["moments"][field] += 1 << 40
    assert not statistics.is_right(state["stage"], frames.network_ns, passes)


@pytest.mark.parametrize("per_frame", [1, PACKETS])
def test_packets_lie_where_the_descriptors_say(per_frame: int) -> None:
    frames = lay(FRAMES, per_frame)
    for i, descriptor in enumerate(frames.descriptors):
        begin = int(descriptor["offset"]) * ALIGN
        payload = frames.arena[begin : begin + int(descriptor["length"])].reshape(per_frame, SIZE)
        assert packets_in(descriptor) == per_frame
        stamps = payload[:, : STAMP.itemsize].copy().view(STAMP).ravel()
        assert (stamps["scheduled_ns"] == frames.sent_ns[i]).all()
        assert (stamps["sequence"] == int(descriptor["number"]) + np.arange(per_frame)).all()


def test_buckets_by_their_bounds_are_those_of_the_histogram() -> None:
    samples = np.array([0, 0, 1, 127, 128, 129, 5_000, 60_000, 1 << 40, (1 << 52) + 1])
    expected = np.zeros(histogram.BUCKETS, np.int64)
    np.add.at(expected, [int(histogram.bucket(x)) for x in samples], 1)
    assert (statistics.buckets_of(samples) == expected).all()
