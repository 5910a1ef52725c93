"""A part of a report: sentences, a table, a picture. An experiment adds its own by `tell(result)`.

The report puts texts and tables into the terminal, report.md and report.html, pictures into NAME.png and
report.html. Where matplotlib is missing no picture is drawn, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"[\d.,%×≥≤±+\-−– ]*")


class Alarm(str):
    """A sentence, or a cell of a table, to be seen first: shown in red."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of numbers are set to the right by themselves."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def is_numeric(table: Table, column: int) -> bool:
    return bool(table.rows) and all(_NUMBER.fullmatch(row[column]) for row in table.rows)


@dataclass(frozen=True, slots=True)
class Picture:
    """name: of its PNG file, without the ending. alt: what it shows, for who cannot see it."""

    name: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Section:
    """text: a paragraph each; `code` in backticks."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    picture: Picture | None = None
