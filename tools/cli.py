"""The command `rxring`: reads arguments, calls the engine, and turns every ending into an exit code.

0 done as asked · 1 something failed while running · 2 bad arguments, or refused by the machine. An
error is one line on stderr: `rxring: what is wrong: what to do`. RXRING_DEBUG=1 adds the traceback.

Whatever a command needs is imported when it runs: help, and looking at rings, must not wait for numba.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from engine import spec
from engine.errors import Failed, Refused

# OpenBLAS starts a thread for each CPU when numpy is imported. The supervisor forks its workers, and
# only a process of a single thread can be forked safely.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        code = _run(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()  # who read it has what he wanted
        return 0
    except SystemExit:  # how rich answers a broken pipe
        return 0
    except KeyboardInterrupt:
        return 130
    except click.ClickException as error:
        return _complain(_usage(error), 2)
    except Refused as error:
        return _complain(str(error), 2)
    except Failed as error:
        return _complain(str(error), 1)
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}: RXRING_DEBUG=1 shows where", 1)
    except Exception as error:
        return _complain(f"unexpected {type(error).__name__}: {error}: RXRING_DEBUG=1 shows where", 1)


def _drop_output() -> None:
    """What is still buffered cannot be written; Python would try again when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: list[str]) -> int:
    # Not click's own main(): that prints its errors itself and takes a broken pipe for a failure.
    try:
        with rxring.make_context("rxring", args) as context:
            return rxring.invoke(context) or 0
    except click.exceptions.Exit as ending:
        return ending.exit_code


def _complain(text: str, code: int) -> int:
    if os.environ.get("RXRING_DEBUG") == "1":
        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"rxring: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


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


def reading(parse: spec.Parser) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A value, or each value of a repeatable flag, read by one of the parsers of `engine.spec`."""

    def read(context: click.Context, param: click.Parameter, given: Any) -> Any:
        try:
            if isinstance(given, tuple):
                return [parse(text) for text in given] or None
            return None if given is None else parse(given)
        except ValueError as error:
            raise click.BadParameter(str(error), context, param) from None

    return read


def flag(name: str, metavar: str, parse: spec.Parser, text: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(name, metavar=metavar, callback=reading(parse), help=text, **more)


def mark(name: str, text: str) -> Callable[[Any], Any]:
    """A flag without a value; None where it is not given, so that a spec file decides."""
    return click.option(name, is_flag=True, default=None, help=text)


def fifo() -> Callable[[Any], Any]:
    text = f"Real-time priority: SCHED_FIFO at PRIO, 1 to 99 ({spec.FIFO_PRIORITY} where PRIO is left out)."
    value = str(spec.FIFO_PRIORITY)
    return flag("--fifo", "[PRIO]", spec.RUN["fifo"], text, is_flag=False, flag_value=value)


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
    "Where: udp://ADDR:PORT, IPv4. Port 0: any free one.",
    multiple=True,
)
@flag("--rx-cpu", "LIST", spec.RECEIVER["rx-cpu"], "Pin the receiver: 0, or 0-3,8 (not pinned).")
@flag(
    "--consumer",
    "HANDLER[@CPU][,KEY=VALUE…]",
    spec.consumer,
    "Who reads, repeatable: latency, rate, gaps, dump=FILE or module:name; @CPU pins it; "
    "policy=gate|skip, wait=block|yield|spin, name=NAME. Without any, packets are only received.",
    multiple=True,
)
@flag("--receive", "recvmmsg|recvmsg", spec.RECEIVER["receive"], "Many packets a call, or one (recvmmsg).")
@flag("--batch", "N", spec.RECEIVER["batch"], "Packets a call may bring; at most 1/8 of the ring (64).")
@flag("--rcvbuf", "SIZE", spec.RECEIVER["rcvbuf"], "Of the socket (8MiB).")
@flag(
    "--gro", "auto|on|off", spec.RECEIVER["gro"], "Let a receive bring many packets of a flow at once (auto)."
)
@flag("--ring", "SIZE", spec.RING["size"], "Of the ring, in /dev/shm (40MiB).")
@flag("--timestamps", "on|off", spec.RUN["timestamps"], "Ask the kernel when each packet came (on).")
@flag("--stamp", "none|rxring|seed", spec.RUN["stamp"], "What packets carry at their start (rxring).")
@flag(
    "--sender", "NAME", spec.RUN["sender"], "Of a local `rxring send`: the ledger then knows what was sent."
)
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
    """Where a sender's or mirror's objects go: JSON, or lines for people."""
    if json:
        from tools.listing import print_json

        return lambda view: print_json([view])
    return lambda view: click.echo(line(view))


@rxring.command()
@flag("--to", "HOST:PORT", str, "Where to.", required=True)
@flag("--name", "NAME", spec.RUN["name"], "For `rxring run --sender NAME`, which then knows what was sent.")
@flag("--size", "SIZE", _packet_size, "Of each packet's payload (256).")
@flag("--rate", "PPS|max", _number_or("max"), "Packets per second; max: as fast as it goes (max).")
@flag("--batch", "N", _ANY_COUNT, "Packets or GSO messages a call, at most 1024 (64).")
@flag("--gso", "N|off", _number_or("off"), "Let the kernel cut each message into N packets (off).")
@flag("--flows", "N", _ANY_COUNT, "Source ports, each with its own sequence numbers (1).")
@flag("--packets", "N", _ANY_COUNT, "End after so many packets.")
@flag("--duration", "S", spec.seconds, "End after so many seconds (until a signal).")
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
    """Send stamped UDP packets, at a rate or flat out."""
    from engine.net import sender

    plan = sender.SendPlan(**{key: value for key, value in flags.items() if value is not None})
    sender.run(plan, _speaker(json, sender.line))
    return 0


@rxring.command()
@flag("--listen", "URL", lambda raw: str(spec.listen(raw)), "Where: udp://ADDR:PORT, IPv4.", required=True)
@flag("--to", "HOST:PORT", str, "Where to (back to whom each packet came from).")
@flag("--batch", "N", _ANY_COUNT, "Packets a call, at most 1024 (64).")
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
    from bench import runner

    return runner.main(arguments)


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

    numbers = [info.number for info in rings.list() if info.name == name] or [0]
    with _ring_errors_refuse():
        for number in sorted(numbers):
            with rings.attach(name, number, timeout_s=0.0) as ring:
                found = listing.describe_in_full(ring)
            listing.print_json([found]) if json else listing.print_in_full(found)
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


if __name__ == "__main__":
    sys.exit(main())
