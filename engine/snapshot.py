"""What a run looks like at one moment: the objects of `run --json`, the same for every form of report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.consumer import Consumer
from engine.known_sender import KnownSender
from engine.ledger import ERROR_NAMES, REFUSED, Shared, balance
from engine.net.counters import Layers
from engine.placement import Placement
from engine.receiving import Receiving
from engine.status import Status
from engine.streaming import Streaming
from rings.ring import ReaderInfo, Ring


@dataclass(slots=True)
class ReceiverPart:
    """One receiver and its ring, as the supervisor keeps them."""

    name: str
    receiving: Receiving | Streaming
    ring: Ring
    listen: str = ""
    dropped_at_cut: int | None = None  # frames
    discarded_after_stop: tuple[int, int] = (0, 0)  # frames, packets
    discarded_ring_full: tuple[int, int] = (0, 0)
    restarts: int = 0
    peak: float = 0.0  # the fullest that the ring was seen

    def counts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Its object in the report, but for the rates."""
        c = self.ring.counters
        _, published = self.ring.published()
        refused = dict(zip(REFUSED, map(int, c["refused"]), strict=False))
        full_frames, full_packets = self.discarded_ring_full
        after_frames, after_packets = self.discarded_after_stop
        refused["ring_full"] += full_packets
        dropped = self.receiving.dropped()
        before_cut = dropped if self.dropped_at_cut is None else self.dropped_at_cut
        after_cut = dropped - before_cut
        return {
            "name": self.name,
            "listen": self.listen,
            **placed(self.receiving.spec.rx_cpu, facts),
            "gro": self.receiving.gro,
            "packets": int(c["received"]) - int(c["lost_in_flight"]) + full_packets,
            "bytes": int(c["bytes"]),
            "frames": int(c["frames"]) + full_frames,
            "calls": int(c["calls"]),
            "refused": {reason: n for reason, n in refused.items() if n},
            "errors": {name: n for name, n in zip(ERROR_NAMES, map(int, c["errors"]), strict=False) if n},
            "socket_dropped": self._packets_in(before_cut),
            "socket_dropped_frames": before_cut,
            "rcvbuf": self.receiving.buffer.as_object(),
            "cpu_ns": int(c["cpu_ns"]),
            "restarts": self.restarts,
            "lost_in_flight": int(c["lost_in_flight"]),
            "after_stop": None if self._packets_in(after_cut) is None else after_cut + after_packets,
            "after_stop_frames": after_cut + after_frames,
            "published": published,
            **self.receiving.details(),
        }

    def _packets_in(self, dropped_frames: int) -> int | None:
        """With GRO nobody knows how many packets there were in frames that the socket dropped."""
        return None if self.receiving.gro and dropped_frames else dropped_frames

    def ring_object(self) -> dict[str, Any]:
        c, geometry = self.ring.counters, self.ring.geometry
        held = [reader for reader in self.ring.readers() if reader.holds]
        slowest = max(held, key=lambda reader: reader.lag, default=None)
        frames, size = self.ring.behind(slowest.cursor) if slowest else (0, 0)
        capacity = geometry.frames - 1
        used = max(frames / capacity, size / geometry.arena_bytes)
        high_water = max(int(c["high_water"]), frames)
        self.peak = 1.0 if c["full_events"] else max(self.peak, used, high_water / capacity)
        return {
            "name": self.ring.name,
            "number": self.ring.number,
            "published": self.ring.published()[1],
            "full_events": int(c["full_events"]),
            "full_ns": int(c["full_ns"]),
            "bytes": int(c["bytes"]),
            "frames": int(c["published"]),
            "high_water": high_water,
            "slowest": slowest.name if slowest and frames else None,
            "lag_frames": frames,
            "lag_bytes": size,
            "used": used,
            "peak": self.peak,
            "capacity_frames": capacity,
            "arena_bytes": geometry.arena_bytes,
            "stride": int(c["stride"]),
        }


@dataclass(slots=True)
class ConsumerPart:
    """One consumer, as the supervisor keeps it."""

    name: str
    consumer: Consumer
    record: int  # its record in the status segment
    alive: bool = True  # or ended in order
    restarts: int = 0
    report_error: str = ""  # why its handler's report failed

    def counts(self, readers: list[ReaderInfo], facts: dict[str, Any], state: bytes) -> dict[str, Any]:
        """Its object in the report. readers: its places in all rings."""
        spec = self.consumer.spec
        argument = "" if spec.argument is None else f"={os.fsencode(spec.argument).decode(errors='replace')}"
        return {
            "name": self.name,
            "handler": f"{spec.handler}{argument}",
            **placed(spec.cpus, facts),
            # gate becomes skip by `demote`, in one ring after the other
            "policy": "skip" if any(reader.policy == "skip" for reader in readers) else spec.policy,
            "wait": spec.wait,
            "delivered": sum(reader.delivered for reader in readers),
            "skipped": sum(reader.skipped for reader in readers),
            "passed": sum(reader.passed for reader in readers),
            "unread": sum(reader.unread for reader in readers),
            "joined": sum(reader.joined_packets for reader in readers),
            "alive": self.alive,
            "restarts": self.restarts,
            "since_packet": facts.get("since_packet", 0),
            "result": self.report([state]),
            "result_at": facts.get("handled", 0),
        }

    def report(self, states: list[bytes]) -> Any:
        """What its handler says of a state, or of several added up; None where there is none yet."""
        handler = self.consumer.handler
        records = [
            np.frombuffer(bytearray(state), handler.dtype)[0]
            for state in states
            if len(state) == self.consumer.state_bytes
        ]
        if not records:
            return None
        try:
            for other in records[1:]:
                handler.merge(records[0], other)
            return handler.report(records[0])
        except (Exception, SystemExit) as error:  # the user's own code: the others' results stand
            self.report_error = f"its report failed: {type(error).__name__}: {error}"
            return {"error": self.report_error}


def placed(asked: tuple[int, ...] | None, facts: dict[str, Any]) -> dict[str, Any]:
    """Where a worker was to run, where it may, and how often it was moved or made to wait."""
    got = {key: facts.get(key) for key in ("cpus", "migrations", "involuntary")}
    return {"cpus_asked": None if asked is None else sorted(asked), **got}


def _groups(
    consumers: list[ConsumerPart], views: list[dict[str, Any]], status: Status
) -> Iterator[dict[str, Any]]:
    """Of the members of each split: what they did together."""
    names = dict.fromkeys(part.consumer.spec.group for part in consumers if part.consumer.spec.group)
    for name in names:
        members = [i for i, part in enumerate(consumers) if part.consumer.spec.group == name]
        yield {
            "name": name,
            "members": [consumers[i].name for i in members],
            **{
                key: sum(views[i][key] for i in members)
                for key in ("delivered", "skipped", "unread", "result_at")
            },
            "result": consumers[members[0]].report([status.read(consumers[i].record)[1] for i in members]),
        }


_OF_ALL_RECEIVERS = (
    "socket_dropped",
    "socket_dropped_frames",
    "after_stop",
    "after_stop_frames",
    "lost_in_flight",
    "frames",
    "published",
)


def _total(views: list[dict[str, Any]], key: str) -> Any:
    """The sum; None where one of them is not known."""
    values = [view[key] for view in views]
    return None if None in values else sum(values)


def snapshot(
    kind: str,
    seconds: float,
    receivers: list[ReceiverPart],
    consumers: list[ConsumerPart],
    status: Status,
    *,
    sender: KnownSender | None,
    layers: Layers,
    placement: Placement,
    previous: dict[str, Any] | None,
    clock_steps: int,
) -> dict[str, Any]:
    """An `interval` or `summary`. Counts are since the start; rates since `previous`, if given."""
    elapsed = seconds - (previous["seconds"] if previous else 0.0)
    views = []
    for i, part in enumerate(receivers):
        view = part.counts(status.read(i)[0])
        before = previous["receivers"][i] if previous else {}
        packets, calls, cpu_ns, size = (
            view[key] - before.get(key, 0) for key in ("packets", "calls", "cpu_ns", "bytes")
        )
        view["packets_per_call"] = packets / calls if calls else None
        view["packets_per_second"] = packets / elapsed if elapsed > 0 else 0.0
        view["bytes_per_second"] = size / elapsed if elapsed > 0 else 0.0
        view["cpu_ns_per_packet"] = cpu_ns / packets if packets else None
        views.append(view)
    readers = [reader for part in receivers for reader in part.ring.readers()]
    consumer_views = [
        part.counts([reader for reader in readers if reader.name == part.name], *status.read(part.record))
        for part in consumers
    ]
    sent = sender.sent if sender else None
    ledger = balance(
        sent=sent.packets if sent else None,
        sent_frames=sent.frames if sent else None,
        shared=Shared.of(layers),
        received=_total(views, "packets"),
        refused=sum(sum(view["refused"].values()) for view in views),
        **{key: _total(views, key) for key in _OF_ALL_RECEIVERS},
        consumers={view["name"]: view for view in consumer_views},
    )
    return {
        "type": kind,
        "seconds": seconds,
        "receivers": views,
        "rings": [part.ring_object() for part in receivers],
        "consumers": consumer_views,
        "groups": list(_groups(consumers, consumer_views, status)),
        "clock_steps": clock_steps,
        "sender": {"name": sender.name, "state": sender.state} if sender else None,
        "layers": layers.as_object(),
        "placement": placement.as_object(layers.softnet),
        "ledger": ledger,
    }
