"""Sections as one page of HTML that needs nothing else: style and pictures are within it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from bench.section import Alarm, Section, Table, is_numeric

_STYLE = """
:root { font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; color: #1c1c1c }
body { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; background: white }
h1 { margin: 0; font-size: 1.9rem }
h2 { margin: 2.5rem 0 .5rem; padding-top: .8rem; border-top: 1px solid #ccc; font-size: 1.25rem }
p { max-width: 46rem; margin: .5rem 0; overflow-wrap: anywhere }
code { font: .9em ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; background: #f2f2f2;
  padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere }
.wide { overflow-x: auto; margin: .8rem 0 }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .18rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4 }
th { border-bottom: 2px solid #888; vertical-align: bottom }
.number { text-align: right }
td.number { white-space: nowrap }
tbody tr:hover { background: #f6f8fa }
.alarm { color: #b00020; font-weight: 600 }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0 }
@media print {
  :root { font-size: 10pt }
  body { max-width: none; padding: 0 }
  .wide { overflow: visible }
  h2 { break-after: avoid }
  tr, img { break-inside: avoid }
  thead { display: table-header-group }
}
"""


def html(title: str, head: Sequence[str], sections: Sequence[Section], drawn: Mapping[str, bytes]) -> str:
    """head: what stands before the sections. drawn: PNGs by name."""
    parts = [f"<h1>{escape(title)}</h1>", *map(_paragraph, head)]
    for section in sections:
        parts += _section(section, drawn)
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section, drawn: Mapping[str, bytes]) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    yield from map(_paragraph, section.text)
    if section.picture and section.picture.name in drawn:
        png = base64.b64encode(drawn[section.picture.name]).decode()
        yield f'<img alt="{escape(section.picture.alt)}" src="data:image/png;base64,{png}">'
    if section.table:
        yield _table(section.table)


def _table(table: Table) -> str:
    kinds = [' class="number"' if is_numeric(table, i) else "" for i in range(len(table.columns))]
    head = _row("th", kinds, table.columns)
    rows = "\n".join(_row("td", kinds, row) for row in table.rows)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _row(tag: str, kinds: Sequence[str], cells: Sequence[str]) -> str:
    filled = (f"<{tag}{kind}>{_inline(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(filled)}</tr>"


def _paragraph(text: str) -> str:
    return f"<p>{_inline(text)}</p>"


def _inline(text: str) -> str:
    """Escaped; `code` in backticks is code, what alarms is red."""
    inline = re.sub(r"``?(.+?)``?", r"<code>\1</code>", escape(text))
    return f'<span class="alarm">{inline}</span>' if isinstance(text, Alarm) else inline
