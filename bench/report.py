"""A result as people read it: on the terminal, as report.md and report.html, with pictures beside them.

All of it is a list of sections (bench/section.py), made once, and shown in three ways. What an experiment
tells comes first, then its claims, its cases by unit, the machine.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bench import pictures
from bench.report_html import html
from bench.report_md import markdown
from bench.section import Alarm, Picture, Section, Table, is_numeric
from engine.affinity.topology import format_cpu_list

_WIDTH = 120  # where there is no terminal to ask
_NO_PICTURES = "no pictures: matplotlib is not installed (pip install 'rxring[plots]')"
_CASE_COLUMNS = ("#", "case", "median", "interval", "≈", "runs", "answers")
_CLAIM_COLUMNS = ("claim", "median", "min – max", "asked", "holds")


def save(folder: Path, result: dict[str, Any]) -> None:
    """result.json, at once and whole: it is never seen half written."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".result.json.{os.getpid()}"
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(folder / "result.json")


def write(folder: Path, result: dict[str, Any], told: Sequence[Section], help_text: str) -> list[str]:
    """report.md, report.html and the pictures; what there is to say of it.

    told: the experiment's own sections. help_text: its docstring.
    """
    sections = [*_verdict(result), *told, *_claims(result), *_cases(result), *_machine(result)]
    sections += _about(help_text)
    drawn = draw([section.picture for section in sections if section.picture])
    for name, png in drawn.items():
        (folder / f"{name}.png").write_bytes(png)
    said = [] if find_spec("matplotlib") else [_NO_PICTURES]
    title, command = result["name"], result["command"]
    (folder / "report.md").write_text(markdown(title, command, sections, drawn.keys(), said))
    (folder / "report.html").write_text(html(title, command, sections, drawn, said))
    return said


def draw(wanted: Iterable[Picture]) -> dict[str, bytes]:
    """PNGs by name; none without matplotlib."""
    if not find_spec("matplotlib"):
        return {}
    drawn = {}
    for picture in wanted:
        buffer = io.BytesIO()
        picture.draw().savefig(buffer, format="png")
        drawn[picture.name] = buffer.getvalue()
    return drawn


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def print_result(result: dict[str, Any], told: Sequence[Section]) -> None:
    """The terminal's share: figures first, what was found last, where the eye is."""
    print_sections([*_cases(result), *_claims(result), *told, *_verdict(result)])


def print_sections(sections: Iterable[Section]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for section in sections:
        console.print()
        console.print(Text(section.title, style="bold"))
        for line in section.text:
            console.print(_styled(line))
        if section.table:
            console.print(_rich(section.table))


def print_list(purposes: dict[str, str], *, json: bool) -> None:
    if json:
        for name, purpose in purposes.items():
            print_json({"name": name, "purpose": purpose})
    else:
        for name, purpose in purposes.items():
            print(f"{name:10} {purpose}")


def purpose(experiment: str) -> str:
    """The first line of its docstring, without importing it (and all it compiles)."""
    source = Path(__file__).with_name(f"{experiment}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def outcome(figures: dict[str, Any], unit: str) -> str:
    """One run in a few words."""
    wrong = "" if figures["ok"] else f"  WRONG {figures.get('error', '')}".rstrip()
    ledger = "  LEDGER NOT BALANCED" if figures.get("ledger_balanced") is False else ""
    return f"{number(figures['value'])} {unit}{wrong}{ledger}"


def number(value: float | None) -> str:
    """Four significant digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def span(low: float | None, high: float | None) -> str:
    return "–" if low is None else f"{number(low)} – {number(high)}"


# ── sections that every report has ───────────────────────────────────────────────────────────────────


def _verdict(result: dict[str, Any]) -> Iterator[Section]:
    bad = "Invalid: a run failed, an answer was wrong or a ledger did not balance."
    text = ["Valid: every answer was right."] if result["valid"] else [Alarm(bad)]
    yield Section("Result", (*text, *result["notes"]))


def _cases(result: dict[str, Any]) -> Iterator[Section]:
    """A table and a picture for each unit."""
    numbered = list(enumerate(result["cases"], 1))
    for index, unit in enumerate(dict.fromkeys(case["unit"] for case in result["cases"]), 1):
        chosen = [(place, case) for place, case in numbered if case["unit"] == unit]
        rows = tuple(_case_row(place, case, chosen) for place, case in chosen)
        values = {
            case["name"]: found
            for _, case in chosen
            if (found := [run["value"] for run in case["runs"] if run["value"] is not None])
        }
        picture = Picture(
            f"cases-{index}", f"Runs, median and interval of every case, {unit}", _dots(values, unit)
        )
        yield Section(
            f"Cases, {unit}",
            ("≈: rows whose interval overlaps this one's; they cannot be told apart.",),
            Table(_CASE_COLUMNS, rows),
            picture if values else None,
        )


def _dots(values: dict[str, list[float]], unit: str) -> Any:
    return lambda: pictures.dots(values, unit)


def _case_row(
    place: int, case: dict[str, Any], others: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[str, ...]:
    alike = [number for number, other in others if number != place and overlap(case["ci"], other["ci"])]
    return (
        str(place),
        case["name"],
        number(case["median"]),
        span(*(case["ci"] or (None, None))),
        format_cpu_list(alike).replace(",", ", "),
        str(len(case["runs"])),
        _answers(case),
    )


def overlap(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]


def _answers(case: dict[str, Any]) -> str:
    if not case["runs"]:
        return "not run"
    answers = "right" if case["ok"] else Alarm("WRONG")
    if case["ledger_balanced"] is False:
        return Alarm(f"{answers}, NOT BALANCED")
    return answers if case["ledger_balanced"] is None else f"{answers}, balanced"


def _claims(result: dict[str, Any]) -> Iterator[Section]:
    if result["claims"]:
        rows = tuple(_claim_row(claim) for claim in result["claims"])
        yield Section("Claims", ("Ratios are taken within a round.",), Table(_CLAIM_COLUMNS, rows))


def _claim_row(claim: dict[str, Any]) -> tuple[str, ...]:
    bounds = (("≥", claim["at_least"]), ("≤", claim["at_most"]))
    return (
        _claim(claim),
        number(claim["median"]),
        span(claim["min"], claim["max"]),
        ", ".join(f"{sign} {number(bound)}" for sign, bound in bounds if bound is not None),
        {True: "yes", False: Alarm("NO"), None: "not run"}[claim["holds"]],
    )


def _claim(claim: dict[str, Any]) -> str:
    against = f" / {claim['against']}" if claim["against"] else ""
    figure = f", {claim['figure']}" if claim["figure"] != "value" else ""
    return f"{claim['case']}{against}{figure}"


def _machine(result: dict[str, Any]) -> Iterator[Section]:
    config = result["config"]
    facts = {key: value for key, value in config.items() if key not in ("sysctl", "versions")}
    facts |= {"commit": result["git"], **config["versions"]}
    rows = tuple((key, str(value)) for key, value in facts.items())
    yield Section("Machine", (), Table(("what", "is"), rows))


def _about(help_text: str) -> Iterator[Section]:
    if help_text.strip():
        paragraphs = re.split(r"\n\s*\n", help_text.strip())
        yield Section("What this measures", tuple(" ".join(text.split()) for text in paragraphs))


# ── on the terminal ──────────────────────────────────────────────────────────────────────────────────


def _styled(text: str) -> Text:
    return Text(text.replace("`", ""), style="bold red" if isinstance(text, Alarm) else "")


def _rich(table: Table) -> RichTable:
    shown = RichTable(header_style="bold")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if is_numeric(table, index) else "left")
    for row in table.rows:
        shown.add_row(*map(_styled, row))
    return shown
