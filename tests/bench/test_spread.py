import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.spread import interval, median, overlap, quartiles, ratios

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


@given(values)
def test_all_lie_where_they_must(found: list[float]) -> None:
    low, high = interval(found)
    q1, q3 = quartiles(found)
    assert min(found) <= low <= median(found) <= high <= max(found)
    assert min(found) <= q1 <= median(found) <= q3 <= max(found)


def test_quartiles_and_median_of_a_known_sample() -> None:
    assert median([5, 1, 3, 2, 4]) == 3
    assert quartiles([5, 1, 3, 2, 4]) == (2, 4)
    assert quartiles([7.0]) == (7.0, 7.0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_few_runs_give_no_better_than_minimum_to_maximum(n: int) -> None:
    assert interval([float(i) for i in range(n)]) == (0, n - 1)


def test_more_runs_give_a_narrower_interval_always_the_same_one() -> None:
    found = [float(i) for i in range(1, 12)]
    low, high = interval(found)
    assert 1 < low < 6 < high < 11
    assert interval(found) == (low, high)
    assert interval(found * 4)[1] - interval(found * 4)[0] < high - low


@pytest.mark.parametrize(("n", "promised"), [(3, 0.75), (5, 0.9375), (7, 0.875), (15, 0.92)])
def test_it_holds_the_true_median_nearly_as_often_as_promised(n: int, promised: float) -> None:
    rng, times = random.Random(1), 500 if n < 6 else 200
    inside = 0
    for _ in range(times):
        low, high = interval([rng.expovariate(1.0) for _ in range(n)])
        inside += low <= math.log(2) <= high
    assert inside / times >= promised - 0.05


@pytest.mark.parametrize(
    ("one", "other", "alike"), [((1, 2), (2, 3), True), ((1, 2), (2.1, 3), False), ((1, 9), (2, 3), True)]
)
def test_what_overlaps(one: tuple[float, float], other: tuple[float, float], alike: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is alike
    assert not overlap(one, None)


def test_ratios_are_of_one_round() -> None:
    assert ratios([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == [0.5, 0.5, 0.5]


def test_a_round_that_lacks_one_has_no_ratio() -> None:
    assert ratios([1.0, None, 3.0], [2.0, 4.0, None]) == [0.5]
    assert ratios([1.0], []) == []
