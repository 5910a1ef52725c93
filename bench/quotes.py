"""Two relays of one feed, head to head, one with recvmsg and one with recvmmsg: the test of 2009.

A multicast feed of quotes of 50 to 100 bytes, in bursts of 64 that come at random (Poisson, fixed seed) at a
given mean rate, or one after the other, flat out. Two relays, A and B, are `rxring mirror`s that have joined
its group; both send all they get to one meter, `rxring run` with a socket for each. The figure is the mean,
over all quotes, of by how much later A's copy of a quote came to the meter than B's: above 0, B was faster.
Quotes are matched by their sequence numbers. Times are the kernel's, when a copy arrived, so that the meter's
own work is not in them; its ring keeps the whole run and is read when the feed is over.

`one by one`: A takes a quote by recvmsg and sends it on, B takes by recvmmsg what is there, up to 64, and
sends that on by one sendmmsg. `same batch`: A, too, sends on up to 64 at once, and takes them by 64 calls of
recvmsg: only the call differs. `control`: A is as B, so the difference must be about 0.

Of two sockets in a group one is served first. So a run has two legs: A is started first in one, B in the
other, and where they have CPUs of their own they exchange them. With two CPUs the feed and the meter's
receivers have one, and the relays share the other. The first tenth of a leg is warm-up: not in the
differences, but in the ledger, which accounts for every quote, on both ways: sent = dropped by the relay's
socket + forwarded; forwarded = dropped by the meter's socket + there.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

import rings
from bench import forked, pictures
from bench.batch import account
from bench.cost import misplaced
from bench.flood import LATE_NS, PACE, RCVBUF
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.place import Place, Side
from bench.report import number
from bench.runner import Case, Claim, Figures, Setting, is_sound
from bench.section import Picture, Section, Table
from bench.spread import median
from engine.errors import Failed, Refused
from engine.net.clock import clock_offset_ns
from engine.net.libc import EINTR, IOVEC, MMSGHDR, Messages, sendmmsg
from engine.net.mirror import MirrorPlan
from engine.net.role import connect
from engine.net.stamp import MAGIC, STAMP, STAMP_BYTES, write_rxring
from rings.atomics import pause
from rings.jit import compile_for, jit
from rings.layout import ALIGN, FrameFlag
from rings.libc import errno, monotonic_ns, sleep_ns
from rings.reader import Reader

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

PLACES = ("lo", "veth")
RATES = (20_000, 50_000, None)  # quotes/s; None: as fast as they go
SIZES = (50, 100)  # bytes of a quote, least and most
BURST = 64
FLAT_OUT = 100_000  # taken for the number of quotes where there is no rate
MOST_QUOTES = 240_000  # of a leg: the meter's ring holds them all
GROUP = "239.18.9.1"
SEED = 2009
THEN_US = (500, 1000, 2000)  # by how much recvmmsg was faster: least, on average, most


@dataclass(frozen=True, slots=True)
class How:
    """How a relay takes quotes, and how many go on together."""

    receive: Any
    batch: int


MANY = How("recvmmsg", BURST)
PAIRS = {
    "one by one": (How("recvmsg", 1), MANY),
    "same batch": (How("recvmsg", BURST), MANY),
    "control": (MANY, MANY),
}
QUICK_PAIRS = ("one by one", "control")

CLAIMS = tuple(
    claim
    for place in PLACES
    for claim in (
        Claim(f"{place}, 50000/s, control", figure="b_first", at_least=0.4, at_most=0.6),
        Claim(f"{place}, flat out, one by one", at_least=0),
    )
)

_MMSGHDR_BYTES = MMSGHDR.itemsize
_LEAD_NS = 20_000_000  # before the first burst
_SPIN_NS = 100_000  # a sleep may end so much too late
_PATIENCE_S = 1.0
_WARM_UP = 0.1  # of a leg's quotes
_PER_CENT = np.arange(1, 100)
_NO_KERNEL_TIME = int(FrameFlag.NO_KERNEL_TIME)


@dataclass(frozen=True, slots=True)
class Cpus:
    feed: int
    meter: int
    relays: tuple[int, int]

    @classmethod
    def here(cls) -> Cpus:
        first, second = two_cpus()  # Refused with fewer
        own = sorted(os.sched_getaffinity(0))
        return cls(own[0], own[3], (own[1], own[2])) if len(own) > 3 else cls(first, first, (second, second))


# ── the feed ─────────────────────────────────────────────────────────────────────────────────────────


@jit
def send_feed(fd, messages, iovecs, sizes, due_ns, paced, offset_ns, late_ns):  # type: ignore[no-untyped-def]
    """Send sizes.size quotes, BURST at each of due_ns (CLOCK_MONOTONIC); how many were sent.

    paced: is a quote due when due_ns says? Else it is when it is sent.

    messages: address of BURST headers, of these iovecs. offset_ns: CLOCK_REALTIME − CLOCK_MONOTONIC.
    late_ns: of each burst, from due_ns.
    """
    for burst in range(due_ns.size):
        first = burst * BURST
        now = monotonic_ns()
        while now < due_ns[burst]:
            if due_ns[burst] - now > _SPIN_NS:
                sleep_ns(due_ns[burst] - now - _SPIN_NS)
            else:
                pause()
            now = monotonic_ns()
        late_ns[burst] = now - due_ns[burst]
        count = min(BURST, sizes.size - first)
        for i in range(count):
            iovecs[i].length = sizes[first + i]
            due = due_ns[burst] if paced else now
            write_rxring(iovecs[i].base, sizes[first + i], 0, first + i, due + offset_ns, now + offset_ns)
        done = 0
        while done < count:
            taken = sendmmsg(fd, messages + done * _MMSGHDR_BYTES, count - done, 0)
            if taken > 0:
                done += taken
            elif errno() != EINTR:
                return first + done
    return sizes.size


def schedule(count: int, rate: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(bytes of each quote, ns from the first burst to each): the same in every run."""
    chance = np.random.default_rng(SEED)
    sizes = chance.integers(SIZES[0], SIZES[1] + 1, count)
    bursts = -(-count // BURST)
    if rate is None:
        return sizes, np.zeros(bursts, np.int64)
    gaps = chance.exponential(BURST / rate, bursts - 1)
    gaps *= (bursts - 1) * BURST / rate / max(gaps.sum(), 1e-9)  # the mean rate is the one asked for
    return sizes, np.concatenate([[0], np.cumsum(gaps) * 1e9]).astype(np.int64)


def _feed(fd: int, count: int, rate: int | None) -> tuple[int, float, float]:
    """(quotes sent, seconds, lateness of the bursts at the 99th percentile, ns: 0 without a rate)."""
    sizes, due_ns = schedule(count, rate)
    messages = Messages.prepare(BURST)
    iovecs = messages.iovecs.reshape(-1)
    payload = np.zeros((BURST, SIZES[1]), np.uint8)
    iovecs["base"] = payload.ctypes.data + np.arange(BURST) * SIZES[1]
    due_ns += int(monotonic_ns()) + _LEAD_NS
    late_ns = np.zeros(due_ns.size, np.int64)
    paced, offset_ns = rate is not None, clock_offset_ns()
    sent = send_feed(fd, messages.address, iovecs, sizes, due_ns, paced, offset_ns, late_ns)
    end_ns = int(due_ns[-1] + late_ns[-1]) if paced else int(monotonic_ns())
    seconds = (end_ns - int(due_ns[0])) / 1e9 + (BURST / rate if rate else 0)
    return int(sent), seconds, float(np.percentile(late_ns, 99)) if paced else 0.0


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Duel:
    """rate: quotes/s, or None. seconds: of a leg, if the feed keeps its pace."""

    place: Place
    rate: int | None
    pair: str
    cpus: Cpus
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.place.name}, {_pace(self.rate)}, {self.pair}"

    @property
    def count(self) -> int:
        return min(int((self.rate or FLAT_OUT) * self.seconds), MOST_QUOTES)

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "place": self.place.name,
            "rate": self.rate,
            "pair": self.pair,
            "a": asdict(PAIRS[self.pair][0]),
            "b": asdict(PAIRS[self.pair][1]),
            "cpus": asdict(self.cpus),
            "burst": BURST,
            "sizes": SIZES,
            "quotes": 2 * self.count,
            "rcvbuf": RCVBUF,
            "seconds": 2 * (self.seconds + 0.5),
        }

    def run(self) -> Figures:
        legs = [self._leg(first) for first in (0, 1)]
        cut = int(self.count * _WARM_UP)
        late = np.concatenate([leg.a_ns[cut:] - leg.b_ns[cut:] for leg in legs])
        paired = np.concatenate([leg.both[cut:] for leg in legs])
        if not paired.any():
            raise Failed("no quote came by both relays")
        late_us = late[paired] / 1e3
        residual = sum(hops["residual"] for leg in legs for hops in leg.hops)
        return {
            "value": float(late_us.mean()),
            "quotes_per_second": sum(leg.sent for leg in legs) / sum(leg.seconds for leg in legs),
            "median_us": float(np.median(late_us)),
            "b_first": float((late_us > 0).mean() + (late_us == 0).mean() / 2),
            "percentiles_us": np.percentile(late_us, _PER_CENT).tolist(),
            "paired": int(paired.sum()),
            "a_latency": _latency([leg.a_ns - leg.due_ns for leg in legs], cut),
            "b_latency": _latency([leg.b_ns - leg.due_ns for leg in legs], cut),
            "a_lost": sum(leg.hops[0]["lost"] for leg in legs) / len(legs),
            "b_lost": sum(leg.hops[1]["lost"] for leg in legs) / len(legs),
            "legs": [{"first": "AB"[i], **leg.told(cut)} for i, leg in enumerate(legs)],
            "ok": all(leg.right for leg in legs),
            "ledger_balanced": residual == 0,
            "flags": [flag for leg in legs for flag in self._doubts(leg)],
        }

    def _doubts(self, leg: _Leg) -> Iterator[str]:
        for hops, relay in zip(leg.hops, "AB", strict=True):
            if hops["residual"]:
                yield f"{hops['residual']} quotes by way of {relay} are nowhere in the ledger"
        if leg.sent < self.count:
            yield f"the feed broke off after {leg.sent} quotes"
        if self.rate and leg.sent < PACE * self.rate * leg.seconds:
            yield f"the feed sent {leg.sent} quotes in {leg.seconds:.2f} s, not {self.rate} a second"
        if leg.late_ns > LATE_NS:
            yield f"the feed was {leg.late_ns / 1e6:.1f} ms late at the 99th percentile"
        yield from leg.astray

    def _leg(self, first: int) -> _Leg:
        """A is relay 0, B relay 1; `first` is started before the other."""
        near = self.place.receive
        order = (first, 1 - first)
        cpus = self.cpus.relays if first == 0 else self.cpus.relays[::-1]
        with ExitStack() as stack:
            engine = stack.enter_context(forked.run(near, wanted(self.cpus.meter)))
            ready = engine.next("ready")
            readers = [stack.enter_context(_attach(stack, ready["name"], number)) for number in (0, 1)]
            relays: dict[int, forked.Forked] = {}
            port = 0
            for relay in order:
                plan = self._relay(near, port, relay, cpus[relay], ready["receivers"][relay]["port"])
                relays[relay] = stack.enter_context(forked.bounce(near, plan))
                port = relays[relay].next("ready")["port"]
            sent, seconds, late_ns = self._feed(port)
            pids = {f"relay {'AB'[relay]}": (relays[relay].pid, cpus[relay]) for relay in order}
            pids |= {f"meter {r['name']}": (r["pid"], self.cpus.meter) for r in ready["receivers"]}
            astray = [told for who, (pid, cpu) in pids.items() for told in misplaced(who, pid, [cpu])]
            bounced = [relays[relay].end() for relay in (0, 1)]
            _await(engine, [summary["forwarded"] for summary in bounced])
            came = [_read(reader, self.count) for reader in readers]
            for reader in readers:
                reader.close()
            summary = engine.end()
        hops = [
            account({"sent": sent}, bounced[k], {**summary, "receivers": [summary["receivers"][k]]})
            for k in (0, 1)
        ]
        right = all(
            came[k].right and came[k].quotes == hops[k]["received"] == int((came[k].ns > 0).sum())
            for k in (0, 1)
        )
        due_ns = np.maximum(came[0].due_ns, came[1].due_ns)
        return _Leg(sent, seconds, late_ns, came[0].ns, came[1].ns, due_ns, hops, right, astray)

    def _relay(self, near: Side, port: int, relay: int, cpu: int, meter: int) -> MirrorPlan:
        how = PAIRS[self.pair][relay]
        listen, to = f"udp://{GROUP}:{port}?interface={near.device}", f"127.0.0.1:{meter}"
        return MirrorPlan(
            listen=listen, to=to, batch=how.batch, receive=how.receive, rcvbuf=RCVBUF, cpu=str(cpu)
        )

    def _feed(self, port: int) -> tuple[int, float, float]:
        side = self.place.send
        with side, connect(f"{GROUP}:{port}?interface={side.device}") as sock:
            feeding = Pinned(self.cpus.feed, _feed, sock.fileno(), self.count, self.rate)
            found: tuple[int, float, float] = feeding.result()
            return found


def _pace(rate: int | None) -> str:
    return "flat out" if rate is None else f"{rate}/s"


def wanted(cpu: int) -> Any:
    """The meter's run: no consumer."""
    flags = {"rx-cpu": str(cpu), "gro": "off", "rcvbuf": str(RCVBUF), "every": "0.1"}
    return forked.wanted_run(["udp://127.0.0.1:0", "udp://127.0.0.1:0"], [], flags)


def cases(setting: Setting) -> Iterator[Case]:
    if any(place.send.remote or place.receive.remote for place in setting.places):
        raise Refused("quotes needs one clock for the feed and the meter: give --device lo or veth")
    cpus = Cpus.here()
    forked.compile_for(wanted(cpus.meter))
    one = np.zeros(1, np.int64)
    compile_for(send_feed, 0, 0, np.zeros(1, IOVEC), one, one, True, 0, one)
    pairs = QUICK_PAIRS if setting.quick else tuple(PAIRS)
    for place, rate, pair in product(setting.places, RATES, pairs):
        duel = Duel(place, rate, pair, cpus, 0.3 if setting.quick else 1.0)
        yield Case(duel.name, "µs", duel.run, duel.parameters)


# ── the meter ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Came:
    """What one ring holds. ns, due_ns: by sequence number, when a quote came and was due; 0: it did not.

    quotes: all that came, any twice. right: each has a stamp as it was sent, and the kernel's time.
    """

    ns: NDArray[np.int64]
    due_ns: NDArray[np.int64]
    quotes: int
    right: bool


@dataclass(frozen=True, slots=True)
class _Leg:
    sent: int
    seconds: float
    late_ns: float
    a_ns: NDArray[np.int64]
    b_ns: NDArray[np.int64]
    due_ns: NDArray[np.int64]
    hops: list[dict[str, Any]]
    right: bool
    astray: list[str]

    @property
    def both(self) -> NDArray[np.bool_]:
        """Which quotes came by both."""
        return (self.a_ns > 0) & (self.b_ns > 0)

    def told(self, cut: int) -> dict[str, Any]:
        late = (self.a_ns - self.b_ns)[cut:][self.both[cut:]] / 1e3
        mean, middle = (float(late.mean()), float(np.median(late))) if late.size else (None, None)
        return {"mean_us": mean, "median_us": middle, "hops": self.hops, "feed_late_p99_ns": self.late_ns}


def _attach(stack: ExitStack, name: str, number: int) -> Reader:
    ring = stack.enter_context(rings.attach(name, number))
    return ring.reader("quotes", policy="gate")


def _await(engine: forked.Forked, forwarded: Sequence[int]) -> None:
    """Until the meter has, or has dropped, all that the relays sent, or for as long as that may take."""
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        receivers = engine.next("interval")["receivers"]
        came = [receiver["packets"] + receiver["socket_dropped"] for receiver in receivers]
        if all(has >= went for has, went in zip(came, forwarded, strict=True)):
            return


def _read(reader: Reader, count: int) -> _Came:
    """All that is in the ring."""
    came = _Came(np.zeros(count, np.int64), np.zeros(count, np.int64), 0, True)
    quotes, right = 0, True
    while (batch := reader.poll()) is not None:
        descriptors = batch.descriptors
        offsets = (descriptors["offset"].astype(np.int64) - int(descriptors["offset"][0])) * ALIGN
        stamps = batch.arena[offsets[:, None] + np.arange(STAMP_BYTES)].view(STAMP)[:, 0]
        sequences = stamps["sequence"].astype(np.int64)
        sound = (
            (stamps["magic"] == MAGIC) & (sequences < count) & (descriptors["flags"] & _NO_KERNEL_TIME == 0)
        )
        right = right and bool(sound.all())
        came.ns[sequences[sound]] = descriptors["time_ns"][sound]
        came.due_ns[sequences[sound]] = stamps["scheduled_ns"][sound]
        quotes += len(descriptors)
    return _Came(came.ns, came.due_ns, quotes, right)


def _latency(of_legs: Sequence[NDArray[np.int64]], cut: int) -> dict[str, float | None]:
    """µs from when a quote was due until it was at the meter, of those that came: others are below 0."""
    found = np.concatenate([leg[cut:] for leg in of_legs])
    found = found[found > 0] / 1e3
    if not found.size:
        return {"mean_us": None, "p50_us": None, "p99_us": None}
    p50, p99 = np.percentile(found, (50, 99))
    return {"mean_us": float(found.mean()), "p50_us": float(p50), "p99_us": float(p99)}


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────

_Case = dict[str, Any]
_COLUMNS = (
    *("place", "quotes/s", "pair", "A − B: mean µs", "median", "5 %", "95 %", "B first"),
    *("A: mean, p99 µs", "B: mean, p99 µs", "lost A, B"),
)


def tell(result: dict[str, Any]) -> Iterator[Section]:
    found = [case for case in result["cases"] if _runs(case)]
    if not found:
        return
    yield Section("Head to head, beside 2009", (_about(found[0]["parameters"]), *_verdicts(found)))
    text = (
        "Medians of the runs. A − B: how much later A's copy of a quote came to the meter; then how long "
        "each relay's took from when the burst was due, and the share of quotes that it lost."
    )
    table = Table(_COLUMNS, tuple(map(_row, found)))
    alt = "Share of the quotes by how much later relay A's copy came than B's, by place, rate and pair"
    yield Section("All pairs", (text,), table, Picture("difference", alt, functools.partial(_picture, found)))


def _runs(case: _Case) -> list[Figures]:
    """Those that count: the sound ones, or where there are none all that have a figure."""
    having = [run for run in case["runs"] if run["value"] is not None]
    return [run for run in having if is_sound(run)] or having


def _middle(case: _Case, *path: str | int) -> float:
    """The median over the runs of a figure, found by its keys."""
    found: list[Any] = list(_runs(case))
    for key in path:
        found = [run[key] for run in found]
    known = [float(figure) for figure in found if figure is not None]
    return median(known) if known else float("nan")


def _about(parameters: Mapping[str, Any]) -> str:
    cpus = parameters["cpus"]
    a, b = cpus["relays"]
    relays = f"both relays share CPU {a}" if a == b else f"the relays have CPUs {a} and {b}, in turn"
    meter = (
        "the meter's receivers, too" if cpus["meter"] == cpus["feed"] else f"they have CPU {cpus['meter']}"
    )
    return f"CPU {cpus['feed']} has the feed, {meter}; {relays}."


def _row(case: _Case) -> tuple[str, ...]:
    parameters = case["parameters"]
    spread = (_middle(case, "percentiles_us", p - 1) for p in (5, 95))
    latencies = (
        ", ".join(f"{_middle(case, f'{relay}_latency', key):.0f}" for key in ("mean_us", "p99_us"))
        for relay in "ab"
    )
    lost = ", ".join(f"{100 * _middle(case, f'{relay}_lost'):.2g} %" for relay in "ab")
    return (
        *(parameters["place"], f"{_middle(case, 'quotes_per_second'):.0f}", parameters["pair"]),
        *(number(_middle(case, key)) for key in ("value", "median_us")),
        *map(number, spread),
        f"{100 * _middle(case, 'b_first'):.0f} %",
        *latencies,
        lost,
    )


def _verdicts(found: Sequence[_Case]) -> Iterator[str]:
    least, then, most = THEN_US
    yield (
        f"2009: the relay with recvmmsg was {then / 1e3:g} ms faster on average ({least / 1e3:g} to "
        f"{most / 1e3:g}); on which machines, at which rate, in which order they stood, is not told."
    )
    by_key = {(c["parameters"]["place"], c["parameters"]["rate"], c["parameters"]["pair"]): c for c in found}
    for (place, rate, pair), case in by_key.items():
        control = by_key.get((place, rate, "control"))
        if pair == "control":
            yield _control(case)
        elif control:
            yield _against_2009(case, control)


def _control(case: _Case) -> str:
    """Is the difference of two that are alike about 0, and what does it mean to be first?"""
    low, high = case["ci"]
    zero = "holds 0, as it must" if low <= 0 <= high else "does not hold 0: what is smaller says nothing"
    first = (_middle(case, "legs", 0, "mean_us") - _middle(case, "legs", 1, "mean_us")) / 2
    place = "behind" if first > 0 else "ahead"
    return (
        f"{case['name']}: {number(case['median'])} µs; the interval ({number(low)} to {number(high)}) {zero}."
        f" Who is started first is {number(abs(first))} µs {place}; each was it in one of two legs."
    )


def _against_2009(case: _Case, control: _Case) -> str:
    mean_us, (low, high) = case["median"], case["ci"]
    told = f"{case['name']}: recvmmsg is {number(abs(mean_us))} µs {'faster' if mean_us > 0 else 'slower'}"
    told += (
        f" ({number(low)} to {number(high)}), first for {100 * _middle(case, 'b_first'):.0f} % of the quotes"
    )
    if low <= control["ci"][1] and control["ci"][0] <= high:
        return f"{told}; not to be told apart from two that are alike."
    if mean_us < 0:
        return f"{told}; that does not agree with 2009."
    if mean_us >= THEN_US[0]:
        return f"{told}; as in 2009{', or more' if mean_us > THEN_US[2] else ''}. {_why(case)}"
    return f"{told}: faster, as in 2009, but {THEN_US[1] / mean_us:.0f} times less. {_why(case)}"


def _why(case: _Case) -> str:
    """A relay is late by what waits in front of it: what it takes a quote, times how many wait."""
    a, b = (_middle(case, f"{relay}_latency", "mean_us") for relay in "ab")
    rate = _middle(case, "quotes_per_second")
    return (
        f"A quote takes {number(a)} µs by A and {number(b)} by B: on average {number(a / 1e6 * rate)} quotes"
        f" are on their way through A (Little's law), of bursts of {BURST}; 1 ms at {rate:,.0f}/s is"
        f" {rate / 1e3:.0f}."
    )


def _picture(found: Sequence[_Case]) -> Figure:
    from matplotlib.figure import Figure as MatplotlibFigure

    places = list(dict.fromkeys(case["parameters"]["place"] for case in found))
    rates = list(dict.fromkeys(case["parameters"]["rate"] for case in found))
    pairs = list(dict.fromkeys(case["parameters"]["pair"] for case in found))
    size = (1.0 + 3.1 * len(rates), 0.9 + 2.5 * len(places))
    figure = MatplotlibFigure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(len(places), len(rates), sharex=True, sharey=True, squeeze=False)
    for case in found:
        parameters = case["parameters"]
        axes = grid[places.index(parameters["place"]), rates.index(parameters["rate"])]
        runs = np.array([run["percentiles_us"] for run in _runs(case)])
        index = pairs.index(parameters["pair"])
        style: dict[str, Any] = {"color": pictures.COLOURS[index], "linestyle": ("-", "--", ":")[index]}
        axes.plot(np.median(runs, axis=0), _PER_CENT, linewidth=1.6, label=parameters["pair"], **style)
        axes.fill_betweenx(
            _PER_CENT, runs.min(axis=0), runs.max(axis=0), color=pictures.COLOURS[index], alpha=0.15
        )
        axes.set(title=f"{parameters['place']}, {_pace(parameters['rate'])}")
    for axes in grid.flat:
        axes.axvline(0, color="#555555", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xticks([-10_000, -100, 0, 100, 10_000], ["−10⁴", "−100", "0", "100", "10⁴"])
        axes.minorticks_off()
        axes.set(ylim=(0, 100))
        axes.grid(color="#dddddd", linewidth=0.6)
    for axes in grid[-1]:
        axes.set(xlabel="A − B, µs (right of 0: B first)")
    for row in grid:
        row[0].set(ylabel="% of the quotes below")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(pairs), frameon=False)
    return figure
