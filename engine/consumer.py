"""The process around a handler: poll → handler → release, until the ring is closed and drained.

The loop is compiled once, for all handlers: it calls the handler's `on_batch` through a pointer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import Failed
from engine.handlers.api import RAISED, Handler, Options, compiled
from engine.net.stamp import StampName
from engine.spec import ConsumerSpec
from engine.worker import Worker
from rings.jit import compile_for, jit
from rings.libc import monotonic_ns
from rings.reader import READER_STATE, Reader, is_closed, poll, release
from rings.ring import Ring, attach
from rings.wait import wait_any

SLICE, DRAINED = 0, 1  # why `consume` came back; anything else: the handler's code
_SLICE_NS = 50_000_000
_PUBLISH_NS = 200_000_000  # how often the handler's state goes to the status segment
_FIRST_FRAMES = 64
_LONG_NS = 10_000_000  # a batch that took longer was too large: its frames are held all that time


@jit
def consume(readers, on_batch, handler_state, strategy, pace, deadline_ns):  # type: ignore[no-untyped-def]
    """Hand batches to `on_batch` until CLOCK_MONOTONIC `deadline_ns` (SLICE) or the end (DRAINED).

    readers: READER_STATE (n,), of n rings, which are read in turn. A batch is released after it was handled;
    a handler that answers another code than 0 ends the loop with it, its batch not released. pace: i8 (1,),
    the most frames of a batch; it follows how long the handler takes, so that a slow one, too, releases and
    looks at the clock often.
    """
    before_ns = monotonic_ns()
    while True:
        largest, drained = 0, 0
        for i in range(len(readers)):
            r = readers[i]
            closed = is_closed(r)
            count = poll(r, pace[0])
            if count > 0:
                code = on_batch(handler_state, r.batch_descriptors, count, r.batch_arena)
                if code != 0:
                    return code
                release(r, count)
                largest = max(largest, count)
            elif closed:
                drained += 1
        if drained == len(readers):
            return DRAINED
        if largest == 0:
            wait_any(readers, strategy, deadline_ns)
        now_ns = monotonic_ns()
        if largest > 0 and now_ns - before_ns > _LONG_NS:
            pace[0] = max(largest * _LONG_NS // (2 * (now_ns - before_ns)), 1)
        elif largest == pace[0]:
            pace[0] = min(2 * largest, readers[0].max_frames)
        if now_ns >= deadline_ns:
            return SLICE
        before_ns = now_ns


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer before it runs: compiled in the supervisor, run in a process forked from it."""

    spec: ConsumerSpec
    handler: Handler
    on_batch: Any
    stamp: StampName

    @classmethod
    def compile(cls, spec: ConsumerSpec, handler: Handler, stamp: StampName) -> Consumer:
        on_batch = compiled(handler)
        compile_for(consume, np.zeros(1, READER_STATE), on_batch, 0, 0, np.zeros(1, np.int64), 0)
        return cls(spec, handler, on_batch, stamp)

    @property
    def state_bytes(self) -> int:
        return int(np.dtype(self.handler.dtype).itemsize)

    def run(self, worker: Worker, engine: str, rings: int, *, restarts: int) -> None:
        """The life of one consumer process, which reads all rings. Failed where the handler gives up."""
        attached = [attach(engine, number) for number in range(rings)]
        records = np.zeros(rings, READER_STATE)
        readers = [self._attach(ring, records[i : i + 1]) for i, ring in enumerate(attached)]
        state = np.zeros(1, self.handler.dtype)
        options = Options(
            stamp=self.stamp, argument=self.spec.argument, name=self.spec.name, restarts=restarts
        )
        self.handler.start(state[0], options)
        facts = {"since_packet": int(records["packets"].sum())}
        worker.ready(facts, _bytes(state))
        strategy, pace = readers[0].strategy, np.full(1, _FIRST_FRAMES)
        published_ns = 0
        while True:
            deadline_ns = int(monotonic_ns()) + _SLICE_NS
            why = consume(records, self.on_batch, state.ctypes.data, strategy, pace, deadline_ns)
            facts["handled"] = int(records["delivered"].sum())
            if why == DRAINED or (why == SLICE and _is_deserted(worker, attached, records)):
                break
            if why != SLICE:
                worker.publish(facts, _bytes(state))
                raise Failed(f"consumer {self.spec.name}: {self._failure(state, int(why))}")
            if deadline_ns - published_ns > _PUBLISH_NS:
                worker.publish(facts, _bytes(state))
                published_ns = deadline_ns
        self.handler.finish(state[0])
        worker.publish(facts | {"done": True}, _bytes(state))  # nothing is left to do again
        for reader, ring in zip(readers, attached, strict=True):
            reader.close()
            ring.forget()

    def _attach(self, ring: Ring, record: NDArray[Any]) -> Reader:
        """Small steps: what is handled is released soon, and the writer never stands still."""
        return ring.reader(
            self.spec.name,
            policy=self.spec.policy,
            wait=self.spec.wait,
            split=self.spec.split,
            member=self.spec.member,
            by=self.spec.by,
            demote_s=self.spec.demote,
            max_frames=max(ring.geometry.frames // 16, 1),
            max_bytes=ring.geometry.arena_bytes // 16,
            record=record,
        )

    def _failure(self, state: NDArray[Any], code: int) -> str:
        if code == RAISED:
            return "the handler raised an exception"
        error = self.handler.report(state[0]).get("error")
        return f"{error}" if error else f"the handler stopped with code {code} ({os.strerror(abs(code))})"


def _bytes(state: NDArray[Any]) -> memoryview:
    return memoryview(state.view(np.uint8).data)


def _is_deserted(worker: Worker, rings: list[Ring], readers: NDArray[Any]) -> bool:
    """The supervisor is gone, so are the receivers, and nothing is left to read."""
    if worker.supervisor_lives() or any(ring.state == "live" for ring in rings):
        return False
    return all(
        int(ring.counters["published"]) <= cursor
        for ring, cursor in zip(rings, readers["cursor"].tolist(), strict=True)
    )
