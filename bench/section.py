"""A part of a report that an experiment adds to its cases: sentences, a table, a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """name: of its PNG file, without the ending. alt: what it shows, for who cannot see it."""

    name: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    picture: Picture | None = None
