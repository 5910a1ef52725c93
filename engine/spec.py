"""What a run is: read from a TOML file, from flags, or from both, and checked before anything starts.

    name = "quotes"
    duration = 60
    [[receiver]]
    listen = "udp://0.0.0.0:5000"
    rx-cpu = "0"
    [ring]
    size = "32MiB"
    [[consumer]]
    handler = "latency"
    cpus = "1"

Keys are the flags' names, and a value is read by the same parser wherever it stands. A flag overrides
the file: a receiver's flag and --ring that one key, --consumer the whole list of consumers.

Parsers raise ValueError("what is wrong: what to do"); `read` says where and raises Refused.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from engine.affinity import layouts
from engine.affinity.topology import parse_cpu_list
from engine.errors import Refused
from engine.figures import format_size, parse_size
from engine.net.address import (
    check_device,
    check_sources,
    format_address,
    literal,
    parse_host_port,
    parse_options,
)

MAX_BATCH = 3000
MIN_SECONDS, MAX_SECONDS = 0.001, 1e9
FIFO_PRIORITY = 1  # any is before every ordinary task; a higher one only passes other real-time tasks
STRIDE_BYTES = 128  # the least that one message of a receive takes of the arena
NAME_BYTES = 32
_GRO_FRAME_BYTES, _GRO_RING = 65536, "160KiB"  # and what size of ring has an arena of twice that
HANDLERS = ("latency", "rate", "gaps")
SINKS = ("dump",)  # these need an argument
WHOLE = ("dump",)  # these make sense of all packets only, in order
IN_ORDER = ("gaps", *WHOLE)  # these of all packets of a flow
SCHEMES = ("udp", "tcp", "smc")
UDP_BUFFER_BYTES = 8 << 20
MAX_SPLIT = 64
MAX_RECEIVERS = 64  # of an engine: a consumer sleeps on the rings of all at once

Parser = Callable[[object], Any]


class Listen(Struct, frozen=True):
    """Where packets are taken. Port 0: any free one, which `ready` tells. A name is resolved at the bind.

    options: `interface`, a device. sources: who may send to a multicast group; none: anybody.
    """

    scheme: str
    host: str
    port: int
    options: dict[str, str] = {}
    sources: tuple[str, ...] = ()

    @property
    def interface(self) -> str | None:
        return self.options.get("interface")

    def __str__(self) -> str:
        pairs = [*self.options.items(), *(("source", source) for source in self.sources)]
        options = "&".join(f"{key}={value}" for key, value in pairs)
        url = f"{self.scheme}://{format_address((self.host, self.port))}"
        return f"{url}?{options}" if options else url


class ReceiverSpec(Struct, frozen=True, kw_only=True):
    """rcvbuf: bytes to ask for, as the kernel counts them; None: UDP_BUFFER_BYTES, and for streams what the
    kernel grows it to.

    receivers: so many share the port, each with its own socket, ring and process. Checked specs have one for
    each `member`. steer: the kernel gives a packet to one by its flow, or by the CPU that took it.
    gro: several packets a frame. auto: unless the run is to end after an exact number of packets, or half
    the ring's arena does not hold a maximal frame, or the kernel can't.
    connect: HOST:PORT, packets from there only. busy_poll: microseconds. rx_wait: for packets; spin takes the
    whole CPU.
    """

    listen: Listen
    rx_cpu: tuple[int, ...] | None = None
    receivers: int = 1
    member: int = 0
    steer: Literal["flow", "cpu"] = "flow"
    receive: Literal["recvmmsg", "recvmsg"] = "recvmmsg"
    batch: int = 64
    rcvbuf: int | None = None
    gro: Literal["auto", "on", "off"] = "auto"
    connect: str | None = None
    busy_poll: int | None = None
    rx_wait: Literal["block", "spin"] = "block"


class RingSpec(Struct, frozen=True, kw_only=True):
    """size: bytes of descriptors and arena together, for each receiver."""

    size: int = 40 << 20


class ConsumerSpec(Struct, frozen=True, kw_only=True):
    """handler: a built-in name, or `module:name`. argument: what follows its `=`, for sinks.

    split: share the work among so many processes. Checked specs have one for each `member`, of `group`.
    by: what the members take in turn, blocks of frames or flows.
    demote: seconds after which a gating consumer that does not move is lapped; None: it is waited for.
    """

    handler: str
    argument: str | None = None
    cpus: tuple[int, ...] | None = None
    policy: Literal["gate", "skip"] = "gate"
    wait: Literal["block", "yield", "spin"] = "block"
    split: int = 1
    by: Literal["block", "flow"] = "block"
    demote: float | None = None
    name: str = ""
    member: int = 0
    group: str = ""


class RunSpec(Struct, frozen=True, kw_only=True):
    """duration, every: seconds. packets: end after so many. fifo: SCHED_FIFO priority of the workers.
    layout: a name of `rxring pin layouts`, or a TOML file; of this device, if that does not name one."""

    name: str = ""
    layout: str | None = None
    device: str | None = None
    receivers: tuple[ReceiverSpec, ...] = ()
    ring: RingSpec = RingSpec()
    consumers: tuple[ConsumerSpec, ...] = ()
    timestamps: bool = True
    stamp: Literal["none", "rxring", "seed"] = "rxring"
    sender: str | None = None
    fifo: int | None = None
    mlock: bool = False
    duration: float | None = None
    packets: int | None = None
    every: float = 1.0
    json: bool = False
    plain: bool = False

    @property
    def sources(self) -> bool:
        """Are the rings to say who sent each frame? Of a stream nobody else does."""
        return any(consumer.by == "flow" for consumer in self.consumers) or any(
            receiver.listen.scheme != "udp" for receiver in self.receivers
        )


# ── values ───────────────────────────────────────────────────────────────────────────────────────────


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is no text: put it in quotes")
    return raw


def _written(raw: object) -> str:
    """What a flag, or TOML as text or as a whole number, says."""
    return str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else _text(raw)


def size(raw: object) -> int:
    """Bytes from 1500 or "64MiB"."""
    return parse_size(_written(raw))


def cpus(raw: object) -> tuple[int, ...]:
    """CPU ids from "0-3,8" or 2."""
    return parse_cpu_list(_written(raw))


def seconds(raw: object) -> float:
    """A duration, from 10 or "0.5"."""
    try:
        value = float(str(raw)) if isinstance(raw, float) else float(_written(raw))
    except ValueError:
        value = math.nan
    if not MIN_SECONDS <= value <= MAX_SECONDS:
        raise ValueError(f"{str(raw)!r} is no time: give seconds from {MIN_SECONDS}, like 10 or 0.5")
    return value


def count(least: int, most: int) -> Parser:
    """A whole number from `least` to `most`."""

    def parse(raw: object) -> int:
        written = _written(raw)
        value = int(written) if re.fullmatch(r"[0-9]{1,19}", written) else -1
        if not least <= value <= most:
            raise ValueError(f"{written!r} is out of range: give a whole number from {least} to {most}")
        return value

    return parse


def one_of(*words: str) -> Parser:
    def parse(raw: object) -> str:
        if raw not in words:
            raise ValueError(f"{str(raw)!r} is not known: give {' or '.join(words)}")
        return str(raw)

    return parse


def switch(raw: object) -> bool:
    """`on` or `off`; in TOML also true or false."""
    words = {"on": True, "off": False, True: True, False: False}
    if not isinstance(raw, str | bool) or raw not in words:
        raise ValueError(f"{str(raw)!r} is not known: give on or off")
    return words[raw]


def engine_name(raw: object) -> str:
    """The name of an engine or sender, which its shared-memory objects carry."""
    from rings.segment import RingError, check_name  # numpy comes with it: not for --help

    try:
        return check_name(_text(raw))
    except RingError as error:
        raise ValueError(str(error)) from None


def consumer_name(raw: object) -> str:
    name = _text(raw)
    if not re.fullmatch(rf"[\w.-]{{1,{NAME_BYTES}}}", name, re.ASCII):
        raise ValueError(f"name {name!r}: use 1 to {NAME_BYTES} of A-Z a-z 0-9 _ . -")
    return name


def listen(raw: object) -> Listen:
    """A URL udp://ADDR:PORT[?interface=DEV&source=ADDR], or tcp://ADDR:PORT, smc://ADDR:PORT."""
    url = _text(raw)
    match = re.fullmatch(r"([a-z0-9+]+)://(\[[^\[\]]*\]|[^:/?\[\]]*)(?::([^/?:]*))?(?:\?(.*))?", url)
    if not match:
        raise ValueError(f"{url!r} is no URL to listen on: give udp://ADDR:PORT, IPv6 in brackets")
    scheme, host, port, rest = match.groups()
    if scheme not in SCHEMES:
        raise ValueError(f"{url!r}: {scheme} is not known: give {'://, '.join(SCHEMES)}://")
    if scheme != "udp" and rest is not None:
        raise ValueError(f"{url!r}: nothing can be chosen after ? with {scheme}: leave it out")
    where = Listen(scheme, _host(url, host), _port(url, port))
    address = literal(where.host)
    if scheme != "udp" and address is not None and address.is_multicast:
        raise ValueError(f"{url!r}: a group has no streams: give an address of this machine")
    try:
        found = {} if rest is None else parse_options(rest, ("interface", "source"))
        sources = found.pop("source", ())
        options = {key: value for key, (value,) in found.items()}
        check_device(where.host, options.get("interface"))
        check_sources(where.host, sources)
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    return replace(where, options=options, sources=sources)


def _host(whole: str, host: str) -> str:
    """An IPv4 address, an IPv6 address without its brackets, or a name."""
    if not host:
        raise ValueError(f"{whole!r} names no address: give one, like 127.0.0.1 (0.0.0.0 listens on all)")
    if host.startswith("["):
        host = host[1:-1]
        if ":" not in host or literal(host) is None:
            raise ValueError(f"{whole!r}: {host!r} is no IPv6 address: give one, like [::1]")
    elif re.fullmatch(r"[0-9.]+", host):
        if literal(host) is None:
            raise ValueError(f"{whole!r}: {host} is no IPv4 address: give four numbers 0 to 255")
    elif not re.fullmatch(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})", host):
        raise ValueError(f"{whole!r}: {host!r} is no host name: give an IPv4 address or a name")
    return host


def _port(whole: str, port: str | None) -> int:
    if not port or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{whole!r}: port {port or 'missing'}: give ADDR:PORT, PORT from 0 to 65535")
    return int(port)


def peer(raw: object) -> str:
    """HOST:PORT of a sender."""
    try:
        parse_host_port(_text(raw))
    except Refused as error:
        raise ValueError(str(error)) from None
    return _text(raw)


def handler(raw: object) -> str:
    """A handler as users write it: latency, dump=FILE, module:name. The text itself; see `split_handler`."""
    split_handler(_text(raw))
    return _text(raw)


def split_handler(text: str) -> tuple[str, str | None]:
    """(name, argument) of a handler; whether a module has it, only loading tells."""
    name, equals, argument = text.partition("=")
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        known, wants = True, False
    else:
        known, wants = name in (*HANDLERS, *SINKS), name in SINKS
    if not known:
        words = (*HANDLERS, *(f"{sink}=FILE" for sink in SINKS), "module:name")
        raise ValueError(f"no handler {name!r}: give {', '.join(words[:-1])} or {words[-1]}")
    if wants and not argument:
        raise ValueError(f"{name} names no file: give {name}=FILE")
    if equals and not wants:
        raise ValueError(f"{name} takes no argument: leave out ={argument}")
    return name, argument if wants else None


def consumer(raw: object) -> ConsumerSpec:
    """HANDLER[@CPU][,KEY=VALUE…], CPU a list: items without `=` belong to it.

    A file name with `,` or `@` in it can be given in a spec file only.
    """
    text = _text(raw)
    head, *items = text.split(",")
    options = [item for item in items if "=" in item]
    more_cpus = items[: len(items) - len(options)]
    if items != more_cpus + options or (more_cpus and "@" not in head):
        stray = next(item for item in items if "=" not in item)
        raise ValueError(f"{text!r}: {stray!r} is no option: give {_some_options()}")
    what, at, first_cpus = head.rpartition("@")
    table: dict[str, object] = {"handler": what if at else head}
    if at:
        table["cpus"] = ",".join([first_cpus, *more_cpus])
    for option in options:
        key, _, value = option.partition("=")
        if key not in _OPTIONS:
            raise ValueError(f"{text!r}: unknown option {key!r}: give {_some_options()}")
        if key in table:
            raise ValueError(f"{text!r}: {key} is given twice: give it once")
        table[key] = value
    try:
        return _consumer({key: CONSUMER[key](value) for key, value in table.items()})
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _some_options() -> str:
    return f"{', '.join(f'{option}=' for option in _OPTIONS[:-1])} or {_OPTIONS[-1]}="


# The parsers of all keys; flags of the same names use them too.
RUN: dict[str, Parser] = {
    "name": engine_name,
    "layout": _text,
    "device": _text,
    "timestamps": switch,
    "stamp": one_of("none", "rxring", "seed"),
    "sender": engine_name,
    "fifo": count(1, 99),
    "mlock": switch,
    "duration": seconds,
    "packets": count(1, (1 << 63) - 1),
    "every": seconds,
    "json": switch,
    "plain": switch,
}
RECEIVER: dict[str, Parser] = {
    "listen": listen,
    "rx-cpu": cpus,
    "receivers": count(1, MAX_RECEIVERS),
    "steer": one_of("flow", "cpu"),
    "receive": one_of("recvmmsg", "recvmsg"),
    "batch": count(1, MAX_BATCH),
    "rcvbuf": size,
    "gro": one_of("auto", "on", "off"),
    "connect": peer,
    "busy-poll": count(1, 1_000_000),
    "rx-wait": one_of("block", "spin"),
}
RING: dict[str, Parser] = {"size": size}
CONSUMER: dict[str, Parser] = {
    "handler": handler,
    "cpus": cpus,
    "policy": one_of("gate", "skip"),
    "wait": one_of("block", "yield", "spin"),
    "split": count(1, MAX_SPLIT),
    "by": one_of("block", "flow"),
    "demote": seconds,
    "name": consumer_name,
}
_OPTIONS = [key for key in CONSUMER if key not in ("handler", "cpus")]  # those behind a comma
_TABLES = {"receiver": RECEIVER, "ring": RING, "consumer": CONSUMER}


# ── files and flags ──────────────────────────────────────────────────────────────────────────────────


def read(path: Path | None, flags: Mapping[str, Any]) -> RunSpec:
    """The run that a spec file and flags ask for, complete and checked. Refused where it can't be.

    flags: values as the parsers return them, by the flags' names; `listen` and `consumer` are lists.
    """
    tree = _load(path) if path else {}
    receivers: list[dict[str, Any]] = tree.pop("receiver", []) or [{}]
    consumers = [_consumer(table) for table in tree.pop("consumer", [])]
    ring = tree.pop("ring", {})
    for key, value in flags.items():
        if key == "listen":
            receivers = [{**receivers[0], "listen": url} for url in value]
        elif key in RECEIVER:
            for receiver in receivers:
                receiver[key] = value
        elif key == "ring":
            ring["size"] = value
        elif key == "consumer":
            consumers = list(value)
        else:
            tree[key] = value
    if any("listen" not in receiver for receiver in receivers):
        raise Refused("nothing to listen on: give --listen udp://ADDR:PORT")
    return _checked(
        RunSpec(
            receivers=tuple(ReceiverSpec(**_fields(table)) for table in receivers),
            ring=RingSpec(**ring),
            consumers=tuple(consumers),
            **tree,
        )
    )


def _load(path: Path) -> dict[str, Any]:
    """The file's keys with their values parsed; `receiver` and `consumer` as lists of such tables."""
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}: give a spec file in TOML") from None
    except UnicodeDecodeError:
        raise Refused(f"{path}: not UTF-8: give a spec file in TOML") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Refused(f"{path}: no TOML: {error}: mend it there") from None
    tables = {key: tree.pop(key) for key in _TABLES if key in tree}
    parsed = _parse(str(path), tree, RUN)
    for key, found in tables.items():
        if key == "ring":
            if not isinstance(found, dict):
                raise Refused(f"{path}: ring is no table: write [ring] and below it size =")
            parsed[key] = _parse(f"{path}: ring", found, RING)
        elif not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
            raise Refused(f"{path}: {key} is no list of tables: write [[{key}]]")
        else:
            parsed[key] = [
                _parse(f"{path}: {key} {i}", table, _TABLES[key]) for i, table in enumerate(found, 1)
            ]
    for i, table in enumerate(parsed.get("consumer", []), 1):
        if "handler" not in table:
            raise Refused(f'{path}: consumer {i} has no handler: give handler =, like "latency"')
    return parsed


def _parse(where: str, table: dict[str, object], parsers: Mapping[str, Parser]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, raw in table.items():
        if parsers is RECEIVER and key == "cpus" and "rx-cpu" not in table:
            key = "rx-cpu"  # `cpus` on each part, as consumers have it
        if key not in parsers:
            raise Refused(f"{where}: unknown key {key!r}: {_instead(key, parsers)}")
        try:
            values[key] = parsers[key](raw)
        except ValueError as error:
            raise Refused(f"{where}: {key}: {error}") from None
    return values


def _instead(key: str, parsers: Mapping[str, Parser]) -> str:
    """What to write in place of an unknown key."""
    if parsers is RUN and key in RECEIVER:
        return "it belongs under [[receiver]]"
    if parsers is not RUN and key in RUN:
        return "it belongs at the top of the file"
    near = difflib.get_close_matches(key, [*parsers, *(_TABLES if parsers is RUN else ())], 1)
    return f"did you mean {near[0]}?" if near else f"give one of {', '.join(parsers)}"


def _fields(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in table.items()}


def _consumer(table: Mapping[str, Any]) -> ConsumerSpec:
    name, argument = split_handler(table["handler"])
    return ConsumerSpec(**{**table, "handler": name, "argument": argument})


# ── the whole ────────────────────────────────────────────────────────────────────────────────────────


def _checked(spec: RunSpec) -> RunSpec:
    """The spec with all names filled in; Refused where its parts do not go together."""
    receivers = tuple(member for receiver in spec.receivers for member in _receivers(receiver))
    if len(receivers) > MAX_RECEIVERS:
        raise Refused(f"{len(receivers)} receivers: give at most {MAX_RECEIVERS}")
    _check_listens(spec.receivers)
    if spec.device is not None and spec.layout is None:
        raise Refused(f"--device {spec.device} is whose packets a layout is for: give --layout NAME, too")
    if spec.layout in layouts.NAMES and spec.device is None:
        raise Refused(f"--layout {spec.layout} is for the packets of a device: give --device DEV, too")
    if spec.json and spec.plain:
        raise Refused("--json and --plain exclude each other: give one of them")
    for receiver in spec.receivers:
        _check_batch(receiver.batch, spec)
        if receiver.gro == "on" and not _holds_gro(spec):
            raise Refused(
                f"--gro on needs a ring that holds frames of 64KiB twice: give --ring {_GRO_RING} or more"
            )
        if receiver.listen.scheme != "udp":
            _check_stream(receiver, spec)
    files = [os.path.realpath(c.argument) for c in spec.consumers if c.argument]
    if len(set(files)) < len(files):
        raise Refused("two consumers write one file: give each its own")
    port = spec.receivers[0].listen.port
    return replace(
        spec,
        name=spec.name or (f"rx{port}" if port else f"rx{os.getpid()}"),
        receivers=receivers,
        consumers=tuple(member for c in _named(spec.consumers) for member in _members(c)),
    )


def _receivers(spec: ReceiverSpec) -> list[ReceiverSpec]:
    """One for each process, with a CPU of its own where there are as many."""
    if spec.receivers == 1 and spec.steer == "cpu":
        raise Refused("steer=cpu chooses among receivers: give --receivers N, too")
    count = spec.receivers
    return [replace(spec, member=k, rx_cpu=own_cpus(spec.rx_cpu, k, count)) for k in range(count)]


def own_cpus(cpus: tuple[int, ...] | None, member: int, members: int) -> tuple[int, ...] | None:
    """Where one of several may run: with as many CPUs as members each gets its own, else all get all."""
    return (cpus[member],) if cpus is not None and len(cpus) == members else cpus


def _check_stream(receiver: ReceiverSpec, run: RunSpec) -> None:
    """Refused: what is asked of a stream and makes sense for packets only."""
    packets_only = {
        "--gro on": receiver.gro == "on",
        "--receive recvmsg": receiver.receive == "recvmsg",
        "--steer cpu": receiver.steer == "cpu",
        "--connect": receiver.connect is not None,
        "--busy-poll": receiver.busy_poll is not None,
        "--rx-wait spin": receiver.rx_wait == "spin",
        "--sender": run.sender is not None,
        "--packets": run.packets is not None,
    }
    for flag, given in packets_only.items():
        if given:
            raise Refused(f"{flag} is for packets, and {receiver.listen} is a stream: leave it out")


def _check_listens(receivers: Iterable[ReceiverSpec]) -> None:
    listens = [receiver.listen for receiver in receivers if receiver.listen.port]
    for one, other in itertools.combinations(listens, 2):
        if str(one) == str(other):
            raise Refused(f"{one} is listened on twice: give --receivers 2, which share it")
        alike = (one.port, one.scheme == "udp", ":" in one.host) == (
            other.port,
            other.scheme == "udp",
            ":" in other.host,
        )
        if alike and {one.host, other.host} & {"0.0.0.0", "::"}:
            raise Refused(f"{one} and {other}: one of them is all addresses: leave one out")


def largest_batch(run: RunSpec) -> int:
    """The most messages a receive may ask for: it reserves at most an eighth of the ring."""
    # Geometry.fitting has a frame for each STRIDE_BYTES, so descriptors never run out first.
    return min(MAX_BATCH, arena_bytes(run) // 8 // STRIDE_BYTES)


def wants_gro(receiver: ReceiverSpec, run: RunSpec) -> bool:
    """Is the kernel to be asked for it?"""
    fits = run.packets is None and _holds_gro(run)
    return receiver.gro == "on" or (receiver.gro == "auto" and fits)


def _holds_gro(run: RunSpec) -> bool:
    """Does half the arena hold a maximal frame? A larger one could not be published."""
    return arena_bytes(run) // 2 >= _GRO_FRAME_BYTES


def arena_bytes(run: RunSpec) -> int:
    from rings.layout import Geometry

    try:
        return Geometry.fitting(run.ring.size, sources=run.sources).arena_bytes
    except ValueError as error:
        raise Refused(f"--ring {format_size(run.ring.size)}: {error}") from None


def _check_batch(batch: int, run: RunSpec) -> None:
    largest = largest_batch(run)
    if batch > largest:
        ring = format_size(run.ring.size)
        raise Refused(
            f"--batch {batch} takes more than an eighth of a ring of {ring}: "
            f"give --batch {largest} or less, or a larger --ring"
        )


def _named(consumers: Iterable[ConsumerSpec]) -> tuple[ConsumerSpec, ...]:
    """Each with a name of its own: the given one, or its handler's, with -2, -3 … where that is taken."""
    given = [c.name for c in consumers if c.name]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice:
        raise Refused(f"two consumers are named {twice!r}: give each its own name=")
    taken = set(given)
    named = []
    for spec in consumers:
        name, number = spec.name or _default_name(spec.handler, ""), 1
        while not spec.name and name in taken:
            number += 1
            name = _default_name(spec.handler, f"-{number}")
        taken.add(name)
        named.append(replace(spec, name=name))
    return tuple(named)


def _members(spec: ConsumerSpec) -> list[ConsumerSpec]:
    """One for each process."""
    if spec.demote is not None and spec.policy == "skip":
        raise Refused(f"{spec.name}: demote= is for policy=gate: a skipping consumer holds nobody up")
    if spec.split == 1 and spec.by == "flow":
        raise Refused(f"{spec.name}: by=flow says how members share the work: give split=N, too")
    if spec.split == 1:
        return [spec]
    if spec.handler in WHOLE:
        raise Refused(f"{spec.handler} needs every packet, in order: leave out split={spec.split}")
    if spec.handler in IN_ORDER and spec.by != "flow":
        raise Refused(f"{spec.handler} needs all packets of a flow, in order: give by=flow")
    return [
        replace(
            spec,
            name=f"{spec.name.encode()[: NAME_BYTES - 3].decode(errors='ignore')}.{k}",
            cpus=own_cpus(spec.cpus, k, spec.split),
            member=k,
            group=spec.name,
        )
        for k in range(spec.split)
    ]


def _default_name(handler_name: str, suffix: str) -> str:
    """A handler of the user's is called by what stands after the colon."""
    base = handler_name.rpartition(":")[2]
    return base.encode()[: NAME_BYTES - len(suffix)].decode(errors="ignore") + suffix
