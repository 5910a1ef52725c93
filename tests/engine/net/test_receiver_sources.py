"""Who sent what: the source record of each frame, where the ring has them."""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from link import Link

import rings
from engine.net.receiver import FINISHED, Receiver, receive
from rings.layout import SOURCE
from rings.reader import Reader

END_NS = (1 << 63) - 1
LOCALHOST = socket.inet_aton("127.0.0.1").ljust(16, b"\0")


def sources(reader: Reader) -> list[tuple[bytes, int, int, int, int, bytes]]:
    """(address, port, family, interface, flow, payload) of each frame that is there."""
    found = []
    while (batch := reader.poll()) is not None:
        assert batch.sources is not None
        assert batch.sources.dtype == SOURCE
        payloads = [payload.tobytes() for payload in batch]
        for record, payload in zip(batch.sources, payloads, strict=True):
            numbers = (int(record[n]) for n in ("port", "family", "interface", "flow"))
            found.append((record["address"].tobytes(), *numbers, payload))
    return found


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize(("one_by_one", "batch"), [(True, 1), (False, 1), (False, 16)])
def test_each_frame_tells_who_sent_it(name: str, policy: str, one_by_one: bool, batch: int) -> None:
    with (
        Link(name, sources=True, policy=policy, one_by_one=one_by_one, batch=batch) as link,
        contextlib.ExitStack() as stack,
    ):
        assert link.reader is not None
        outs = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(20)]
        for i in range(200):
            outs[i * i % 20].sendto(bytes([i * i % 20]) * (i % 7 + 1), link.address)
        link.take()
        ports = [out.getsockname()[1] for out in outs]
        flows: dict[int, set[int]] = defaultdict(set)
        found = sources(link.reader)
        assert len(found) == 200
        for address, port, family, interface, flow, payload in found:
            assert (address, family, interface) == (LOCALHOST, socket.AF_INET, 0)
            assert port == ports[payload[0]]
            assert 0 <= flow < 1 << 63
            flows[port].add(flow)
        assert all(len(of_port) == 1 for of_port in flows.values())
        assert len(set.union(*flows.values())) == len(flows)


def test_the_flows_of_neighbouring_ports_are_spread(name: str) -> None:
    """Among any number of members: none gets more than twice its share of 256 ports."""
    with Link(name, sources=True) as link, contextlib.ExitStack() as stack:
        assert link.reader is not None
        for _ in range(256):
            out = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            out.sendto(b"", link.address)
        link.take()
        flows = [flow for _, _, _, _, flow, _ in sources(link.reader)]
        for members in range(2, 9):
            shares = [sum(flow % members == k for flow in flows) for k in range(members)]
            assert max(shares) <= 2 * 256 / members


def test_a_gro_frame_has_one_source(name: str) -> None:
    with Link(name, sources=True, gro=True) as link:
        assert link.reader is not None
        link.send_gso([6400, 450], 100)
        link.take()
        batch = link.reader.poll()
        assert batch is not None
        assert batch.sources is not None
        assert len(batch) == 69
        assert batch.sources["port"].tolist() == [link.out.getsockname()[1]] * 2


def test_messages_put_together_privately_keep_their_source(name: str) -> None:
    """A message longer than its stride: the batch goes another way."""
    with Link(name, sources=True, size_bytes=1 << 20) as link:
        assert link.reader is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(b"o" * 60_000, link.address)
            link.send([10])
            other.sendto(b"o" * 3, link.address)
            link.take()
            assert link.ring.counters["overflowed"] == 1
            mine, others = link.out.getsockname()[1], other.getsockname()[1]
        assert [(port, len(payload)) for _, port, _, _, _, payload in sources(link.reader)] == [
            (others, 60_000),
            (mine, 10),
            (others, 3),
        ]
        link.sent += 2
        link.check_balance()


def link_local() -> tuple[str, int]:
    """(address, index of its interface)."""
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        address, index, *_ = line.split()
        if address.startswith("fe80"):
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)), int(index, 16)
    pytest.skip("no interface has a link-local address")


@pytest.mark.parametrize("host", ["::1", "link-local"])
def test_ipv6_with_its_scope(name: str, host: str) -> None:
    """A hand-made IPv6 socket: what is asked here is what the record says of a sockaddr_in6."""
    scope = 0
    if host == "link-local":
        host, scope = link_local()
    with (
        rings.create(name, size_bytes=1 << 20, sources=True) as ring,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as out,
        ring.writer() as writer,
        ring.reader("r") as reader,
    ):
        sock.setblocking(False)
        sock.bind((host, 0, 0, scope))
        rx = Receiver.prepare(
            sock.fileno(), batch=4, one_by_one=False, timestamps=False, sources=True, packets=None
        )
        out.bind((host, 0, 0, scope))
        out.sendto(b"hello", sock.getsockname())
        stop = np.zeros(1, np.int64)
        assert receive(rx.state, writer.record, stop.ctypes.data, END_NS, True) == FINISHED
        ((address, port, family, interface, _, payload),) = sources(reader)
        assert address == socket.inet_pton(socket.AF_INET6, host)
        assert (port, family, interface) == (out.getsockname()[1], socket.AF_INET6, scope)
        assert payload == b"hello"
