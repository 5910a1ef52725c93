"""Numbers for people: three digits, the right unit, and sizes that are read back exactly."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import figures


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500", 1500),
        ("1B", 1),
        ("40KiB", 40 << 10),
        ("64MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("2MB", 2_000_000),
        ("3kB", 3000),
    ],
)
def test_sizes_binary_and_decimal(text: str, size: int) -> None:
    assert figures.parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "1.5MiB",
        "64mib",
        "64 MiB",
        " 1",
        "1\n",
        "MiB",
        "1K",
        "0x10",
        "1_000",
        "٣",
        "9" * 20,
        "8589934592GiB",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: give bytes"):
        figures.parse_size(text)


@given(st.integers(1, (1 << 63) - 1))
def test_a_formatted_size_is_read_back_exactly(size: int) -> None:
    assert figures.parse_size(figures.format_size(size)) == size


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = figures.parse_size(text)
    except ValueError:
        return
    assert 0 < size < 1 << 63
    assert re.fullmatch(r"[0-9]+([kMG]?B|[KMG]iB)?", text)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"),
        (999, "", "999"),
        (999.6, "", "1.00 k"),
        (1_534_211.0, "/s", "1.53 M/s"),
        (50, "/s", "50/s"),
        (12.34, "", "12.3"),
        (9.996, "", "10.0"),
        (99.96, "", "100"),
        (160_010_560, "bit/s", "160 Mbit/s"),
        (3_200_000_000, "B", "3.20 GB"),
        (-1500, "", "-1.50 k"),
        (None, "B", "–"),
        (math.nan, "B", "–"),
        (math.inf, "", "–"),
    ],
)
def test_magnitudes(value: float | None, unit: str, text: str) -> None:
    assert figures.magnitude(value, unit) == text


@given(st.floats(1e-2, 1e17))
def test_a_magnitude_is_right_to_three_digits(value: float) -> None:
    number, _, prefix = figures.magnitude(value).partition(" ")
    scale = 1000 ** ["", "k", "M", "G", "T", "P"].index(prefix)
    assert float(number) * scale == pytest.approx(value, rel=0.006, abs=0.006)
    assert len(number) <= 4


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (850, "850 ns"),
        (12_400, "12.4 µs"),
        (999_700, "1.00 ms"),
        (1_230_000, "1.23 ms"),
        (4_560_000_000, "4.56 s"),
        (3.6e12, "3600 s"),
        (-1500, "-1.50 µs"),
        (None, "–"),
    ],
)
def test_durations(nanoseconds: float | None, text: str) -> None:
    assert figures.duration(nanoseconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (99.94, "99.9 s"), (99.96, "1 min 40 s"), (307, "5 min 07 s"), (10_920, "3 h 02 min")],
)
def test_clock(seconds: float, text: str) -> None:
    assert figures.clock(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.00001, "<0.01 %"), (0.0412, "4.12 %"), (0.958, "95.8 %"), (1, "100 %")]
)
def test_percent(share: float, text: str) -> None:
    assert figures.percent(share) == text


def test_counts_are_whole() -> None:
    assert figures.exact(131_072_345_678) == "131,072,345,678"
    assert figures.exact(None) == "–"


def test_cpus_or_any() -> None:
    assert figures.cpu_list([0, 1, 2, 8]) == "0-2,8"
    assert figures.cpu_list(None) == figures.cpu_list([]) == "any"
