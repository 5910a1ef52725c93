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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Flood:
    """size: of a packet, bytes. gso: packets in a message; 1: without GSO. rate: packets a second; None: as
    fast as it goes. interrupt_cpu: where the layout in force has packets handled; None: there is none."""

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

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "place": self.place.name,
            "size": self.size,
            "gso": self.gso,
            "rate": self.rate,
            "flows": self.flows,
            "receive_cpu": self.receive_cpu,
            "send_cpu": self.send_cpu,
            "interrupt_cpu": self.interrupt_cpu,
            "warm_s": self.warm_s,
            "window_s": self.window_s,
            "rcvbuf": RCVBUF,
        }

    def _send(self, port: int) -> Rxring:
        to, gso = f"{self.place.receive.host}:{port}", str(self.gso) if self.gso > 1 else "off"
        what = ("--size", str(self.size), "--gso", gso, "--flows", str(self.flows))
        pace = ("--rate", "max" if self.rate is None else str(self.rate))
        cpu = ("--cpu", str(self.send_cpu))
        return self.place.send.rxring("send", "--name", _SENDER, "--to", to, *what, *pace, *cpu)

    def engine(
        self,
        consume: int | Sequence[int],
        gro: str = "auto",
        *,
        policy: str = "gate",
        wait: str = "block",
        receive: Sequence[int] = (),
        ring: str = "40MiB",
    ) -> Figures:
        """One run of the engine with a `latency` consumer on each CPU of `consume`.

        receive: CPUs of several receivers, one each; (): one, on receive_cpu. ring: size of each one's.
        """
        consumers = [consume] if isinstance(consume, int) else list(consume)
        receivers = list(receive) or [self.receive_cpu]
        arguments = ["--listen", f"udp://{self.place.receive.host}:0", "--gro", gro, "--ring", ring]
        arguments += ["--rx-cpu", format_cpu_list(receivers), "--receivers", str(len(receivers))]
        arguments += ["--rcvbuf", str(RCVBUF), "--sender", _SENDER, "--every", str(self.warm_s)]
        for i, cpu in enumerate(consumers):
            arguments += ["--consumer", f"latency@{cpu},policy={policy},wait={wait},name=reader{i}"]
        with self.place.receive.rxring("run", *arguments) as engine:
            ready = engine.next("ready")
            with self._send(ready["receivers"][0]["port"]) as sender:
                threads = self._threads(ready, receivers, consumers, sender.next("ready"))
                window = self._window(engine, ready, threads)
                sent = sender.end()
            summary = engine.end()
        if self.place.send.remote:
            summary["ledger"] = _with_sent(summary["ledger"], summary["receivers"], sent)
        return self._figures(window, sent, summary)

    def _threads(
        self,
        ready: Mapping[str, Any],
        receivers: Sequence[int],
        consumers: Sequence[int],
        sender: Mapping[str, Any],
    ) -> list[_Worker]:
        """All processes, and where each is to run."""
        found = (
            [_Worker("sender", "sender", sender["pid"], self.send_cpu)] if not self.place.send.remote else []
        )
        for role, cpus in (("receiver", receivers), ("consumer", consumers)):
            for worker, cpu in zip(ready[f"{role}s"], cpus, strict=True):
                found.append(_Worker(role, worker["name"], worker["pid"], cpu))
        return found

    def _window(self, engine: Rxring, ready: Mapping[str, Any], workers: Sequence[_Worker]) -> _Window:
        """From an interval some time after the first packet to one some time later."""
        irqs = _irqs(self.place)
        pids = [worker.pid for worker in workers]
        record = len(ready["receivers"])  # of the first consumer
        with contextlib.closing(Status.open(ready["name"])) as status:
            while _packets(engine.next("interval")) == 0:
                pass
            begin, cost_before = engine.next("interval"), cost.read(pids, irqs)
            astray = _astray(workers)
            state_before = status.read(record)[1]
            end = engine.next("interval")
            while end["seconds"] < begin["seconds"] + 0.9 * self.window_s:  # intervals are never exact
                end = engine.next("interval")
            spent, state = cost.read(pids, irqs).since(cost_before), status.read(record)[1]
        astray += [told for told in _astray(workers) if told not in astray]
        return _Window(begin, end, spent, _latency(state_before, state), astray, workers)

    def _figures(self, window: _Window, sent: Mapping[str, Any], summary: Mapping[str, Any]) -> Figures:
        packets = _packets(window.end) - _packets(window.begin)
        frames, cpu_ns = (window.risen(key) for key in ("frames", "cpu_ns"))
        ledger = summary["ledger"]
        seconds = window.end["seconds"] - window.begin["seconds"]
        per_packet = 1 / packets if packets else None
        return {
            **figures(packets, seconds, cpu_ns / 1e9, 0),
            "ok": _adds_up(summary),
            "ledger_balanced": bool(ledger["balanced"]),
            "flags": [
                *_lost_unseen(ledger),
                *self._out_of_pace(sent),
                *window.astray,
                *self._strayed(window),
            ],
            "gro": window.end["receivers"][0]["gro"],
            "packets_per_frame": packets / frames if frames else None,
            "asked_per_second": self.rate,
            "sent_per_second": sent["packets_per_second"],
            "late_ns": sent["late_ns"],
            "lost": _lost(ledger),
            "ledger": ledger,
            **{f"{role}_ns": per_packet and ns * per_packet for role, ns in window.cpu_ns().items()},
            "softirq_ns": per_packet and window.spent.softirq_ns * per_packet,
            "busy": {str(cpu): times._asdict() for cpu, times in window.spent.busy.items()},
            "softirq_packets": {str(cpu): count for cpu, count in window.spent.packets.items()},
            "latency": window.latency,
            "socket_p50_ns": window.latency["socket"]["p50_ns"],
            "ring_p50_ns": window.latency["ring"]["p50_ns"],
            "total_p99_ns": window.latency["total"]["p99_ns"],
        }

    def _out_of_pace(self, sent: Mapping[str, Any]) -> Iterator[str]:
        if self.rate is None:
            return
        if sent["packets_per_second"] < PACE * self.rate:
            yield f"the sender sent {sent['packets_per_second']:.0f} packets/s, not {self.rate} as asked"
        late_ns = sent["late_ns"]["p99"]
        if late_ns is not None and late_ns > LATE_NS:
            late = f"{late_ns / 1e6:.1f} ms late at the 99th percentile"
            yield f"the sender was {late}, more than {LATE_NS / 1e6:g}"

    def _strayed(self, window: _Window) -> list[str]:
        return [] if self.interrupt_cpu is None else cost.strayed(window.spent, self.interrupt_cpu)

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


# ── the window ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Worker:
    role: str
    name: str
    pid: int
    cpu: int


@dataclass(frozen=True, slots=True)
class _Window:
    """begin, end: intervals of the engine. astray: who was found on another CPU."""

    begin: dict[str, Any]
    end: dict[str, Any]
    spent: cost.Cost
    latency: dict[str, dict[str, int | None]]
    astray: list[str]
    workers: Sequence[_Worker]

    def risen(self, key: str) -> int:
        """Of all receivers."""
        return _sum(self.end, key) - _sum(self.begin, key)

    def cpu_ns(self) -> dict[str, int]:
        """Of the threads of each role."""
        found: dict[str, int] = {}
        for worker in self.workers:
            found[worker.role] = found.get(worker.role, 0) + self.spent.threads_ns[worker.pid]
        return found


def _sum(interval: Mapping[str, Any], key: str) -> int:
    return sum(receiver[key] for receiver in interval["receivers"])


def _packets(interval: Mapping[str, Any]) -> int:
    return _sum(interval, "packets")


def _astray(workers: Sequence[_Worker]) -> list[str]:
    return [
        told
        for worker in workers
        for told in cost.misplaced(f"{worker.role} {worker.name}", worker.pid, [worker.cpu])
    ]


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


def _adds_up(summary: Mapping[str, Any]) -> bool:
    """Is all that left the socket in the ring, or refused, and all that is in the ring accounted for?"""
    ledger = summary["ledger"]
    counts = [sum(account.values()) for account in ledger["consumers"].values()]
    return bool(ledger["received"] == ledger["published"] + ledger["refused"]) and all(
        count == ledger["published"] for count in counts
    )


def _with_sent(
    ledger: Mapping[str, Any], receivers: Sequence[Mapping[str, Any]], sent: Mapping[str, Any]
) -> dict[str, Any]:
    """The ledger with what a sender on another machine says it sent; there is no count of it here."""
    dropped = ledger["socket_dropped_frames"]
    shared = Shared(
        ledger["nic_dropped"], ledger["softnet_dropped"], ledger["other_errors"] + dropped, udp_full=0
    )
    kept = ("socket_dropped", "socket_dropped_frames", "after_stop", "after_stop_frames", "lost_in_flight")
    return balance(
        sent=sent["sent"],
        sent_frames=sent["frames"],
        shared=shared,
        frames=sum(receiver["frames"] for receiver in receivers),
        **{key: ledger[key] for key in (*kept, "received", "refused", "published")},
        consumers={name: {**counts, "joined": 0} for name, counts in ledger["consumers"].items()},
    )


def _lost_unseen(ledger: Mapping[str, Any]) -> list[str]:
    if ledger["residual"] is None:
        return ["what was sent is not known"]
    unit = "packets" if ledger["exact"] else "frames"
    residual = ledger["residual"]
    return [f"{residual} {unit} are nowhere in the ledger"] if residual else []


def _lost(ledger: Mapping[str, Any]) -> float | None:
    """The share of the packets sent that the consumer with the fewest did not have."""
    had = [account["delivered"] for account in ledger["consumers"].values()]
    return 1 - min(had, default=ledger["received"]) / ledger["sent"] if ledger["sent"] else None
