"""The statistics of an experiment: of few runs, on a machine that others use too. So medians throughout."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

_RESAMPLES = 9_999
_FEW = 6  # runs; of fewer, resampling gives minimum to maximum, too
_SEED = 20090  # fixed: the same runs always have the same interval

CI = (
    f"an interval goes from the 2.5th to the 97.5th percentile of the medians of {_RESAMPLES} resamples of "
    f"the runs (bootstrap, fixed seed); of fewer than {_FEW} runs, from minimum to maximum. It holds the "
    "median that very many runs would have with 75 % for 3 runs, 94 % for 5, 85 to 96 % for more"
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
    """Where the median lies, as CI says. B. Efron, "Bootstrap methods", Annals of Statistics 7, 1979."""
    if len(values) < _FEW:
        return min(values), max(values)
    found = np.array(values, float)
    drawn = np.random.default_rng(_SEED).integers(len(found), size=(_RESAMPLES, len(found)))
    medians = np.median(found[drawn], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def overlap(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Do two intervals share a point? Then what they are of cannot be told apart."""
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]


def ratios(values: Iterable[float | None], against: Iterable[float | None]) -> list[float]:
    """Run by run: what disturbs a whole round disturbs both. A round without both has none."""
    return [a / b for a, b in zip(values, against, strict=False) if a is not None and b]
