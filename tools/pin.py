"""`rxring pin`, or `python tools/pin.py`: which core takes the interrupts, which receives, which process.

Looking needs no rights, and neither numpy nor numba is loaded.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else a script finds what is beside it only

import click
import msgspec

from engine.affinity import checks, devices, interrupts, journal, launch, layouts, load, steering, topology
from engine.affinity import governor as governors
from engine.affinity.checks import Check
from engine.affinity.devices import Device
from engine.affinity.journal import Change, Write
from engine.affinity.topology import ROOT, Topology
from engine.errors import Failed, Refused
from engine.signals import END_SIGNALS
from engine.spec import RUN
from tools.flags import flag, mark

Object = dict[str, Any]
_JSON = mark("--json", "One JSON object a line on stdout.")


def _device(text: str) -> Any:
    return click.option("--device", metavar="DEV", help=text)


def main(args: Sequence[str], root: Path = ROOT) -> int:
    """One of the commands below; its exit code. root: of /proc, /sys and /run."""
    with pin.make_context("rxring pin", list(args), obj=root) as context:
        return pin.invoke(context) or 0


@click.group(invoke_without_command=True)
@click.pass_context
def pin(context: click.Context) -> int:
    """Which core takes the interrupts, which receives, which process; and the proof of it."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


def _print_json(found: object) -> None:
    click.echo(msgspec.json.encode(found))


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────


@pin.command()
@_JSON
@click.pass_obj
def show(root: Path, json: bool | None) -> int:
    """CPUs and how they are related; devices, and where their packets are handled."""
    view = describe(root)
    if json:
        _print_json(view)
    else:
        from tools import pin_tables

        pin_tables.show(view)
    return 0


def describe(root: Path = ROOT) -> Object:
    """All that `show` tells, as --json has it."""
    machine = topology.read(root)
    found: Object = msgspec.to_builtins(machine)
    return {
        **found,
        "offline": machine.offline,
        "devices": [msgspec.to_builtins(device) for device in devices.read_all(root)],
        "rfs_entries": steering.rfs_entries(root),
        "irqbalance": interrupts.irqbalance(root),
        "load": [{"cpu": cpu, **row._asdict()} for cpu, row in load.read(root).items()],
    }


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────


@pin.command("layouts")
@_device("They are near this device.")
@_JSON
@click.pass_obj
def list_layouts(root: Path, device: str | None, json: bool | None) -> int:
    """The layouts this machine can do, and why it cannot do the others.

    \b
    same            the interrupt core is the receive core
    sibling         the receive core's other thread takes the interrupts
    split           different cores behind one last-level cache
    split-package   one package, another last-level cache
    cross-node      receiving at another memory node than the interrupts
    """
    machine = topology.read(root)
    near = devices.read(device, root) if device else None
    found = [_possible(name, machine, near) for name in layouts.NAMES]
    if json:
        for layout in found:
            _print_json(layout)
    else:
        from tools import pin_tables

        pin_tables.list_layouts(found, near)
    return 0


def _possible(name: str, machine: Topology, device: Device | None) -> Object:
    made_by: Object = {"interrupt_by": layouts.made_by(device) if device else None}
    try:
        layout = layouts.find(name, machine, device)
    except Refused as refused:
        roles: Object = {"interrupt": None, "receive": None, "process": []}
        return {"layout": name, "possible": False, **roles, **made_by, "note": str(refused)}
    return {"possible": True, **layout.as_object(), **made_by, "note": layout.note}


# ── apply, restore ───────────────────────────────────────────────────────────────────────────────────


@pin.command(
    epilog="A file: interrupt = 2, receive = 3, process = '4-7'; send = '5,6' gives the transmit queues to "
    "these CPUs; device = 'eth0'."
)
@click.argument("layout", metavar="LAYOUT|FILE.toml")
@_device("Whose packets.")
@flag("--governor", "NAME", str, "Also this frequency governor on the layout's CPUs, like performance.")
@mark("--dry-run", "Say what would be written, and what would be refused.")
@_JSON
@click.pass_obj
def apply(
    root: Path,
    layout: str,
    device: str | None,
    governor: str | None,
    dry_run: bool | None,
    json: bool | None,
) -> int:
    """Bring a device's interrupts, RPS and XPS to a layout, all or none; `restore` takes it back."""
    chosen, target = layouts.choose(layout, device, root)
    writes = layouts.writes(chosen, target, root)
    if governor is not None:
        writes += governors.writes(governor, set(chosen.cpus), root)
    refusals = layouts.obstacles(chosen, target, topology.read(root), root)
    refusals += filter(None, [journal.obstacle(writes, root)])
    view = layouts.about(chosen, target, root)
    if refusals and not dry_run:
        raise Refused("; ".join(refusals))
    if dry_run:
        changes = _foreseen(writes, refusals)
    else:
        done = journal.apply(writes, view, root)
        changes = done.changes
        view["journal"] = done.number
    view |= {"applied": not dry_run, "writes": msgspec.to_builtins(changes), "refusals": refusals}
    if json:
        _print_json(view)
    else:
        from tools import pin_tables

        pin_tables.applied(view, chosen.note)
    return 2 if refusals else 0


def _foreseen(writes: Sequence[Write], refusals: Sequence[str]) -> list[Change]:
    """What would be written; nothing where that cannot be told and is refused for another reason anyway."""
    try:
        return journal.plan(writes)
    except Refused:
        if refusals:
            return []
        raise


@pin.command()
@_JSON
@click.pass_obj
def restore(root: Path, json: bool | None) -> int:
    """Take back what `apply` changed, newest first, also after it was killed."""
    done = journal.restore(root)
    if json:
        for file in done:
            _print_json(msgspec.to_builtins(file))
    else:
        from tools import pin_tables

        pin_tables.restored(done)
    return 0


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────

_AGAIN_S = 10.5  # irqbalance looks every ten seconds


@pin.command()
@mark("--traffic", "Count packets, too: ours over lo, else whatever comes; and look again after ten seconds.")
@_JSON
@click.pass_obj
def verify(root: Path, traffic: bool | None, json: bool | None) -> int:
    """Is it so? The layout applied last is read back, and the threads of running engines are looked at."""
    wrong = _look(root, bool(traffic), bool(json))
    if traffic:
        time.sleep(_AGAIN_S)
        wrong += _look(root, True, bool(json))
    if wrong:
        count = "1 thing is" if len(wrong) == 1 else f"{len(wrong)} things are"
        first = wrong[0]
        raise Failed(f"{count} not as the layout says: {first.what}: {first.found}, not {first.wanted}")
    return 0


def _look(root: Path, with_traffic: bool, json: bool) -> list[Check]:
    """One look, printed; what is wrong."""
    layout, made = checks.applied(root)
    device = made.about["device"]
    found = [*checks.read_back(layout, made, root), *checks.engine_threads(layout, made)]
    if with_traffic:
        found += checks.traffic(layout, device)
    wrong = [check for check in found if not check.ok]
    view = {"layout": layout.name, "device": device, "ok": not wrong, "checks": msgspec.to_builtins(found)}
    if json:
        _print_json(view)
    else:
        from tools import pin_tables

        pin_tables.verified(view)
    return wrong


# ── run, watch ───────────────────────────────────────────────────────────────────────────────────────


@pin.command(context_settings={"allow_interspersed_args": False})
@flag("--cpus", "LIST", lambda text: topology.parse_cpu_list(str(text)), "Where it may run: 0, or 0-3,8.")
@flag("--fifo", "N", RUN["fifo"], "Real-time priority: SCHED_FIFO, 1 to 99.")
@mark("--mlock", "Keep the command's memory in RAM; that of children it makes is not.")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND…", type=click.UNPROCESSED)
def run(cpus: tuple[int, ...] | None, fifo: int | None, mlock: bool | None, command: tuple[str, ...]) -> int:
    """Run a command pinned, with every thread and child it makes, and say where they ran.

    The report is on stderr, the exit code the command's own.
    """
    ended = launch.run(command, cpus, fifo, mlock=bool(mlock))

    from tools import pin_tables

    pin_tables.ended(command[0], ended, cpus)
    return ended.code


@pin.command()
@click.pass_obj
def watch(root: Path) -> int:
    """Softirqs, interrupts and packets of each CPU, every second, until Ctrl-C."""
    from tools import pin_tables

    signals = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        with pin_tables.Watch() as screen:
            last, at = load.read(root), time.monotonic()
            while signal.sigtimedwait(END_SIGNALS, 1.0) is None:
                now, moment = load.read(root), time.monotonic()
                screen.print({cpu: now[cpu].since(last[cpu]) for cpu in now if cpu in last}, moment - at)
                last, at = now, moment
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    return 0


if __name__ == "__main__":
    from tools import cli

    sys.exit(cli.main(["pin", *sys.argv[1:]]))
