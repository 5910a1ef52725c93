import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.spread import interval, median, quartiles, ratios

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


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (30, 10)])
def test_ranks_are_those_of_the_binomial_tables(n: int, rank: int) -> None:
    assert interval([float(i) for i in range(1, n + 1)]) == (rank, n + 1 - rank)


def test_it_holds_the_true_median_as_often_as_promised() -> None:
    rng = random.Random(1)
    inside = 0
    for _ in range(2000):
        low, high = interval([rng.expovariate(1.0) for _ in range(15)])
        inside += low <= math.log(2) <= high
    assert inside / 2000 >= 0.95


def test_ratios_are_of_one_round() -> None:
    assert ratios([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == [0.5, 0.5, 0.5]


def test_a_round_that_lacks_one_has_no_ratio() -> None:
    assert ratios([1.0, None, 3.0], [2.0, 4.0, None]) == [0.5]
    assert ratios([1.0], []) == []
