"""One Python process hands messages of 100 bytes to another: the ring's Python face, and what else there is.

The writer makes one call for each message, in every case. The reader takes them one by one; or, where it can
be had, many at a time: the ring's batch as a matrix, faster-fifo's `get_many`. Nothing is dropped: who is
full waits (pyzmq by PUSH and PULL, iceoryx2 without overflow), and the writer stays until all is read: pyzmq
loses what a full reader has not yet taken when the writer leaves. Each message carries a number, and the sum
of them that the reader makes must be right. Both ends have a CPU of their own. What is not installed is left
out: `pip install 'rxring[peers]'` brings it.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import rings
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures, Setting
from rings.reader import Reader
from rings.segment import SHM
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
Total = Callable[[int], int]  # reads so many messages: the sum of their numbers


def cases(setting: Setting) -> Iterator[Case]:
    count = 50_000 if setting.quick else 500_000
    cpus = two_cpus()
    Writer.compile()
    Reader.compile()
    parameters = {"messages": count, "size": SIZE, "cpus": cpus}
    for name, (prepare, module) in _WAYS.items():
        skip = "" if find_spec(module) else f"{module} is not installed: pip install 'rxring[peers]'"
        yield Case(name, "M/s", _measure(prepare, count, cpus), parameters, skip)


def _measure(prepare: Prepare, count: int, cpus: tuple[int, int]) -> Callable[[], Figures]:
    def run() -> Figures:
        all_read = multiprocessing.get_context("fork").Event()
        with ExitStack() as stack:
            writer, reader = prepare(stack)
            reading = Pinned(cpus[1], _read, reader, count, all_read)
            writing = Pinned(cpus[0], _write, writer, count, all_read)
            began = writing.result()
            total, ended = reading.result()
        seconds = ended - began
        return {
            "value": count / seconds / 1e6,
            "seconds": seconds,
            "ok": total == count * (count - 1) // 2,
        }

    return run


def _write(writer: Callable[[], Put], count: int, all_read: Event) -> float:
    put = writer()
    began = time.monotonic()
    for n in range(count):
        put(n.to_bytes(8, "little") + _REST)
    all_read.wait(_PATIENCE_S)
    return began


def _read(reader: Callable[[], Total], count: int, all_read: Event) -> tuple[int, float]:
    total = reader()
    found, ended = total(count), time.monotonic()
    all_read.set()
    return found, ended


def number(message: Any) -> int:
    return int.from_bytes(message[:8], "little")


# ── the ways: each prepares what a writer and a reader open in processes of their own ────────────────────

Ends = tuple[Callable[[], Put], Callable[[], Total]]
Prepare = Callable[[ExitStack], Ends]


def _ring(total: Callable[[Reader, int], int]) -> Prepare:
    def prepare(stack: ExitStack) -> Ends:
        ring = stack.enter_context(rings.create(f"bench{os.getpid()}"))

        def reader() -> Total:
            own = rings.attach(ring.name).reader()
            return lambda count: total(own, count)

        def writer() -> Put:
            while not ring.readers():  # what is written before it has joined is not for it
                time.sleep(0.001)
            return rings.attach(ring.name).writer().write

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


def _queue(stack: ExitStack) -> Ends:
    queue: Any = multiprocessing.get_context("fork").Queue()
    return lambda: queue.put, lambda: lambda count: sum(number(queue.get()) for _ in range(count))


def _pipe(stack: ExitStack) -> Ends:
    out, into = multiprocessing.Pipe(duplex=False)
    stack.callback(out.close)
    stack.callback(into.close)
    receive = out.recv_bytes
    return lambda: into.send_bytes, lambda: lambda count: sum(number(receive()) for _ in range(count))


def _faster_fifo(stack: ExitStack) -> Ends:
    module: Any = importlib.import_module("faster_fifo")
    queue = module.Queue(max_size_bytes=32 << 20)

    def total(count: int) -> int:
        found = 0
        while count > 0:
            messages = queue.get_many(max_messages_to_get=_MANY, timeout=_PATIENCE_S)
            found += sum(map(number, messages))
            count -= len(messages)
        return found

    return lambda: lambda message: queue.put(message, timeout=_PATIENCE_S), lambda: total


def _pyzmq(stack: ExitStack) -> Ends:
    """Each end makes its context in its own process: one that is forked hangs."""
    address = f"ipc://{_folder(stack)}/socket"

    def writer() -> Put:
        zmq: Any = importlib.import_module("zmq")
        push = zmq.Context().socket(zmq.PUSH)
        push.bind(address)
        push.send(b"")  # waits until the reader is there
        put: Put = push.send
        return put

    def reader() -> Total:
        zmq: Any = importlib.import_module("zmq")
        pull = zmq.Context().socket(zmq.PULL)
        pull.connect(address)
        pull.recv()
        return lambda count: sum(number(pull.recv()) for _ in range(count))

    return writer, reader


def _iceoryx2(stack: ExitStack) -> Ends:
    """Publish and subscribe; all its files are in our folder, or in /dev/shm under the folder's name."""
    folder = _folder(stack)
    stack.callback(_unlink_all, folder.name)

    def writer() -> Put:
        iox: Any = importlib.import_module("iceoryx2")
        service = _service(iox, folder)
        waiting = iox.BackpressureStrategy.RetryUntilDelivered
        publisher = service.publisher_builder().backpressure_strategy(waiting).create()
        while service.dynamic_config.number_of_subscribers == 0:
            time.sleep(0.001)

        def put(message: bytes) -> None:
            while publisher.send_copy(_Message.from_buffer_copy(message)) == 0:
                pass  # it does not wait for a reader that has not looked yet

        return put

    def reader() -> Total:
        service = _service(importlib.import_module("iceoryx2"), folder)
        receive = service.subscriber_builder().buffer_size(_MANY).create().receive

        def total(count: int) -> int:
            found = 0
            while count > 0:
                if (sample := receive()) is not None:
                    found += number(ctypes.string_at(sample.payload_ptr, SIZE))
                    count -= 1
            return found

        return total

    return writer, reader


_Message = ctypes.c_uint8 * SIZE


def _service(iox: Any, folder: Path) -> Any:
    config = iox.config.default()
    config.global_cfg.root_path = iox.Path.new(str(folder))
    config.global_cfg.prefix = iox.FileName.new(folder.name)
    node = iox.NodeBuilder.new().config(config).create(iox.ServiceType.Ipc)
    builder = node.service_builder(iox.ServiceName.new("bench")).publish_subscribe(_Message)
    return builder.enable_safe_overflow(False).subscriber_max_buffer_size(_MANY).open_or_create()


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(TemporaryDirectory(prefix=f"bench{os.getpid()}-")))


def _unlink_all(prefix: str) -> None:
    for path in SHM.glob(f"{prefix}*"):
        path.unlink()


# name: how it is prepared, and the module that it needs
_WAYS: dict[str, tuple[Prepare, str]] = {
    "rxring, one by one": (_ring(_one_by_one), "rings"),
    "rxring, batches": (_ring(_in_batches), "rings"),
    "multiprocessing.Queue": (_queue, "multiprocessing"),
    "multiprocessing.Pipe": (_pipe, "multiprocessing"),
    "faster-fifo": (_faster_fifo, "faster_fifo"),
    "pyzmq": (_pyzmq, "zmq"),
    "iceoryx2": (_iceoryx2, "iceoryx2"),
}
