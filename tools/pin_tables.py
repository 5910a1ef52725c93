"""What `rxring pin` finds, as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from engine import figures
from engine.affinity.devices import Device
from engine.affinity.journal import Restored
from engine.affinity.launch import Ended
from engine.affinity.load import Load
from engine.affinity.topology import format_cpu_list
from engine.screen import Column, Fitted, Flow, printable

Object = Mapping[str, Any]
_MOST_IRQS = 16  # of a device, in lines of their own
_MOST_LOADS = 8  # CPUs that are named by their load
_HAND_OVER = (
    "no interrupts of its own: RPS hands its packets to the interrupt CPU, which whoever sends pays for"
)


def console() -> Console:
    return Console(highlight=False)


def _list(cpus: Iterable[int] | None) -> str:
    return figures.UNKNOWN if cpus is None else format_cpu_list(cpus) or "none"


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────


def show(view: Object) -> None:
    out = console()
    kinds = [(kind, view[kind]) for kind in ("online", "allowed", "isolated", "offline")]
    pieces = [Text.assemble((f"{kind} ", "dim"), _list(cpus)) for kind, cpus in kinds]
    out.print(Flow(Text("CPUs", "bold"), pieces))
    out.print()
    out.print(Fitted(_CACHES, _caches(view["cpus"])))
    irqs = [row for device in view["devices"] for row in _irqs(device)]
    threads = [thread for device in view["devices"] for thread in device["napi"] or []]
    for columns, rows in ((_DEVICES, view["devices"]), (_IRQS, irqs), (_NAPI, threads)):
        if rows:
            out.print()
            out.print(Fitted(columns, rows))
    out.print()
    out.print(Flow(Text("packets since the boot", "bold"), list(_loads(view["load"]))))
    if view["irqbalance"] is not None:
        out.print(
            Text(f"irqbalance runs (process {view['irqbalance']}): it moves interrupts every 10 s", "yellow")
        )


def _caches(cpus: Sequence[Object]) -> list[Object]:
    """A row for all CPUs that share a last-level cache; where no two cores do, one for all of a node."""
    alone = all(set(cpu["llc"]) == set(cpu["siblings"]) for cpu in cpus)
    groups: dict[Any, list[Object]] = {}
    for cpu in cpus:
        cache = None if alone else tuple(cpu["llc"])
        groups.setdefault((cpu["package"], cpu["node"], cache), []).append(cpu)
    return [
        {
            "package": package,
            "node": node,
            "cpus": _list(cpu["id"] for cpu in group),
            "cache": "each core its own" if cache is None else "shared",
            "cores": len({cpu["siblings"] for cpu in group}),
            "threads": max(len(cpu["siblings"]) for cpu in group),
            "siblings": _siblings([cpu["siblings"] for cpu in group]),
        }
        for (package, node, cache), group in sorted(groups.items(), key=lambda item: item[1][0]["id"])
    ]


def _siblings(cores: Sequence[Sequence[int]]) -> str:
    """Which CPUs are threads of one core: 0+64 and so on, where all are as far apart."""
    threads = [core for core in dict.fromkeys(map(tuple, cores)) if len(core) > 1]
    apart = {tuple(cpu - core[0] for cpu in core) for core in threads}
    if not threads:
        return ""
    if len(apart) == 1 and len(threads) > 2:
        return f"{'+'.join(map(str, threads[0]))} to {'+'.join(map(str, threads[-1]))}"
    return " ".join("+".join(map(str, core)) for core in threads)


def _irqs(device: Object) -> Iterator[Object]:
    """Each of the device's; where there are many, one row of all."""
    irqs, name = device["irqs"], device["name"]
    if len(irqs) > _MOST_IRQS:
        yield {
            "of": name,
            "number": format_cpu_list(irq["number"] for irq in irqs),
            "action": f"{len(irqs)}, each in --json",
            "wish": _list({cpu for irq in irqs for cpu in irq["wish"]}),
            "fact": _list({cpu for irq in irqs for cpu in irq["fact"] or ()}),
            "managed": any(irq["managed"] for irq in irqs),
        }
        return
    for irq in irqs:
        row = {"of": name, "number": str(irq["number"]), "action": ", ".join(irq["actions"]) or "unused"}
        lists = {"wish": _list(irq["wish"]), "fact": _list(irq["fact"])}
        yield {**row, **lists, "managed": irq["managed"]}


def _loads(load: Sequence[Object]) -> Iterator[Text]:
    """Who handles packets, the busiest first."""
    total = sum(row["processed"] for row in load)
    busy = sorted((row for row in load if row["processed"]), key=lambda row: -row["processed"])
    for row in busy[:_MOST_LOADS]:
        dropped = f", {figures.exact(row['dropped'])} dropped" if row["dropped"] else ""
        share = figures.percent(row["processed"] / total)
        yield Text.assemble(("CPU ", "dim"), f"{row['cpu']} {share}", (dropped, "yellow"))
    if rest := busy[_MOST_LOADS:]:
        share = figures.percent(sum(row["processed"] for row in rest) / total)
        yield Text(f"{len(rest)} more {share}", "dim")
    if not busy:
        yield Text("none", "dim")


def _masks(queues: Sequence[Object], key: str) -> str:
    """The CPUs of all queues together: off where none names any."""
    known = [queue[key] for queue in queues if queue[key] is not None]
    return "off" if known and not any(known) else _list({c for m in known for c in m} if known else None)


def _coalescing(device: Object) -> str:
    found = device["coalescing"]
    if found is None:
        return figures.UNKNOWN
    return "adaptive" if found["adaptive"] else f"{found['rx_usecs']} µs, {found['rx_frames']}"


_CACHES = (
    Column("CPUs", lambda r: r["cpus"], 100, left=True),
    Column("package", lambda r: str(r["package"]), 90),
    Column("node", lambda r: str(r["node"]), 95),
    Column("last-level cache", lambda r: r["cache"], 85, left=True),
    Column("cores", lambda r: str(r["cores"]), 80),
    Column("threads of a core", lambda r: str(r["threads"]), 70),
    Column("siblings", lambda r: r["siblings"], 75, left=True, rare=True),
)
_DEVICES = (
    Column("device", lambda r: r["name"], 100, left=True),
    Column("driver", lambda r: r["driver"] or figures.UNKNOWN, 70, left=True),
    Column("node", lambda r: figures.UNKNOWN if r["node"] is None else str(r["node"]), 80),
    Column("rx", lambda r: str(len(r["rx"])), 85),
    Column("tx", lambda r: str(len(r["tx"])), 84),
    Column("IRQs", lambda r: str(len(r["irqs"])), 90),
    Column("RPS", lambda r: _masks(r["rx"], "rps"), 95, left=True),
    Column("RFS", lambda r: str(sum(queue["rfs"] for queue in r["rx"])), 60, rare=True),
    Column("XPS", lambda r: _masks(r["tx"], "xps"), 75, left=True, rare=True),
    Column("polled by", lambda r: "softirq" if r["napi"] is None else "threads", 65, left=True),
    Column("coalescing", _coalescing, 50, left=True, rare=True),
)
_IRQS = (
    Column("interrupt", lambda r: r["number"], 100, left=True),
    Column("of", lambda r: r["of"], 80, left=True),
    Column("handler", lambda r: r["action"], 85, left=True),
    Column("wish", lambda r: r["wish"], 90, left=True),
    Column("fact", lambda r: r["fact"], 95, left=True),
    Column(
        "managed", lambda r: Text("by the kernel", "yellow") if r["managed"] else "", 70, left=True, rare=True
    ),
)
_NAPI = (
    Column("thread", lambda r: r["name"], 100, left=True),
    Column("process", lambda r: str(r["pid"]), 80),
    Column("CPUs", lambda r: _list(r["cpus"]), 90, left=True),
)


# ── layouts, apply, restore ──────────────────────────────────────────────────────────────────────────


def list_layouts(found: Sequence[Object], device: Device | None) -> None:
    out = console()
    possible = [layout for layout in found if layout["possible"]]
    if possible:
        out.print(Fitted(_LAYOUTS, possible))
    for layout in found:
        if not layout["possible"]:
            out.print(Text(layout["note"], "dim"))
    if device and not device.irqs:
        out.print(Text(f"{printable(device.name)} has {_HAND_OVER}", "yellow"))


def applied(view: Object, note: str) -> None:
    """What was, or would be, written and refused; and how a run goes with it."""
    out = console()
    roles = [Text.assemble((f"{role} ", "dim"), _cpus_of(view[role])) for role in _ROLES if role in view]
    done = "applied to" if view["applied"] else "would be applied to"
    out.print(Flow(Text(f"{printable(view['layout'])} {done} {printable(view['device'])}", "bold"), roles))
    if view["interrupt_by"] == "rps":
        out.print(Text(f"{printable(view['device'])} has {_HAND_OVER}", "yellow"))
    if note:
        out.print(Text(note, "yellow"))
    for write in view["writes"]:
        click.echo(f"  {write['path']}: {write['old']} -> {write['new']}")
    for refusal in view["refusals"]:
        out.print(Text(f"refused: {refusal}", "red"))
    if not view["refusals"]:
        flags = f"--rx-cpu {view['receive']} --consumer HANDLER@{format_cpu_list(view['process'])}"
        out.print(Text.assemble(("run with ", "dim"), flags))
    if view["applied"]:
        out.print(Text.assemble(("take it back with ", "dim"), "rxring pin restore"))


def _cpus_of(role: int | Sequence[int]) -> str:
    return str(role) if isinstance(role, int) else format_cpu_list(role)


def restored(done: Sequence[Restored]) -> None:
    if not done:
        click.echo("nothing to restore")
    for file in done:
        found = figures.UNKNOWN if file.found is None else file.found
        click.echo(f"  {file.path}: {found} -> {file.value}{_STATES[file.state]}")


def verified(view: Object) -> None:
    """Each check in a line: what is wrong stands out."""
    out = console()
    out.print(Text(f"{printable(view['layout'])} on {printable(view['device'])}", "bold"))
    for check in view["checks"]:
        mark, style = ("ok", "green") if check["ok"] else ("WRONG", "bold red")
        line = Text.assemble((f"  {mark} ", style), f"{check['what']}: {check['found']}")
        if not check["ok"]:
            line.append(f", not {check['wanted']}")
        out.print(line, soft_wrap=True)


# ── run, watch ───────────────────────────────────────────────────────────────────────────────────────


def ended(command: str, end: Ended, cpus: Sequence[int] | None) -> None:
    """On stderr, which is the command's, too."""
    out = Console(highlight=False, stderr=True)
    rows = [{"tid": tid, "thread": thread} for tid, thread in sorted(end.threads.items())]
    where = f"pinned to CPU {format_cpu_list(cpus)}" if cpus else "not pinned"
    strayed = sum(thread.strayed > 0 for thread in end.threads.values())
    pieces = [
        Text(f"ended with {end.code} after {figures.clock(end.seconds)}, {where}"),
        Text(f"{figures.exact(end.involuntary)} × switched out against its will"),
        *(
            [Text(f"{strayed} threads let themselves run elsewhere and were brought back", "red")]
            * (strayed > 0)
        ),
    ]
    out.print(Flow(Text(printable(command), "bold"), pieces))
    if rows:
        out.print(Fitted(_THREADS, rows[:_MOST_THREADS]))
    if len(rows) > _MOST_THREADS:
        out.print(Text(f"and {len(rows) - _MOST_THREADS} more", "dim"))


class Watch:
    """A table that is drawn anew on a terminal, and printed again and again elsewhere."""

    def __init__(self) -> None:
        self._console = console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def print(self, risen: Mapping[int, Load], seconds: float) -> None:
        """What each CPU did in so many seconds; those that did nothing only where there is room."""
        rows = [
            {"cpu": cpu, **{k: n / seconds for k, n in row._asdict().items()}} for cpu, row in risen.items()
        ]
        room = max(self._console.height - 2, 1) if self._live else len(rows)
        busiest = sorted(rows, key=lambda row: (-row["processed"], row["cpu"]))[:room]
        table = Fitted(_LOAD, sorted(busiest, key=lambda row: row["cpu"]))
        if self._live:
            self._live.update(table, refresh=True)
        else:
            self._console.print(table)
            sys.stdout.flush()


def _rate(key: str, style: str = "") -> Callable[[Object], Text]:
    def cell(row: Object) -> Text:
        return Text(figures.magnitude(round(row[key]), "/s"), style if row[key] else "")

    return cell


_MOST_THREADS = 40
_THREADS = (
    Column("thread", lambda r: r["thread"].name, 100, left=True),
    Column("tid", lambda r: str(r["tid"]), 60),
    Column("process", lambda r: str(r["thread"].pid), 70),
    Column("ran on", lambda r: format_cpu_list(r["thread"].cpus), 95, left=True),
    Column("may run on", lambda r: format_cpu_list(r["thread"].allowed), 90, left=True),
    Column("migrations", lambda r: figures.exact(r["thread"].migrations), 85),
    Column("switched out", lambda r: figures.exact(r["thread"].involuntary), 80),
    Column("strayed", lambda r: Text(figures.exact(r["thread"].strayed), "red"), 75, rare=True),
)
_LOAD = (
    Column("CPU", lambda r: str(r["cpu"]), 100),
    Column("packets", _rate("processed"), 95),
    Column("by RPS", _rate("received_rps"), 80),
    Column("dropped", _rate("dropped", "bold red"), 97),
    Column("out of time", _rate("time_squeeze", "yellow"), 75),
    Column("NET_RX", _rate("net_rx"), 90),
    Column("NET_TX", _rate("net_tx"), 70),
    Column("interrupts", _rate("interrupts"), 85),
)
_ROLES = ("interrupt", "receive", "process", "send")
_LAYOUTS = (
    Column("layout", lambda r: r["layout"], 100, left=True),
    Column("interrupt", lambda r: str(r["interrupt"]), 95),
    Column("receive", lambda r: str(r["receive"]), 94),
    Column("process", lambda r: format_cpu_list(r["process"]), 93, left=True),
    Column("", lambda r: Text(r["note"], "yellow"), 50, left=True, rare=True),
)
_STATES = {
    "back": "",
    "unchanged": " (somebody else had put it back)",
    "drifted": " (somebody else had changed it)",
    "gone": " (gone)",
}
