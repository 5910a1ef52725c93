from __future__ import annotations

from fractions import Fraction
from typing import Any

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.handlers import histogram
from engine.handlers.histogram import BUCKETS, bounds, bucket, percentiles

LARGEST = (1 << 63) - 1
any_size = st.integers(0, 63).flatmap(lambda bits: st.integers(0, (1 << bits) - 1))
PER_MILLE = (1, 250, 500, 900, 990, 999, 1000)


@numba.njit
def add_row(buckets, samples):
    histogram.add_row(buckets, samples, len(samples))


def of(samples: list[int]) -> NDArray[np.int64]:
    buckets = np.zeros(BUCKETS, np.int64)
    add_row(buckets, np.array(samples, np.int64))
    return buckets


def test_every_bucket_begins_where_the_one_before_ends() -> None:
    following = 0
    for index in range(BUCKETS - 1):
        low, high = bounds(index)
        if low > high:
            continue  # below 64 there are more buckets than integers
        assert low == following
        following = high + 1
        if high < 1 << 53:  # what float64 holds exactly
            assert bucket(low) == bucket(high) == index
    assert following == LARGEST + 1


@given(any_size)
def test_the_middle_of_a_bucket_is_within_one_percent_of_all_in_it(x: int) -> None:
    low, high = bounds(int(bucket(x)))
    middle = (low + high) // 2
    assert abs(middle - x) <= Fraction(x, 127)


def test_small_integers_are_exact() -> None:
    assert [bounds(int(bucket(x))) for x in range(128)] == [(x, x) for x in range(128)]


def test_no_sample_is_out_of_range() -> None:
    assert 0 <= bucket(0) < bucket(1) < bucket(LARGEST) == BUCKETS - 1


@given(st.lists(any_size, min_size=1, max_size=200))
def test_percentiles_are_within_one_percent_of_the_sorted_samples(samples: list[int]) -> None:
    got = percentiles(of(samples), PER_MILLE, min(samples), max(samples))
    ranked = sorted(samples)
    for found, mille in zip(got, PER_MILLE, strict=True):
        exact = ranked[max(-(-len(ranked) * mille // 1000), 1) - 1]
        assert abs(found - exact) <= Fraction(exact, 100)
        assert min(samples) <= found <= max(samples)
    assert got == sorted(got)


def test_percentiles_of_one_sample_are_the_sample() -> None:
    x = 123_456_789
    assert percentiles(of([x]), PER_MILLE, x, x) == [x] * len(PER_MILLE)


@given(st.lists(any_size), st.lists(any_size))
def test_adding_two_is_the_same_as_all_samples_in_one(a: list[int], b: list[int]) -> None:
    assert (of(a) + of(b) == of(a + b)).all()


@given(st.lists(any_size))
def test_filled_lists_all_samples_ascending(samples: list[int]) -> None:
    found: list[Any] = list(histogram.filled(of(samples)))
    assert sum(count for _, _, count in found) == len(samples)
    assert found == sorted(found)
