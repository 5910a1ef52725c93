"""The statistics of an experiment: of few runs, on a machine that others use too. So medians throughout."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

CI = (
    "interval of the median between order statistics, the narrowest that holds it with at least 95 %; "
    "of fewer than 6 runs: minimum to maximum"
)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile, interpolated; of one value, twice that."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, as CI says. It holds for any distribution.

    The median lies below the k-th smallest of n values with the chance that fewer than k of n fair coins
    show heads, and above the k-th largest with the same.
    """
    ordered, n = sorted(values), len(values)
    k, below = 1, 0.5**n
    while (next_below := below + math.comb(n, k) * 0.5**n) <= 0.025:
        k, below = k + 1, next_below
    return ordered[k - 1], ordered[n - k]


def ratios(values: Iterable[float | None], against: Iterable[float | None]) -> list[float]:
    """Run by run: what disturbs a whole round disturbs both. A round without both has none."""
    return [a / b for a, b in zip(values, against, strict=False) if a is not None and b]
