"""The report in its three forms: what stands in it, what is red, and that nothing is taken for markup."""

import base64
import copy
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import machine, pictures, report
from bench.runner import Case, Taken, summary
from bench.section import Alarm, Picture, Section, Table, is_numeric

HELP = "What it answers.\n\nA `word` and\nmore < less.\n\nThe end."


def case(name: str, values: Sequence[float], unit: str = "M/s", **more: Any) -> dict[str, Any]:
    runs = [{"value": value, "ok": True, "took_s": 1.0, **more} for value in values]
    return summary(Case(name, unit, dict), Taken(runs))


@pytest.fixture(scope="module")
def blank() -> dict[str, Any]:
    of_runs = {"seed": 1, "runs": 3, "quick": False, "ci": "interval of the median"}
    noise = {"before the runs": [{"cpu": 0, "lost": 0.02, "longest_us": 30.0, "gaps": 9}]}
    return {
        "name": "tiny",
        "command": "rxring bench tiny --runs 3 --seed 1",
        "begun": "2026-01-01 00:00:00 +0000",
        "out": "results/tiny",
        "git": {"commit": "0123456789abcdef", "changed": True},
        "config": of_runs | machine.config() | {"noise": noise},
        "complete": True,
        "valid": True,
        "cases": [],
        "claims": [],
        "changes": [],
        "notes": [],
    }


@pytest.fixture
def result(blank: dict[str, Any]) -> dict[str, Any]:
    cases = [case("A", [1.0, 1.2, 1.1]), case("B", [1.15, 1.3, 1.25]), case("C | <c>", [5.0, 6.0, 7.0])]
    return copy.deepcopy(blank) | {"cases": [*cases, case("D", [9.0], "ns")]}


def written(folder: Path, result: dict[str, Any], told: Sequence[Section] = ()) -> tuple[str, str]:
    report.write(folder, result, told, HELP)
    return (folder / "report.md").read_text(), (folder / "report.html").read_text()


def test_cases_that_overlap_name_each_other(result: dict[str, Any], tmp_path: Path) -> None:
    """By unit; rows are numbered through."""
    text, _ = written(tmp_path, result)
    assert "| 1 | A | 1.1 | 1 – 1.2 | 2 | 3 right |" in text
    assert "| 2 | B | 1.25 | 1.15 – 1.3 | 1 | 3 right |" in text
    assert "| 3 | C \\| <c> | 6 | 5 – 7 |  | 3 right |" in text
    assert "## Cases, ns" in text
    assert "| 4 | D | 9 | 9 – 9 |  | 1 right |" in text


def test_one_page_that_needs_nothing_else(result: dict[str, Any], tmp_path: Path) -> None:
    _, page = written(tmp_path, result)
    assert "C | &lt;c&gt;" in page
    assert "<c>" not in page
    assert "<p>A <code>word</code> and more &lt; less.</p>" in page
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "url(" not in page
    pytest.importorskip("matplotlib")
    png = base64.b64decode(re.findall(r"base64,([^\"]+)", page)[0])
    assert png == (tmp_path / "cases-1.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_what_was_told_stands_before_the_cases(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = pictures.Curve("A", [(1, [1.0, 2.0])])
    picture = Picture("mine", "A line", lambda: pictures.lines({"": [curve]}, "batch", "M/s"))
    told = [Section("Mine", ("So it is.", Alarm("Beware.")), Table(("x",), ((Alarm("bad"),),)), picture)]
    text, page = written(tmp_path, result, told)
    assert text.index("## Mine") < text.index("## Cases, M/s") < text.index("## Machine")
    for part in ("So it is.", "**Beware.**", "| **bad** |", "![A line](mine.png)"):
        assert part in text
    for part in (
        '<span class="alarm">Beware.</span>',
        '<td><span class="alarm">bad</span></td>',
        'alt="A line"',
    ):
        assert part in page
    assert (tmp_path / "mine.png").exists()


def test_what_is_against_a_run_is_red_and_named(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = case("E", [3.0, 4.0], flags=["the sender was late"], why=["the sender was late"])
    failed = summary(Case("F", "M/s", dict), Taken([{"value": None, "ok": False, "error": "it fell over"}]))
    result |= {"cases": [*result["cases"], wrong, failed], "valid": False}
    result["cases"][0]["repeated"] = [{"value": 0.5, "round": 2, "why": ["an interrupt moved"]}]
    result["changes"] = [{"key": "sysctl.x", "before": "1", "after": None, "when": "during the runs"}]
    result["notes"] = ["the machine was not quiet"]
    text, page = written(tmp_path, result)
    for sentence in (
        "**Invalid: do not rely on it.**",
        "**E, round 1…2: the sender was late.**",
        "**F, round 1: it fell over.**",
        "**`sysctl.x` changed during the runs: 1 → –.**",
        "The machine was not quiet.",
        "| 5 | E | 3.5 | 3 – 4 | ",
        " **2 DOUBTFUL** |",
        " **1 WRONG** |",
        "3 right, 1 repeated",
        "| A | 2 | 0.5 | M/s | an interrupt moved |",
    ):
        assert sentence in text
    assert page.count('class="alarm"') == 6
    report.print_result(result, ())
    assert "E, round 1…2: the sender was late." in capsys.readouterr().out


def test_what_was_stopped_says_how_to_go_on(result: dict[str, Any], tmp_path: Path) -> None:
    result |= {"complete": False, "valid": True}
    text, _ = written(tmp_path, result)
    assert (
        "**Stopped after 10 of 12 runs: `rxring bench tiny --runs 3 --seed 1 --out results/tiny` goes on.**"
        in text
    )


def test_the_machine_stands_in_it(result: dict[str, Any], tmp_path: Path) -> None:
    text, _ = written(tmp_path, result)
    for row in ("kernel", "net.core.rmem_max", "numba", "mitigations"):
        assert f"| {row} | " in text
    assert "| commit | 0123456789ab, with changes |" in text
    assert (
        "| CPU 0, before the runs | 2.00 % of its time lost in 9 gaps of more than 1 µs, the longest 30 µs |"
        in text
    )


def test_nothing_measured_is_a_report_too(result: dict[str, Any], tmp_path: Path) -> None:
    result["cases"] = [summary(Case("A", "M/s", dict, skip="no compiler"), Taken())]
    text, _ = written(tmp_path, result)
    assert "| 1 | A | – | – |  | not run |" in text


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_all_else_is_written_and_that_is_said(
    result: dict[str, Any], tmp_path: Path
) -> None:
    said = report.write(tmp_path, result, (), HELP)
    assert said == ["no pictures: matplotlib is not installed (pip install 'rxring[plots]')"]
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert said[0] in text
    assert "no pictures" in page
    assert "![" not in text
    assert "<img" not in page
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_numbers_whole(
    result: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_WIDTH", width)
    name = "recvmmsg, 1024 B, batch 3000, flat out, one very long name"
    result["cases"] = [case(name, [i + 0.123456, i + 0.6]) for i in range(40)]
    report.print_result(result, ())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("39.36" in line and "39.12 – 39.6" in line for line in lines)
    assert "very" in " ".join(lines)
    assert not any("…" in line.replace("1…", "") for line in lines)  # nothing is cut off


def test_a_table_too_wide_goes_on_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_WIDTH", 80)
    columns = ("buffer", *(f"column {i} µs/KB" for i in range(19)))
    rows = tuple((str(i), *(f"{1000 * i + j + 7000}.125" for j in range(19))) for i in range(3))
    report.print_sections([Section("Wide", table=Table(columns, rows))])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(out.count(cell) == 1 for row in rows for cell in row[1:])
    assert out.count("buffer") > 1


@pytest.mark.parametrize(
    ("cells", "numeric"),
    [(("1", "2.5", "–"), True), (("1 – 2", "≥ 3"), True), (("1", "a"), False), (("12 %", "−3"), True)],
)
def test_numbers_are_known(cells: tuple[str, ...], numeric: bool) -> None:
    assert is_numeric(Table(("x",), tuple((cell,) for cell in cells)), 0) is numeric


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "yes"), (1, "1"), (None, "–"), ("", "none"), ([0, 1], "0, 1"), ({"a": {}}, "a: none")],
)
def test_values_of_a_configuration(value: Any, text: str) -> None:
    assert report.shown(value) == text


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────


def pixels(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_dots_have_a_row_for_each_name() -> None:
    pytest.importorskip("matplotlib")
    figure = pictures.dots({"A": [1.0, 2.0], "B": [3.0]}, "M/s", frozenset("B"))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A", "B"]
    assert axes.get_xlabel().startswith("M/s\n")
    assert axes.get_xlim()[0] == 0
    assert axes.get_xscale() == "linear"
    assert pictures.dots({"A": [1.0], "B": [31.0]}, "M/s").axes[0].get_xscale() == "log"
    assert pictures.dots({"A": [0.0], "B": [31.0]}, "M/s").axes[0].get_xscale() == "linear"
    assert pixels(pictures.dots({"A": [0.0]}, "M/s"))
    assert pixels(pictures.dots({"A": [-1.0, 5.0]}, "µs"))


def test_lines_share_their_styles_over_panels() -> None:
    pytest.importorskip("matplotlib")
    one, two = [(1.0, [1.0, 2.0, 3.0]), (8.0, [4.0])], [(1.0, [5.0])]
    panels = {"P": [pictures.Curve("A", one), pictures.Curve("B", two)], "Q": [pictures.Curve("B", two)]}
    figure = pictures.lines(panels, "batch", "M/s", log_x=True)
    left, right = figure.axes
    assert (left.get_title(), left.get_xlabel(), left.get_ylabel()) == ("P", "batch", "M/s")
    assert list(left.containers[0].lines[0].get_ydata()) == [2.0, 4.0]  # medians
    assert left.containers[1].lines[0].get_color() == right.containers[0].lines[0].get_color()
    assert left.containers[0].lines[0].get_color() != left.containers[1].lines[0].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A", "B"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["1", "8"]
    assert pixels(figure)


def test_each_nine_has_the_same_room() -> None:
    pytest.importorskip("matplotlib")
    curve = pictures.Curve("A", [(50, [1.0]), (90, [2.0]), (99, [4.0]), (99.9, [90.0])])
    figure = pictures.percentiles({"": [curve]}, "latency, µs")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["50 %", "90 %", "99 %", "99.9 %"]
    ticks = axes.get_xticks()
    assert ticks[2] / ticks[1] == pytest.approx(ticks[3] / ticks[2]) == pytest.approx(10)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert pixels(figure)


def test_bars_are_stacked() -> None:
    pytest.importorskip("matplotlib")
    figure = pictures.bars({"A": {"softirq": 2.0, "receiver": 1.0}, "B": {"receiver": 4.0}}, "ns")
    first, second = figure.axes[0].containers
    assert [bar.get_width() for bar in first] == [2.0, 0.0]
    assert [bar.get_x() for bar in second] == [2.0, 0.0]
    assert pixels(figure)
