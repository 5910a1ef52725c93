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
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from engine import figures
from engine.ledger import COUNTERS

Object = Mapping[str, Any]
_GAP = 2  # blanks between columns
_SHORT_NAME = 16  # a name is not cut below this
_TOP_SIZES = 4
_BLANK = Text()


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
    between: str = " " * _GAP

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width):
            line.overflow, line.no_wrap = "fold", False  # a piece may be wider than all of the line
            yield line

    def lines(self, width: int | None, indent: int = 2) -> Iterator[Text]:
        """None: one line, however long."""
        line = Text.assemble(self.head)  # the head's style is its own
        for piece in self.pieces:
            between = Text(self.between if line.plain.strip() else "", "dim")
            wide = line.cell_len + between.cell_len + piece.cell_len
            if width is not None and wide > width and line.plain.strip():
                yield line
                line = Text.assemble(" " * min(indent, width - piece.cell_len), piece)
            else:
                line = Text.assemble(line, between, piece)
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
    where = ", ".join(_listens(ready))
    return Group(Title(ready["name"], (), "ready"), Text(f"receiving on {printable(where)}", "dim"))


@dataclass(frozen=True, slots=True)
class Display:
    """The live display, no higher than the terminal: the ledger is left out first, then results get short;
    losses never are cut.
    """

    name: str
    view: Object

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.size.height
        forms = ((_books, _results), (_none, _results), (_none, _digests), (_none, _digests))
        for i, (books, results) in enumerate(forms):
            parts = [
                *_head(self.name, self.view, figures.clock(self.view["seconds"])),
                *_receiving(self.view),
                *_consumers(self.view, CONSUMER),
                *books(self.view),
                *results(self.view),
            ]
            shown = [part for part in parts if i < len(forms) - 1 or part is not _BLANK]
            lines = console.render_lines(Group(*shown), options, pad=False)
            if len(lines) <= height:
                break
        else:
            more = f"… ({len(lines) - height + 1} more lines: a taller terminal, or --plain)"
            told = Text(more, "dim", no_wrap=True, overflow="ellipsis")
            lines = [*lines[: height - 1], *console.render_lines(told, options, pad=False)]
        for line in lines:
            yield from line
            yield Segment.line()


def summary(name: str, view: Object) -> RenderableType:
    """The end of a run, with its ledger."""
    return Group(
        *_head(name, view, f"{figures.clock(view['seconds'])}, done"),
        *_receiving(view),
        *_results(view),
        *_placement(view),
        _BLANK,
        ledger(view),
        *_consumers(view, CONSUMER_AFTERWARDS),
    )


def _listens(view: Object) -> list[str]:
    """Where packets are taken; receivers that share a port are one."""
    return list(dict.fromkeys(str(receiver["listen"]) for receiver in view["receivers"]))


@dataclass(frozen=True, slots=True)
class Title:
    """The run's name and where it listens; `right` at the other end of the line."""

    name: str
    listen: Sequence[str]
    right: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        end = Text(self.right, "dim")
        room = options.max_width - _GAP - end.cell_len
        line = Text.assemble(("rxring ", "bold cyan"), (printable(self.name), "bold"))
        if self.listen:
            line.truncate(room - _GAP - _SHORT_NAME, overflow="ellipsis")
            line = Text.assemble(line, " " * _GAP, shortened(self.listen, room - _GAP - line.cell_len))
        line.truncate(room, overflow="ellipsis", pad=True)
        yield Text.assemble(line, " " * _GAP, end)


def shortened(listen: Sequence[str], room: int) -> str:
    """All of the URLs where there is room, else the first; its end, the port, at any rate."""
    first, *others = map(printable, listen)
    some = f"{first} and {len(others)} more" if others else first
    fitting = (text for text in (", ".join([first, *others]), some) if cell_len(text) <= room)
    return next(fitting, f"…{first[1 - room :]}")


def _head(name: str, view: Object, right: str) -> Iterator[RenderableType]:
    yield Title(name, _listens(view), right)
    yield loss(view)


def _receiving(view: Object) -> Iterator[RenderableType]:
    columns = RECEIVER_AFTERWARDS if view["type"] == "summary" else RECEIVER
    several = len(view["receivers"]) > 1  # a single one's URL stands in the title
    yield _BLANK
    yield Fitted([*columns, *([LISTEN] if several else [])], view["receivers"])
    for receiver in view["receivers"]:
        if pieces := troubles(receiver):
            yield Flow(Text(f"{printable(receiver['name'])}: refused or failed", "yellow"), pieces)
    yield _BLANK
    yield Fitted(RING, rings_of(view))


def rings_of(view: Object) -> list[Object]:
    """Its rings, named so that they can be told apart."""
    rings = view["rings"]
    return rings if len(rings) == 1 else [r | {"name": f"{r['name']} {r['number']}"} for r in rings]


def _consumers(view: Object, columns: Sequence[Column]) -> Iterator[RenderableType]:
    if view["consumers"]:
        yield _BLANK
        yield Fitted(columns, view["consumers"])


def _placement(view: Object) -> Iterator[RenderableType]:
    """Who ran where, the kernel's packets included, and what was seen not to be as it should."""
    placement = view["placement"]
    yield _BLANK
    if placement["layout"] is not None:
        roles = (
            f"interrupts on CPU {placement['interrupt']}",
            f"receiving on {placement['receive']}",
            f"processing on {figures.cpu_list(placement['process'])}",
        )
        head = f"layout {placement['layout']} of {placement['device']}: "
        yield Flow(Text(printable(head)), list(map(Text, roles)), ", ")
    for head, key in (("packets handled", "packets"), ("interrupts", "interrupts")):
        counts = [(row["cpu"], row[key]) for row in placement["cpus"] if row[key]]
        if counts:
            pieces = [Text(f"{figures.exact(count)} on CPU {cpu}") for cpu, count in counts]
            yield Flow(Text(f"{head}: "), pieces, ", ")
    for worker in (*view["receivers"], *view["consumers"]):
        told = [
            f"CPU {figures.cpu_list(worker['cpus'])}",
            f"{figures.exact(worker['migrations'])} migrations",
            f"switched out against its will {figures.exact(worker['involuntary'])} times",
        ]
        yield Flow(Text(f"{printable(worker['name'])}: "), list(map(Text, told)), ", ")
    for words in placement["deviations"]:
        yield Flow(Text(), [Text(word, "bold yellow") for word in printable(words).split()], " ")


def reporting(view: Object) -> list[Object]:
    """Who has a result: groups in place of their members."""
    members = {name for group in view["groups"] for name in group["members"]}
    return [c for c in view["consumers"] if c["name"] not in members] + list(view["groups"])


def _results(view: Object) -> Iterator[RenderableType]:
    for consumer in reporting(view):
        if found := found_by(consumer):
            yield _BLANK
            yield from result(consumer["name"], found, as_of(consumer))


def _books(view: Object) -> Iterator[RenderableType]:
    yield _BLANK
    yield ledger(view)


def _none(view: Object) -> Iterator[RenderableType]:
    yield from ()


def _digests(view: Object) -> Iterator[RenderableType]:
    """The results in as few lines as they can do with."""
    yield _BLANK
    for consumer in reporting(view):
        if found := found_by(consumer):
            yield Flow(Text(printable(consumer["name"]), "bold"), digest(found, as_of(consumer)))


def found_by(consumer: Object) -> Object:
    """Its handler's report, which may be any JSON."""
    found = consumer["result"]
    return found if isinstance(found, Mapping) else {} if found is None else {"result": found}


def as_of(consumer: Object) -> str:
    """At which packet the result was taken, where that is not the last one delivered."""
    at = consumer["result_at"]
    return "" if at is None or at == consumer["delivered"] else f"as of {figures.exact(at)}"


# ── what was lost ────────────────────────────────────────────────────────────────────────────────────


def loss(view: Object) -> Flow:
    """What matters most, in a line: which layers lost how much."""
    pieces = [Text(f"{figures.exact(n)} {where}", style) for n, where, style in _losses(view) if n]
    if view["type"] == "summary" and not view["ledger"]["adds_up"]:
        pieces.append(Text("what was received does not add up", _GRAVE))
    if pieces:
        grave = any(piece.style == _GRAVE for piece in pieces)
        first, *others = pieces
        head = Text.assemble(("lost: ", _GRAVE if grave else "bold yellow"), first)
    else:
        head, others = Text("nothing lost", "bold green"), []
    count, unit = _packets_or_frames(view["ledger"], "after_stop")
    late = [Text(f"{figures.exact(count)}{unit} after the stop", "dim")] if count else []
    return Flow(head, [*others, *late], " · ")


def _losses(view: Object) -> Iterator[tuple[int | None, str, str]]:
    """How much, where and how grave it is, from the wire to the consumers."""
    book = view["ledger"]
    dropped, unit = _packets_or_frames(book, "socket_dropped")
    yield dropped, f"socket{unit}", _GRAVE
    shared = {name: book[key] for key, name in _SHARED.items() if book[key]}
    *first, last = shared or [""]
    where = f"{', '.join(first)} or {last}" if first else last
    others = "" if book["of_others"] is not None else ", of all traffic"
    yield sum(shared.values()) - (book["of_others"] or 0), where + others, "yellow"
    yield book["lost_in_flight"], "in flight", _GRAVE
    yield book["residual"], "residual" if book["exact"] else "residual frames", _GRAVE
    yield book["refused"], "refused", "yellow"
    for consumer in view["consumers"]:
        name = printable(consumer["name"])
        yield consumer["skipped"], f"skipped by {name}", "yellow"
        if view["type"] == "summary":
            yield consumer["unread"], f"unread by {name}", "yellow"
        missing = found_by(consumer).get("lost")
        yield missing if isinstance(missing, int) else None, f"missing, says {name}", _GRAVE


_GRAVE = "bold red"
_SHARED = {"nic_dropped": "NIC", "softnet_dropped": "softnet", "other_errors": "UDP errors"}


def _packets_or_frames(row: Object, key: str) -> tuple[int | None, str]:
    """Packets; or with GRO, where the kernel counts only frames, those and their unit."""
    frames = row.get(f"{key}_frames")
    return (frames, " frames") if row.get(key) is None and frames is not None else (row.get(key), "")


# ── receivers, rings, consumers ──────────────────────────────────────────────────────────────────────


def _count(key: str, *, bad: bool = False) -> Callable[[Object], Text]:
    def cell(row: Object) -> Text:
        value = row.get(key)
        return Text(figures.exact(value), _GRAVE if bad and value else "")

    return cell


def dropped(row: Object) -> Text:
    return _count_or_frames("socket_dropped", bad=True)(row)


def _count_or_frames(key: str, *, bad: bool = False) -> Callable[[Object], Text]:
    def cell(row: Object) -> Text:
        count, unit = _packets_or_frames(row, key)
        return Text(figures.exact(count) + unit, _GRAVE if bad and count else "")

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


def full(ring: Object) -> Text:
    """How often the writer found no room, and how long it waited for some."""
    times = ring["full_events"]
    if not times:
        return Text("never")
    return Text(f"{figures.exact(times)} times, for {figures.duration(ring['full_ns'])}", "yellow")


def slowest(ring: Object) -> str:
    """Whom the ring waits for, or would, if somebody is behind."""
    name = Text(printable(ring["slowest"] or ""))
    name.truncate(_SHORT_NAME, overflow="ellipsis")
    return name.plain if ring["lag_frames"] else ""


def _frames(row: Object) -> str:
    return "" if row["frames"] == row["published"] else figures.exact(row["frames"])


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


def _receiver(mean: str) -> tuple[Column, ...]:
    """mean: what stands before the heads of rates."""
    return (
        Column("receiver", lambda r: r["name"], 100, left=True),
        Column("cpu", lambda r: figures.cpu_list(r.get("cpus")), 75),
        Column("packets", _count("packets"), 85),
        Column(f"{mean}packets/s", lambda r: figures.magnitude(r.get("packets_per_second")), 99),
        Column(f"{mean}payload", lambda r: figures.magnitude(8 * r["bytes_per_second"], "bit/s"), 80),
        Column("dropped", dropped, 98),
        Column("packets/call", lambda r: figures.magnitude(r.get("packets_per_call")), 70),
        Column("CPU/packet", lambda r: figures.duration(r.get("cpu_ns_per_packet")), 40),
        Column("rcvbuf", _rcvbuf, 65),
        Column("restarts", _count("restarts", bad=True), 94, rare=True),
        Column("lost in flight", _count("lost_in_flight", bad=True), 93, rare=True),
        Column("after stop", _count_or_frames("after_stop"), 20, rare=True),
        Column("bytes", lambda r: figures.magnitude(r.get("bytes"), "B"), 35),
        Column("calls", _count("calls"), 30),
    )


RECEIVER = _receiver("")
RECEIVER_AFTERWARDS = _receiver("mean ")
LISTEN = Column("listen", lambda r: r["listen"], 38, left=True)
RING = (
    Column("ring", lambda r: r["name"], 100, left=True),
    Column("published", _count("published"), 90),
    Column("in use", lambda r: figures.percent(r["used"]), 85),
    Column("most in use", lambda r: figures.percent(r["peak"]), 75),
    Column("full", full, 84),
    Column("slowest reader", slowest, 80, left=True, rare=True),
    Column("arena", lambda r: figures.format_size(r["arena_bytes"]), 60),
    Column("frames", _frames, 40, rare=True),
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
_MEANS = ("packets_per_second", "bytes_per_second")  # from the first to the last packet
_PERCENTILE = re.compile(r"p(\d\d)(\d*)")


def result(name: str, found: Object, as_of: str = "") -> Iterator[RenderableType]:
    """Any handler's report, by its shape; units are taken from the names' endings.

    Objects of numbers become the rows of one table, `sizes` the most frequent sizes, and all
    other values a line of `name value`. as_of: to be said beside it.
    """
    rows = {key: value for key, value in found.items() if _is_row(key, value)}
    if rows:
        yield _table_of(name, rows, as_of)
    pieces = list(_pieces({key: value for key, value in found.items() if key not in rows}))
    if pieces:
        head = Text(" " if rows else printable(name), "bold")
        yield Flow(head, pieces if rows or not as_of else [Text(as_of, "dim"), *pieces])


def digest(found: Object, as_of: str = "") -> list[Text]:
    """The same in a few words, for a plain line."""
    rows = {key: value for key, value in found.items() if _is_row(key, value)}
    pieces = list(_pieces({key: value for key, value in found.items() if key not in rows}))
    for key, row in rows.items():
        if row.get("count") == 0:
            continue
        told = [k for k in ("p50_ns", "p99_ns") if k in row] or list(row)[:3]
        pieces.append(Text(" ".join([words(key), *(f"{label(k)} {value(k, row[k])}" for k in told)])))
    pieces = pieces or [Text("nothing yet", "dim")]
    return [Text(as_of, "dim"), *pieces] if as_of else pieces


def _is_row(key: str, found: Any) -> bool:
    scalars = isinstance(found, Mapping) and found and all(_is_scalar(v) for v in found.values())
    return bool(scalars) and key != "sizes"


def _is_scalar(found: Any) -> bool:
    return found is None or isinstance(found, bool | int | float | str)


def _table_of(name: str, rows: Mapping[str, Object], as_of: str) -> Fitted:
    found = list(dict.fromkeys(key for row in rows.values() for key in row))
    keys = [key for key in _STATISTICS if key in found] + [key for key in found if key not in _STATISTICS]
    columns = [Column(name, lambda row: words(row["row of"]), 100, left=True)]
    for i, key in enumerate(keys):
        weight = _STATISTICS.get(key, 80 - i)
        rare = key == "negative" or any(key not in row for row in rows.values())
        columns.append(Column(label(key), _value_of(key), weight, rare=rare))
    if as_of:
        columns.append(Column(as_of, lambda row: "", 94))  # nothing but its head
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
            style = _GRAVE if content and key in _BAD else "" if content else "dim"
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
    """`p999_ns` → p99.9, `quotes_per_second` → quotes/s, and of `rate` mean packets/s."""
    if key.endswith("_per_second"):
        return f"{'mean ' if key in _MEANS else ''}{words(key.removesuffix('_per_second'))}/s"
    key = key.removesuffix("_ns")
    percentile = _PERCENTILE.fullmatch(key)
    if percentile:
        return f"p{percentile[1]}" + (f".{percentile[2]}" if percentile[2] else "")
    return words(key)


def value(key: str, content: Any) -> str:
    """A value with the unit that its key ends in, unless its label says it."""
    number = isinstance(content, int | float) and not isinstance(content, bool)
    if content is None:
        return figures.UNKNOWN
    if number and key.endswith("_ns"):
        return figures.duration(content)
    if number and key.endswith("_per_second"):
        return figures.magnitude(content)
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


def ledger(view: Object) -> RenderableType:
    """Where every packet went: two accounts, each of which must come out even."""
    legend = Text(f"{_MARK} counts all traffic, not ours alone", "dim")
    return Group(Text("ledger", "bold"), _accounts(view), legend)


def _accounts(view: Object) -> Table:
    book = view["ledger"]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for sign, key in _ACCOUNTS:
        count, unit = _packets_or_frames(book, key)
        if key == "of_others" and not count:
            continue
        style = _ledger_style(key, bool(count))
        line = Text(_COUNTERS[key].label + _remark(view, key), style)
        table.add_row(Text(sign, "dim"), Text(figures.exact(book[key]), style), line)
        if unit:
            line.append(f": {figures.exact(count)}{unit}")
        if key == "residual":
            line.append(*_verdict(view))
            table.add_row()
        if key == "published":
            line.append(*_sum_of_received(view))
    return table


# Each counter with its sign: sent − … = residual, and received − refused = published.
_ACCOUNTS = (
    (" ", "sent"),
    ("−", "nic_dropped"),
    ("−", "softnet_dropped"),
    ("−", "socket_dropped"),
    ("−", "other_errors"),
    ("+", "of_others"),
    ("−", "lost_in_flight"),
    ("−", "after_stop"),
    ("−", "received"),
    ("=", "residual"),
    (" ", "received"),
    ("−", "refused"),
    ("=", "published"),
)
_COUNTERS = {counter.id: counter for counter in COUNTERS}
_MARK = "*"
_LOST_BY_DEVICE = ("rx_missed_errors", "rx_errors", "rx_dropped")


def _ledger_style(key: str, something: bool) -> str:
    if key in ("sent", "received", "published"):
        return "bold"
    if key == "residual":
        return _GRAVE if something else ""
    return "yellow" if something else "dim"


def _remark(view: Object, key: str) -> str:
    """That other traffic is in this count; and where it was counted."""
    if _COUNTERS[key].ours or key == "of_others":
        return ""
    layers = view["layers"]
    where: Sequence[str] = ()
    if key == "nic_dropped":
        where = [name for name, n in layers["nic"].items() if any(n[count] for count in _LOST_BY_DEVICE)]
    if key == "softnet_dropped" and (cpus := [row["cpu"] for row in layers["softnet"] if row["dropped"]]):
        where = [f"CPU {figures.cpu_list(cpus)}"]
    told = f" on {', '.join(map(printable, where))}" if where and view["ledger"][key] else ""
    return f" {_MARK}{told}"


def _verdict(view: Object) -> tuple[str, str]:
    book, sender = view["ledger"], view["sender"]
    frames = ", in frames" if book["exact"] is False else ""
    if book["balanced"]:
        return f"  balanced{frames}", "bold green"
    under_way = view["type"] == "interval"
    if book["balanced"] is not None:
        return f"  {'not yet' if under_way else 'not'} balanced{frames}", _GRAVE
    if not any(receiver["listen"].startswith("udp:") for receiver in view["receivers"]):
        return "  of a stream nobody tells how many frames it will be", "dim"
    if sender is None:
        return "  sent is not known: name its sender with --sender", "dim"
    name = printable(sender["name"])
    if under_way and sender["state"] == "sends":
        return f"  known when {name!r} has ended", "dim"
    return {
        "absent": (f"  no sender {name!r} came: start rxring send --name {name}", "yellow"),
        "sends": (f"  sender {name!r} still sends: end it before the run", "yellow"),
        "died": (f"  sender {name!r} died: how much it sent is not known", "yellow"),
    }[sender["state"]]


def _sum_of_received(view: Object) -> tuple[str, str]:
    """What holds or not without a known sender, too; each consumer's account is part of it.

    Before the end, counts are read one after another, while they rise: it says nothing.
    """
    if view["type"] == "interval":
        return "", ""
    if not view["ledger"]["adds_up"]:
        return "  what was received does not add up", _GRAVE
    known = view["ledger"]["balanced"] is not None
    return ("", "") if known else ("  what was received adds up", "bold green")
