"""What an experiment tells, as its report would have it."""

from __future__ import annotations

from collections.abc import Iterable

from bench.section import Section


def text_of(sections: Iterable[Section]) -> str:
    """All sentences. Every picture can be drawn, and no row of a table is longer or shorter than its head."""
    sentences: list[str] = []
    for section in sections:
        if section.picture:
            section.picture.draw()
        if section.table:
            assert {len(row) for row in section.table.rows} <= {len(section.table.columns)}
        sentences += section.text
    return "\n".join(sentences)
