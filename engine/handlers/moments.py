"""Count, sum, sum of squares, least and most of non-negative integers: exact, however many.

Sums are kept as integers of several 64-bit words, little end first. 2⁶³ samples of up to 2⁶³ each sum
to at most 2¹²⁶ and their squares to 2¹⁸⁹, so that two and three words never overflow. Mean and deviation
are computed from them when asked for: nothing is rounded on the way, the order of the samples does not
matter, and merging is addition.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rings.jit import jit

MOMENTS = np.dtype(
    [
        ("count", "i8"),
        ("least", "i8"),  # 0 while count is 0, as `most`
        ("most", "i8"),
        ("total", "u8", (2,)),
        ("squares", "u8", (3,)),
    ],
    align=True,
)

# Numba makes a float of a mix of signed and unsigned: in sums of words everything is a u8.
_u = np.uint64
_HALF = _u(32)
_LOW = _u(0xFFFFFFFF)


@jit
def _add_words(words, low, high):  # type: ignore[no-untyped-def]
    """words += high × 2⁶⁴ + low; `words` has two words or more."""
    first = words[0] + low
    carry = _u(first < low)
    second = words[1] + high
    carries = _u(second < high)
    second += carry
    carries += _u(second < carry)
    words[0] = first
    words[1] = second
    if len(words) > 2:
        words[2] += carries


@jit
def _widen(m, least, most, count):  # type: ignore[no-untyped-def]
    m.least = min(m.least, least) if m.count > 0 else least
    m.most = max(m.most, most)
    m.count += count


@jit
def add(m, x):  # type: ignore[no-untyped-def]
    """Add one sample, 0 ≤ x < 2⁶³, to a MOMENTS record."""
    _widen(m, x, x, 1)
    word = _u(x)
    high = word >> _HALF
    low = word & _LOW
    cross = high * low  # of (high × 2³² + low)², to be taken twice
    _add_words(m.total, word, _u(0))
    _add_words(m.squares, low * low, high * high)
    _add_words(m.squares, cross << _u(33), cross >> _u(31))


@jit
def _add_sums(m, total, squares_low, squares_high):  # type: ignore[no-untyped-def]
    """Add sums of samples, and of the halves of their squares."""
    _add_words(m.total, total, _u(0))
    _add_words(m.squares, squares_low, _u(0))
    _add_words(m.squares, squares_high << _HALF, squares_high >> _HALF)


@jit
def add_row(m, row, count):  # type: ignore[no-untyped-def]
    """Add row[:count], 1 ≤ count ≤ 2³¹, each 0 ≤ x < 2³²: about ten times as fast.

    The halves of the squares are summed apart, so that no sum in the loop passes 64 bits, and the loop
    is one that the compiler makes vector instructions of.
    """
    total = _u(0)
    squares_low = _u(0)
    squares_high = _u(0)
    least = row[0]
    most = row[0]
    for i in range(count):
        word = _u(row[i]) & _LOW
        square = word * word
        total += word
        squares_low += square & _LOW
        squares_high += square >> _HALF
        least = min(least, row[i])
        most = max(most, row[i])
    _widen(m, least, most, count)
    _add_sums(m, total, squares_low, squares_high)


@jit
def add_repeated(m, x, count):  # type: ignore[no-untyped-def]
    """Add a sample, 0 ≤ x < 2⁶³, `count` times, 1 ≤ count ≤ 2³¹; at once where x < 2³²."""
    if x > np.int64(_LOW):
        for _ in range(count):
            add(m, x)
        return
    times = _u(count)
    square = _u(x) * _u(x)
    _widen(m, x, x, count)
    _add_sums(m, _u(x) * times, (square & _LOW) * times, (square >> _HALF) * times)


def merge(into: Any, other: Any) -> None:
    """Make `into` the moments of both sets of samples."""
    if other["count"]:
        into["least"] = min(into["least"], other["least"]) if into["count"] else other["least"]
        into["most"] = max(into["most"], other["most"])
    into["count"] += other["count"]
    for field in ("total", "squares"):
        _store(into[field], _integer(into[field]) + _integer(other[field]))


def since(later: Any, earlier: Any) -> Any:
    """Of what `later` has and `earlier`, a former state of it, has not. least and most are those of all."""
    between = later.copy()
    between["count"] -= earlier["count"]
    for field in ("total", "squares"):
        _store(between[field], _integer(later[field]) - _integer(earlier[field]))
    return between


def mean(m: Any) -> float | None:
    """The mean, rounded once; None without samples."""
    count = int(m["count"])
    return _integer(m["total"]) / count if count else None


def stddev(m: Any) -> float | None:
    """The standard deviation of a sample (n − 1); None with fewer than two."""
    count, total = int(m["count"]), _integer(m["total"])
    if count < 2:
        return None
    return math.sqrt((count * _integer(m["squares"]) - total * total) / (count * (count - 1)))


def _integer(words: Any) -> int:
    return sum(int(word) << 64 * i for i, word in enumerate(words))


def _store(words: Any, value: int) -> None:
    for i in range(len(words)):
        words[i] = value >> 64 * i & 0xFFFF_FFFF_FFFF_FFFF
