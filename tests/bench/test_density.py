"""The experiment `density` in small: both loops receive, and know what they hold."""

import os

import pytest

from bench import density

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")


@pytest.mark.parametrize("size", density.SIZES)
@pytest.mark.parametrize("dense", [True, False])
def test_a_flood_is_received(size: int, dense: bool) -> None:
    density._compile()
    slot_bytes = 0 if dense else 2048 if size <= 2048 else 16384
    figures = density._fill(size, slot_bytes, (CPUS[0], CPUS[1]), 0.02, 0.1)
    assert figures["ok"]
    assert figures["packets"] > 0
    assert (figures["payload_share"] > 0.6) == (dense or size > 0.6 * slot_bytes)
