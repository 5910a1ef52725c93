"""Streams into a ring: every byte, in order, whose it is, and where it ends."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pytest
from forked import Child, await_

from engine.net.receiver import SLICE, STOPPED
from engine.net.sockets import ReceiveBuffer
from engine.net.stream import (
    CONTROL,
    ENDED,
    StreamReceiver,
    receive_streams,
    take_up_streams,
)
from engine.net.stream_socket import listen_on, open_stream
from engine.spec import Listen, ReceiverSpec
from engine.streaming import Streaming
from rings.layout import FrameFlag
from rings.libc import monotonic_ns
from rings.reader import Reader
from rings.ring import create

END = int(FrameFlag.END)
BROKEN = END | int(FrameFlag.TRUNCATED)


class Streams:
    """A stream receiver with everything around it in one process: its ring, a reader, clients."""

    def __init__(
        self,
        name: str,
        *,
        size_bytes: int = 1 << 20,
        batch: int = 64,
        host: str = "127.0.0.1",
    ) -> None:
        Streaming.compile()
        self.ring = create(name, size_bytes=size_bytes, sources=True)
        sock = open_stream("tcp", host, rcvbuf=None, share=False)
        self.address = listen_on(sock, "tcp", host, 0)
        spec = ReceiverSpec(listen=Listen("tcp", host, 0, {}))
        rx = StreamReceiver.prepare(batch=batch, arena_bytes=self.ring.geometry.arena_bytes)
        self.streaming = Streaming(spec, sock, rx, ReceiveBuffer(None, 0))
        self.writer = self.ring.writer()
        self.streaming._take_over()
        take_up_streams(rx.state, self.writer.record)
        self.reader: Reader = self.ring.reader("r")
        self.stop = np.zeros(1, np.int64)
        self.poll = select.poll()
        self.bytes: dict[int, bytearray] = defaultdict(bytearray)  # by flow
        self.ends: dict[int, int] = {}  # the flags of each flow's last frame
        self.ports: dict[int, int] = {}

    def attend(self) -> None:
        self.streaming.attend(self.poll)

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.address)
        accepted = self.streaming.accepted
        while self.streaming.accepted == accepted:
            self.attend()
        self.streaming._add()
        return client

    def take(self, seconds: float = 0.02, *, drain: bool = False) -> int:
        deadline_ns = int(monotonic_ns()) + int(seconds * 1e9)
        rx = self.streaming.rx
        why = receive_streams(rx.state, self.writer.record, self.stop.ctypes.data, deadline_ns, drain)
        self.streaming._close_ended()
        return int(why)

    def read(self) -> None:
        with contextlib.suppress(StopIteration):
            while (batch := self.reader.poll()) is not None:
                assert batch.sources is not None
                for descriptor, source, payload in zip(batch.descriptors, batch.sources, batch, strict=True):
                    flow, flags = int(source["flow"]), int(descriptor["flags"])
                    assert flow not in self.ends, "nothing comes after the end"
                    self.bytes[flow] += payload.tobytes()
                    self.ports[flow] = int(source["port"])
                    if flags & END:
                        assert payload.size == 0
                        self.ends[flow] = flags & BROKEN
                    else:
                        assert payload.size > 0

    def take_until(self, condition: Any) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "it does not happen"
            if self.take() == CONTROL:
                self.streaming._add()
            self.read()
            self.attend()

    def check_counts(self) -> None:
        c = self.ring.counters
        _, published = self.ring.published()
        assert c["received"] == c["frames"] == published
        assert c["bytes"] == sum(map(len, self.bytes.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.writer.close()
        self.ring.close()
        self.streaming.close()
        for connection in self.streaming.mine.values():
            connection.close()


@pytest.fixture
def streams(name: str) -> Iterator[Streams]:
    with Streams(name) as streams:
        yield streams


def test_a_stream_from_its_first_byte_to_its_end(streams: Streams) -> None:
    client = streams.connect()
    sent = random.Random(1).randbytes(300_000)
    client.sendall(sent)
    port = client.getsockname()[1]
    client.close()
    streams.take_until(lambda: streams.ends)
    assert bytes(streams.bytes[1]) == sent
    assert streams.ends == {1: END}
    assert streams.ports == {1: port}
    streams.check_counts()
    streams.attend()
    assert not streams.streaming.connections
    assert not (streams.streaming.rx.connections["state"] == ENDED).any()


@pytest.mark.parametrize(
    ("size_bytes", "batch"), [(64 << 10, 1), (64 << 10, 64), (1 << 20, 64), (8 << 20, 8)]
)
def test_many_streams_at_once(name: str, size_bytes: int, batch: int, fork: Any) -> None:
    """Through a ring that holds a fraction: each whole and in its order, however they mix."""
    chance = random.Random(size_bytes + batch)
    contents = [chance.randbytes(chance.choice([0, 1, 100, 70_000, 400_000])) for _ in range(12)]
    with Streams(name, size_bytes=size_bytes, batch=batch) as streams:
        clients = [streams.connect() for _ in contents]
        child = fork(send_in_pieces, clients, contents)
        for client in clients:
            client.close()
        streams.take_until(lambda: len(streams.ends) == len(contents))
        assert child.wait() == 0
        for flow, content in enumerate(contents, 1):
            assert bytes(streams.bytes[flow]) == content
        assert set(streams.ends.values()) == {END}
        streams.check_counts()


def send_in_pieces(clients: list[socket.socket], contents: list[bytes]) -> None:
    chance = random.Random(7)
    places = [0] * len(clients)
    while any(place < len(content) for place, content in zip(places, contents, strict=True)):
        i = chance.randrange(len(clients))
        piece = contents[i][places[i] : places[i] + chance.choice([1, 10, 1000, 50_000])]
        clients[i].sendall(piece)
        places[i] += len(piece)


def test_a_reset_stream_is_marked_broken(streams: Streams) -> None:
    client = streams.connect()
    client.sendall(b"abc")
    streams.take_until(lambda: streams.bytes[1] == b"abc")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
    client.close()
    streams.take_until(lambda: streams.ends)
    assert streams.ends == {1: BROKEN}
    assert sum(streams.ring.counters["errors"]) == 1
    streams.check_counts()


def test_the_other_side_sees_that_its_end_was_taken(streams: Streams) -> None:
    """Its last word is answered at once, though the supervisor still holds the connection."""
    client = streams.connect()
    client.sendall(b"all")
    client.shutdown(socket.SHUT_WR)
    streams.take_until(lambda: streams.ends)
    client.settimeout(10)
    assert client.recv(1) == b""
    client.close()


def test_a_full_ring_holds_the_sender_up_and_loses_nothing(name: str, fork: Any) -> None:
    content = random.Random(3).randbytes(3_000_000)
    with Streams(name, size_bytes=64 << 10) as streams:
        client = streams.connect()
        child = fork(send_in_pieces, [client], [content])
        client.close()
        end = time.monotonic() + 30
        while streams.ring.counters["full_events"] == 0:
            streams.take()
            assert time.monotonic() < end
        streams.take_until(lambda: streams.ends)
        assert child.wait() == 0
        assert bytes(streams.bytes[1]) == content
        streams.check_counts()


def test_the_cut_at_the_end_takes_what_has_come(streams: Streams) -> None:
    clients = [streams.connect() for _ in range(3)]
    clients[0].sendall(b"x" * 200_000)
    clients[1].sendall(b"y")
    streams.stop[0] = 1
    assert streams.take(10) == STOPPED
    streams.streaming._drain(streams.writer, streams.stop.ctypes.data)
    streams.read()
    assert streams.bytes[1] == b"x" * len(streams.bytes[1])
    assert 0 < len(streams.bytes[1]) <= 200_000
    assert streams.bytes[2] == b"y"
    assert streams.ends == {1: BROKEN, 2: BROKEN, 3: BROKEN}
    streams.check_counts()
    for client in clients:
        client.close()


def test_who_waits_is_served_when_another_has_left(streams: Streams) -> None:
    """The table is full: the next waits to be accepted, and is no worse off."""
    streams.streaming.most = 1
    first = streams.connect()
    second = socket.create_connection(streams.address)
    second.sendall(b"second")
    streams.attend()
    assert streams.streaming.accepted == 1
    first.close()
    streams.take_until(lambda: streams.ends)
    streams.take_until(lambda: streams.bytes[2] == b"second")
    second.close()
    streams.take_until(lambda: len(streams.ends) == 2)
    assert streams.streaming.rx.state[0]["rows"] == 1


def test_how_much_each_call_brought_is_counted(streams: Streams) -> None:
    client = streams.connect()
    client.sendall(b"x" * 100)
    streams.take_until(lambda: len(streams.bytes[1]) == 100)
    client.close()
    streams.take_until(lambda: streams.ends)
    assert streams.streaming.details()["lengths"] == {"16384": 1}


def test_ipv6(name: str) -> None:
    with Streams(name, host="::1") as streams, socket.create_connection(streams.address) as client:
        before = streams.streaming.accepted
        while streams.streaming.accepted == before:
            streams.attend()
        streams.streaming._add()
        client.sendall(b"six")
        streams.take_until(lambda: streams.bytes[1] == b"six")
        assert streams.ports[1] == client.getsockname()[1]


def receive_as_successor(streams: Streams) -> None:
    """A receiver's life, in a process of its own that was forked with the connections."""
    streams.writer = streams.ring.writer()
    streams.streaming._take_over()
    take_up_streams(streams.streaming.rx.state, streams.writer.record)
    while (why := streams.take(0.05)) in (SLICE, CONTROL):
        if why == CONTROL:
            streams.streaming._add()
    streams.streaming._drain(streams.writer, streams.stop.ctypes.data)


@pytest.mark.parametrize("batch", [1, 64])
def test_a_receiver_killed_at_random_loses_no_byte(name: str, fork: Any, batch: int, board: Any) -> None:
    contents = [random.Random(i).randbytes(2_000_000 + i) for i in range(4)]
    chance, everything = random.Random(batch), sum(map(len, contents))
    with Streams(name, size_bytes=256 << 10, batch=batch) as streams:
        streams.stop = board  # shared
        streams.writer.abandon()
        clients = [streams.connect() for _ in contents]
        receiver: Child = fork(receive_as_successor, streams)
        sender = fork(send_in_pieces, clients, contents)
        for client in clients:
            client.close()
        for _ in range(15):
            before = sum(map(len, streams.bytes.values()))
            goal = min(before + chance.randrange(1, 300_000), everything)
            await_(lambda goal=goal: streams.read() or sum(map(len, streams.bytes.values())) >= goal)
            receiver.kill()
            receiver = fork(receive_as_successor, streams)
        await_(lambda: streams.read() or len(streams.ends) == len(contents))
        board[0] = 1
        assert sender.wait() == 0
        assert receiver.wait() == 0
        for flow, content in enumerate(contents, 1):
            assert bytes(streams.bytes[flow]) == content
        assert set(streams.ends.values()) == {END}
        streams.check_counts()


def test_a_stream_that_had_ended_before_the_cut_has_ended_cleanly(streams: Streams) -> None:
    whole, open_still = streams.connect(), streams.connect()
    whole.sendall(b"x" * 40_000)
    whole.close()
    open_still.sendall(b"y")
    streams.stop[0] = 1
    assert streams.take(10) == STOPPED
    streams.streaming._drain(streams.writer, streams.stop.ctypes.data)
    streams.read()
    assert (len(streams.bytes[1]), bytes(streams.bytes[2])) == (40_000, b"y")
    assert streams.ends == {1: END, 2: BROKEN}
    open_still.close()


def test_whoever_was_accepted_before_the_cut_is_heard(streams: Streams) -> None:
    """Not passed on to the receiver yet, or not even accepted."""
    for payload in (b"one", b"two", b"three"):
        with socket.create_connection(streams.address) as client:
            client.sendall(payload)
    streams.streaming.cut(streams.poll)
    streams.streaming._drain(streams.writer, streams.stop.ctypes.data)
    streams.read()
    assert sorted(map(bytes, streams.bytes.values())) == [b"one", b"three", b"two"]
    assert set(streams.ends.values()) == {END}
    assert streams.streaming.unfinished() is None


def test_a_ring_without_room_at_the_end_is_said(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.streaming._STALLED_SLICES", 2)
    client = streams.connect()
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(b"x" * 65536)
            streams.take(0.001)
    streams.streaming._drain(streams.writer, streams.stop.ctypes.data)
    assert streams.streaming.unfinished() == (
        "1 streams are cut short: the ring had no room for what had come"
    )
    client.close()
