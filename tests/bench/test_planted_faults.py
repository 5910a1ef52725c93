"""Faults planted in a measured run, for real: each is told by the run, which makes its case invalid."""

from __future__ import annotations

import functools
import os
import re
import socket
import struct
from dataclasses import replace
from typing import Any

import pytest

from bench import runner
from bench.commands import Rxring
from bench.flood import Flood
from bench.pinned import Pinned
from bench.place import LO, Place, Side, open_place
from bench.progress import Progress
from bench.runner import Case, Taken, measure, summary
from engine.affinity import topology
from engine.affinity.layouts import find
from engine.net.libc import SOL_UDP, UDP_GRO, UDP_SEGMENT

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")

FLOOD = Flood(100, 64, *CPUS[:2], 0.25, 0.5, rate=200_000) if len(CPUS) > 1 else None


def measured(flood: Flood, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[str]]:
    """(the case as it stands in a result, why its run is doubtful)."""
    monkeypatch.setattr(runner, "REPEATS", 0)
    consumer_cpu, gro = flood.receive_cpu, "off"
    case = Case("planted", "M/s", functools.partial(flood.engine, consumer_cpu, gro))
    taken = {"planted": Taken()}
    measure([case], 1, 0, taken, Progress({"planted": 1}, 1, {}))
    (run,) = taken["planted"].runs
    assert run["ok"], run
    return summary(case, taken["planted"]), run.get("why", [])


# ── a receiver that loses one packet in 10⁵ unseen, a slow sender, a consumer on the wrong core ──────


class Relay:
    """Passes packets to `to`, but for each packet number `every` (0: none). `lost`: how many, at the end."""

    def __init__(self, to: str, every: int) -> None:
        host, _, port = to.rpartition(":")
        self._in = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._in.setsockopt(SOL_UDP, UDP_GRO, 1)
        self._in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._in.bind(("127.0.0.1", 0))
        self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._out.connect((host, int(port)))
        self.address = f"127.0.0.1:{self._in.getsockname()[1]}"
        self._process = Pinned(CPUS[1], _relay, self._in, self._out, every)

    def end(self) -> int:
        """After the sender's end."""
        self._out.sendto(b"end", self._in.getsockname())
        self._in.close()
        self._out.close()
        return int(self._process.result())


def _relay(come: socket.socket, go: socket.socket, every: int) -> int:
    passed = lost = 0
    while True:
        data, control, *_ = come.recvmsg(1 << 16, 64)
        if data == b"end":
            return lost
        size = struct.unpack("i", control[0][2][:4])[0] if control else len(data)
        packets = -(-len(data) // size)
        if every and passed // every < (passed + packets) // every:
            data, lost = data[size:], lost + 1
        passed += packets
        segments = [(SOL_UDP, UDP_SEGMENT, struct.pack("H", size))] if len(data) > size else []
        if data:
            go.sendmsg([data], segments)


class Relayed(Rxring):
    """A sender behind a relay."""

    relay: Relay

    def end(self) -> dict[str, Any]:
        sent = super().end()
        return {**sent, "relay_lost": self.relay.end()}


class ThroughARelay(Side):
    """Packets sent here pass a relay; and the sender is told another rate than the one asked for."""

    every, pace = 0, 1.0

    def rxring(self, *arguments: str) -> Rxring:
        words = list(arguments)
        to, rate = words.index("--to") + 1, words.index("--rate") + 1
        relay = Relay(words[to], self.every)
        words[to], words[rate] = relay.address, str(round(int(words[rate]) * self.pace))
        sender = Relayed(*words)
        sender.relay = relay
        return sender


class LossyAndSlow(ThroughARelay):
    every, pace = 100_000, 0.97


class WrongCore(Side):
    """Consumers that start here find themselves on another CPU."""

    def rxring(self, *arguments: str) -> Rxring:
        return Moving(*arguments)


class Moving(Rxring):
    def next(self, kind: str) -> dict[str, Any]:
        found = super().next(kind)
        if kind == "ready":
            os.sched_setaffinity(found["consumers"][0]["pid"], {CPUS[1]})
        return found


def test_a_loss_in_100_000_a_slow_sender_and_a_consumer_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    sane = replace(FLOOD, place=Place("lo", LO.receive, ThroughARelay("lo", "127.0.0.1")))
    case, why = measured(sane, monkeypatch)
    assert not [told for told in why if "late" not in told], "nothing is wrong, but that we may be disturbed"

    place = Place("lo", WrongCore("lo", "127.0.0.1"), LossyAndSlow("lo", "127.0.0.1"))
    case, why = measured(replace(FLOOD, place=place), monkeypatch)
    assert not case["valid"]
    told = " · ".join(why)
    ledger = case["runs"][0]["ledger"]
    assert ledger["sent"] // 100_000 - 1 <= ledger["residual"] <= ledger["sent"] // 100_000
    assert f"{ledger['residual']} packets are nowhere in the ledger" in told
    assert re.search(r"the sender sent 19[34]\d{3} packets/s, not 200000 as asked", told)
    assert f"and may on {CPUS[1]}, not on {CPUS[0]} as asked" in told


# ── an interrupt moved during the run ────────────────────────────────────────────────────────────────


class Steered(Side):
    """Whoever runs here has packets handled by another CPU from some time within the window on."""

    other = -1

    def rxring(self, *arguments: str) -> Rxring:
        engine = Steering(*arguments, prefix=self.command())
        engine.side, engine.other = self, self.other
        return engine


class Steering(Rxring):
    side: Side
    other = -1
    with_packets = 0

    def next(self, kind: str) -> dict[str, Any]:
        found = super().next(kind)
        if kind == "interval" and found["receivers"][0]["packets"]:
            self.with_packets += 1
            if self.with_packets == 3:  # the window has begun with the second one
                self.side.steer(self.other)
        return found


@pytest.mark.root
def test_an_interrupt_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place("veth") as place, place.receive.layout("same"):
        cpu = find("same", topology.read()).interrupt
        other = next(other for other in CPUS if other != cpu)
        flood = replace(FLOOD, receive_cpu=cpu, send_cpu=other, interrupt_cpu=cpu)
        _, why = measured(replace(flood, place=place), monkeypatch)
        assert not [told for told in why if "handled elsewhere" in told]

        receive = place.receive
        moved = Steered(receive.device, receive.host, receive.namespace)
        moved.other = other
        case, why = measured(replace(flood, place=Place("veth", moved, place.send)), monkeypatch)
        assert not case["valid"]
        assert [told for told in why if f"handled elsewhere than on CPU {cpu}" in told]
