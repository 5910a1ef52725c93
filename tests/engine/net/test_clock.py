import time

import pytest

from engine.net.clock import STEP_NS, clock_offset_ns, clock_step_ns


def test_offset_lies_between_the_clocks() -> None:
    before = time.time_ns() - time.monotonic_ns()  # too small by the time between the two reads
    offset = clock_offset_ns()
    late_monotonic = time.monotonic_ns()
    after = time.time_ns() - late_monotonic  # too large by it
    assert before - STEP_NS <= offset <= after + STEP_NS


def test_a_clock_that_nobody_set_shows_no_step() -> None:
    offset = clock_offset_ns()
    assert not any(clock_step_ns(offset) for _ in range(1000))


@pytest.mark.parametrize("step", [-3_600_000_000_000, -1_000_000, 1_000_000, 1_000_000_000])
def test_a_step_is_found_with_its_size(step: int) -> None:
    found = clock_step_ns(clock_offset_ns() - step)
    assert abs(found - step) <= STEP_NS
