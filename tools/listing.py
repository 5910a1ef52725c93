"""Rings as `rxring rings` shows them: plain objects for --json, and tables of the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from engine import figures
from engine.ledger import ERROR_NAMES, REFUSED
from engine.screen import Column, Fitted, Flow, words

if TYPE_CHECKING:
    from rings.ring import Ring, RingInfo

Object = dict[str, Any]
_NOT_COUNTERS = ("state", "wake", "refused", "errors")


def state_of(info: RingInfo) -> str:
    """live · waiting: no writer, yet or any more · orphaned: its engine died · dead · unreadable"""
    if not info.readable:
        return "unreadable"
    if info.owned:
        return "live" if info.written else "waiting"
    return "orphaned" if info.written else "dead"


def describe(info: RingInfo) -> Object:
    return {
        "name": info.name,
        "number": info.number,
        "state": state_of(info),
        "size_bytes": info.size_bytes,
        "pid": info.pid,
    }


def describe_in_full(ring: Ring) -> Object:
    """Everything that the ring says of itself, its writer and its readers."""
    counters = ring.counters
    return {
        "name": ring.name,
        "number": ring.number,
        "state": ring.state,
        "frames_capacity": ring.geometry.frames,
        "arena_bytes": ring.geometry.arena_bytes,
        "counters": {name: int(counters[name]) for name in counters.dtype.names if name not in _NOT_COUNTERS},
        "refused": _by_name(REFUSED, counters["refused"]),
        "errors": _by_name(ERROR_NAMES, counters["errors"]),
        "readers": [asdict(reader) | {"alive": reader.state == "active"} for reader in ring.readers()],
    }


def _by_name(names: Iterable[str], counts: Iterable[int]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, counts, strict=False)}


def print_json(objects: Iterable[Object]) -> None:
    for found in objects:
        click.echo(msgspec.json.encode(found))


def print_list(objects: list[Object]) -> None:
    if not objects:
        click.echo("no rings")
        return
    Console(highlight=False).print(Fitted(_LIST, objects))


def print_in_full(found: Object) -> None:
    console = Console(highlight=False)
    console.print(
        Flow(
            Text(f"{found['name']} {found['number']}", "bold"),
            [
                Text(found["state"], "green" if found["state"] == "live" else "yellow"),
                Text(f"{figures.format_size(found['arena_bytes'])} of payload"),
                Text(f"{figures.exact(found['frames_capacity'])} frames"),
            ],
        )
    )
    for head in ("counters", "refused", "errors"):
        pieces = [
            Text.assemble((f"{words(name)} ", "dim"), _counter(name, count))
            for name, count in found[head].items()
        ]
        console.print(Flow(Text(head, "bold"), pieces))
    if found["readers"]:
        console.print()
        console.print(Fitted(_READERS, found["readers"]))


def _counter(name: str, count: int) -> str:
    return figures.duration(count) if name.endswith("_ns") else figures.exact(count)


def _alive(reader: Mapping[str, Any]) -> Text:
    return Text(reader["state"], {"active": "green", "dead": "bold red"}.get(reader["state"], "dim"))


def _exact(key: str, head: str, weight: int) -> Column:
    return Column(head, lambda row: figures.exact(row[key]), weight)


_LIST = (
    Column("ring", lambda r: r["name"], 100, left=True),
    Column("number", lambda r: str(r["number"]), 90),
    Column("state", lambda r: r["state"], 95, left=True),
    Column("size", lambda r: figures.magnitude(r["size_bytes"], "B"), 80),
    Column("engine's pid", lambda r: str(r["pid"]), 70),
)
_READERS = (
    Column("reader", lambda r: r["name"], 100, left=True),
    Column("policy", lambda r: r["policy"], 90, left=True),
    Column("state", _alive, 99, left=True),
    Column("pid", lambda r: str(r["pid"]), 50),
    _exact("lag", "lag", 98),
    _exact("delivered", "delivered", 97),
    _exact("skipped", "skipped", 96),
    _exact("passed", "passed", 70),
    _exact("unread", "unread", 95),
    _exact("restarts", "restarts", 60),
    _exact("joined_packets", "since packet", 40),
)
