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
from engine.ledger import COUNTERS

Draw = Callable[[str, views.View], RenderableType]
CASES = [
    (screen.Display, views.calm("interval")),
    (screen.summary, views.calm()),
    (screen.Display, views.troubled("interval")),
    (screen.summary, views.troubled()),
    (screen.summary, views.unknown_sender()),
    (screen.summary, views.unknown_sender(sender={"name": "source", "state": "absent"})),
]


def drawn(what: RenderableType, width: int, height: int = 100, *, colour: bool = False) -> str:
    # Nothing is cut or folded by the console itself: a line that is too long shows.
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=colour,
        color_system="standard" if colour else None,
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
    for draw in (screen.Display, screen.summary):
        assert "…" not in drawn(draw("rx5000", views.calm()), width)


def test_long_names_are_cut_before_counts_are_left_out() -> None:
    text = drawn(screen.Display("rx5000", views.troubled("interval")), 60)
    assert re.search(r"a_name_of_32_bytes\S*…\s+2,399,988\s+681,629", text)


def test_more_width_shows_more() -> None:
    narrow, wide = (drawn(screen.Display("rx5000", views.calm()), width) for width in (60, 160))
    for head in ("CPU/packet", "rcvbuf", "most in use", "stddev"):
        assert head in wide
        assert head not in narrow


def test_what_never_happened_takes_no_column() -> None:
    text = drawn(screen.summary("rx5000", views.calm()), 250)
    for head in ("restarts", "negative", "saturated", "refused or failed", "frames", "of others", "listen"):
        assert head not in text
    text = drawn(screen.summary("rx5000", views.troubled()), 250)
    for head in ("restarts", "lost in flight", "refused or failed", "frames", "of others"):
        assert head in text


def test_the_ledger_is_an_account() -> None:
    assert [line.rstrip() for line in drawn(screen.ledger(views.calm()), 80).splitlines()] == [
        "ledger",
        "  2,400,000 sent",
        "−         0 NIC dropped *",
        "−         0 softnet dropped *",
        "−         0 socket dropped",
        "−         0 other UDP errors *",
        "−         0 lost in flight",
        "−         0 after the stop",
        "− 2,400,000 received",
        "=         0 residual  balanced",
        "",
        "  2,400,000 received",
        "−         0 refused",
        "= 2,400,000 published",
        "* counts all traffic, not ours alone",
    ]


UNKNOWN: dict[str, Any] = {"sent": None, "of_others": None, "residual": None, "balanced": None}


def with_ledger(sender: dict[str, str] | None, **changes: Any) -> views.View:
    view = views.calm()
    return view | {"sender": sender, "ledger": view["ledger"] | changes}


@pytest.mark.parametrize(
    ("sender", "changes", "style", "words"),
    [
        ("done", {}, "1;32", "balanced"),
        ("done", {"residual": 7, "balanced": False}, "1;31", "not balanced"),
        ("done", {"residual": 0, "balanced": False, "adds_up": False}, "1;31", "not balanced"),
        (None, UNKNOWN, "2", "sent is not known: name its sender with --sender"),
        ("absent", UNKNOWN, "33", "no sender 'source' came: start rxring send --name source"),
        ("sends", UNKNOWN, "33", "sender 'source' still sends: end it before the run"),
        ("died", UNKNOWN, "33", "sender 'source' died: how much it sent is not known"),
        (None, UNKNOWN, "1;32", "what was received adds up"),
        (None, UNKNOWN | {"adds_up": False}, "1;31", "what was received does not add up"),
    ],
)
def test_the_verdict_says_why_and_has_its_colour(
    sender: str | None, changes: dict[str, Any], style: str, words: str
) -> None:
    view = with_ledger(sender and {"name": "source", "state": sender}, **changes)
    text = drawn(screen.ledger(view), 100, colour=True)
    assert re.search(rf"\x1b\[{style}m\s*{words}", text)
    assert bool(re.search(r"\x1b\[1;31m\s*7", text)) == (changes.get("residual") == 7)


def test_what_others_lost_is_taken_back() -> None:
    text = drawn(screen.ledger(with_ledger(None, softnet_dropped=9, of_others=9)), 80)
    assert re.search(r"\+ +9 of others\s*\n", text)
    assert re.search(r"− +9 softnet dropped \*\s*\n", text)


# ── the first line ───────────────────────────────────────────────────────────────────────────────────


def loss(view: views.View, width: int = 500) -> str:
    return drawn(screen.loss(view), width).strip()


def test_losses_come_first_each_with_its_layer() -> None:
    for draw, kind in ((screen.Display, "interval"), (screen.summary, "summary")):
        second, third, *_ = drawn(draw("rx5000", views.calm(kind)), 100).splitlines()[1:]
        assert (second.strip(), third.strip()) == ("nothing lost", "")
    assert loss(views.troubled("interval")) == (
        "lost: 1,973 socket frames · 10 NIC, softnet or UDP errors · 64 in flight · -44 residual frames"
        " · 15 refused · 681,629 skipped by a_name_of_32_bytes_at_the_most.1 · 1,973 missing, says gaps"
        " · 11 after the stop"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "nothing lost"),
        ({"socket_dropped": 20_250, "socket_dropped_frames": 20_250}, "lost: 20,250 socket"),
        ({"softnet_dropped": 9, "of_others": 9}, "nothing lost"),
        ({"softnet_dropped": 9, "of_others": 2}, "lost: 7 softnet"),
        ({"softnet_dropped": 9, "of_others": None}, "lost: 9 softnet, of all traffic"),
        ({"nic_dropped": 1, "other_errors": 2}, "lost: 3 NIC or UDP errors"),
        ({"residual": 3}, "lost: 3 residual"),
        ({"adds_up": False}, "lost: what was received does not add up"),
        ({"after_stop": 11}, "nothing lost · 11 after the stop"),
        ({"after_stop": None, "after_stop_frames": 2}, "nothing lost · 2 frames after the stop"),
    ],
)
def test_what_counts_as_lost(changes: dict[str, Any], told: str) -> None:
    assert loss(with_ledger(None, **changes)) == told


def test_what_a_consumer_did_not_read_is_lost_only_at_the_end() -> None:
    for kind, told in (("interval", "nothing lost"), ("summary", "lost: 12 unread by dump")):
        assert loss(views.calm(kind) | {"consumers": [views.consumer("dump", None)]}) == told


def test_the_loss_has_the_colour_of_the_gravest() -> None:
    def colour(**changes: Any) -> str:
        return drawn(screen.loss(with_ledger(None, **changes)), 80, colour=True)[:7]

    assert colour() == "\x1b[1;32m"
    assert colour(refused=3) == "\x1b[1;33m"
    assert colour(refused=3, lost_in_flight=1) == "\x1b[1;31m"


@pytest.mark.parametrize(
    ("listen", "width", "shown"),
    [
        (["udp://10.0.0.1:5000"], 60, " udp://10.0.0.1:5000 "),
        (["udp://10.0.0.1:5000"], 40, " …://10.0.0.1:5000 "),
        (["udp://10.0.0.1:5000", "udp://10.0.0.2:5001"], 80, " udp://10.0.0.1:5000, udp://10.0.0.2:5001 "),
        (["udp://10.0.0.1:5000", "udp://10.0.0.2:5001"], 60, " udp://10.0.0.1:5000 and 1 more "),
        (["udp://10.0.0.1:5000", "udp://10.0.0.2:5001"], 40, " …://10.0.0.1:5000 "),
    ],
)
def test_the_title_says_where_it_listens(listen: list[str], width: int, shown: str) -> None:
    assert shown in drawn(screen.Title("quotes", listen, "12.0 s"), width)


def test_a_long_name_leaves_room_for_the_port() -> None:
    text = drawn(screen.Title("n" * 32, ["udp://127.0.0.1:54321"], "12.0 s"), 40)
    assert re.search(r"n… +….*:54321  12.0 s$", text.rstrip())


# ── low terminals ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (100, 30), (120, 40), (160, 50)])
@pytest.mark.parametrize("view", [views.calm("interval"), views.troubled("interval")])
def test_no_loss_is_ever_cut(width: int, height: int, view: views.View) -> None:
    lines = drawn(screen.Display("rx5000", view), width, height).splitlines()
    assert len(lines) <= height
    text = "\n".join(lines)
    lost = drawn(screen.loss(view), width).splitlines()
    assert [line.rstrip() for line in lines[1 : 1 + len(lost)]] == [line.rstrip() for line in lost]
    for part in ("receivers", "rings", "consumers"):
        for row in view[part]:
            assert f"\n{row['name'][:15]}" in text


def test_results_get_short_before_they_are_left_out() -> None:
    display = screen.Display("rx5000", views.calm("interval"))
    tall, middle, low = (drawn(display, 80, height) for height in (40, 24, 15))
    assert "stddev" not in middle
    assert "p99.9" in tall
    assert "p99.9" not in middle
    for text in (tall, middle):
        assert "untracked 0" in text
        assert "more lines" not in text
    assert len(low.splitlines()) == 15
    assert low.splitlines()[-1].rstrip() == "… (5 more lines: a taller terminal, or --plain)"


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────


def test_rings_and_urls_are_told_apart_where_there_are_several() -> None:
    view = views.calm("interval")
    view["receivers"] += [views.receiver(name="rx1", listen="udp://127.0.0.1:5001")]
    view["rings"] += [views.ring(number=1)]
    text = drawn(screen.Display("rx5000", view), 200)
    assert "rx5000 0" in text
    assert "rx5000 1" in text
    assert text.count("udp://127.0.0.1:5001") == 2


def test_a_full_ring_says_who_is_slow() -> None:
    text = drawn(screen.Display("rx5000", views.troubled("interval")), 100)
    assert re.search(r"99.9 % +100 % +31,337 times, for 4.71 s +gaps", text)
    calm = drawn(screen.Display("rx5000", views.calm() | {"rings": [views.ring(lag_frames=0)]}), 100)
    assert "never" in calm
    assert "slowest" not in calm


def test_a_result_behind_its_account_says_as_of_when() -> None:
    text = drawn(screen.Display("rx5000", views.calm("interval")), 120)
    assert text.count("as of 2,391,004") == 3
    assert "as of" not in drawn(screen.summary("rx5000", views.calm()), 120)


def test_rates_of_a_run_are_means() -> None:
    text = drawn(screen.summary("rx5000", views.calm()), 120)
    assert "mean packets/s  mean payload" in text
    assert "mean packets/s 200 k  mean bytes/s 20.0 M  packets 2,399,988  bytes 240 MB" in text
    assert "mean payload" not in drawn(screen.Display("rx5000", views.calm("interval")), 120)


def test_a_result_without_samples_says_so() -> None:
    found = {"socket": views.no_samples(), "total": views.no_samples()}
    assert [piece.plain for piece in screen.digest(found, "as of 0")] == ["as of 0", "nothing yet"]


@pytest.mark.parametrize("found", [[1, 2], "text", 7])
def test_a_result_may_be_any_json(found: Any) -> None:
    view = views.calm() | {"consumers": [views.consumer("mine", found)]}
    assert f"mine  result {found}" in drawn(screen.Display("rx5000", view), 80)


def test_what_counts_all_traffic_says_so_and_where_it_was() -> None:
    text = drawn(screen.ledger(views.troubled()), 80)
    assert re.search(r" 3 NIC dropped \* on eth0\s*\n", text)
    assert re.search(r" 7 softnet dropped \* on CPU 1\s*\n", text)
    assert re.search(r" 1 other UDP errors \*\s*\n", text)
    assert {line.split()[2] for line in text.splitlines() if " * " in line} == {"NIC", "softnet", "other"}
    assert text.splitlines()[-1].strip() == "* counts all traffic, not ours alone"


def test_every_shared_layer_is_marked_and_none_of_ours() -> None:
    for counter in COUNTERS:
        text = drawn(screen.ledger(with_ledger(None, of_others=3)), 80)
        (line, *_) = (line for line in text.splitlines() if f" {counter.label} " in line)
        assert ("*" in line) is (not counter.ours and counter.id != "of_others"), line


@pytest.mark.parametrize(("width", "height", "shown"), [(80, 50, True), (120, 50, True), (80, 30, False)])
def test_the_live_display_has_the_ledger_where_there_is_room(width: int, height: int, shown: bool) -> None:
    text = drawn(screen.Display("rx5000", views.calm("interval")), width, height)
    assert ("residual" in text) is shown
    assert "p99.9" in text
    assert len(text.splitlines()) <= height


@pytest.mark.parametrize(
    ("changes", "style", "words"),
    [
        (UNKNOWN, "2", "known when 'source' has ended"),
        ({"residual": 7, "balanced": False}, "1;31", "not yet balanced"),
        ({"balanced": True}, "1;32", "balanced"),
    ],
)
def test_before_the_end_the_ledger_may_be_open(changes: dict[str, Any], style: str, words: str) -> None:
    view = views.calm("interval")
    view["sender"]["state"] = "sends"
    view["ledger"] |= {"adds_up": False, **changes}  # counts were read while they rose
    text = drawn(screen.ledger(view), 80, colour=True)
    assert re.search(rf"\x1b\[{style}m\s*{words}", text)
    assert bool(re.search(r"\x1b\[1;31m\s*7", text)) == (changes.get("residual") == 7)
    assert "add up" not in text


def test_a_short_receive_buffer_shows_what_was_asked() -> None:
    assert "416KiB of 8MiB" in drawn(screen.Display("rx5000", views.troubled("interval")), 160)


def test_results_are_shown_by_the_endings_of_their_names() -> None:
    found = {"took_ns": 1500, "seen_per_second": 2e6, "bytes": 12, "of": 1234567, "ok": False, "why": None}
    assert drawn(screen.Flow(Text("x"), screen.digest(found)), 200).strip() == (
        "x  took 1.50 µs  seen/s 2.00 M  bytes 12 B  of 1,234,567  ok no  why –"
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
    text = drawn(screen.Display("rx\x1b[2J", views.troubled("interval")), 120)
    assert "ÄBC?[2J" in text
    assert "\x1b" not in text


def test_a_shared_port_is_named_once() -> None:
    view = views.calm() | {"receivers": [views.receiver(), views.receiver(name="rx1")]}
    assert drawn(screen.Display("rx5000", view), 100, 40).splitlines()[0].count("udp://127.0.0.1:5000") == 1


def test_a_stream_has_no_count_to_be_balanced_against() -> None:
    view = views.calm() | {"receivers": [views.receiver(listen="tcp://127.0.0.1:5000")], "sender": None}
    text = drawn(screen.ledger(view | {"ledger": view["ledger"] | UNKNOWN}), 100)
    assert "of a stream nobody tells how many frames it will be" in text
