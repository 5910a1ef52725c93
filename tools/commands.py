"""The commands as click has them: reads arguments, calls the engine.

Whatever a command needs is imported when it runs: help, and looking at rings, must not wait for numba.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from engine import spec
from engine.errors import Refused
from tools import streams
from tools.flags import fifo, flag, mark, reading


def invoke(args: list[str]) -> int:
    """Run one command; its exit code. Refused where the arguments are bad."""
    # Not click's own main(): that prints its errors itself and takes a broken pipe for a failure.
    try:
        with rxring.make_context("rxring", args) as context:
            return rxring.invoke(context) or 0
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.ClickException as error:
        raise Refused(_usage(error)) from None


def _usage(error: click.ClickException) -> str:
    """What is wrong with the arguments, and what to do."""
    context = getattr(error, "ctx", None)
    instead = f"see `{context.command_path if context else 'rxring'} --help`"
    if isinstance(error, click.NoSuchOption):
        near = error.possibilities
        return f"unknown flag {error.option_name}: {f'did you mean {near[0]}?' if near else instead}"
    if isinstance(error, click.MissingParameter) and error.param:
        return f"{_name_of(error.param)} is missing: {instead}"
    if isinstance(error, click.BadParameter) and error.param:
        return f"{_name_of(error.param)}: {error.message}"
    if isinstance(error, click.BadOptionUsage):
        takes_none = "does not take" in error.message
        advice = "takes no value: leave it out" if takes_none else "has no value: write one after it"
        return f"{error.option_name} {advice}"
    return f"{_sentence(error.format_message())}: {instead}"


def _name_of(param: click.Parameter) -> str:
    return param.opts[0] if isinstance(param, click.Option) else param.make_metavar(click.Context(rxring))


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _version(context: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"rxring {version('rxring')}")
    except PackageNotFoundError:
        click.echo("rxring, from a checkout that is not installed")
    context.exit()


@click.group(invoke_without_command=True, context_settings={"max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print it."
)
@click.pass_context
def rxring(context: click.Context) -> int:
    """UDP at full rate from Python: a pinned receiver, a ring in shared memory, pinned consumers.

    Every packet is accounted for.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


# ── run ──────────────────────────────────────────────────────────────────────────────────────────────


@rxring.command(
    epilog="A spec file says the same in TOML; keys are the flags' names, below [[receiver]], [ring] and "
    "[[consumer]]. A flag overrides the file; --consumer replaces all its consumers. "
    "SIGINT and SIGTERM end a run in order, a second one ends it at once."
)
@click.argument("spec_file", metavar="[SPEC.toml]", required=False, type=click.Path(path_type=Path))
@flag("--name", "NAME", spec.RUN["name"], "Of this engine and its rings (rxPORT; for port 0 rxPID).")
@flag(
    "--listen",
    "URL",
    spec.RECEIVER["listen"],
    "Where: udp://ADDR:PORT[?interface=DEV&source=ADDR], IPv6 in brackets. Port 0: any free one.",
    multiple=True,
)
@flag("--rx-cpu", "LIST", spec.RECEIVER["rx-cpu"], "Pin the receiver: 0, or 0-3,8 (not pinned).")
@flag("--receivers", "N", spec.RECEIVER["receivers"], "That share each port, every one with its ring (1).")
@flag(
    "--steer",
    "flow|cpu",
    spec.RECEIVER["steer"],
    "Which of them gets a packet: by its flow, or its CPU (flow).",
)
@flag(
    "--consumer",
    "HANDLER[@CPU][,KEY=VALUE…]",
    spec.consumer,
    "Who reads, repeatable: latency, rate, gaps, dump=FILE or module:name; @CPU pins it; "
    "policy=gate|skip, wait=block|yield|spin, split=N, by=block|flow, demote=S, name=NAME. "
    "Without any, packets are only received.",
    multiple=True,
)
@flag("--receive", "recvmmsg|recvmsg", spec.RECEIVER["receive"], "Many packets a call, or one (recvmmsg).")
@flag("--batch", "N", spec.RECEIVER["batch"], "Packets a call may bring; at most 1/8 of the ring (64).")
@flag("--rcvbuf", "SIZE", spec.RECEIVER["rcvbuf"], "Of the socket (8MiB).")
@flag(
    "--gro", "auto|on|off", spec.RECEIVER["gro"], "Let a receive bring many packets of a flow at once (auto)."
)
@flag("--connect", "HOST:PORT", spec.RECEIVER["connect"], "Take packets from there only.")
@flag(
    "--rx-wait", "block|spin", spec.RECEIVER["rx-wait"], "For packets: sleep, or take the whole CPU (block)."
)
@flag("--busy-poll", "US", spec.RECEIVER["busy-poll"], "Each receive asks the device, for so long (no).")
@flag("--ring", "SIZE", spec.RING["size"], "Of the ring, in /dev/shm (40MiB).")
@flag("--timestamps", "on|off", spec.RUN["timestamps"], "Ask the kernel when each packet came (on).")
@flag("--stamp", "none|rxring|seed", spec.RUN["stamp"], "What packets carry at their start (rxring).")
@flag(
    "--sender", "NAME", spec.RUN["sender"], "Of a local `rxring send`: the ledger then knows what was sent."
)
@flag(
    "--layout",
    "NAME|FILE.toml",
    spec.RUN["layout"],
    "Bring --device to this layout of `rxring pin layouts`, receive and process on its CPUs; "
    "at the end all is put back.",
)
@flag("--device", "DEV", spec.RUN["device"], "Whose packets the layout is for.")
@fifo()
@mark("--mlock", "Keep the workers' memory in RAM.")
@flag("--duration", "S", spec.RUN["duration"], "End after so many seconds (until a signal).")
@flag("--packets", "N", spec.RUN["packets"], "End after so many packets.")
@flag("--every", "S", spec.RUN["every"], "Report so often (1).")
@mark("--json", "One JSON object a line on stdout.")
@mark("--plain", "Plain lines on a terminal, too.")
def run(spec_file: Path | None, **flags: Any) -> int:
    """Receive into a ring, feed consumers, report."""
    given = {key.replace("_", "-"): value for key, value in flags.items() if value is not None}
    wanted = spec.read(spec_file, given)

    from engine import supervisor
    from engine.report import choose

    with choose(json=wanted.json, plain=wanted.plain) as report:
        return supervisor.run(wanted, report)


# ── send, mirror ─────────────────────────────────────────────────────────────────────────────────────


def _number_or(word: str) -> spec.Parser:
    """A whole number, or `word`; what range makes sense, the plan says."""

    def parse(raw: object) -> int | str:
        try:
            return word if raw == word else _ANY_COUNT(raw)
        except ValueError:
            raise ValueError(f"{raw!r} is no number: give a whole number or {word}") from None

    return parse


_ANY_COUNT = spec.count(0, (1 << 63) - 1)


def _packet_size(raw: object) -> int:
    return 0 if raw == "0" else spec.size(raw)


def _speaker(json: bool | None, line: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], None]:
    """Where a sender's or mirror's objects go: JSON, or lines for people.

    If whoever reads them goes away, or the terminal closes, the work goes on in silence.
    """
    from tools.listing import print_json

    def say(view: dict[str, Any]) -> None:
        try:
            print_json([view]) if json else click.echo(line(view))
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            streams.drop_output()

    return say


@rxring.command()
@flag(
    "--to",
    "HOST:PORT",
    str,
    "Where to; a multicast group takes ?interface=DEV&ttl=N. tcp://HOST:PORT, smc://HOST:PORT: a stream.",
    required=True,
)
@flag("--name", "NAME", spec.RUN["name"], "For `rxring run --sender NAME`, which then knows what was sent.")
@flag("--size", "SIZE", _packet_size, "Of each packet's payload (256), or of a message (128KiB).")
@flag("--rate", "PPS|max", _number_or("max"), "Packets per second; max: as fast as it goes (max).")
@flag("--batch", "N", _ANY_COUNT, "Packets or GSO messages a call, at most 1024 (64).")
@flag("--gso", "N|off", _number_or("off"), "Let the kernel cut each message into N packets (off).")
@flag("--flows", "N", _ANY_COUNT, "Source ports, each with its own sequence numbers; connections (1).")
@flag("--packets", "N", _ANY_COUNT, "End after so many packets.")
@flag("--duration", "S", spec.seconds, "End after so many seconds (until a signal).")
@flag("--sndbuf", "SIZE", spec.size, "Of a stream's socket (as the kernel likes).")
@flag("--cpu", "LIST", str, "Pin the sender: 0, or 0-3,8 (not pinned).")
@flag("--stamp", "none|rxring|seed", spec.RUN["stamp"], "What packets carry at their start (rxring).")
@flag(
    "--send",
    "sendmmsg|sendmsg",
    spec.one_of("sendmmsg", "sendmsg"),
    "Many messages a call, or one (sendmmsg).",
)
@fifo()
@mark("--mlock", "Keep the sender's memory in RAM.")
@mark("--json", "One JSON object a line on stdout.")
def send(json: bool | None, **flags: Any) -> int:
    """Send stamped UDP packets, or messages through a stream, at a rate or flat out."""
    given = {key: value for key, value in flags.items() if value is not None}
    if given["to"].startswith(("tcp://", "smc://")):
        from engine.net import stream_sender

        stream_sender.refuse_what_streams_lack(given)
        stream_sender.run(stream_sender.StreamPlan(**given), _speaker(json, stream_sender.line))
        return 0
    from engine.net import sender

    if "sndbuf" in given:
        raise Refused("--sndbuf is for tcp:// and smc://: leave it out")
    plan = sender.SendPlan(**given)
    plan.check()
    if plan.note:
        streams.complain(plan.note)
    sender.run(plan, _speaker(json, sender.line))
    return 0


def _packets_url(raw: object) -> str:
    where = spec.listen(raw)
    if where.scheme != "udp":
        raise ValueError(f"{str(raw)!r} is a stream: give udp://ADDR:PORT")
    return str(where)


@rxring.command()
@flag("--listen", "URL", _packets_url, "Where: udp://ADDR:PORT.", required=True)
@flag("--to", "HOST:PORT", str, "Where to (back to whom each packet came from).")
@flag("--batch", "N", _ANY_COUNT, "Packets that go on together, at most 3000 (64).")
@flag("--receive", "recvmmsg|recvmsg", spec.RECEIVER["receive"], "Many packets a call, or one (recvmmsg).")
@flag("--rcvbuf", "SIZE", spec.size, "Of the socket (the system's default).")
@flag("--cpu", "LIST", str, "Pin the mirror: 0, or 0-3,8 (not pinned).")
@flag("--duration", "S", spec.seconds, "End after so many seconds (until a signal).")
@mark("--json", "One JSON object a line on stdout.")
def mirror(json: bool | None, **flags: Any) -> int:
    """Receive packets and bounce them."""
    from engine.net import mirror

    plan = mirror.MirrorPlan(**{key: value for key, value in flags.items() if value is not None})
    mirror.run(plan, _speaker(json, mirror.line))
    return 0


# ── bench ────────────────────────────────────────────────────────────────────────────────────────────


@rxring.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> int:
    """Measure: `list` names the experiments, `NAME` runs one."""
    from bench import main

    return main.main(arguments)


# ── pin ──────────────────────────────────────────────────────────────────────────────────────────────


@rxring.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def pin(arguments: tuple[str, ...]) -> int:
    """Decide, and prove, which CPU takes interrupts, receives, processes."""
    from tools import pin

    return pin.main(arguments)


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────


@rxring.command()
@mark("--json", "One JSON object on stdout.")
def doctor(json: bool | None) -> int:
    """What on this machine costs packets or microseconds, and the command that mends it.

    Changes nothing itself. Works without root; what only root may see, or mend, says so.
    """
    from engine.doctor import examine, screen
    from tools.listing import print_json

    found = examine()
    print_json([{"findings": found}]) if json else screen.show(found)
    return 0


# ── rings ────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _ring_errors_refuse() -> Iterator[None]:
    from rings import RingError

    try:
        yield
    except RingError as error:
        raise Refused(str(error)) from None


@rxring.group("rings", invoke_without_command=True)
@click.pass_context
def rings_group(context: click.Context) -> int:
    """Look at the rings of this user, and remove dead ones. Alone: ls."""
    return context.invoke(ls) if context.invoked_subcommand is None else 0


@rings_group.command("ls")
@mark("--json", "One JSON object a line on stdout.")
def ls(json: bool | None = None) -> int:
    """List them with their state.

    live; waiting: without a writer; orphaned: its engine died; dead: gc removes it;
    unreadable: not finished, or of another version.
    """
    import rings
    from tools import listing

    with _ring_errors_refuse():
        found = [listing.describe(info) for info in rings.list()]
    listing.print_json(found) if json else listing.print_list(found)
    return 0


@rings_group.command("show")
@click.argument("name", metavar="NAME", callback=reading(spec.engine_name))
@mark("--json", "One JSON object a line on stdout.")
def show(name: str, json: bool | None) -> int:
    """All counters of NAME's rings, and every reader's place and account."""
    import rings
    from tools import listing

    with _ring_errors_refuse():
        numbers = [info.number for info in rings.list() if info.name == name] or [0]
    refusals = []
    for number in sorted(numbers):
        try:
            with rings.attach(name, number, timeout_s=0.0) as ring:
                found = listing.describe_in_full(ring)
        except rings.RingError as error:
            refusals.append(str(error))  # the others can be shown
        else:
            listing.print_json([found]) if json else listing.print_in_full(found)
    if refusals:
        raise Refused(refusals[0])
    return 0


@rings_group.command("rm")
@click.argument("name", metavar="NAME", callback=reading(spec.engine_name))
def rm(name: str) -> int:
    """Remove what a dead engine of this NAME left. Refused where it lives."""
    import rings

    with _ring_errors_refuse():
        removed = rings.remove(name)
    click.echo("\n".join(f"removed {object_name}" for object_name in removed))
    return 0


@rings_group.command("gc")
@mark("--json", "One JSON object on stdout.")
def gc(json: bool | None) -> int:
    """Remove whatever has neither an engine nor a writer any more."""
    import rings
    from tools import listing

    with _ring_errors_refuse():
        removed = rings.collect()
    if json:
        listing.print_json([{"removed": removed}])
    else:
        click.echo("\n".join(f"removed {object_name}" for object_name in removed) or "nothing to remove")
    return 0
