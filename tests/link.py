"""A receiver with everything around it in one process: a socket that sends to it, its ring, a reader.

Loopback delivers within the send, so nothing has to be awaited: `take` receives what is queued.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from forked import readable

from engine.ledger import REFUSED
from engine.net.libc import SOL_UDP, UDP_SEGMENT, shared_zeros
from engine.net.receiver import SLICE, Receiver, receive, take_up
from engine.net.sockets import DropCount, ask_for_gro, bind_udp, discard, open_udp
from engine.receiving import Receiving
from engine.spec import Listen
from rings.layout import MAX_FRAME_BYTES
from rings.libc import monotonic_ns
from rings.ring import create

_PATTERN = np.random.default_rng(1).bytes(MAX_FRAME_BYTES + 256)
LENGTH_STEPS = (0, 16, 64, 112, 128, 1472, 2048, 4096, 8192, 8872, 16384, 32768, 65507)
# Lengths where something changes: buffers, strides, alignment, half a ring, the largest datagram.
LENGTHS = sorted({n + d for n in LENGTH_STEPS for d in (-1, 0, 1) if 0 <= n + d <= 65507})


def payload(number: int, length: int) -> bytes:
    """`length` bytes that only packet `number` has, as far as so many can tell."""
    head = number.to_bytes(8, "little")[:length]
    return head + _PATTERN[number % 251 : number % 251 + length - len(head)]


def segments(length: int, segment: int) -> list[int]:
    """The lengths of the packets that a message of `length` bytes becomes; 0: it is one."""
    if segment == 0 or length <= segment:
        return [length]
    return [segment] * (length // segment) + [length % segment] * (length % segment > 0)


class Link:
    def __init__(
        self,
        name: str,
        *,
        size_bytes: int = 1 << 20,
        batch: int = 64,
        one_by_one: bool = False,
        timestamps: bool = True,
        packets: int | None = None,
        gro: bool = False,
        sources: bool = False,
        room: int = MAX_FRAME_BYTES,
        rcvbuf: int | None = 4 << 20,
        policy: str | None = "gate",
    ) -> None:
        Receiving.compile()  # deadlines are for receiving
        self.ring = create(name, size_bytes=size_bytes, sources=sources)
        listen = Listen("udp", "127.0.0.1", 0)
        self.sock, _ = open_udp(listen, timestamps=timestamps, rcvbuf=rcvbuf)
        if gro:
            assert ask_for_gro(self.sock)
        self.address = bind_udp(self.sock, listen)
        self.rx = Receiver.prepare(
            self.sock.fileno(),
            batch=batch,
            one_by_one=one_by_one,
            timestamps=timestamps,
            gro=gro,
            sources=sources,
            packets=packets,
            room=room,
        )
        self.writer = self.ring.writer()
        take_up(self.rx.state, self.writer.record)
        self.reader = self.ring.reader("reader", policy=policy) if policy else None
        self.out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.out.connect(self.address)
        self.stop = shared_zeros(1, np.int64)
        self.drops = DropCount(self.sock)
        self.sent = self.discarded = 0

    def send(self, lengths: Iterable[int]) -> list[bytes]:
        """Send packets of these lengths; them."""
        payloads = []
        for length in lengths:
            payloads.append(payload(self.sent, length))
            self.out.send(payloads[-1])
            self.sent += 1
        return payloads

    def send_gso(self, lengths: Iterable[int], segment: int) -> list[bytes]:
        """Send messages of these lengths, which the kernel cuts into packets of `segment`; the packets."""
        packets = []
        for length in lengths:
            cut = [payload(self.sent + i, n) for i, n in enumerate(segments(length, segment))]
            control = [(SOL_UDP, UDP_SEGMENT, struct.pack("H", segment))]
            self.out.sendmsg([b"".join(cut)], control if length > segment else [])
            self.sent += len(cut)
            packets += cut
        return packets

    def take(self, seconds: float = 5.0, *, drain: bool = True) -> int:
        """Receive until the socket is empty, or as long as it takes; why it ended."""
        if drain and self.sent > self.received + self.drops.read() + self.discarded:
            readable(self.sock.fileno(), 0.1)  # a busy CPU may deliver after the send
        return self.receive(seconds, drain=drain)

    def receive(self, seconds: float, *, drain: bool = True) -> int:
        """The same, without a look at what is under way: the compiled loop alone."""
        deadline_ns = int(monotonic_ns()) + int(seconds * 1e9)
        why = receive(self.rx.state, self.writer.record, self.stop.ctypes.data, deadline_ns, drain)
        return int(why)

    def take_all(self) -> list[bytes]:
        """Receive until the socket is empty, reading whenever the ring is full; what was read."""
        got, end = [], time.monotonic() + 20
        while self.take(0.002) == SLICE:
            got += self.read()
            assert time.monotonic() < end, "reading makes no room"
        return got + self.read()

    def read(self) -> list[bytes]:
        """What the reader has not had yet."""
        assert self.reader is not None
        payloads = []
        with contextlib.suppress(StopIteration):  # the ring is closed, and all is read
            while (batch := self.reader.poll()) is not None:
                payloads += [batch.payload(i).tobytes() for i in range(len(batch))]
        return payloads

    def descriptors(self) -> list[Any]:
        """The same, as descriptors."""
        assert self.reader is not None
        found: list[Any] = []
        while (batch := self.reader.poll()) is not None:
            found += list(batch.descriptors.copy())
        return found

    @property
    def received(self) -> int:
        counters = self.ring.counters
        return int(counters["received"]) - int(counters["lost_in_flight"])

    @property
    def published(self) -> int:
        return self.ring.published()[1]

    @property
    def refused(self) -> dict[str, int]:
        counts = dict(zip(REFUSED, map(int, self.ring.counters["refused"]), strict=False))
        return {reason: count for reason, count in counts.items() if count}

    def check_balance(self) -> None:
        """Every packet that was sent is somewhere, to the packet."""
        lost = int(self.ring.counters["lost_in_flight"])
        assert self.received == self.published + sum(self.refused.values())
        assert self.sent == self.received + lost + self.drops.read() + self.discarded

    def discard(self) -> int:
        """Empty the socket's queue; how many there were."""
        _, count = discard(self.sock)
        self.discarded += count
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.reader is not None:
            self.reader.close()
        self.writer.close()
        self.ring.close()
        self.sock.close()
        self.out.close()
