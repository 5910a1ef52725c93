from __future__ import annotations

import math
import statistics
from fractions import Fraction
from typing import Any

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.handlers import moments
from engine.handlers.moments import MOMENTS, _add_words

LARGEST = (1 << 63) - 1
any_size = st.integers(0, LARGEST) | st.integers(0, 1 << 33) | st.integers(0, 100)
small = st.integers(0, (1 << 32) - 1)


@numba.njit
def add_all(state, samples):
    for x in samples:
        moments.add(state[0], x)


@numba.njit
def add_row(state, samples):
    moments.add_row(state[0], samples, len(samples))


@numba.njit
def add_repeated(state, samples):
    moments.add_repeated(state[0], samples[0], len(samples))


def of(samples: list[int], add: Any = add_all) -> NDArray[Any]:
    state = np.zeros(1, MOMENTS)
    if samples:
        add(state, np.array(samples, np.int64))
    return state


def variance(samples: list[int]) -> Fraction:
    n, total = len(samples), sum(samples)
    return Fraction(n * sum(x * x for x in samples) - total * total, n * (n - 1))


@given(st.lists(any_size, min_size=2))
def test_mean_and_deviation_are_those_of_exact_arithmetic(samples: list[int]) -> None:
    m = of(samples)[0]
    assert moments.mean(m) == float(Fraction(sum(samples), len(samples)))
    assert moments.stddev(m) == math.sqrt(float(variance(samples)))
    assert (m["count"], m["least"], m["most"]) == (len(samples), min(samples), max(samples))


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=50))
def test_deviation_is_that_of_the_statistics_module(samples: list[int]) -> None:
    assert math.isclose(moments.stddev(of(samples)[0]) or 0.0, statistics.stdev(samples), rel_tol=1e-15)


@given(st.lists(small, min_size=1, max_size=300))
def test_a_row_is_the_same_as_its_samples_one_by_one(samples: list[int]) -> None:
    assert of(samples, add_row) == of(samples)


@given(any_size | st.sampled_from([(1 << 32) - 1, 1 << 32, LARGEST]), st.integers(1, 300))
def test_a_sample_that_repeats_is_the_same_as_that_many_samples(x: int, count: int) -> None:
    assert of([x] * count, add_repeated) == of([x] * count)


words = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, (1 << 64) - 1])


@given(st.integers(0, (1 << 192) - 1) | st.just((1 << 128) - 1), words, words)
def test_sums_of_words_carry_through(start: int, low: int, high: int) -> None:
    values = np.array([start >> 64 * i & (1 << 64) - 1 for i in range(3)], np.uint64)
    _add_words(values, np.uint64(low), np.uint64(high))
    got = sum(int(value) << 64 * i for i, value in enumerate(values))
    assert got == (start + (high << 64) + low) % (1 << 192)


def test_a_row_of_the_largest_it_takes() -> None:
    samples = [(1 << 32) - 1] * 5000
    assert of(samples, add_row) == of(samples)


@given(st.lists(any_size), st.lists(any_size))
def test_merging_is_the_same_as_all_samples_in_one(a: list[int], b: list[int]) -> None:
    merged = of(a)
    moments.merge(merged[0], of(b)[0])
    assert merged == of(a + b)


@given(st.lists(any_size), st.lists(any_size))
def test_what_came_since(a: list[int], b: list[int]) -> None:
    between = moments.since(of(a + b)[0], of(a)[0])
    for field in ("count", "total", "squares"):
        assert (between[field] == of(b)[0][field]).all()


def test_right_for_more_samples_than_anyone_will_count() -> None:
    """Doubled 33 times: 2.6 × 10¹⁰ samples of every size, where a float has long lost the small ones."""
    samples = [1, 5_000_000_001, LARGEST]
    m = of(samples)
    for _ in range(33):
        moments.merge(m[0], m.copy()[0])
    times = 1 << 33
    assert m[0]["count"] == 3 * times
    assert moments.mean(m[0]) == float(Fraction(sum(samples), 3))
    n, total = 3 * times, times * sum(samples)
    exact = Fraction(n * times * sum(x * x for x in samples) - total * total, n * (n - 1))
    assert moments.stddev(m[0]) == math.sqrt(float(exact))


def test_a_small_spread_far_from_zero() -> None:
    """Where the textbook formula in floating point answers 0, or the root of a negative number."""
    samples = [LARGEST - 2, LARGEST - 1, LARGEST]
    assert moments.stddev(of(samples)[0]) == 1.0


def test_what_there_is_none_of_is_none() -> None:
    assert moments.mean(of([])[0]) is None
    assert moments.stddev(of([])[0]) is None
    assert moments.stddev(of([3])[0]) is None
    assert moments.mean(of([3])[0]) == 3.0
