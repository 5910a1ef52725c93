"""Findings for people."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.doctor.check import STATES, Finding

if TYPE_CHECKING:
    from rich.text import Text


_STYLES = {"bad": "bold red", "note": "yellow", "unknown": "cyan", "ok": "green"}
_WIDEST = 100
_INDENT = "          "


def show(found: Sequence[Finding]) -> None:
    """What matters first; the why of bad and note only. Commands have lines of their own, unbroken."""
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    width = min(out.width, _WIDEST)
    counts = Counter(finding.state for finding in found)
    plural = {state: f"{state}s" if state == "note" and counts[state] > 1 else state for state in STATES}
    pieces = [Text(f"{counts[state]} {plural[state]}", _STYLES[state]) for state in STATES if counts[state]]
    out.print(Text(", ").join(pieces))
    for group in dict.fromkeys(finding.group for finding in found):
        out.print(Text(f"\n{group}", "bold"))
        for finding in (f for f in found if f.group == group):
            for line in _lines(finding, width):
                out.print(line, soft_wrap=True)


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    from rich.text import Text

    from engine.screen import printable

    def wrapped(text: str) -> list[str]:
        """A number and its unit stay together."""
        joined = re.sub(r"(?<=\d) (?=([kM]|[KM]iB|[kMG]B|[nµm]s|%)( |$|[.,;:)]))", "\N{NO-BREAK SPACE}", text)
        lines = textwrap.wrap(joined, max(width - len(_INDENT), 40), break_on_hyphens=False)
        return [printable(line.replace("\N{NO-BREAK SPACE}", " ")) for line in lines]

    matters = finding.state in ("bad", "note")
    state = (f"  {finding.state:<{len(_INDENT) - 2}}", _STYLES[finding.state])
    head, *more = wrapped(f"{finding.id}: {finding.finding}")
    name, colon, rest = head.partition(":")
    yield Text.assemble(state, (name, "bold" if matters else ""), colon, rest)
    for line in more:
        yield Text(f"{_INDENT}{line}")
    for line in wrapped(finding.why) if matters else []:
        yield Text(f"{_INDENT}{line}", "dim")
    if finding.mend:
        yield Text(f"{_INDENT}{printable(finding.mend)}", "cyan")
