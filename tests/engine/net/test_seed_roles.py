"""The roles of the test program of 2009 (S1), written anew from their description, against ours.

Its producer puts the time into the first 8 bytes: microseconds since the epoch, u64, native order. Its
mirror bounces to a fixed place. Its consumer takes now − stamp for the latency.
"""

import socket
import struct
import time
from typing import Any

from engine.net import mirror, sender
from engine.net.mirror import MirrorPlan
from engine.net.sender import SendPlan


def produce(port: int, count: int, size: int) -> list[bytes]:
    """The producer: what it sent to the mirror at `port`."""
    packets = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(count):
            packets.append(struct.pack("=Q", time.time_ns() // 1000).ljust(size, b"\0"))
            sock.sendto(packets[-1], ("127.0.0.1", port))
    return packets


def consume(receiver: Any) -> list[int]:
    """The consumer: the latency of each packet, in microseconds."""
    now = time.time_ns() // 1000
    return [now - struct.unpack("=Q", payload[:8])[0] for payload, _ in receiver.take()]


def test_its_producer_and_consumer_with_our_mirror_between(receiver: Any) -> None:
    sent: list[bytes] = []

    def when_ready(view: dict[str, Any]) -> None:
        if view["type"] == "ready":
            sent.extend(produce(view["port"], 100, 256))

    begin = time.time_ns() // 1000
    plan = MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, batch=8, duration=0.05)
    summary = mirror.run(plan, when_ready)
    assert summary["forwarded"] == 100
    got = [payload for payload, _ in receiver.take()]
    assert got == sent
    stamps = [struct.unpack("=Q", payload[:8])[0] for payload in got]
    assert stamps == sorted(stamps)
    assert begin <= stamps[0]
    assert stamps[-1] <= time.time_ns() // 1000


def test_its_consumer_reads_what_our_sender_sends(receiver: Any) -> None:
    begin = time.time_ns() // 1000
    summary = sender.run(SendPlan(to=receiver.to, stamp="seed", packets=100, size=256), lambda view: None)
    latencies = consume(receiver)
    assert len(latencies) == summary["sent"] == 100
    assert min(latencies) >= 0
    assert max(latencies) <= time.time_ns() // 1000 - begin


def test_the_whole_round(receiver: Any) -> None:
    """Our sender → our mirror → its consumer, with GSO on the way in."""

    def when_ready(view: dict[str, Any]) -> None:
        if view["type"] == "ready":
            plan = SendPlan(to=f"127.0.0.1:{view['port']}", stamp="seed", packets=100, size=64, gso=8)
            sender.run(plan, lambda view: None)

    plan = MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, duration=0.05)
    assert mirror.run(plan, when_ready)["forwarded"] == 100
    latencies = consume(receiver)
    assert len(latencies) == 100
    assert 0 <= min(latencies) <= max(latencies) < 60_000_000
