"""A UDP flood counted at every layer: flows, a connected socket, early demux, and who takes the interrupts.

A flood of 2016 (bulk dequeue from the UDP receive queue, netdev), with the rules that its reviewer set: it
is said whether softirq and sink share a CPU; packets are counted at every layer, since the kernel drops
silently where user space is slow; the socket is connected or not, on the receiving side too; early demux and
the rest of the configuration stand with each case, and stay as they are during it.

Frames have 64 bytes, as 2016's: 18 of payload. `rxring send` sends them as GSO messages of 64 through one
source port a flow, from one CPU, to `rxring run --gro off` without a consumer on another one, over a veth
cable. Its device takes packets one by one (gso_max_segs 1): the sender's kernel cuts the messages before it.
`same`: the sink's CPU takes the interrupts, too. `other`: another one does, a third where there is one; with
two it is the sender's, which then pays for both. An RPS mask of one bit sees to that.

Layers, within one window: `sent` (over the whole run, by the sender), `device` (rx_packets of the receiving
end, without those for which a CPU's backlog had no room), `softirq` (handled on the CPU that was asked for),
`socket` (queued there, or dropped since it was full), `engine` (published in the ring). `whole_run` has them
from start to end. Right is a run whose ledger balances: each packet sent is in the ring, or some layer
counted it as dropped.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import pictures
from bench.machine import two_cpus
from bench.place import Place, Side
from bench.report import number, span
from bench.runner import Case, Claim, Figures, Setting
from bench.section import Picture, Section, Table
from bench.spread import median, ratios
from bench.window import EVERY_S, Window, devices, strayed
from engine.errors import Refused

PLACES = ("veth",)
VARIES = ("rps", "net.ipv4.ip_early_demux", "net.ipv4.udp_early_demux")  # each case sets its own
SAME, OTHER = "same", "other"
CLAIMS = (
    Claim("1 flow, other", against="1 flow, same", at_least=2),
    Claim("1 flow, connected, other", against="1 flow, other", at_least=0.95),
)

PAYLOAD = 18  # 64 bytes with the headers of UDP, IP and Ethernet, and the checksum behind
MESSAGE = 64  # packets
FEW, MANY = (1, 2, 3, 4), 64  # flows
RCVBUF = 8 << 20
SATURATED = 0.95  # of the best rate: the sink takes no more
IDLE = 5  # per cent of the time: a sink with more could take more
THEN = {  # S4: k packets/s before and after the change
    "many flows": (570, 1800),
    "fewest that saturate": (1850, 3500),
    "one flow": (1850, 1630),
}
_FIRST_PORT = 40000  # of the sender: who connects must know it beforehand
_SENDER = f"flows{os.getpid()}"
_IPV4 = Path("/proc/sys/net/ipv4")  # of the network namespace of who opens it


@dataclass(frozen=True, slots=True)
class Flows:
    """flows: source ports. connected: the sink's socket, to the one there is. early_demux: IP's and UDP's."""

    flows: int
    connected: bool
    early_demux: bool
    layout: str
    receive_cpu: int
    interrupt_cpu: int
    send_cpu: int
    window_s: float

    @property
    def name(self) -> str:
        flows = "1 flow" if self.flows == 1 else f"{self.flows} flows"
        how = (", connected" if self.connected else "") + ("" if self.early_demux else ", no early demux")
        return f"{flows}{how}, {self.layout}"

    def run(self, place: Place) -> Figures:
        self._prepare(place)
        listen = ["--listen", f"udp://{place.receive.host}:0", "--rx-cpu", str(self.receive_cpu)]
        listen += ["--gro", "off", "--rcvbuf", str(RCVBUF), "--sender", _SENDER, "--every", str(EVERY_S)]
        if self.connected:
            listen += ["--connect", f"{place.send.host}:{_FIRST_PORT}"]
        with place.receive.rxring("run", *listen) as engine:
            port = engine.next("ready")["receivers"][0]["port"]
            what = ["--to", f"{place.receive.host}:{port}", "--size", str(PAYLOAD), "--stamp", "none"]
            what += ["--gso", str(MESSAGE), "--flows", str(self.flows), "--cpu", str(self.send_cpu)]
            with place.send.rxring("send", "--name", _SENDER, *what) as sender:
                window = Window.watch(engine, self.window_s)
                sent = sender.end()
            summary = engine.end()
        return self._figures(window, sent, summary)

    def _prepare(self, place: Place) -> None:
        """Devices and namespaces as this flood wants them: runs are in no order, each sets all."""
        _give_packets_one_by_one(place.send)
        place.receive.steer(self.interrupt_cpu)
        with place.receive:
            for name in ("ip_early_demux", "udp_early_demux"):
                (_IPV4 / name).write_text(str(int(self.early_demux)))
        with place.send:
            last = _FIRST_PORT + self.flows - 1
            (_IPV4 / "ip_local_port_range").write_text(f"{_FIRST_PORT} {last}")

    def _figures(self, window: Window, sent: Mapping[str, Any], summary: dict[str, Any]) -> Figures:
        receiver, ledger = summary["receivers"][0], summary["ledger"]
        packets, calls, dropped = (window.risen(key) for key in ("packets", "calls", "socket_dropped"))
        counts = {
            "device": window.came(),
            "softirq": window.handled(self.interrupt_cpu),
            "socket": packets + dropped,
            "engine": window.risen("published"),
        }
        unseen = ledger["residual"]
        return {
            "value": counts["engine"] / window.seconds / 1e3,
            "kpps": {"sent": sent["packets_per_second"] / 1e3}
            | {layer: count / window.seconds / 1e3 for layer, count in counts.items()},
            "whole_run": {
                "sent": ledger["sent"],
                "device": devices(summary, "rx_packets"),
                "lost": devices(summary, "rx_dropped"),
                "socket": ledger["received"] + ledger["socket_dropped"],
                "engine": receiver["published"],
            },
            "dropped_kpps": dropped / window.seconds / 1e3,
            "lost_kpps": window.lost() / window.seconds / 1e3,
            "packets_per_call": packets / calls if calls else None,
            "busy": {str(cpu): times._asdict() for cpu, times in window.spent.items()},
            "seconds": window.seconds,
            "ok": ledger["adds_up"] and receiver["published"] == ledger["received"] > 0,
            "ledger_balanced": ledger["balanced"],
            "ledger": ledger,
            "flags": strayed(summary, self.interrupt_cpu)
            + ([f"{unseen} packets are nowhere in the ledger"] if unseen else []),
        }


def _give_packets_one_by_one(side: Side) -> None:
    words = side.command("ip", "link", "set", side.device, "gso_max_segs", "1")
    subprocess.run(words, check=True, capture_output=True)


def cases(setting: Setting) -> Iterator[Case]:
    if any(place.name != "veth" for place in setting.places):
        raise Refused("flows sets who handles the packets of its devices, and more: give --device veth")
    receiver, sender = two_cpus()
    third = [cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu not in (receiver, sender)]
    window_s = 0.5 if setting.quick else 1.0
    for layout, cpu in ((OTHER, third[0] if third else sender), (SAME, receiver)):
        for flows, connected, early_demux in _kinds(setting.quick, layout):
            flood = Flows(flows, connected, early_demux, layout, receiver, cpu, sender, window_s)
            parameters = asdict(flood) | {"payload": PAYLOAD, "message": MESSAGE, "rcvbuf": RCVBUF}
            run = functools.partial(_run, flood, setting.places)
            yield Case(flood.name, "k packets/s", run, parameters | {"seconds": 2.0 + window_s})


def _kinds(quick: bool, layout: str) -> Sequence[tuple[int, bool, bool]]:
    """(flows, connected, early demux); connected to one peer, so of one flow."""
    if not quick:
        one = [(1, connected, demux) for connected in (False, True) for demux in (True, False)]
        return [*one, *((flows, False, True) for flows in (*FEW[1:], MANY))]
    if layout == SAME:
        return [(1, False, True)]
    return [(1, False, True), (1, True, True), (1, True, False), (2, False, True), (MANY, False, True)]


def _run(flood: Flows, places: tuple[Place, ...]) -> Figures:
    (place,) = places
    return flood.run(place)


# ── what the report tells ────────────────────────────────────────────────────────────────────────────

_LAYERS = ("sent", "device", "softirq", "socket", "engine")
_COLUMNS = (
    *("case", "sent", "lost before", "device", "softirq", "socket", "dropped there", "engine"),
    *("packets a call", "sink's CPU %", "interrupts' CPU %"),
)
_THEN_COLUMNS = ("scenario", "2016, before", "2016, after", "here, other", "here, same")


def tell(result: dict[str, Any]) -> Iterator[Section]:
    """S4's table beside ours, what agrees and why; then every case by layer."""
    found = {case["name"]: case for case in result["cases"] if case["median"] is not None}
    if not found:
        return
    fewest = {layout: _fewest(found, layout) for layout in (OTHER, SAME)}
    text = (
        *_saturation(found, fewest),
        *_placement(found),
        *_ratio_lines(found, "connected to its peer", _connected(found)),
        *_ratio_lines(found, "without early demux", _without_demux(found)),
        *_limit(found),
    )
    yield Section("Beside 2016", text, Table(_THEN_COLUMNS, tuple(_beside(found, fewest))))
    picture = Picture(
        "layers",
        "Of the packets that crossed the device: taken into the ring, dropped at the socket, lost before it",
        lambda: pictures.bars({name: _parts(case) for name, case in found.items()}, "k packets/s"),
    )
    units = "k packets/s, medians of the runs. CPU: of one, all that ran there, interrupts included."
    yield Section("Layer by layer", (units,), Table(_COLUMNS, tuple(map(_row, found.values()))), picture)


def _runs(case: Mapping[str, Any]) -> list[Figures]:
    return [run for run in case["runs"] if run["value"] is not None]


def _kpps(case: Mapping[str, Any], layer: str) -> float:
    return median([run["kpps"][layer] for run in _runs(case)])


def _load(case: Mapping[str, Any], role: str) -> float:
    """How busy the CPU of that role was, per cent."""
    cpu = str(case["parameters"][role])
    shares = [(run["busy"][cpu]["own"] + run["busy"][cpu]["softirq"]) / run["seconds"] for run in _runs(case)]
    return 100 * median(shares)


def _dropped(case: Mapping[str, Any], where: str) -> float:
    return median([run[where] for run in _runs(case)])


def _parts(case: Mapping[str, Any]) -> dict[str, float]:
    return {
        "in the ring": _kpps(case, "engine"),
        "dropped at the socket": _dropped(case, "dropped_kpps"),
        "lost before it": _dropped(case, "lost_kpps"),
    }


def _row(case: Mapping[str, Any]) -> tuple[str, ...]:
    dropped, lost = (f"{_dropped(case, where):.0f}" for where in ("dropped_kpps", "lost_kpps"))
    sent, device, softirq, socket, engine = (f"{_kpps(case, layer):.0f}" for layer in _LAYERS)
    a_call = median([run["packets_per_call"] or 0 for run in _runs(case)])
    loads = (f"{_load(case, role):.0f}" for role in ("receive_cpu", "interrupt_cpu"))
    return (case["name"], sent, lost, device, softirq, socket, dropped, engine, number(a_call), *loads)


def _fewest(found: Mapping[str, Any], layout: str) -> int | None:
    """So few flows bring the sink (nearly) as much as any number of them does."""
    rates = {
        case["parameters"]["flows"]: case["median"]
        for case in found.values()
        if case["parameters"]["layout"] == layout
        and not case["parameters"]["connected"]
        and case["parameters"]["early_demux"]
    }
    return min((n for n in rates if rates[n] >= SATURATED * max(rates.values())), default=None)


def _plain(flows: int, layout: str) -> str:
    return f"{flows} flow{'s' if flows > 1 else ''}, {layout}"


def _beside(found: Mapping[str, Any], fewest: Mapping[str, int | None]) -> Iterator[tuple[str, ...]]:
    flows_of = {
        "many flows": dict.fromkeys(fewest, MANY),
        "fewest that saturate": fewest,
        "one flow": dict.fromkeys(fewest, 1),
    }
    for scenario, (before, after) in THEN.items():
        here = []
        for layout, flows in flows_of[scenario].items():
            case = found.get(_plain(flows, layout)) if flows else None
            count = f" ({flows})" if scenario == "fewest that saturate" else ""
            here.append(f"{number(case['median'])}{count}" if case else "–")
        yield scenario, str(before), str(after), *here


def _saturation(found: Mapping[str, Any], fewest: Mapping[str, int | None]) -> Iterator[str]:
    told = []
    for layout, flows in fewest.items():
        tried = [str(n) for n in (*FEW, MANY) if _plain(n, layout) in found]
        if flows:
            told.append(f"`{layout}`: {flows} of {', '.join(tried)}")
    if told:
        yield (
            f"The fewest flows that bring the most into the ring, within {100 * (1 - SATURATED):.0f} %: "
            f"{'; '.join(told)}. In 2016 it took 1 before, 3 after, where a flow came with a queue and a "
            "softirq core. Here one sender and one softirq core serve all flows; more of them bring no more "
            "packets"
        )


def _placement(found: Mapping[str, Any]) -> Iterator[str]:
    other, same = (found.get(_plain(1, layout)) for layout in (OTHER, SAME))
    if other and same and (ratio := _compare(other, same)):
        dropped, lost = (number(_dropped(same, where)) for where in ("dropped_kpps", "lost_kpps"))
        yield (
            f"Softirq on another CPU than the sink's: {number(median(ratio))} "
            f"({span(min(ratio), max(ratio))}) of the rate on the same. On the same, interrupts come first: "
            f"the sink had time for {number(same['median'])} k packets/s; its socket dropped {dropped} k, "
            f"the CPU's backlog {lost} k"
        )


def _compare(case: Mapping[str, Any], against: Mapping[str, Any]) -> list[float]:
    return ratios([run["value"] for run in case["runs"]], [run["value"] for run in against["runs"]])


def _connected(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, name.replace(", connected", "")) for name in found if ", connected" in name)


def _without_demux(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, name.replace(", no early demux", "")) for name in found if ", no early demux" in name)


def _ratio_lines(found: Mapping[str, Any], what: str, pairs: Iterator[tuple[str, str]]) -> Iterator[str]:
    """A sentence for all pairs of which both were run."""
    told = []
    for name, against in pairs:
        ratio = _compare(found[name], found[against]) if against in found else []
        if ratio:
            spread = "cannot be told from it" if min(ratio) <= 1 <= max(ratio) else "in every round"
            told.append(f"{name}: {number(median(ratio))} ({span(min(ratio), max(ratio))}; {spread})")
    if told:
        yield f"A sink {what}, against one that differs in nothing else. {'. '.join(told)}"


def _limit(found: Mapping[str, Any]) -> Iterator[str]:
    """Who was the limit with one flow: the third row of S4."""
    case = found.get(_plain(1, OTHER))
    if case is None:
        return
    socket, engine = _kpps(case, "socket"), _kpps(case, "engine")
    taken = median([run["kpps"]["engine"] / run["kpps"]["socket"] for run in _runs(case)])
    idle = max(100 - _load(case, "receive_cpu"), 0.0)
    told = (
        f"One flow, `{OTHER}`: of {number(socket)} k packets/s that reached its socket the sink took "
        f"{number(engine)} k; its CPU was idle for {idle:.0f} % of the time"
    )
    if taken < SATURATED:  # within a run: medians of two layers may be of two runs
        yield f"{told}: it is the limit here, as before the change of 2016, not its softirq core"
    elif idle > IDLE:
        yield (
            f"{told}: the softirq core (with two CPUs, the sender on it, too) is the limit, as after the "
            "change of 2016. User space is the faster one, and each time it sleeps the softirq core pays for "
            "waking it"
        )
    else:
        yield f"{told}: neither it nor its softirq core is the limit for certain"
