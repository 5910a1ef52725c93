"""One Python process hands messages of 100 bytes to another: the ring's Python face, and what else there is.

The writer makes one call for each message, in every case. The reader takes them one by one; or, where it can
be had, many at a time: the ring's batch as a matrix, faster-fifo's `get_many`. Each message carries a number,
and the reader's sum of them must be right. Both ends have a CPU of their own. What is not installed is left
out: `pip install 'rxring[peers]'` brings it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import numpy as np

import rings
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures
from rings.reader import Reader
from rings.writer import Writer

CLAIMS = (
    Claim("rxring, batches", against="multiprocessing.Queue", at_least=2),
    Claim("rxring, batches", against="multiprocessing.Pipe", at_least=1),
    Claim("rxring, one by one", against="multiprocessing.Queue", at_least=1),
)

SIZE = 100
_REST = bytes(SIZE - 8)
_MANY = 1000
_PATIENCE_S = 60.0  # longer than any run
Put = Callable[[bytes], Any]
Finish = Callable[[], Any]  # waits until all that was put is on its way: then the writer's process ends
Total = Callable[[int], int]  # reads so many messages: the sum of their numbers


def cases(quick: bool) -> Iterator[Case]:
    count = 50_000 if quick else 500_000
    cpus = two_cpus()
    Writer.compile()
    Reader.compile()
    parameters = {"messages": count, "size": SIZE, "cpus": cpus}
    for name, (prepare, module) in _WAYS.items():
        skip = "" if find_spec(module) else f"{module} is not installed: pip install 'rxring[peers]'"
        yield Case(name, "M/s", _measure(prepare, count, cpus), parameters, skip)


def _measure(prepare: Prepare, count: int, cpus: tuple[int, int]) -> Callable[[], Figures]:
    def run() -> Figures:
        with ExitStack() as stack:
            writer, reader = prepare(stack)
            reading = Pinned(cpus[1], _read, reader, count)
            writing = Pinned(cpus[0], _write, writer, count)
            began = writing.result()
            total, ended = reading.result()
        seconds = ended - began
        return {
            "value": count / seconds / 1e6,
            "seconds": seconds,
            "ok": total == count * (count - 1) // 2,
        }

    return run


def _write(writer: Callable[[], tuple[Put, Finish]], count: int) -> float:
    put, finish = writer()
    began = time.monotonic()
    for n in range(count):
        put(n.to_bytes(8, "little") + _REST)
    finish()
    return began


def _read(reader: Callable[[], Total], count: int) -> tuple[int, float]:
    total = reader()(count)
    return total, time.monotonic()


def number(message: Any) -> int:
    return int.from_bytes(message[:8], "little")


# ── the ways: each prepares what a writer and a reader open in processes of their own ────────────────────

Open = Callable[[], tuple[Put, Finish]]
Prepare = Callable[[ExitStack], tuple[Open, Callable[[], Total]]]


def _ring(total: Callable[[Reader, int], int]) -> Prepare:
    def prepare(stack: ExitStack) -> tuple[Open, Callable[[], Total]]:
        ring = stack.enter_context(rings.create(f"bench{os.getpid()}"))

        def reader() -> Total:
            own = rings.attach(ring.name).reader()
            return lambda count: total(own, count)

        def writer() -> tuple[Put, Finish]:
            while not ring.readers():  # what is written before it has joined is not for it
                time.sleep(0.001)
            own = rings.attach(ring.name).writer()
            return own.write, own.close

        return writer, reader

    return prepare


def _one_by_one(reader: Reader, count: int) -> int:
    total = 0
    for batch in reader:
        for i in range(len(batch)):
            total += number(batch.payload(i).tobytes())
        count -= len(batch)
        if count == 0:
            break
    return total


def _in_batches(reader: Reader, count: int) -> int:
    total = 0
    for batch in reader:
        matrix = batch.matrix
        assert matrix is not None  # all are of one size
        total += int(matrix[:, :8].copy().view(np.uint64).sum())
        count -= len(batch)
        if count == 0:
            break
    return total


def _queue(stack: ExitStack) -> tuple[Open, Callable[[], Total]]:
    queue: Any = multiprocessing.get_context("fork").Queue()

    def finish() -> None:
        queue.close()
        queue.join_thread()  # which does the writing

    return lambda: (queue.put, finish), lambda: lambda count: sum(number(queue.get()) for _ in range(count))


def _pipe(stack: ExitStack) -> tuple[Open, Callable[[], Total]]:
    out, into = multiprocessing.Pipe(duplex=False)
    stack.callback(out.close)
    stack.callback(into.close)
    receive = out.recv_bytes
    return lambda: (
        into.send_bytes,
        _nothing,
    ), lambda: lambda count: sum(number(receive()) for _ in range(count))


def _nothing() -> None:
    return


def _faster_fifo(stack: ExitStack) -> tuple[Open, Callable[[], Total]]:
    module: Any = importlib.import_module("faster_fifo")
    queue = module.Queue(max_size_bytes=32 << 20)

    def total(count: int) -> int:
        found = 0
        while count > 0:
            messages = queue.get_many(max_messages_to_get=_MANY, timeout=_PATIENCE_S)
            found += sum(map(number, messages))
            count -= len(messages)
        return found

    return lambda: (lambda message: queue.put(message, timeout=_PATIENCE_S), _nothing), lambda: total


# name: how it is prepared, and the module that it needs
_WAYS: dict[str, tuple[Prepare, str]] = {
    "rxring, one by one": (_ring(_one_by_one), "rings"),
    "rxring, batches": (_ring(_in_batches), "rings"),
    "multiprocessing.Queue": (_queue, "multiprocessing"),
    "multiprocessing.Pipe": (_pipe, "multiprocessing"),
    "faster-fifo": (_faster_fifo, "faster_fifo"),
}
