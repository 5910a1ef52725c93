"""The process around the receive loop: `engine.net.receiver` does the work, this one's life is here."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.errors import Failed, Refused
from engine.net.address import Address
from engine.net.receiver import FAILED, FINISHED, SLICE, Receiver, give_up, receive, take_up
from engine.net.sockets import (
    DropCount,
    ReceiveBuffer,
    ask_for_gro,
    bind_udp,
    cut_off,
    discard,
    joined,
    open_udp,
    probe_udp,
    steer_by_cpu,
)
from engine.spec import UDP_BUFFER_BYTES, Listen, ReceiverSpec, RunSpec, wants_gro
from engine.worker import Worker
from rings.jit import compile_for
from rings.libc import monotonic_ns
from rings.ring import Ring, attach
from rings.writer import WRITER_STATE, Writer

SLICE_NS = 50_000_000
PUBLISH_NS = 200_000_000
_STALLED_SLICES = 6  # at the end: a ring that has had no room for so long gets none any more


def drain_slices(take: Callable[[int], int], writer: Writer, most: int) -> int:
    """Call take(CLOCK_MONOTONIC ns) until it answers other than SLICE, or `most` slices bring no new frame.

    How many slices have passed without one: in slices, not by the clock, for who was stopped has not waited.
    """
    stalled, head = 0, -1
    while stalled < most and take(int(monotonic_ns()) + SLICE_NS) == SLICE:
        now: Any = writer.record[0]["head"]
        stalled = stalled + 1 if now == head else 0
        head = now
    return stalled


@dataclass(slots=True)
class Receiving:
    """A UDP receiver before it runs. Socket and working memory outlive any one process of it."""

    spec: ReceiverSpec
    sock: socket.socket
    rx: Receiver
    buffer: ReceiveBuffer
    gro: bool
    drops: DropCount = field(init=False)

    def __post_init__(self) -> None:
        self.drops = DropCount(self.sock)

    # ── in the supervisor ────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def compile() -> None:
        """Compile what it runs, before there is a socket that could drop packets meanwhile."""
        rx = Receiver.prepare(-1, batch=1, one_by_one=False, timestamps=True, packets=None)
        w = np.zeros(1, WRITER_STATE)
        compile_for(receive, rx.state, w, 0, 0, True)
        compile_for(take_up, rx.state, w)
        compile_for(give_up, rx.state, w)
        Writer.compile()

    @staticmethod
    def probe(listen: Listen) -> None:
        """Refused if `bind` would be, before anything else is done."""
        probe_udp(listen)

    @classmethod
    def open(cls, spec: ReceiverSpec, run: RunSpec) -> Receiving:
        """Its socket, set up and not bound."""
        sock, buffer = open_udp(
            spec.listen,
            timestamps=run.timestamps,
            rcvbuf=spec.rcvbuf or UDP_BUFFER_BYTES,
            share=spec.receivers > 1,
            busy_poll=spec.busy_poll,
        )
        gro = wants_gro(spec, run) and ask_for_gro(sock)
        if spec.gro == "on" and not gro:
            raise Refused("--gro on: this kernel has no UDP GRO (Linux 5.0 does): give auto or off")
        rx = Receiver.prepare(
            sock.fileno(),
            batch=spec.batch,
            one_by_one=spec.receive == "recvmsg",
            timestamps=run.timestamps,
            gro=gro,
            sources=run.sources,
            packets=run.packets if len(run.receivers) == 1 else None,
            spin=spec.rx_wait == "spin",
        )
        return cls(spec, sock, rx, buffer, gro)

    def bind(self, port: int) -> Address:
        """The address as bound, to this port. From now on packets come."""
        bound = bind_udp(self.sock, replace(self.spec.listen, port=port), self.spec.connect)
        if self.spec.steer == "cpu":
            steer_by_cpu(self.sock, self.spec.receivers)
        return bound

    def remark(self) -> str | None:
        """What to say of where it listens: the device on which a group was joined, if nobody chose it."""
        return joined(self.spec.listen)

    def attend(self, poll: select.poll) -> None:
        """Nothing has to be done for it while it runs."""

    @property
    def is_full(self) -> bool:
        return False

    def cut(self, poll: select.poll) -> None:
        cut_off(self.sock)

    def discard(self) -> tuple[int, int]:
        """What is left in the queue at the end: (frames, packets)."""
        return discard(self.sock)

    def dropped(self) -> int:
        """By the kernel so far, in packets; with GRO in frames."""
        return self.drops.read()

    def unfinished(self) -> str | None:
        """None: what the ring has no room for at the end is counted as refused."""
        return None

    def details(self) -> dict[str, Any]:
        return {}

    def forget(self, *, mine: bool) -> None:
        """In a forked child: a consumer would keep the port when all others are gone."""
        if not mine:
            self.sock.close()

    def close(self) -> None:
        self.sock.close()

    # ── in the receiver's process ────────────────────────────────────────────────────────────────────

    def run(self, worker: Worker, ring_name: str, ring_number: int) -> None:
        """The life of one receiver process. Failed where the socket cannot be received from."""
        ring = attach(ring_name, ring_number)
        writer = ring.writer()
        stop = worker.stop_address
        take_up(self.rx.state, writer.record)
        worker.ready({})
        published_ns = 0
        while True:
            deadline_ns = int(monotonic_ns()) + SLICE_NS
            why = receive(self.rx.state, writer.record, stop, deadline_ns, False)
            if why == FAILED:
                raise Failed(f"receiving on {self.spec.listen}: {os.strerror(self.rx.state[0]['failure'])}")
            if why != SLICE:
                break
            if not worker.supervisor_lives():
                cut_off(self.sock)  # what is queued is drained and delivered, nothing is added
                break
            if deadline_ns - published_ns > PUBLISH_NS:
                worker.publish({})
                published_ns = deadline_ns
        if why != FINISHED:
            self._drain(writer, stop)
        writer.close()
        worker.publish({"finished": why == FINISHED})
        ring.forget()

    def finish(self, ring: Ring, stop: int) -> None:
        """The last acts of a receiver that died before them, in its place: readers wait for the end."""
        with ring.writer() as writer:
            take_up(self.rx.state, writer.record)
            self._drain(writer, stop)

    def _drain(self, writer: Writer, stop: int) -> None:
        """Take what is queued, as long as the readers make room for it; refuse what then still waits."""
        drain_slices(
            lambda until_ns: int(receive(self.rx.state, writer.record, stop, until_ns, True)),
            writer,
            _STALLED_SLICES,
        )
        give_up(self.rx.state, writer.record)
