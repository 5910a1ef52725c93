"""`rxring pin`, or `python tools/pin.py`: which core takes the interrupts, which receives, which process.

Looking needs no rights, and neither numpy nor numba is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else a script finds what is beside it only

import click
import msgspec

from engine.affinity import devices, interrupts, journal, layouts, steering, topology
from engine.affinity.devices import Device
from engine.affinity.layouts import Layout
from engine.affinity.topology import ROOT, Topology
from engine.errors import Refused
from engine.net.counters import Softnet, parse_softnet
from tools.commands import mark

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
        "softirqs": list(_softirqs(machine, root)),
    }


def _softirqs(machine: Topology, root: Path) -> Iterator[Object]:
    """Of each CPU since the boot: how often softirqs ran (net_rx, net_tx), and packets."""
    runs = interrupts.parse_softirqs((root / "proc/softirqs").read_text())
    packets = parse_softnet((root / "proc/net/softnet_stat").read_text(), machine.online)
    for cpu in machine.online:
        kinds = {kind.lower(): runs.get(kind, {}).get(cpu, 0) for kind in ("NET_RX", "NET_TX")}
        yield {"cpu": cpu, **kinds, **packets.get(cpu, Softnet())._asdict()}


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
@mark("--dry-run", "Say what would be written, and what would be refused.")
@_JSON
@click.pass_obj
def apply(root: Path, layout: str, device: str | None, dry_run: bool | None, json: bool | None) -> int:
    """Bring a device's interrupts, RPS and XPS to a layout, all or none; `restore` takes it back."""
    chosen, target = _choose(layout, device, root)
    writes = layouts.writes(chosen, target, root)
    refusals = layouts.obstacles(chosen, target, topology.read(root), root)
    view: Object = {**chosen.as_object(), "device": target.name, "interrupt_by": layouts.made_by(target)}
    if refusals and not dry_run:
        raise Refused("; ".join(refusals))
    if dry_run:
        changes = journal.plan(writes)
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


def _choose(layout: str, device: str | None, root: Path) -> tuple[Layout, Device]:
    """By name, near the device; or from a file, which may name the device."""
    if layout in layouts.NAMES:
        if device is None:
            raise Refused(f"--device is missing: choose from {', '.join(devices.names(root))}")
        target = devices.read(device, root)
        return layouts.find(layout, topology.read(root), target), target
    chosen, named = layouts.read_file(Path(layout))
    device = device or named
    if device is None:
        raise Refused(f"{layout} names no device: write device = 'DEV', or give --device DEV")
    return chosen, devices.read(device, root)


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


if __name__ == "__main__":
    from tools import cli

    sys.exit(cli.main(["pin", *sys.argv[1:]]))
