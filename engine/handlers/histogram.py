"""A log-linear histogram of non-negative integers: 64 buckets for each power of two, none out of range.

The bucket of x is read off x as a float64: its exponent, and the first 6 bits of its fraction. A bucket
is 1/64 of its power of two wide, so its middle is within 1/128 (0.8 %) of every sample in it; below 128
each integer has its own. Bucket 0 is for 0. Merging is addition.

The histogram is a plain i8 array (BUCKETS,), a field of somebody's record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rings.jit import jit

_PARTS_LOG2 = 6
_PARTS = 1 << _PARTS_LOG2
_SHIFT = 52 - _PARTS_LOG2  # a float64 has 52 bits of fraction
_BIAS = 1023 * _PARTS - 1  # makes 1 the bucket of 1
BUCKETS = 63 * _PARTS + 2  # up to 2⁶³, which float64 rounds the greatest int64 to


@jit
def bucket(x):  # type: ignore[no-untyped-def]
    """The index of the bucket that x, 0 ≤ x < 2⁶³, belongs to."""
    return max((np.float64(x).view(np.int64) >> _SHIFT) - _BIAS, 0)


@jit
def add_row(buckets, row, count):  # type: ignore[no-untyped-def]
    """Count row[:count], each 0 ≤ x < 2⁶³."""
    for i in range(count):
        buckets[bucket(row[i])] += 1


def bounds(index: int) -> tuple[int, int]:
    """The least and the greatest integer of a bucket; least > greatest in those that hold none."""
    if index == 0:
        return 0, 0
    return _begin(index), _begin(index + 1) - 1


def _begin(index: int) -> int:
    """The least integer that is not below bucket `index`, index > 0."""
    octave, part = divmod(index - 1, _PARTS)
    return -(-((_PARTS + part) << octave) // _PARTS)


def percentiles(buckets: Any, per_mille: tuple[int, ...], least: int, most: int) -> list[int]:
    """The samples at these ranks (nearest rank, ascending per mille): the middles of their buckets.

    least, most: of the samples, known exactly; nothing outside of them is answered. There must be samples.
    """
    found = []
    sums = np.cumsum(buckets)
    for mille in per_mille:
        rank = max(-(-int(sums[-1]) * mille // 1000), 1)
        low, high = bounds(int(np.searchsorted(sums, rank)))
        found.append(min(max((low + high) // 2, least), most))
    return found


def filled(buckets: Any) -> Iterator[tuple[int, int, int]]:
    """(least, greatest, samples) of each bucket that has any, ascending: for plots."""
    for index in np.flatnonzero(buckets):
        yield (*bounds(int(index)), int(buckets[index]))
