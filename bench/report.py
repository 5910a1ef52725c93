"""A result as people read it, as report.md, as result.json."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_CASE_COLUMNS = ("case", "median", "unit", "min – max", "quartiles", "runs", "answers")
_CLAIM_COLUMNS = ("claim", "median", "min – max", "asked", "holds")


def write(folder: Path, result: dict[str, Any], help_text: str) -> None:
    """result.json with every run, and report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "report.md").write_text(_markdown(result, help_text))


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def print_table(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for columns, rows in ((_CASE_COLUMNS, _case_rows(result)), (_CLAIM_COLUMNS, _claim_rows(result))):
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in result["notes"]:
        console.print(note)


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


def _case_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    for case in result["cases"]:
        answers = "right" if case["ok"] else "WRONG"
        if case["ledger_balanced"] is not None:
            answers += ", balanced" if case["ledger_balanced"] else ", NOT BALANCED"
        yield [
            case["name"],
            number(case["median"]),
            case["unit"],
            _range(case["min"], case["max"]),
            _range(*(case["quartiles"] or (None, None))),
            str(len(case["runs"])),
            answers if case["runs"] else "not run",
        ]


def _claim_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    for claim in result["claims"]:
        bounds = (("≥", claim["at_least"]), ("≤", claim["at_most"]))
        yield [
            _claim(claim),
            number(claim["median"]),
            _range(claim["min"], claim["max"]),
            ", ".join(f"{sign} {number(bound)}" for sign, bound in bounds if bound is not None),
            {True: "yes", False: "NO", None: "not run"}[claim["holds"]],
        ]


def _claim(claim: dict[str, Any]) -> str:
    against = f" / {claim['against']}" if claim["against"] else ""
    figure = f", {claim['figure']}" if claim["figure"] != "value" else ""
    return f"{claim['case']}{against}{figure}"


def _range(low: float | None, high: float | None) -> str:
    return "–" if low is None else f"{number(low)} – {number(high)}"


def _markdown(result: dict[str, Any], help_text: str) -> str:
    config = result["config"]
    facts = {key: value for key, value in config.items() if key not in ("sysctl", "versions")}
    facts |= {"commit": result["git"], **config["versions"]}
    parts = [
        f"# {result['name']}",
        f"`{result['command']}`",
        help_text.strip(),
        ""
        if result["valid"]
        else "**Invalid: a run failed, an answer was wrong or a ledger did not balance.**",
        "## Cases",
        _markdown_table(_CASE_COLUMNS, _case_rows(result)),
        *(f"- {case['name']}: {_parameters(case['parameters'])}" for case in result["cases"]),
        "## Claims",
        "Ratios are taken within a round.",
        _markdown_table(_CLAIM_COLUMNS, _claim_rows(result)),
        "## Machine",
        *(f"- {key}: {value}" for key, value in facts.items()),
        *(["## Notes", *(f"- {note}" for note in result["notes"])] if result["notes"] else []),
    ]
    return "\n\n".join(part for part in parts if part).replace("\n\n- ", "\n- ") + "\n"


def _parameters(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in parameters.items()) or "no parameters"


def _markdown_table(columns: tuple[str, ...], rows: Iterator[list[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
