"""Runs as tables: everything that matters is there, whole, at any width."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import run_views as views
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from engine import screen

Draw = Callable[[str, views.View], RenderableType]
CASES = [
    (screen.interval, views.calm("interval")),
    (screen.summary, views.calm()),
    (screen.interval, views.troubled("interval")),
    (screen.summary, views.troubled()),
    (screen.summary, views.unknown_sender()),
]


def drawn(what: RenderableType, width: int, *, colour: bool = False) -> str:
    # So wide that nothing is cut or folded by the console itself: a line that is too long shows.
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None
    )
    with console.capture() as captured:
        console.print(what, crop=False, overflow="ignore", no_wrap=True)
    return captured.get()


@pytest.mark.parametrize(("draw", "view"), CASES)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 250])
def test_no_line_is_wider_than_the_terminal(draw: Draw, view: views.View, width: int) -> None:
    for line in drawn(draw("rx5000", view), width).splitlines():
        assert cell_len(line.rstrip()) <= width, line


@pytest.mark.parametrize("width", [60, 80, 160])
def test_drops_and_losses_are_never_left_out(width: int) -> None:
    text = drawn(screen.summary("rx5000", views.troubled()), width)
    for shown in ("1,973 frames", "681,629", "truncated 12", "too large 3", "ECONNREFUSED 2", "lost 1,973"):
        assert shown in text
    assert re.search(r"-44 residual\s+not balanced, in frames", text)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_nothing_is_cut_while_names_are_short(width: int) -> None:
    for draw in (screen.interval, screen.summary):
        assert "…" not in drawn(draw("rx5000", views.calm()), width)


def test_long_names_are_cut_before_counts_are_left_out() -> None:
    text = drawn(screen.interval("rx5000", views.troubled("interval")), 60)
    assert re.search(r"a_name_of_32_bytes\S*…\s+2,399,988\s+681,629", text)


def test_more_width_shows_more() -> None:
    narrow, wide = (drawn(screen.interval("rx5000", views.calm()), width) for width in (60, 160))
    for head in ("listen", "CPU/packet", "rcvbuf", "stddev"):
        assert head in wide
        assert head not in narrow


def test_what_never_happened_takes_no_column() -> None:
    text = drawn(screen.summary("rx5000", views.calm()), 250)
    for head in ("restarts", "negative", "saturated", "refused or failed"):
        assert head not in text
    text = drawn(screen.summary("rx5000", views.troubled()), 250)
    for head in ("restarts", "lost in flight", "refused or failed"):
        assert head in text


def test_the_ledger_is_an_account() -> None:
    assert drawn(screen.ledger(views.calm()["ledger"]), 80).splitlines() == [
        line.ljust(len("  2,400,000 residual  balanced")) if i else line
        for i, line in enumerate(
            [
                "ledger",
                "  2,400,000 sent",
                "−         0 NIC dropped",
                "−         0 softnet dropped",
                "−         0 socket dropped",
                "−         0 other UDP errors",
                "−         0 lost in flight",
                "−         0 after the stop",
                "− 2,400,000 received",
                "=         0 residual  balanced",
                "",
                "  2,400,000 received",
                "−         0 refused",
                "= 2,400,000 published",
            ]
        )
    ]


@pytest.mark.parametrize(
    ("changes", "style", "word"),
    [
        ({}, "1;32", "balanced"),
        ({"residual": 7, "balanced": False}, "1;31", "not balanced"),
        ({"residual": 0, "balanced": False}, "1;31", "not balanced"),
        ({"sent": None, "residual": None, "balanced": None}, "2", "sent is not known"),
    ],
)
def test_the_verdict_has_its_colour(changes: dict[str, Any], style: str, word: str) -> None:
    text = drawn(screen.ledger(views.ledger([], **changes)), 80, colour=True)
    assert re.search(rf"\x1b\[{style}m\s*{word}", text)
    assert bool(re.search(r"\x1b\[1;31m\s*7", text)) == (changes.get("residual") == 7)


def test_what_counts_all_traffic_says_so() -> None:
    text = drawn(screen.ledger(views.troubled()["ledger"]), 80)
    assert "7 softnet dropped (of all traffic)" in text
    assert re.search(r"64 lost in flight\s*\n", text)


def test_a_short_receive_buffer_shows_what_was_asked() -> None:
    assert "416KiB of 8MiB" in drawn(screen.interval("rx5000", views.troubled("interval")), 160)


def test_results_are_shown_by_the_endings_of_their_names() -> None:
    found = {"took_ns": 1500, "seen_per_second": 2e6, "bytes": 12, "of": 1234567, "ok": False, "why": None}
    assert drawn(screen.Flow(Text("x"), screen.digest(found)), 200).strip() == (
        "x  took 1.50 µs  seen 2.00 M/s  bytes 12 B  of 1,234,567  ok no  why –"
    )


def test_objects_of_one_shape_become_a_table() -> None:
    found = {"bid": {"price": 101.25, "count": 3}, "ask": {"price": 101.5, "count": 2}, "symbol": "ABC"}
    lines = [line.split() for part in screen.result("book", found) for line in drawn(part, 80).splitlines()]
    assert lines == [
        ["book", "count", "price"],
        ["bid", "3", "101.25"],
        ["ask", "2", "101.5"],
        ["symbol", "ABC"],
    ]


def test_sizes_are_shares_of_the_most_frequent() -> None:
    (line,) = screen.result("rate", {"sizes": {"100": 990, "64": 5, "1": 2, "2": 1, "3": 1, "4": 1}})
    assert (
        drawn(line, 200).strip()
        == "rate  100 B 99.0 %  64 B 0.50 %  1 B 0.20 %  2 B 0.10 %  and 2 other sizes"
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=10), x, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=12), VALUES, max_size=5), st.integers(40, 200))
def test_any_result_can_be_shown(found: dict[str, Any], width: int) -> None:
    text = "".join(drawn(part, width) for part in screen.result("mine", found))
    assert "\x1b" not in text
    for piece in screen.digest(found):
        assert piece.plain.isprintable()


def test_no_escape_sequence_of_a_handler_reaches_the_terminal() -> None:
    text = drawn(screen.interval("rx\x1b[2J", views.troubled("interval")), 120)
    assert "ÄBC?[2J" in text
    assert "\x1b" not in text
