"""The process around the receive loop for streams, and the connections that outlive any one process of it.

The supervisor accepts, keeps every connection in its own hands, and passes a copy to the receiver through a
control socket: the table row stands in the message, the descriptor rides with it. A receiver that is started
anew is forked with all of them. When the receiver has seen the end of a stream, the supervisor closes it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import select
import socket
import struct
import termios
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.net.address import Address
from engine.net.receiver import SLICE
from engine.net.sockets import ReceiveBuffer
from engine.net.stream import (
    CONTROL,
    ENDED,
    FREE,
    MAX_CONNECTIONS,
    OPEN,
    StreamReceiver,
    accept_into,
    break_off_all,
    lengths_by_name,
    receive_streams,
    take_up_streams,
)
from engine.net.stream_socket import listen_on, open_stream, probe_stream
from engine.receiving import PUBLISH_NS, SLICE_NS, drain_slices
from engine.spec import Listen, ReceiverSpec, RunSpec, arena_bytes
from engine.worker import Worker
from rings.jit import compile_for
from rings.libc import monotonic_ns
from rings.ring import Ring, attach
from rings.writer import WRITER_STATE, Writer

_STALLED_SLICES = 90  # at the end: a ring that has had no room for so long gets none any more
_RESERVED = 200  # descriptors that are not for connections
_MESSAGE = struct.Struct("=qq")  # row, flow


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """(the supervisor's end, the receiver's)."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


@dataclass(slots=True)
class Streaming:
    """A stream receiver before it runs: its listening socket and connections. It has Receiving's face."""

    spec: ReceiverSpec
    sock: socket.socket
    rx: StreamReceiver
    buffer: ReceiveBuffer
    gro: bool = False
    accepted: int = 0
    most: int = MAX_CONNECTIONS  # open at a time
    connections: dict[int, socket.socket] = field(default_factory=dict)  # by their row; the supervisor's
    mine: dict[int, socket.socket] = field(default_factory=dict)  # the same, in the receiver's process
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (row, flow) not passed on yet
    control: tuple[socket.socket, socket.socket] = field(default_factory=_socket_pair)

    # ── in the supervisor ────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def compile() -> None:
        """Compile what it runs."""
        rx = StreamReceiver.prepare(batch=1, arena_bytes=1 << 16)
        w = np.zeros(1, WRITER_STATE)
        compile_for(receive_streams, rx.state, w, 0, 0, True)
        compile_for(take_up_streams, rx.state, w)
        compile_for(break_off_all, rx.state, w)
        Writer.compile()

    @staticmethod
    def probe(listen: Listen) -> None:
        """Refused if `bind` would be, before anything else is done."""
        probe_stream(listen.scheme, listen.host, listen.port)

    @classmethod
    def open(cls, spec: ReceiverSpec, run: RunSpec) -> Streaming:
        """Its socket, set up and not bound."""
        listen = spec.listen
        sock = open_stream(listen.scheme, listen.host, rcvbuf=spec.rcvbuf, share=spec.receivers > 1)
        buffer = ReceiveBuffer(spec.rcvbuf, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
        rx = StreamReceiver.prepare(batch=spec.batch, arena_bytes=arena_bytes(run))
        streams = sum(receiver.listen.scheme != "udp" for receiver in run.receivers)
        most = max(min((_descriptors() - _RESERVED) // streams, MAX_CONNECTIONS), 1)
        return cls(spec, sock, rx, buffer, most=most)

    def bind(self, port: int) -> Address:
        """The address as bound, to this port. From now on connections come."""
        return listen_on(self.sock, self.spec.listen.scheme, self.spec.listen.host, port)

    def remark(self) -> str | None:
        return None

    def attend(self, poll: select.poll) -> None:
        """Close what has ended; accept who waits, as long as the table has room; pass them on.

        poll: is to wake us when somebody else wants to connect, if there is room for him.
        """
        for row, connection in list(self.connections.items()):
            if self.rx.connections[row]["state"] == ENDED:
                connection.close()
                del self.connections[row]
                self.rx.connections[row]["state"] = FREE
        self._accept()
        self._pass_on()
        if self.sock.fileno() >= 0:
            poll.register(self.sock, 0 if self.is_full else select.POLLIN)

    @property
    def is_full(self) -> bool:
        """Does who wants to connect have to wait until another has left?"""
        return len(self.connections) >= self.most

    def _accept(self) -> None:
        while not self.is_full:
            try:
                connection, address = self.sock.accept()
            except OSError:  # nobody waits, or went away while he did
                return
            self._keep(connection, address)

    def _keep(self, connection: socket.socket, address: Any) -> None:
        connection.setblocking(False)
        self.accepted += 1
        row = accept_into(self.rx, self.accepted, _source(address))
        self.connections[row] = connection
        self.waiting.append((row, self.accepted))

    def _pass_on(self) -> None:
        """As far as the control socket has room: a receiver that is stopped does not read it."""
        with contextlib.suppress(BlockingIOError):
            while self.waiting:
                row, flow = self.waiting[0]
                if row in self.connections:
                    message = _MESSAGE.pack(row, flow)
                    socket.send_fds(self.control[0], [message], [self.connections[row].fileno()])
                del self.waiting[0]

    def cut(self, poll: select.poll) -> None:
        """Nobody is accepted any more; of each stream what has come by now is still taken."""
        self._accept()
        self._pass_on()
        with contextlib.suppress(KeyError):
            poll.unregister(self.sock)
        self.sock.close()

    def discard(self) -> tuple[int, int]:
        """None: what is not taken stays with the sender, who sees that the stream was broken off."""
        return 0, 0

    def dropped(self) -> int:
        return 0

    def unfinished(self) -> str | None:
        """At the end: what was left undone, if anything."""
        count = int((self.rx.connections["state"] == OPEN).sum()) + int(self.rx.state[0]["cut_short"])
        return f"{count} streams are cut short: the ring had no room for what had come" if count else None

    def details(self) -> dict[str, Any]:
        """connections: accepted so far, open now. lengths: how many receive calls brought how many bytes."""
        return {
            "connections": {
                "accepted": self.accepted,
                "open": int((self.rx.connections["state"] == OPEN).sum()),
            },
            "lengths": lengths_by_name(self.rx.state[0]["lengths"]),
        }

    def forget(self, *, mine: bool) -> None:
        """In a forked child: only the receiver itself keeps connections."""
        self.sock.close()
        self.control[0].close()
        if not mine:
            self.control[1].close()
            for connection in self.connections.values():
                connection.close()

    def close(self) -> None:
        for one in (self.sock, *self.control, *self.connections.values()):
            one.close()

    # ── in the receiver's process ────────────────────────────────────────────────────────────────────

    def run(self, worker: Worker, ring_name: str, ring_number: int) -> None:
        """The life of one receiver process."""
        ring = attach(ring_name, ring_number)
        writer = ring.writer()
        stop = worker.stop_address
        self._take_over()
        take_up_streams(self.rx.state, writer.record)
        worker.ready({})
        published_ns = 0
        while True:
            deadline_ns = int(monotonic_ns()) + SLICE_NS
            why = receive_streams(self.rx.state, writer.record, stop, deadline_ns, False)
            self._close_ended()
            if why == CONTROL:
                self._add()
            elif why != SLICE or not worker.supervisor_lives():
                break
            if deadline_ns - published_ns > PUBLISH_NS:
                worker.publish({})
                published_ns = deadline_ns
        self._drain(writer, stop)
        writer.close()
        worker.publish({"finished": False})
        ring.forget()

    def finish(self, ring: Ring, stop: int) -> None:
        """The last acts of a receiver that died before them, in its place: readers wait for the end."""
        with ring.writer() as writer:
            self._take_over()
            take_up_streams(self.rx.state, writer.record)
            self._drain(writer, stop)

    def _take_over(self) -> None:
        """The connections that came by the fork."""
        self.rx.pollfds["fd"] = -1
        self.rx.pollfds[0]["fd"] = self.control[1].fileno()
        self.mine = dict(self.connections)
        for row, connection in self.mine.items():
            if self.rx.connections[row]["state"] == OPEN:
                self.rx.pollfds[1 + row]["fd"] = connection.fileno()

    def _add(self) -> None:
        """Connections that the supervisor has accepted since. Those that came by the fork, too, are known."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self.control[1], _MESSAGE.size, 1)
            except BlockingIOError:
                return
            row, flow = _MESSAGE.unpack(message)
            c = self.rx.connections[row]
            known = self.rx.pollfds[1 + row]["fd"] >= 0
            if known or c["flow"] != flow or c["state"] != OPEN:
                os.close(descriptors[0])
                continue
            self.mine[row] = socket.socket(fileno=descriptors[0])
            self.rx.pollfds[1 + row]["fd"] = descriptors[0]

    def _close_ended(self) -> None:
        for row, connection in list(self.mine.items()):
            if self.rx.pollfds[1 + row]["fd"] < 0:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # the supervisor's copy would hold it open
                connection.close()
                del self.mine[row]

    def _drain(self, writer: Writer, stop: int) -> None:
        """Take what had come of each stream when the end was called, then mark its end."""
        self._add()
        for row, connection in self.mine.items():
            self.rx.connections[row]["left"] = _queued(connection)
        stalled = drain_slices(
            lambda until_ns: int(receive_streams(self.rx.state, writer.record, stop, until_ns, True)),
            writer,
            _STALLED_SLICES,
        )
        while break_off_all(self.rx.state, writer.record) and stalled < _STALLED_SLICES:
            time.sleep(SLICE_NS / 1e9)
            stalled += 1
        self._close_ended()


def _descriptors() -> int:
    """How many files this process may have open, after it has asked for as many as it can get."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _queued(connection: socket.socket) -> int:
    """Bytes that can be read now."""
    size = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, size)
    return size[0]


def _source(address: Any) -> tuple[int, int, int]:
    """(address as two words, place) as layout.SOURCE has them."""
    host, port = address[0], address[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")
    scope = address[3] if len(address) > 3 else 0
    first, rest = struct.unpack("<qq", packed)
    return first, rest, struct.unpack("<q", struct.pack("<HHI", port, family, scope))[0]
