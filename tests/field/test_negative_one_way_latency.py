"""Case 29: the clock was set, or two clocks differ, and the one-way latency came out negative (or huge)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.handlers.latency import STAGES, handler
from rings.layout import FrameFlag
from tests.engine.handlers.batches import Frame, one, report, rxring, seed

HOUR_NS = 3600 * 10**9


def stages(*frames: Frame, **options: Any) -> dict[str, Any]:
    found = report(handler, *frames, **options)
    for stage in STAGES:
        values = [found[stage][key] for key in ("min_ns", "mean_ns", "max_ns", "p50_ns", "p999_ns")]
        assert all(value is None or 0 <= value < 2 * HOUR_NS for value in values)
    return found


@pytest.mark.parametrize("ahead_ns", [1, 1_000, HOUR_NS, 1 << 60])
def test_a_sender_whose_clock_is_ahead(ahead_ns: int) -> None:
    now_ns = time.time_ns()
    good = one(rxring(0, scheduled_ns=now_ns - 500), kernel_ns=now_ns)
    bad = one(rxring(1, scheduled_ns=now_ns + ahead_ns), kernel_ns=now_ns)
    network = stages(good, bad, good)["network"]
    assert (network["count"], network["negative"]) == (2, 1)
    assert network["mean_ns"] == 500.0


def test_a_sender_whose_clock_is_ahead_with_the_seed_stamp() -> None:
    now_ns = time.time_ns()
    found = stages(one(seed((now_ns + HOUR_NS) // 1000), kernel_ns=now_ns), stamp="seed")
    assert found["network"]["negative"] == found["total"]["negative"] == 1


def test_the_clock_was_set_back_while_packets_stood_in_the_ring() -> None:
    now_ns = time.time_ns()
    found = stages(one(rxring(0, scheduled_ns=now_ns + HOUR_NS - 700), kernel_ns=now_ns + HOUR_NS))
    assert found["network"]["max_ns"] == 700
    assert found["ring"]["negative"] == found["total"]["negative"] == 1


def test_the_clock_was_set_back_while_packets_stood_in_the_socket() -> None:
    now_ns = time.time_ns()
    frame = one(rxring(0, scheduled_ns=now_ns), kernel_ns=now_ns, flags=int(FrameFlag.NEGATIVE))
    found = stages(frame)
    assert (found["socket"]["count"], found["socket"]["negative"]) == (0, 1)
    assert found["ring"]["count"] + found["ring"]["negative"] == 0
