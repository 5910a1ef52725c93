"""There and back with recvmmsg and with recvmsg: the experiment of 2009, beside its figures.

`rxring send` sends stamped packets to `rxring mirror`, which bounces them to `rxring run` with a `latency`
consumer: one host, one clock, so the latency is that of the round trip, from when a packet was due to when
the consumer took it. Mirror and receiver both receive with the call and the batch of the case; all other
options are the same, and both calls have their packets sent on by sendmmsg, up to a batch at once. To a
receiver that takes one packet a call the batch says nothing, to a mirror it says how many go on together.
Without GRO; the consumer blocks.

Flat out, the sender sends as fast as it can: the figure is the rate that comes back, and latency is the time
in queues. Paced, it sends 50,000 packets a second (a consumer that blocks naps, for up to a millisecond, from
64,000 on): the figure is the mean latency. Warm-up is cut off. Every packet is accounted for over both hops:
sent = dropped by the mirror's socket + received there; forwarded = dropped by the receiver's + received. On
veth the mirror is in a namespace of its own, at the other end of the cable. With two CPUs the sender has one,
mirror, receiver and consumer share the other; with four each has its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import forked, pictures
from bench.cost import misplaced
from bench.flood import LATE_NS, PACE, RCVBUF, SILENCE_S
from bench.machine import two_cpus
from bench.pictures import Curve
from bench.place import Place
from bench.report import number
from bench.runner import Case, Claim, Figures, Setting, is_sound
from bench.section import Picture, Section, Table
from bench.spread import interval, median, ratios
from engine.errors import Failed, Refused
from engine.handlers import histogram, moments
from engine.handlers.latency import LATENCY, STAGES
from engine.net.mirror import MirrorPlan
from engine.net.sender import SendPlan
from engine.status import Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("lo", "veth")
SIZES, QUICK_SIZES = (1024, 100), (100,)
BATCHES, QUICK_BATCHES = (1, 8, 30, 3000), (1, 30)
CALLS = ("recvmmsg", "recvmsg")
RATE = 50_000  # packets/s of a paced run
PERCENTILES = (500, 750, 900, 950, 990, 995, 999)  # per mille

# (size, batch, call): packets/s, mean µs, standard deviation µs (netdev, September 2009). Of what was given
# as a range, the middle.
THEN = {
    (1024, 30, "recvmmsg"): (113_840, 943, 128),
    (1024, 30, "recvmsg"): (74_712, 952, 124),
    (1024, 3000, "recvmmsg"): (113_840, 948, 132),
    (1024, 3000, "recvmsg"): (74_740, 951, 128),
    (100, 30, "recvmmsg"): (245_000, 472, 114),
    (100, 30, "recvmsg"): (210_000, 755, 395),
    (100, 3000, "recvmmsg"): (283_000, 1379, 75),
    (100, 3000, "recvmsg"): (231_350, 924, 600),
}
THEN_MACHINES = (
    "2009: quad-core desktop and 8-core server over switched 1 GbE, Linux 2.6.31, all SCHED_FIFO. Its last "
    "line is the middle of 217,700–245,000, 829–1019, 540–660"
)

CLAIMS = tuple(
    Claim(
        f"{place}, 100 B, batch 30, recvmmsg, flat out",
        f"{place}, 100 B, batch 30, recvmsg, flat out",
        at_least=1,
    )
    for place in PLACES
)

_FOREVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Cpus:
    send: int
    mirror: int
    receive: int
    consume: int

    @classmethod
    def here(cls) -> Cpus:
        two_cpus()  # Refused with fewer
        own = sorted(os.sched_getaffinity(0))
        return cls(*own[:4]) if len(own) >= 4 else cls(own[0], own[1], own[1], own[1])


@dataclass(frozen=True, slots=True)
class Round:
    """rate: packets a second; None: flat out."""

    place: Place
    size: int
    batch: int
    call: Any
    rate: int | None
    cpus: Cpus
    warm_s: float
    window_s: float

    @property
    def name(self) -> str:
        pace = "flat out" if self.rate is None else "paced"
        return f"{self.place.name}, {self.size} B, batch {self.batch}, {self.call}, {pace}"

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "place": self.place.name,
            "size": self.size,
            "batch": self.batch,
            "call": self.call,
            "rate": self.rate,
            "cpus": asdict(self.cpus),
            "warm_s": self.warm_s,
            "window_s": self.window_s,
            "rcvbuf": RCVBUF,
            "seconds": self.warm_s + self.window_s + 0.8,
        }

    def run(self) -> Figures:
        near, far = self.place.send, self.place.receive
        with forked.run(near, wanted(near.host, self.batch, self.call, self.cpus, self.warm_s)) as engine:
            ready = engine.next("ready")
            to = f"{near.host}:{ready['receivers'][0]['port']}"
            with forked.bounce(far, self._mirror(far.host, to)) as bouncing:
                to = f"{far.host}:{bouncing.next('ready')['port']}"
                with forked.send(near, self._send(to)) as sending:
                    roles = {"send": sending.pid, "mirror": bouncing.pid}
                    roles |= {
                        "receive": ready["receivers"][0]["pid"],
                        "consume": ready["consumers"][0]["pid"],
                    }
                    sending.next("ready")
                    window = self._window(engine, ready["name"], roles)
                    sent = sending.end()
                bounced = bouncing.end()
            summary = engine.end()
        return self._figures(window, sent, bounced, summary)

    def _mirror(self, host: str, to: str) -> MirrorPlan:
        own: dict[str, Any] = {"batch": self.batch, "receive": self.call, "cpu": str(self.cpus.mirror)}
        return MirrorPlan(listen=f"udp://{host}:0", to=to, rcvbuf=RCVBUF, **own)

    def _send(self, to: str) -> SendPlan:
        return SendPlan(to=to, size=self.size, rate=self.rate or "max", cpu=str(self.cpus.send))

    def _window(self, engine: forked.Forked, name: str, roles: Mapping[str, int]) -> _Window:
        """From an interval some time after the first packet to one some time later."""
        give_up = time.monotonic() + SILENCE_S
        with contextlib.closing(Status.open(name)) as status:
            while engine.next("interval")["receivers"][0]["packets"] == 0:
                if time.monotonic() > give_up:
                    raise Failed(f"nothing came back within {SILENCE_S} s")
            begin = end = engine.next("interval")
            before = _state(status)
            while end["seconds"] < begin["seconds"] + self.window_s:
                end = engine.next("interval")
            state = _state(status)
        astray = [
            told for role, pid in roles.items() for told in misplaced(role, pid, [getattr(self.cpus, role)])
        ]
        packets = end["receivers"][0]["packets"] - begin["receivers"][0]["packets"]
        return _Window(packets, end["seconds"] - begin["seconds"], before, state, astray)

    def _figures(
        self, window: _Window, sent: dict[str, Any], bounced: dict[str, Any], summary: dict[str, Any]
    ) -> Figures:
        hops = account(sent, bounced, summary)
        latency, curve = window.latency()
        mean_us = latency["total"]["mean_us"]
        rate = window.packets / window.seconds
        return {
            "value": rate if self.rate is None else mean_us,
            "packets_per_second": rate,
            "latency": latency,
            "curve_us": curve,
            "p99_us": curve["990"],
            "in_flight": mean_us and mean_us / 1e6 * rate,
            **{key: hops[key] for key in ("lost", "lost_at_mirror", "lost_at_receiver")},
            "hops": hops,
            "mirror_packets_per_call": bounced["packets_per_call"],
            "receiver_packets_per_call": summary["receivers"][0]["packets_per_call"],
            "sent_per_second": sent["packets_per_second"],
            "late_ns": sent["late_ns"],
            "ok": _right(summary),
            "ledger_balanced": hops["residual"] == 0 and summary["ledger"]["adds_up"],
            "flags": [*_unseen(hops), *self._out_of_pace(sent), *window.astray],
        }

    def _out_of_pace(self, sent: Mapping[str, Any]) -> Iterator[str]:
        if self.rate is None:
            return
        if sent["packets_per_second"] < PACE * self.rate:
            yield f"the sender sent {sent['packets_per_second']:.0f} packets/s, not {self.rate} as asked"
        if sent["late_ns"]["p99"] > LATE_NS:
            yield f"the sender was {sent['late_ns']['p99'] / 1e6:.1f} ms late at the 99th percentile"


def wanted(host: str, batch: int, call: str, cpus: Cpus, every_s: float) -> Any:
    """The receiver's run."""
    flags = {"batch": str(batch), "receive": call, "rx-cpu": str(cpus.receive), "every": str(every_s)}
    flags |= {"gro": "off", "rcvbuf": str(RCVBUF)}
    return forked.wanted_run([f"udp://{host}:0"], [f"latency@{cpus.consume}"], flags)


def cases(setting: Setting) -> Iterator[Case]:
    if any(place.send.remote or place.receive.remote for place in setting.places):
        raise Refused("batch needs one clock at both ends: give --device lo or veth")
    warm_s, window_s = (0.1, 0.3) if setting.quick else (0.2, 0.8)
    sizes, batches = (QUICK_SIZES, QUICK_BATCHES) if setting.quick else (SIZES, BATCHES)
    cpus = Cpus.here()
    forked.compile_for(wanted("127.0.0.1", 1, CALLS[0], cpus, warm_s))
    for place, size, batch, call, rate in product(setting.places, sizes, batches, CALLS, (None, RATE)):
        measured = Round(place, size, batch, call, rate, cpus, warm_s, window_s)
        yield Case(measured.name, "packets/s" if rate is None else "µs", measured.run, measured.parameters)


# ── the window ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Window:
    """What came in it. before, state: of the latency handler, at its two ends (each at most 0.2 s old)."""

    packets: int
    seconds: float
    before: Any
    state: Any
    astray: list[str]

    def latency(self) -> tuple[dict[str, dict[str, Any]], dict[str, float | None]]:
        """(by stage {count, mean_us, stddev_us}, µs of `total` at PERCENTILES)."""
        stages = {}
        for stage in STAGES:
            found = moments.since(self.state[stage]["moments"], self.before[stage]["moments"])
            mean, stddev = (_us(figure) for figure in (moments.mean(found), moments.stddev(found)))
            stages[stage] = {"count": int(found["count"]), "mean_us": mean, "stddev_us": stddev}
        buckets = self.state["total"]["buckets"] - self.before["total"]["buckets"]
        ranks: Sequence[int | None] = [None] * len(PERCENTILES)
        if buckets.any():
            ranks = histogram.percentiles(buckets, PERCENTILES, 0, _FOREVER_NS)
        return stages, {str(p): _us(rank) for p, rank in zip(PERCENTILES, ranks, strict=True)}


def _state(status: Status) -> Any:
    """Of the consumer, whose record stands behind the receiver's."""
    return np.frombuffer(status.read(1)[1] or bytes(LATENCY.itemsize), LATENCY)[0]


def _us(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e3


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────


def account(
    sent: Mapping[str, Any], bounced: Mapping[str, Any], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Both hops, from the summaries of sender, mirror and engine.

    What is missing on the way may have been dropped from a CPU's backlog or by a device (`below_sockets`):
    these counts are shared with others, and explain no more than what is missing.
    """
    receiver, ledger = summary["receivers"][0], summary["ledger"]
    arrived = bounced["received"] + bounced["socket_dropped"] + bounced["after_stop"] + bounced["unforwarded"]
    came_back = receiver["packets"] + receiver["socket_dropped"] + receiver["after_stop"]
    kept = bounced["received"] - bounced["forwarded"] - bounced["truncated"] - bounced["failed"]
    missing = (sent["sent"] - arrived, kept, bounced["forwarded"] - came_back)
    explained = ledger["nic_dropped"] + ledger["softnet_dropped"] + ledger["other_errors"]
    below = min(max(sum(missing), 0), explained) if min(missing) >= 0 else 0
    total = sent["sent"] or 1
    return {
        "sent": sent["sent"],
        "mirror_received": bounced["received"],
        "mirror_dropped": bounced["socket_dropped"],
        "mirror_after_stop": bounced["after_stop"] + bounced["unforwarded"],
        "mirror_failed": bounced["failed"] + bounced["truncated"],
        "forwarded": bounced["forwarded"],
        "receiver_dropped": receiver["socket_dropped"],
        "receiver_after_stop": receiver["after_stop"],
        "received": receiver["packets"],
        "below_sockets": below,
        "missing": missing,
        "residual": sum(map(abs, missing)) - below,
        "lost": 1 - receiver["packets"] / total,
        "lost_at_mirror": bounced["socket_dropped"] / total,
        "lost_at_receiver": receiver["socket_dropped"] / total,
    }


def _unseen(hops: Mapping[str, Any]) -> list[str]:
    return [f"{hops['residual']} packets are nowhere in the ledger"] if hops["residual"] else []


def _right(summary: Mapping[str, Any]) -> bool:
    """Did packets come back, every one with its stamp as it was sent?"""
    consumer, total = summary["consumers"][0], summary["consumers"][0]["result"]["total"]
    return bool(0 < consumer["delivered"] == total["count"] + total["negative"])


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────

_Case = dict[str, Any]


def tell(result: dict[str, Any]) -> Iterator[Section]:
    found = [case for case in result["cases"] if _runs(case)]
    flat = [case for case in found if case["parameters"]["rate"] is None]
    paced = [case for case in found if case["parameters"]["rate"] is not None]
    if not flat or not paced:
        return
    yield Section("Who shares a CPU", (_sharing(flat[0]["parameters"]["cpus"]),))
    for place in dict.fromkeys(case["parameters"]["place"] for case in flat):
        here = [case for case in flat if case["parameters"]["place"] == place]
        text = "Medians of the runs; lost: of what was sent, at the mirror's socket and at the receiver's."
        table = Table(_THEN_COLUMNS, tuple(map(_beside, here)))
        yield Section(f"Flat out over {place}, beside 2009", (f"{text} {THEN_MACHINES}.",), table)
    yield Section("What agrees with 2009, what does not", tuple(_verdicts(flat, paced)))
    alt = "Packets a second that come back over the batch, recvmmsg and recvmsg, by place and size"
    yield Section("Rate by batch", picture=Picture("rate", alt, functools.partial(_rates, flat)))
    text = (
        f"{RATE:,} packets a second. µs: mean and deviation of the round trip, its percentiles, the means of"
    )
    text += (
        " its parts: network: sender, mirror and both ways; socket: until the receiver has it; ring: until"
    )
    text += " the consumer has it."
    table = Table(_PACED_COLUMNS, tuple(map(_paced, paced)))
    yield Section("Latency, paced", (text,), table)
    alt = "Round trip time by percentile at a fixed pace, batches of 30 and 3000, both calls"
    yield Section("Latency by percentile, paced", picture=Picture("latency", alt, lambda: _latencies(paced)))


def _runs(case: _Case) -> list[Figures]:
    """Those that count: the sound ones, or where there are none all that have a figure."""
    having = [run for run in case["runs"] if run["value"] is not None and run.get("packets_per_second")]
    return [run for run in having if is_sound(run)] or having


def _middle(case: _Case, *path: str) -> float:
    """The median over the runs of a figure, found by its keys."""
    found: list[Any] = list(_runs(case))
    for key in path:
        found = [run[key] for run in found]
    known = [float(figure) for figure in found if figure is not None]
    return median(known) if known else float("nan")


def _sharing(cpus: Mapping[str, int]) -> str:
    names = {"send": "sender", "mirror": "mirror", "receive": "receiver", "consume": "consumer"}
    by_cpu: dict[int, list[str]] = {}
    for role, cpu in cpus.items():
        by_cpu.setdefault(cpu, []).append(names[role])
    told = "; ".join(f"CPU {cpu}: {', '.join(roles)}" for cpu, roles in by_cpu.items())
    return (
        f"{told}. Packets are handled on the CPU of whoever sends them: the first hop's cost the sender, the "
        "second one's the mirror."
    )


_THEN_COLUMNS = (
    *("size", "batch", "call", "packets/s", "mean µs", "stddev"),
    *("lost at mirror, receiver", "packets a call, there", "2009: packets/s", "mean µs", "stddev"),
)


def _key(case: _Case) -> tuple[int, int, str]:
    parameters = case["parameters"]
    return parameters["size"], parameters["batch"], parameters["call"]


def _beside(case: _Case) -> tuple[str, ...]:
    lost = (f"{100 * _middle(case, f'lost_at_{where}'):.1f} %" for where in ("mirror", "receiver"))
    latency = (f"{_middle(case, 'latency', 'total', figure):.0f}" for figure in ("mean_us", "stddev_us"))
    calls = (f"{_middle(case, f'{who}_packets_per_call'):.1f}" for who in ("mirror", "receiver"))
    then = THEN.get(_key(case))
    return (
        *map(str, _key(case)),
        *(f"{_middle(case, 'packets_per_second'):,.0f}", *latency, ", ".join(lost), ", ".join(calls)),
        *((f"{figure:,}" for figure in then) if then else ("–", "–", "–")),
    )


_PACED_COLUMNS = (
    *("place", "size", "batch", "call", "mean", "stddev", "p50", "p99", "p99.9"),
    *("network", "socket", "ring", "lost"),
)


def _paced(case: _Case) -> tuple[str, ...]:
    total = (_middle(case, "latency", "total", figure) for figure in ("mean_us", "stddev_us"))
    ranks = (_middle(case, "curve_us", p) for p in ("500", "990", "999"))
    parts = (_middle(case, "latency", stage, "mean_us") for stage in ("network", "socket", "ring"))
    return (
        case["parameters"]["place"],
        *map(str, _key(case)),
        *(f"{figure:.0f}" for figure in (*total, *ranks, *parts)),
        f"{100 * _middle(case, 'lost'):.2g} %",
    )


def _verdicts(flat: Sequence[_Case], paced: Sequence[_Case]) -> Iterator[str]:
    by_key = {(case["parameters"]["place"], *_key(case)): case for case in flat}
    for (place, size, batch, call), case in by_key.items():
        one = by_key.get((place, size, batch, "recvmsg"))
        if call == "recvmmsg" and batch > 1 and one:
            yield _calls_compared(place, size, batch, case, one)
    for (place, size, batch, call), case in by_key.items():
        small = by_key.get((place, size, 30, call))
        if batch == 3000 and call == "recvmmsg" and small:
            yield _batches_compared(place, size, case, small)
    yield from _queues(flat, paced)
    if any(key[1] == 1024 for key in by_key):
        most = max(_middle(case, "packets_per_second") for key, case in by_key.items() if key[1] == 1024)
        yield (
            f"At 1024 bytes 2009's 113,840 packets/s were all that 1 GbE carries; here is no wire, and "
            f"{most:,.0f} came back: the call can show at this size, too."
        )


def _calls_compared(place: str, size: int, batch: int, many: _Case, one: _Case) -> str:
    """recvmmsg against recvmsg: ratio, what a packet costs less, beside 2009."""
    found = _ratios(many, one)
    told = f"{place}, {size} B, batch {batch}: recvmmsg brings {number(median(found))} of recvmsg's rate"
    told += f" ({number(min(found))} to {number(max(found))} within a round)"
    rates = [_middle(case, "packets_per_second") for case in (one, many)]
    told += f", {1e9 / rates[0] - 1e9 / rates[1]:.0f} ns less a packet"
    then = [THEN.get((size, batch, call)) for call in CALLS]
    verdict = "faster, as in 2009" if then[0] else "faster"
    if _holds_one(found):
        verdict = "not to be told apart by these runs"
    elif median(found) < 1:
        verdict = "slower; that does not agree" if then[0] else "slower"
    if then[0] and then[1]:
        wire = "at least, for the wire was full: " if size == 1024 else ""
        less = 1e9 / then[1][0] - 1e9 / then[0][0]
        told += f" (2009: {wire}{then[0][0] / then[1][0]:.2f}, {less:.0f} ns)"
    return f"{told}: {verdict}."


def _batches_compared(place: str, size: int, large: _Case, small: _Case) -> str:
    found = _ratios(large, small)
    latencies = [_middle(case, "latency", "total", "mean_us") for case in (large, small)]
    then = [THEN[size, batch, "recvmmsg"] for batch in (3000, 30)]
    apart = ", not to be told apart by these runs" if _holds_one(found) else ""
    return (
        f"{place}, {size} B, recvmmsg: batches of up to 3000 bring {number(median(found))} of the rate of 30"
        f"{apart}, at {latencies[0] / latencies[1]:.2f} of its latency; "
        f"2009: {then[0][0] / then[1][0]:.2f} at {then[0][1] / then[1][1]:.2f}."
    )


def _queues(flat: Sequence[_Case], paced: Sequence[_Case]) -> Iterator[str]:
    """What latency is, flat out and paced: by Little's law rate × latency is what is on its way."""
    for place in dict.fromkeys(case["parameters"]["place"] for case in flat):
        out, at_pace = (
            [case for case in cases if case["parameters"]["place"] == place] for cases in (flat, paced)
        )
        long, short = (
            median([_middle(case, "latency", "total", "mean_us") for case in cases])
            for cases in (out, at_pace)
        )
        waiting = median([_middle(case, "in_flight") for case in out])
        if long < short:
            yield f"{place}: paced, packets took longer than flat out: something else held them up."
            continue
        yield (
            f"{place}: flat out a round trip takes {long:,.0f} µs, paced {short:,.0f} (medians of the cases)."
            f" Flat out rate × latency makes {waiting:,.0f} packets on their way (Little's law), in receive"
            f" buffers of {RCVBUF >> 20} MiB. 2009's 472 µs × 245,000/s are 116: latencies flat out are the"
            " depth of queues, and say little of the call."
        )


def _ratios(one: _Case, other: _Case) -> list[float]:
    """Of what comes back, within a round."""
    rates = ([run.get("packets_per_second") for run in case["runs"]] for case in (one, other))
    return ratios(*rates)


def _holds_one(found: Sequence[float]) -> bool:
    """Is none of the two the faster one, for all that these ratios say?"""
    low, high = interval(found)
    return low <= 1 <= high


def _panels(cases: Sequence[_Case]) -> dict[str, list[_Case]]:
    panels: dict[str, list[_Case]] = {}
    for case in cases:
        title = f"{case['parameters']['place']}, {case['parameters']['size']} B"
        panels.setdefault(title, []).append(case)
    return panels


def _rates(flat: Sequence[_Case]) -> Figure:
    panels = {
        title: [
            Curve(
                call,
                [
                    (case["parameters"]["batch"], [run["packets_per_second"] / 1e3 for run in _runs(case)])
                    for case in cases
                    if case["parameters"]["call"] == call
                ],
            )
            for call in CALLS
        ]
        for title, cases in _panels(flat).items()
    }
    return pictures.lines(panels, "batch, packets", "1,000 packets/s come back", log_x=True)


def _latencies(paced: Sequence[_Case]) -> Figure:
    panels = {}
    for title, cases in _panels(paced).items():
        panels[title] = [
            Curve(
                f"{call}, batch {batch}",
                [(p / 10, [run["curve_us"][str(p)] for run in _runs(case)]) for p in PERCENTILES],
                style=BATCHES.index(batch),
                dashed=call == "recvmsg",
            )
            for case in cases
            for _, batch, call in [_key(case)]
            if batch in (30, 3000)
        ]
    return pictures.percentiles(panels, "round trip, µs")
