"""The process around the receive loop: `engine.net.receiver` does the work, this one's life is here."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import Failed
from engine.net.receiver import FAILED, FINISHED, SLICE, Receiver, give_up, receive, take_up
from engine.net.sockets import cut_off
from engine.spec import ReceiverSpec
from engine.worker import Worker
from rings.jit import compile_for
from rings.libc import monotonic_ns
from rings.ring import Ring, attach
from rings.writer import WRITER_STATE, Writer

_SLICE_NS = 50_000_000
_PUBLISH_NS = 200_000_000
_STALLED_SLICES = 6  # at the end: a ring that has had no room for so long gets none any more


def compile_all() -> None:
    """Compile what a receiver runs, before there is a socket that could drop packets meanwhile."""
    rx = Receiver.prepare(-1, batch=1, one_by_one=False, timestamps=True, packets=None)
    w = np.zeros(1, WRITER_STATE)
    compile_for(receive, rx.state, w, 0, 0, True)
    compile_for(take_up, rx.state, w)
    compile_for(give_up, rx.state, w)
    Writer.compile()


@dataclass(frozen=True, slots=True)
class Receiving:
    """A receiver before it runs. Socket and working memory outlive any one process of it."""

    spec: ReceiverSpec
    sock: socket.socket
    rx: Receiver

    def run(self, worker: Worker, ring_name: str, ring_number: int) -> None:
        """The life of one receiver process. Failed where the socket cannot be received from."""
        ring = attach(ring_name, ring_number)
        writer = ring.writer()
        stop = worker.stop_address
        take_up(self.rx.state, writer.record)
        worker.ready({})
        published_ns = 0
        while True:
            deadline_ns = int(monotonic_ns()) + _SLICE_NS
            why = receive(self.rx.state, writer.record, stop, deadline_ns, False)
            if why == FAILED:
                raise Failed(f"receiving on {self.spec.listen}: {os.strerror(self.rx.state[0]['failure'])}")
            if why != SLICE:
                break
            if not worker.supervisor_lives():
                cut_off(self.sock)  # what is queued is drained and delivered, nothing is added
                break
            if deadline_ns - published_ns > _PUBLISH_NS:
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
        # In slices, not by the clock: who was stopped for a while has not waited.
        stalled, published = 0, -1
        while stalled < _STALLED_SLICES:
            deadline_ns = int(monotonic_ns()) + _SLICE_NS
            if receive(self.rx.state, writer.record, stop, deadline_ns, True) != SLICE:
                break
            now: Any = writer.record[0]["head"]
            stalled = stalled + 1 if now == published else 0
            published = now
        give_up(self.rx.state, writer.record)
