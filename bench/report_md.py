"""Sections as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from bench.section import Alarm, Section, Table


def markdown(title: str, head: Sequence[str], sections: Sequence[Section], drawn: Collection[str]) -> str:
    """head: what stands before the sections. drawn: names of the pictures that there are."""
    parts = [f"# {title}", *head]
    for section in sections:
        parts += _section(section, drawn)
    return "\n\n".join(parts) + "\n"


def _section(section: Section, drawn: Collection[str]) -> Iterator[str]:
    yield f"## {section.title}"
    yield from map(_strong, section.text)
    if section.picture and section.picture.name in drawn:
        yield f"![{section.picture.alt}]({section.picture.name}.png)"
    if section.table:
        yield _table(section.table)


def _table(table: Table) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return _strong(text).replace("|", "\\|").replace("\n", " ")


def _strong(text: str) -> str:
    return f"**{text}**" if isinstance(text, Alarm) else str(text)
