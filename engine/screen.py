"""What a run looks like to people: the objects of `run --json` as tables that fit any width.

A table has more columns than most terminals can show. Each column has a weight; the lightest are left
out until the rest fits. Nothing is cut in the middle of a number, and drops are never left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from engine import figures
from engine.ledger import COUNTERS

Object = Mapping[str, Any]
_GAP = 2  # blanks between columns
_SHORT_NAME = 16  # a name is not cut below this
_TOP_SIZES = 4


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. `rare`: shown only where a row has something other than 0 in it."""

    head: str
    cell: Callable[[Object], str | Text]
    weight: int
    left: bool = False
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Fitted:
    """Rows as a table of the heaviest columns that fit the width it is given.

    The first column holds names; where they are long, they are cut before a column is left out.
    """

    columns: Sequence[Column]
    rows: Sequence[Object]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {column: [as_text(column.cell(row)) for row in self.rows] for column in self.columns}
        names, *others = [c for c in self.columns if not c.rare or any(map(_tells, cells[c]))]
        widths = {c: max(cell_len(c.head), *(t.cell_len for t in cells[c])) for c in (names, *others)}
        shortened = min(widths[names], _SHORT_NAME)
        while others and shortened + sum(_GAP + widths[c] for c in others) > options.max_width:
            others.remove(min(others, key=lambda column: column.weight))
        widths[names] = min(widths[names], options.max_width - sum(_GAP + widths[c] for c in others))

        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        for column in (names, *others):
            table.add_column(
                Text(column.head, "bold not dim" if column is names else ""),
                justify="left" if column.left else "right",
                width=widths[column],
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in zip(*(cells[c] for c in (names, *others)), strict=True):
            table.add_row(*row)
        yield table


@dataclass(frozen=True, slots=True)
class Flow:
    """Short pieces, one after another, broken only between them; later lines are indented."""

    head: Text
    pieces: Sequence[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from flow(self.head, self.pieces, options.max_width)


def flow(head: Text, pieces: Sequence[Text], width: int | None, indent: int = 2) -> Iterator[Text]:
    """The lines of a `Flow`; None: one line, however long."""
    line = Text.assemble(head)  # the head's style is its own
    for piece in pieces:
        if width is not None and line.cell_len + _GAP + piece.cell_len > width and line.plain.strip():
            yield line
            line = Text.assemble(" " * indent, piece)
        else:
            line = Text.assemble(line, " " * _GAP if line.plain.strip() else "", piece)
    yield line


def _tells(cell: Text) -> bool:
    return cell.plain not in ("", "0", figures.UNKNOWN)


def as_text(content: str | Text) -> Text:
    return content if isinstance(content, Text) else Text(printable(content))


def printable(text: str) -> str:
    """Names and results come from outside: no escape sequence of theirs reaches the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


# ── a whole run ──────────────────────────────────────────────────────────────────────────────────────


def waiting(ready: Object) -> RenderableType:
    """Before the first interval."""
    where = ", ".join(str(receiver["listen"]) for receiver in ready["receivers"])
    return Group(title(ready["name"], "ready"), Text(f"receiving on {printable(where)}", "dim"))


def interval(name: str, view: Object) -> RenderableType:
    """The live display."""
    return Group(
        title(name, figures.clock(view["seconds"])),
        *_receiving(view),
        *_consumers(view, CONSUMER),
        *_results(view),
    )


def summary(name: str, view: Object) -> RenderableType:
    """The end of a run, with its ledger."""
    return Group(
        title(name, f"{figures.clock(view['seconds'])}, done"),
        *_receiving(view),
        *_results(view),
        Text(),
        ledger(view["ledger"]),
        *_consumers(view, CONSUMER_AFTERWARDS),
    )


def title(name: str, right: str) -> Table:
    """The run's name at the left, `right` at the other end of the line."""
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    line.add_row(Text.assemble(("rxring ", "bold cyan"), (printable(name), "bold")), Text(right, "dim"))
    return line


def _receiving(view: Object) -> Iterator[RenderableType]:
    yield Text()
    yield Fitted(RECEIVER, view["receivers"])
    for receiver in view["receivers"]:
        if pieces := troubles(receiver):
            yield Flow(Text(f"{printable(receiver['name'])}: refused or failed", "yellow"), pieces)
    yield Text()
    yield Fitted(RING, view["rings"])


def _consumers(view: Object, columns: Sequence[Column]) -> Iterator[RenderableType]:
    if view["consumers"]:
        yield Text()
        yield Fitted(columns, view["consumers"])


def _results(view: Object) -> Iterator[RenderableType]:
    for consumer in view["consumers"]:
        if consumer["result"]:
            yield Text()
            yield from result(consumer["name"], consumer["result"])


# ── receivers, rings, consumers ──────────────────────────────────────────────────────────────────────


def _count(key: str, *, bad: bool = False) -> Callable[[Object], Text]:
    def cell(row: Object) -> Text:
        value = row.get(key)
        return Text(figures.exact(value), "bold red" if bad and value else "")

    return cell


def dropped(row: Object) -> Text:
    return _count_or_frames("socket_dropped", bad=True)(row)


def _count_or_frames(key: str, *, bad: bool = False) -> Callable[[Object], Text]:
    """Packets, or with GRO, where the kernel counts only frames, those."""

    def cell(row: Object) -> Text:
        frames = row.get(f"{key}_frames")
        if row.get(key) is None and frames is not None:
            return Text(f"{figures.exact(frames)} frames", "bold red" if bad and frames else "")
        return _count(key, bad=bad)(row)

    return cell


def _rcvbuf(row: Object) -> Text:
    """What was granted; and what was asked, where that is more."""
    rcvbuf = row.get("rcvbuf") or {}
    asked, granted = rcvbuf.get("asked"), rcvbuf.get("granted")
    if granted is None:
        return Text(figures.UNKNOWN)
    if asked is not None and granted < asked:
        return Text(f"{figures.format_size(granted)} of {figures.format_size(asked)}", "yellow")
    return Text(figures.format_size(granted))


def share_of_ring(ring: Object, key: str) -> str:
    return figures.percent(ring[key] / ring["capacity_frames"])


def _handler(row: Object) -> str:
    return "" if row["handler"] == row["name"] else str(row["handler"])


def _total(row: Object) -> str:
    """What the consumer's part of the ledger adds up to: all that was published."""
    return figures.exact(sum(row[key] for key in ("delivered", "skipped", "passed", "unread")))


def _state(row: Object) -> Text:
    state = {True: ("alive", "green"), False: ("dead", "bold red")}.get(row["alive"], (figures.UNKNOWN, ""))
    return Text(*state)


def troubles(receiver: Object) -> list[Text]:
    """Refused packets and errors by their names, restarts and their losses; where there are any."""
    counted = {**(receiver.get("refused") or {}), **(receiver.get("errors") or {})}
    return [Text(f"{words(name)} {figures.exact(n)}", "yellow") for name, n in counted.items() if n]


def words(key: str) -> str:
    return printable(key.replace("_", " "))


RECEIVER = (
    Column("receiver", lambda r: r["name"], 100, left=True),
    Column("cpu", lambda r: figures.cpu_list(r.get("cpus")), 75),
    Column("packets", _count("packets"), 85),
    Column("packets/s", lambda r: figures.magnitude(r.get("packets_per_second")), 99),
    Column("payload", lambda r: figures.magnitude(8 * r["bytes_per_second"], "bit/s"), 80),
    Column("dropped", dropped, 98),
    Column("a call", lambda r: figures.magnitude(r.get("packets_per_call")), 70),
    Column("CPU/packet", lambda r: figures.duration(r.get("cpu_ns_per_packet")), 40),
    Column("rcvbuf", _rcvbuf, 65),
    Column("restarts", _count("restarts", bad=True), 94, rare=True),
    Column("lost in flight", _count("lost_in_flight", bad=True), 93, rare=True),
    Column("after stop", _count_or_frames("after_stop"), 20, rare=True),
    Column("bytes", lambda r: figures.magnitude(r.get("bytes"), "B"), 35),
    Column("calls", _count("calls"), 30),
    Column("listen", lambda r: r["listen"], 38, left=True),
)
RING = (
    Column("ring", lambda r: r["name"], 100, left=True),
    Column("published", _count("published"), 90),
    Column("used", lambda r: share_of_ring(r, "lag_frames"), 85),
    Column("peak", lambda r: share_of_ring(r, "high_water"), 75),
    Column("full", lambda r: figures.exact(r["full_events"]), 80),
    Column("waited", lambda r: figures.duration(r["full_ns"]), 70),
    Column("arena", lambda r: figures.format_size(r["arena_bytes"]), 60),
    Column("frames", _count("frames"), 40),
    Column("bytes", lambda r: figures.magnitude(r["bytes"], "B"), 50),
)
_CONSUMER = (
    Column("consumer", lambda r: r["name"], 100, left=True),
    Column("cpu", lambda r: figures.cpu_list(r.get("cpus")), 75),
    Column("policy", lambda r: r["policy"], 60, left=True),
    Column("wait", lambda r: r["wait"], 30, left=True),
    Column("delivered", _count("delivered"), 95),
    Column("skipped", _count("skipped", bad=True), 98),
    Column("passed", _count("passed"), 50),
    Column("unread", _count("unread"), 85),
)
_CONSUMER_MORE = (
    Column("restarts", _count("restarts", bad=True), 94, rare=True),
    Column("since packet", _count("since_packet"), 20, rare=True),
    Column("handler", _handler, 25, left=True, rare=True),
)
CONSUMER = (*_CONSUMER, Column("state", _state, 97, left=True), *_CONSUMER_MORE)
# Afterwards: that it has ended is no news, that its account comes out even is.
CONSUMER_AFTERWARDS = (*_CONSUMER, Column("= total", _total, 45), *_CONSUMER_MORE)


# ── what handlers found ──────────────────────────────────────────────────────────────────────────────

# A distribution's columns from left to right, each with its weight.
_STATISTICS = {
    "count": 94,
    "negative": 89,
    "min_ns": 90,
    "mean_ns": 96,
    "stddev_ns": 91,
    "p50_ns": 99,
    "p90_ns": 93,
    "p99_ns": 98,
    "p999_ns": 95,
    "max_ns": 97,
}
_BAD = ("lost", "error")
_PERCENTILE = re.compile(r"p(\d\d)(\d*)")


def result(name: str, found: Object) -> Iterator[RenderableType]:
    """Any handler's report, by its shape; units are taken from the names' endings.

    Objects of numbers become the rows of one table, `sizes` the most frequent sizes, and all
    other values a line of `name value`.
    """
    rows = {key: value for key, value in found.items() if _is_row(key, value)}
    if rows:
        yield _table_of(name, rows)
    pieces = list(_pieces({key: value for key, value in found.items() if key not in rows}))
    if pieces:
        yield Flow(Text(" " if rows else printable(name), "bold"), pieces)


def digest(found: Object) -> list[Text]:
    """The same in a few words, for a plain line."""
    rows = {key: value for key, value in found.items() if _is_row(key, value)}
    pieces = list(_pieces({key: value for key, value in found.items() if key not in rows}))
    for key, row in rows.items():
        if row.get("count") == 0:
            continue
        told = [k for k in ("p50_ns", "p99_ns") if k in row] or list(row)[:3]
        pieces.append(Text(" ".join([words(key), *(f"{label(k)} {value(k, row[k])}" for k in told)])))
    return pieces


def _is_row(key: str, found: Any) -> bool:
    scalars = isinstance(found, Mapping) and found and all(_is_scalar(v) for v in found.values())
    return bool(scalars) and key != "sizes"


def _is_scalar(found: Any) -> bool:
    return found is None or isinstance(found, bool | int | float | str)


def _table_of(name: str, rows: Mapping[str, Object]) -> Fitted:
    found = list(dict.fromkeys(key for row in rows.values() for key in row))
    keys = [key for key in _STATISTICS if key in found] + [key for key in found if key not in _STATISTICS]
    columns = [Column(name, lambda row: words(row["row of"]), 100, left=True)]
    for i, key in enumerate(keys):
        weight = _STATISTICS.get(key, 80 - i)
        rare = key == "negative" or any(key not in row for row in rows.values())
        columns.append(Column(label(key), _value_of(key), weight, rare=rare))
    return Fitted(columns, [{**row, "row of": key} for key, row in rows.items()])


def _value_of(key: str) -> Callable[[Object], Text]:
    def cell(row: Object) -> Text:
        text = value(key, row.get(key))
        return Text(text, "dim" if text == figures.UNKNOWN or row.get("count") == 0 else "")

    return cell


def _pieces(found: Object) -> Iterator[Text]:
    for key, content in found.items():
        if key == "sizes":
            yield from _sizes(content)
        else:
            style = "bold red" if content and key in _BAD else "" if content else "dim"
            yield Text.assemble((f"{label(key)} ", "dim"), (value(key, content), style))


def _sizes(found: Any) -> Iterator[Text]:
    """The most frequent packet sizes and their share."""
    counts = {str(size): n for size, n in found.items()} if isinstance(found, Mapping) else {}
    total = sum(counts.values())
    top = sorted(counts.items(), key=lambda pair: -pair[1])[:_TOP_SIZES]
    for size, n in top:
        yield Text.assemble((f"{printable(size)} B ", "dim"), figures.percent(n / total))
    if len(counts) > len(top):
        yield Text(f"and {len(counts) - len(top)} other sizes", "dim")


def label(key: str) -> str:
    """`p999_ns` → p99.9, `packets_per_second` → packets."""
    key = key.removesuffix("_ns").removesuffix("_per_second")
    percentile = _PERCENTILE.fullmatch(key)
    if percentile:
        return f"p{percentile[1]}" + (f".{percentile[2]}" if percentile[2] else "")
    return words(key)


def value(key: str, content: Any) -> str:
    """A value with the unit that its key ends in."""
    number = isinstance(content, int | float) and not isinstance(content, bool)
    if content is None:
        return figures.UNKNOWN
    if number and key.endswith("_ns"):
        return figures.duration(content)
    if number and key.endswith("_per_second"):
        return figures.magnitude(content, "B/s" if key.startswith("bytes") else "/s")
    if number and (key == "bytes" or key.endswith("_bytes")):
        return figures.magnitude(content, "B")
    if number and isinstance(content, int):
        return figures.exact(content)
    if number:
        return f"{content:.6g}"
    if isinstance(content, bool):
        return "yes" if content else "no"
    return printable(str(content))


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────


def ledger(book: Object) -> RenderableType:
    """Where every packet went: two accounts, each of which must come out even."""
    return Group(Text("ledger", "bold"), _accounts(book))


def _accounts(book: Object) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for sign, key in _ACCOUNTS:
        count = book.get(key)
        remark = _remark(book, key)
        style = _ledger_style(key, bool(count or remark))
        line = Text(_COUNTERS[key].label + remark, style)
        table.add_row(Text(sign, "dim"), Text(figures.exact(count), style), line)
        if key == "residual":
            line.append(*_verdict(book))
            table.add_row()
    return table


# Each counter with its sign: sent − … = residual, and received − refused = published.
_ACCOUNTS = (
    (" ", "sent"),
    ("−", "nic_dropped"),
    ("−", "softnet_dropped"),
    ("−", "socket_dropped"),
    ("−", "other_errors"),
    ("−", "lost_in_flight"),
    ("−", "after_stop"),
    ("−", "received"),
    ("=", "residual"),
    (" ", "received"),
    ("−", "refused"),
    ("=", "published"),
)
_COUNTERS = {counter.id: counter for counter in COUNTERS}


def _ledger_style(key: str, something: bool) -> str:
    if key in ("sent", "received", "published"):
        return "bold"
    if key == "residual":
        return "bold red" if something else ""
    return "yellow" if something else "dim"


def _remark(book: Object, key: str) -> str:
    """What the bare count does not say: that other traffic is in it, that it is known in frames only."""
    frames = book.get(f"{key}_frames")
    if book[key] is None and frames is not None:
        return f": {figures.exact(frames)} frames"
    return "" if _COUNTERS[key].ours or not book[key] else " (of all traffic)"


def _verdict(book: Object) -> tuple[str, str]:
    frames = ", in frames" if book["exact"] is False else ""
    if book["balanced"] is None:
        return "  sent is not known: name its sender with --sender", "dim"
    if book["balanced"]:
        return f"  balanced{frames}", "bold green"
    return f"  not balanced{frames}", "bold red"
