"""A flood of packets of one size, and how the engine, or another receiver, takes it: the measured run.

`rxring send` sends as fast as it can, or at a rate, from one CPU; received is on another one. All receivers
have the same receive buffer. Counted is what comes in a window that begins some time after the first packet.
`spare` is the part of it that the receiving thread slept through: where there is much, the sender was the
limit.

A run of the engine tells more: `lost` (share of what was sent, over the whole run) and where, by the ledger;
`latency` within the window, by stage; what a packet costs the receiver's, the consumers' and the sender's
threads, and interrupts (bench/cost.py); how the sender kept its pace. And it says itself what makes it
doubtful (`flags`): packets that are nowhere in the ledger, a sender slower or later than it was asked to be,
a thread on another CPU, packets handled on another CPU than the layout's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

import numpy as np

from bench import cost, native
from bench.commands import Rxring
from bench.place import LO, Place
from bench.runner import Figures
from engine.affinity import devices
from engine.affinity.topology import format_cpu_list
from engine.errors import Failed
from engine.handlers import histogram
from engine.handlers.latency import LATENCY, STAGES
from engine.ledger import Shared, balance
from engine.net.sockets import ask_for_gro, bind_udp, open_udp
from engine.spec import Listen
from engine.status import Status

BATCH = 64
RCVBUF = 8 << 20
SILENCE_S = 10  # no packet for so long: there is no sender
PACE = 0.99  # of the rate asked for: a sender below it did not keep it
LATE_NS = 5_000_000  # at the 99th percentile: a sender later than this did not keep its schedule
PERCENTILES = {"p50_ns": 500, "p75_ns": 750, "p90_ns": 900, "p95_ns": 950, "p99_ns": 990, "p999_ns": 999}
_SENDER = f"bench{os.getpid()}"
_FOREVER_NS = 1 << 62
_START_S, _SENDER_S = 1.5, 0.8  # about as long take an engine's start and end, and a sender's


class How(TypedDict, total=False):
    """policy, wait: of the consumers. receive: CPUs of several receivers, one each; (): one, on the flood's.
    ring: size of each one's."""

    policy: str
    wait: str
    receive: Sequence[int]
    ring: str


_USUAL: How = {"policy": "gate", "wait": "block", "receive": (), "ring": "40MiB"}


@dataclass(frozen=True, slots=True)
class Flood:
    """size: of a packet, bytes. gso: packets in a message; 1: without GSO. rate: packets a second; None: as
    fast as it goes. interrupt_cpu: where the layout in force has packets handled; None: there is none.
    paced: packets a second that the engine is sent first, one a message; of these, then, is `latency`, which
    under a flood tells how long queues are. What they cost is in `paced`."""

    size: int
    gso: int
    receive_cpu: int
    send_cpu: int
    warm_s: float
    window_s: float
    place: Place = LO
    rate: int | None = None
    flows: int = 1
    interrupt_cpu: int | None = None
    paced: int | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "place": self.place.name,
            "size": self.size,
            "gso": self.gso,
            "rate": self.rate,
            "flows": self.flows,
            "paced": self.paced,
            "receive_cpu": self.receive_cpu,
            "send_cpu": self.send_cpu,
            "interrupt_cpu": self.interrupt_cpu,
            "warm_s": self.warm_s,
            "window_s": self.window_s,
            "rcvbuf": RCVBUF,
            "seconds": _START_S + len(self._phases()) * (_SENDER_S + 3 * self.warm_s + self.window_s),
        }

    def _send(self, port: int, seconds: float | None = None) -> Rxring:
        """seconds: how long it sends by itself; None: until it is ended."""
        to, gso = f"{self.place.receive.host}:{port}", str(self.gso) if self.gso > 1 else "off"
        what = ("--size", str(self.size), "--gso", gso, "--flows", str(self.flows))
        pace = ("--rate", "max" if self.rate is None else str(self.rate))
        end = ("--duration", str(seconds)) if seconds else ()
        cpu = ("--cpu", str(self.send_cpu))
        return self.place.send.rxring("send", "--name", _SENDER, "--to", to, *what, *pace, *end, *cpu)

    def _phases(self) -> list[Flood]:
        if self.paced is None:
            return [self]
        return [replace(self, paced=None, rate=self.paced, gso=1), replace(self, paced=None)]

    def engine(self, consume: int | Sequence[int], gro: str = "auto", **how: Unpack[How]) -> Figures:
        """One run of the engine with a `latency` consumer on each CPU of `consume`."""
        with self.running(consume, gro, **how) as running:
            for phase in self._phases():
                running.flood(phase)
        return running.figures(paced=self.paced is not None)

    @contextlib.contextmanager
    def running(
        self, consume: int | Sequence[int], gro: str = "auto", **how: Unpack[How]
    ) -> Iterator[Running]:
        """The engine, while it runs; `engine` says what all this is."""
        chosen = _USUAL | how
        policy, wait = chosen["policy"], chosen["wait"]
        consumers = [consume] if isinstance(consume, int) else list(consume)
        receivers = list(chosen["receive"]) or [self.receive_cpu]
        arguments = ["--listen", f"udp://{self.place.receive.host}:0", "--gro", gro, "--ring", chosen["ring"]]
        arguments += ["--rx-cpu", format_cpu_list(receivers), "--receivers", str(len(receivers))]
        arguments += ["--rcvbuf", str(RCVBUF), "--sender", _SENDER, "--every", str(self.warm_s)]
        for i, cpu in enumerate(consumers):
            arguments += ["--consumer", f"latency@{cpu},policy={policy},wait={wait},name=reader{i}"]
        with self.place.receive.rxring("run", *arguments) as engine:
            ready, began = engine.next("ready"), time.monotonic()
            workers = [
                _Worker(role, worker["name"], worker["pid"], cpu)
                for role, cpus in (("receiver", receivers), ("consumer", consumers))
                for worker, cpu in zip(ready[f"{role}s"], cpus, strict=True)
            ]
            with contextlib.closing(Status.open(ready["name"])) as status:
                running = Running(engine, ready, workers, status, began)
                yield running
            running.summary = engine.end()

    def peer(
        self, receive: Callable[[socket.socket], Figures], *, timestamps: bool = False, gro: bool = False
    ) -> Figures:
        """One run of another receiver, on a socket that is set up as the engine's."""
        listen = Listen("udp", self.place.receive.host, 0)
        with self.place.receive:
            sock, _ = open_udp(listen, timestamps=timestamps, rcvbuf=RCVBUF)
        with contextlib.closing(sock):
            if gro and not ask_for_gro(sock):
                raise Failed("this kernel has no UDP GRO")
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", SILENCE_S, 0))
            port = bind_udp(sock, listen)[1]
            with self._send(port) as sender:
                found = receive(sock)
                return {**found, "sent_per_second": sender.end()["packets_per_second"]}

    def c(self, *, timestamps: bool, gro: bool) -> Figures:
        """One run of the recvmmsg loop in C."""

        def receive(sock: socket.socket) -> Figures:
            asks, window = (int(timestamps), int(gro)), (int(self.warm_s * 1e9), int(self.window_s * 1e9))
            arguments = (sock.fileno(), self.receive_cpu, BATCH, *asks, self.size, *window)
            return figures(*native.run("receive", *arguments, pass_fds=(sock.fileno(),)))

        return self.peer(receive, timestamps=timestamps, gro=gro)


def figures(packets: float, seconds: float, cpu_seconds: float, wrong: float) -> Figures:
    return {
        "value": packets / seconds / 1e6,
        "packets": packets,
        "seconds": seconds,
        "cpu_ns_per_packet": cpu_seconds / packets * 1e9 if packets else None,
        "spare": 1 - cpu_seconds / seconds,
        "ok": wrong == 0,
    }


# ── a run, its phases, and their windows ─────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Running:
    """An engine that runs; `flood` and `trial` are its phases, `figures` what came of it after its end.

    began: when it was ready, on the monotonic clock, s.
    """

    engine: Rxring
    ready: dict[str, Any]
    workers: list[_Worker]
    status: Status
    began: float
    summary: dict[str, Any] = field(default_factory=dict)
    _phases: list[_Phase] = field(default_factory=list)

    def flood(self, flood: Flood) -> None:
        """Send until a window, that begins some time after the first packet, has passed."""
        with flood._send(self._port) as sender:
            workers = self._with_sender(flood, sender)
            before = _packets(self.engine.next("interval"))
            while _packets(self.engine.next("interval")) == before:
                pass
            begin = self._look(flood, workers)
            interval = self.engine.next("interval")
            while interval["seconds"] < begin.interval["seconds"] + 0.9 * flood.window_s:  # never exact
                interval = self.engine.next("interval")
            end, sent = self._look(flood, workers, interval), sender.end()
        self._phases.append(_Phase(flood, workers, begin, end, sent, self._settled()))

    def trial(self, flood: Flood, seconds: float) -> Figures:
        """Send for so long; its figures, of all that was sent: `lost` and `flags` among them."""
        with flood._send(self._port, seconds) as sender:
            workers = self._with_sender(flood, sender)
            begin = self._look(flood, workers, self._fresh())
            sent = sender.next("summary")
        before = self._phases[-1].settled if self._phases else None
        settled = self._settled()
        phase = _Phase(flood, workers, begin, self._look(flood, self.workers, settled), sent, settled)
        self._phases.append(phase)
        lost = _lost(_ledger(before, settled, sent))
        return {**phase.figures(), "lost": lost, "flags": [*phase.doubts()]}

    def _fresh(self) -> dict[str, Any]:
        """The first interval after now: those before it may have waited to be read."""
        now = time.monotonic() - self.began
        while (interval := self.engine.next("interval"))["seconds"] < now:
            pass
        return interval

    def _settled(self) -> dict[str, Any]:
        """An interval after all that has been sent by now was taken: nothing moved since the one before."""
        last, interval = self._fresh(), self.engine.next("interval")
        while (_packets(interval), _had(interval)) != (_packets(last), _had(last)):
            last, interval = interval, self.engine.next("interval")
        return interval

    def figures(self, *, paced: bool = False) -> Figures:
        """Of the last phase, and of the whole run. paced: the first one was for latency."""
        first, last = self._phases[0], self._phases[-1]
        ends = [phase.settled for phase in self._phases[:-1]] + [self.summary]
        ledgers = [
            _ledger(before, after, phase.sent)
            for before, after, phase in zip([None, *ends], ends, self._phases, strict=False)
        ]
        doubts = [told for ledger in ledgers for told in _lost_unseen(ledger)]
        doubts += [told for phase in self._phases for told in phase.doubts()]
        return {
            **last.figures(),
            **({"latency": first.latency, "paced": first.figures()} if paced else {}),
            "ok": _adds_up(self.summary["ledger"]),
            "ledger_balanced": all(ledger["balanced"] for ledger in ledgers),
            "flags": list(dict.fromkeys([*doubts, *self.summary["placement"]["deviations"]])),
            "lost": _lost(ledgers[-1]),
            "ledger": ledgers[-1],
        }

    @property
    def _port(self) -> int:
        return int(self.ready["receivers"][0]["port"])

    def _with_sender(self, flood: Flood, sender: Rxring) -> list[_Worker]:
        pid = sender.next("ready")["pid"]
        if flood.place.send.remote:
            return self.workers
        return [*self.workers, _Worker("sender", "sender", pid, flood.send_cpu)]

    def _look(
        self, flood: Flood, workers: Sequence[_Worker], interval: dict[str, Any] | None = None
    ) -> _Moment:
        """Everything at the moment of an interval; None: the next one."""
        return _Moment(
            interval or self.engine.next("interval"),
            cost.read([worker.pid for worker in workers], _irqs(flood.place)),
            [told for worker in workers for told in cost.misplaced(worker.told, worker.pid, [worker.cpu])],
            self.status.read(len(self.ready["receivers"]))[1],
        )


@dataclass(frozen=True, slots=True)
class _Worker:
    role: str
    name: str
    pid: int
    cpu: int

    @property
    def told(self) -> str:
        return self.role if self.role == self.name else f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True)
class _Moment:
    """astray: who was found on another CPU. state: of the first consumer's handler."""

    interval: dict[str, Any]
    cost: cost.Cost
    astray: list[str]
    state: bytes


@dataclass(frozen=True, slots=True)
class _Phase:
    """A sender, and what was between two moments. sent: the sender's summary. settled: an interval after all
    that was sent had been taken."""

    flood: Flood
    workers: Sequence[_Worker]
    begin: _Moment
    end: _Moment
    sent: dict[str, Any]
    settled: dict[str, Any]

    @property
    def latency(self) -> dict[str, dict[str, int | None]]:
        return _latency(self.begin.state, self.end.state)

    @property
    def spent(self) -> cost.Cost:
        return self.end.cost.since(self.begin.cost)

    def figures(self) -> Figures:
        begin, end, spent = self.begin.interval, self.end.interval, self.spent
        packets, frames, cpu_ns = (
            _sum(end, key) - _sum(begin, key) for key in ("packets", "frames", "cpu_ns")
        )
        each = 1 / packets if packets else None
        of_role: dict[str, int] = {}
        for worker in self.workers:
            if worker.pid in spent.threads_ns:
                of_role[worker.role] = of_role.get(worker.role, 0) + spent.threads_ns[worker.pid]
        return {
            **figures(packets, end["seconds"] - begin["seconds"], cpu_ns / 1e9, 0),
            "gro": end["receivers"][0]["gro"],
            "packets_per_frame": packets / frames if frames else None,
            "asked_per_second": self.flood.rate,
            "sent_per_second": self.sent["packets_per_second"],
            "late_ns": self.sent["late_ns"],
            **{f"{role}_ns": each and ns * each for role, ns in of_role.items()},
            "softirq_ns": each and spent.softirq_ns * each,
            "busy": {str(cpu): times._asdict() for cpu, times in spent.busy.items()},
            "softirq_packets": {str(cpu): count for cpu, count in spent.packets.items()},
            "latency": self.latency,
        }

    def doubts(self) -> Iterator[str]:
        rate, interrupt_cpu = self.flood.rate, self.flood.interrupt_cpu
        sent_per_second, late_ns = self.sent["packets_per_second"], self.sent["late_ns"]["p99"]
        if rate is not None and sent_per_second < PACE * rate:
            yield f"the sender sent {sent_per_second:.0f} packets/s, not {rate} as asked"
        if late_ns is not None and late_ns > LATE_NS:
            late = f"{late_ns / 1e6:.1f} ms late at the 99th percentile"
            yield f"the sender was {late}, more than {LATE_NS / 1e6:g}"
        yield from dict.fromkeys([*self.begin.astray, *self.end.astray])
        if interrupt_cpu is not None:
            yield from cost.strayed(self.spent, interrupt_cpu)


def _sum(interval: Mapping[str, Any], key: str) -> int:
    return sum(receiver[key] for receiver in interval["receivers"])


def _packets(interval: Mapping[str, Any]) -> int:
    return _sum(interval, "packets")


def _had(interval: Mapping[str, Any]) -> int:
    """By the consumer that has had the fewest."""
    return min(int(consumer["delivered"]) for consumer in interval["consumers"])


def _irqs(place: Place) -> list[int]:
    """Of the receiving device, if it has any; those we make ourselves have none."""
    if place.name in ("lo", "veth"):
        return []
    return [irq.number for irq in devices.read(place.receive.device).packet_irqs]


def _latency(before: bytes, after: bytes) -> dict[str, dict[str, int | None]]:
    """By stage, of the packets that the first consumer took between two of its states."""
    old, new = (np.frombuffer(state or bytes(LATENCY.itemsize), LATENCY)[0] for state in (before, after))
    found: dict[str, dict[str, int | None]] = {}
    for stage in STAGES:
        buckets = new[stage]["buckets"] - old[stage]["buckets"]
        count = int(buckets.sum())
        ranks: Sequence[int | None] = [None] * len(PERCENTILES)
        if count:
            ranks = histogram.percentiles(buckets, tuple(PERCENTILES.values()), 0, _FOREVER_NS)
        negative = int(new[stage]["negative"] - old[stage]["negative"])
        found[stage] = {"count": count, "negative": negative, **dict(zip(PERCENTILES, ranks, strict=True))}
    return found


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────


def _adds_up(ledger: Mapping[str, Any]) -> bool:
    """Is all that left the socket in the ring, or refused, and all that is in the ring accounted for?"""
    counts = [sum(account.values()) for account in ledger["consumers"].values()]
    return bool(ledger["received"] == ledger["published"] + ledger["refused"]) and all(
        count == ledger["published"] for count in counts
    )


_COUNTS = (
    *("socket_dropped", "socket_dropped_frames", "after_stop", "after_stop_frames", "lost_in_flight"),
    *("received", "refused", "published"),
)


def _ledger(
    before: Mapping[str, Any] | None, after: Mapping[str, Any], sent: Mapping[str, Any]
) -> dict[str, Any]:
    """That of one sender: what was counted between two views of the run (None: its start), and what was sent.

    Each phase has its own: below the socket messages are counted, and two senders' may be of several sizes.
    What a sender on another machine sent, the engine does not know.
    """
    end = after["ledger"]
    begin: dict[str, Any] = before["ledger"] if before else dict.fromkeys(end, 0) | {"consumers": {}}

    def risen(key: str) -> Any:
        return None if end[key] is None or begin[key] is None else end[key] - begin[key]

    dropped = risen("socket_dropped_frames")
    return balance(
        sent=sent["sent"],
        sent_frames=sent["frames"],
        shared=Shared(
            *(risen("nic_dropped"), risen("softnet_dropped")),
            udp_errors=risen("other_errors") + dropped,
            udp_full=0,
        ),
        frames=_sum(after, "frames") - (_sum(before, "frames") if before else 0),
        **{key: risen(key) for key in _COUNTS},
        consumers={
            name: {key: n - begin["consumers"].get(name, {}).get(key, 0) for key, n in counts.items()}
            | {"joined": 0}
            for name, counts in end["consumers"].items()
        },
    )


def _lost_unseen(ledger: Mapping[str, Any]) -> list[str]:
    unit = "packets" if ledger["exact"] else "frames"
    residual = ledger["residual"]
    return [f"{residual} {unit} are nowhere in the ledger"] if residual else []


def _lost(ledger: Mapping[str, Any]) -> float:
    """What the consumer with the fewest did not have, as a share of what was sent."""
    had = min((account["delivered"] for account in ledger["consumers"].values()), default=ledger["received"])
    return float(1 - had / ledger["sent"])
