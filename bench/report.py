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
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bench import pictures
from bench.report_html import html
from bench.report_md import markdown
from bench.section import Alarm, Picture, Section, Table, is_numeric
from bench.spread import overlap
from engine.affinity.topology import format_cpu_list

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 12  # characters of a column of words
_WIDTH = 120  # where there is no terminal to ask
_NO_PICTURES = "no pictures: matplotlib is not installed (pip install 'rxring[plots]')"
_SYSCTLS = (
    *(f"net.core.{name}" for name in ("rmem_max", "wmem_max", "netdev_max_backlog", "netdev_budget")),
    *(f"net.core.{name}" for name in ("busy_poll", "default_qdisc", "rps_sock_flow_entries")),
    *(
        f"net.ipv4.{name}"
        for name in ("udp_mem", "ip_early_demux", "udp_early_demux", "tcp_rmem", "tcp_wmem")
    ),
)
_CASE_COLUMNS = ("#", "case", "median", "interval", "≈", "runs")
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
    sections = [*_verdict(result), *told, *_claims(result), *_cases(result), *_repeated(result)]
    sections += [*_machine(result), *_about(help_text)]
    drawn = draw([section.picture for section in sections if section.picture])
    for name, png in drawn.items():
        (folder / f"{name}.png").write_bytes(png)
    said = [] if find_spec("matplotlib") else [_NO_PICTURES]
    head = [help_text.strip().partition("\n")[0], f"`{result['command']}`, begun {result['begun']}", *said]
    (folder / "report.md").write_text(markdown(result["name"], head, sections, drawn.keys()))
    (folder / "report.html").write_text(html(result["name"], head, sections, drawn))
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
        for part in _parts(section.table, console.width) if section.table else ():
            console.print(_rich(part, console.width))


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


def outcome(figures: Mapping[str, Any], unit: str) -> str:
    """One run in a few words."""
    wrong = "" if figures["ok"] else f"  WRONG {figures.get('error', '')}".rstrip()
    doubtful = f"  DOUBTFUL {'; '.join(figures['why'])}" if figures.get("why") else ""
    return f"{number(figures['value'])} {unit}{wrong}{doubtful}"


def number(value: float | None) -> str:
    """Four significant digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def span(low: float | None, high: float | None) -> str:
    return "–" if low is None else f"{number(low)} – {number(high)}"


def shown(value: Any) -> str:
    """A value of a configuration, as a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value) or "none"


# ── sections that every report has ───────────────────────────────────────────────────────────────────


def _verdict(result: dict[str, Any]) -> Iterator[Section]:
    cases = result["cases"]
    runs = sum(len(case["runs"]) for case in cases)
    again = sum(len(case["repeated"]) for case in cases)
    text: list[str] = []
    if not result["complete"]:
        asked = result["config"]["runs"] * sum(1 for case in cases if not case["skip"])
        text.append(
            Alarm(
                f"Stopped after {runs} of {asked} runs: `{result['command']} --out {result['out']}` goes on."
            )
        )
    if result["valid"]:
        text.append(f"Valid: {runs} runs, every answer was right, nothing is known against any of them.")
    else:
        text.append(Alarm("Invalid: do not rely on it."))
    text += [Alarm(sentence) for case in cases if not case["valid"] for sentence in _against(case)]
    text += [
        Alarm(f"`{one['key']}` changed {one['when']}: {shown(one['before'])} → {shown(one['after'])}.")
        for one in result["changes"]
    ]
    if again:
        text.append(f"Repeated, since something was against them: {again} runs; see below.")
    yield Section("Result", (*text, *map(_sentence, result["notes"])))


def _against(case: dict[str, Any]) -> Iterator[str]:
    """A sentence for each reason, with the rounds in which it holds."""
    rounds: dict[str, list[int]] = {}
    for place, run in enumerate(case["runs"], 1):
        wrong = [] if run["ok"] else [run.get("error", "the answer is wrong")]
        for reason in (*wrong, *run.get("why", ())):
            rounds.setdefault(reason, []).append(place)
    for reason, places in rounds.items():
        yield f"{case['name']}, round {_ranges(places)}: {reason}."


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}."


def _ranges(numbers: Iterable[int]) -> str:
    """1…3, 8"""
    return format_cpu_list(numbers).replace(",", ", ").replace("-", "…")


def _repeated(result: dict[str, Any]) -> Iterator[Section]:
    rows = tuple(
        (case["name"], str(run["round"]), number(run["value"]), case["unit"], "; ".join(run["why"]))
        for case in result["cases"]
        for run in case["repeated"]
    )
    if rows:
        yield Section(
            "Repeated runs",
            ("These are in no figure above.",),
            Table(("case", "round", "figure", "unit", "what was against it"), rows),
        )


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
            f"cases-{index}",
            f"Runs, median and interval of every case, {unit}",
            _dots(values, unit, frozenset(case["name"] for _, case in chosen if not case["valid"])),
        )
        of_ci = f" {_sentence(result['config']['ci'])}" if index == 1 else ""
        yield Section(
            f"Cases, {unit}",
            (f"≈: rows whose interval overlaps this one's; they cannot be told apart.{of_ci}",),
            Table(_CASE_COLUMNS, rows),
            picture if values else None,
        )


def _dots(values: dict[str, list[float]], unit: str, alarming: frozenset[str]) -> Callable[[], Figure]:
    return lambda: pictures.dots(values, unit, alarming)


def _case_row(
    place: int, case: dict[str, Any], others: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[str, ...]:
    alike = [number for number, other in others if number != place and overlap(case["ci"], other["ci"])]
    return (
        str(place),
        case["name"],
        number(case["median"]),
        span(*(case["ci"] or (None, None))),
        _ranges(alike),
        _runs(case),
    )


def _runs(case: dict[str, Any]) -> str:
    """How many, and what is to be said of them."""
    if not case["runs"]:
        return "not run"
    right = "right" if case["ledger_balanced"] is None else "balanced"
    faults = {
        "WRONG": not case["ok"],
        "NOT BALANCED": case["ledger_balanced"] is False,
        "DOUBTFUL": any(run.get("flags") for run in case["runs"]),
    }
    words = [word for word, holds in faults.items() if holds] or [right]
    if case["repeated"]:
        words.append(f"{len(case['repeated'])} repeated")
    text = f"{len(case['runs'])} {', '.join(words)}"
    return text if case["valid"] else Alarm(text)


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
        {True: "yes", False: Alarm("NO"), None: "not measured"}[claim["holds"]],
    )


def _claim(claim: dict[str, Any]) -> str:
    against = f" / {claim['against']}" if claim["against"] else ""
    figure = f", {claim['figure']}" if claim["figure"] != "value" else ""
    return f"{claim['case']}{against}{figure}"


def _machine(result: dict[str, Any]) -> Iterator[Section]:
    """What is worth reading; all of it is in result.json."""
    config = dict(result["config"])
    versions, sysctl, mitigations = (config.pop(key) for key in ("versions", "sysctl", "mitigations"))
    sides, noise = config.pop("sides"), config.pop("noise")
    del config["interrupts"], config["ci"]
    facts: dict[str, Any] = config | {"commit": commit(result["git"]), **versions}
    facts["mitigations"] = {name: text for name, text in mitigations.items() if text != "Not affected"}
    facts |= {key: sysctl[key] for key in _SYSCTLS if key in sysctl}
    for name, side in sides.items():
        facts |= {f"{name}: {key}": value for key, value in side.items() if value and key != "sysctl"}
        facts |= {f"{name}: {key}": side["sysctl"][key] for key in _SYSCTLS if key in side.get("sysctl", ())}
    for when, found in noise.items():
        facts |= {f"CPU {one['cpu']}, {when}": _noise(one) for one in found}
    rows = tuple((key, shown(value)) for key, value in facts.items())
    yield Section("Machine", ("All of it stands in result.json.",), Table(("what", "is"), rows))


def commit(git: dict[str, Any] | None) -> str:
    if git is None:
        return "unknown"
    return f"{git['commit'][:12]}{', with changes' if git['changed'] else ''}"


def _noise(one: dict[str, Any]) -> str:
    lost, longest = f"{100 * one['lost']:.2f} %", f"{one['longest_us']:.0f} µs"
    return f"{lost} of its time lost in {one['gaps']} gaps of more than 1 µs, the longest {longest}"


def _about(help_text: str) -> Iterator[Section]:
    """All but its first line, which is the head's."""
    paragraphs = re.split(r"\n\s*\n", help_text.strip())[1:]
    if paragraphs:
        yield Section("What this measures", tuple(" ".join(text.split()) for text in paragraphs))


# ── on the terminal ──────────────────────────────────────────────────────────────────────────────────


def _styled(text: str) -> Text:
    return Text(text.replace("`", ""), style="bold red" if isinstance(text, Alarm) else "")


def _parts(table: Table, width: int) -> Iterator[Table]:
    """The table, or where it is too wide, some of its columns below the others; the first one in all."""
    groups: list[list[int]] = [[0]]
    for index in range(1, len(table.columns)):
        if len(groups[-1]) > 1 and _width(table, [*groups[-1], index]) > width:
            groups.append([0])
        groups[-1].append(index)
    for group in groups:
        rows = tuple(tuple(row[index] for index in group) for row in table.rows)
        yield Table(tuple(table.columns[index] for index in group), rows)


def _width(table: Table, columns: Iterable[int]) -> int:
    """Of the narrowest table, with a blank beside each column."""
    return 2 + sum(_least(table, index) + 1 for index in columns)


def _least(table: Table, column: int) -> int:
    """Characters that it needs: numbers stay whole; words may be broken, the head between words."""
    head = max(map(len, table.columns[column].split()), default=0)
    widest = _widest(table, column)
    return max(head, widest if is_numeric(table, column) else min(_LEAST, widest))


def _widest(table: Table, column: int) -> int:
    return max((len(row[column]) for row in table.rows), default=0)


def _rich(table: Table, width: int) -> RichTable:
    shown = RichTable(header_style="bold", box=SIMPLE_HEAD, padding=0)
    heads = [max(len(name), _widest(table, index)) + 1 for index, name in enumerate(table.columns)]
    for index, name in enumerate(table.columns):
        if is_numeric(table, index):
            head = name if 2 + sum(heads) <= width else textwrap.fill(name, _least(table, index))
            shown.add_column(head, justify="right", no_wrap=True)
        else:
            shown.add_column(name, overflow="fold", min_width=_least(table, index))
    for row in table.rows:
        shown.add_row(*map(_styled, row))
    return shown
