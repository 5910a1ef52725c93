"""What the dense arena costs and saves, and how much memory a worker takes.

The receive loop takes a flood of packets of one size on one CPU, nobody reads. Once into the dense arena:
how many packets/s, and which share of the arena bytes in use is payload, from the ring's descriptors. Once,
with the same loop, into slots of a fixed size (2 KiB; 16 KiB where packets are larger): how many packets/s.
Then the whole engine under such a flood: the private memory of its largest worker.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from numba import carray

import rings
from bench.commands import Rxring
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures, Setting
from engine.errors import Failed
from engine.net.libc import IOVEC, MMSGHDR, MSG_DONTWAIT, recvmmsg
from engine.net.receiver import CONTROL_BYTES, Receiver, await_packets, describe_message, receive
from engine.net.sockets import bind_udp, open_udp
from engine.spec import Listen
from rings.atomics import pointer
from rings.jit import compile_for, jit
from rings.layout import ALIGN, DESCRIPTOR
from rings.libc import monotonic_ns, realtime_ns
from rings.ring import Ring
from rings.writer import WRITER_STATE, Writer, publish, reserve

SIZES = {100: 64, 1472: 44, 8872: 7}  # bytes of a packet: packets in a GSO message
BATCH = 64
RCVBUF = 8 << 20
ANYWHERE = Listen("udp", "127.0.0.1", 0)
MOST_MB = 250

CLAIMS = (
    *(Claim(f"dense {size} B", figure="payload_share", at_least=0.6) for size in SIZES),
    *(Claim(f"dense {size} B", against=f"slots {size} B", at_least=0.95) for size in SIZES),
    Claim("worker memory", at_most=MOST_MB),
)

_SILENCE_S = 10  # no packet for so long: there is no sender
_SLICE_NS = 20_000_000


def cases(setting: Setting) -> Iterator[Case]:
    warm_s, window_s = (0.25, 0.5) if setting.quick else (1.0, 2.0)
    cpus = two_cpus()
    _compile()

    def fill(size: int, slot_bytes: int) -> Callable[[], Figures]:
        return lambda: _fill(size, slot_bytes, cpus, warm_s, window_s)

    for size, gso in SIZES.items():
        slot_bytes = 2048 if size <= 2048 else 16384
        base = {
            "size": size,
            "gso": gso,
            "batch": BATCH,
            "rcvbuf": RCVBUF,
            "cpus": cpus,
            "window_s": window_s,
        }
        yield Case(f"dense {size} B", "M/s", fill(size, 0), base)
        yield Case(f"slots {size} B", "M/s", fill(size, slot_bytes), base | {"slot_bytes": slot_bytes})
    yield Case("worker memory", "MB", lambda: _worker_memory(cpus, window_s), {"size": 8872, "batch": BATCH})


def _flood(port: int, size: int, cpu: int) -> Rxring:
    to, gso = f"127.0.0.1:{port}", str(SIZES[size])
    return Rxring("send", "--to", to, "--size", str(size), "--gso", gso, "--cpu", str(cpu))


def _fill(size: int, slot_bytes: int, cpus: tuple[int, int], warm_s: float, window_s: float) -> Figures:
    """One run; into slots of `slot_bytes`, or dense if that is 0."""
    with ExitStack() as stack:
        sock, _ = open_udp(ANYWHERE, timestamps=True, rcvbuf=RCVBUF)
        stack.enter_context(contextlib.closing(sock))
        port = bind_udp(sock, ANYWHERE)[1]
        ring = stack.enter_context(rings.create(f"bench{os.getpid()}"))
        writer = stack.enter_context(ring.writer())
        rx = Receiver.prepare(sock.fileno(), batch=BATCH, one_by_one=False, timestamps=True, packets=None)
        stack.enter_context(_flood(port, size, cpus[1]))
        loop = Pinned(cpus[0], _receive_for, rx, writer, slot_bytes, warm_s, window_s)
        packets, seconds = loop.result()
        descriptors, span = _live(ring)
    lengths = descriptors["length"].astype(np.int64)
    return {
        "value": packets / seconds / 1e6,
        "packets": packets,
        "seconds": seconds,
        "payload_share": float(lengths.sum() / span),
        "live_frames": len(descriptors),
        "ok": bool((lengths == size).all() and (np.diff(descriptors["number"].astype(np.int64)) == 1).all()),
    }


def _receive_for(
    rx: Receiver, writer: Writer, slot_bytes: int, warm_s: float, window_s: float
) -> tuple[int, float]:
    """(packets, seconds) of the window that begins `warm_s` after the first packet."""
    w, stop = writer.record[0], np.zeros(1, np.int64)
    if slot_bytes:
        rx.messages.headers["iovec_count"] = 1

    def run(seconds: float, enough: Callable[[], bool] = lambda: False) -> float:
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < seconds and not enough():
            deadline_ns = int(monotonic_ns()) + _SLICE_NS
            if slot_bytes:
                receive_into_slots(rx.state, writer.record, slot_bytes, deadline_ns)
            else:
                receive(rx.state, writer.record, stop.ctypes.data, deadline_ns, False)
        return elapsed

    if run(_SILENCE_S, lambda: w["head"] > 0) >= _SILENCE_S:
        raise Failed("no packet came")
    run(warm_s)
    before = int(w["head"])
    seconds = run(window_s)
    return int(w["head"]) - before, seconds


@jit
def receive_into_slots(rx_state, w_state, slot_bytes, deadline_ns):  # type: ignore[no-untyped-def]
    """`engine.net.receiver.receive` without a dense arena: message i of a call at i × slot_bytes."""
    rx, w = rx_state[0], w_state[0]
    headers = carray(pointer(rx.headers), rx.batch, MMSGHDR)
    iovecs = carray(pointer(rx.iovecs), 2 * rx.batch, IOVEC)
    while monotonic_ns() < deadline_ns:
        if rx.short != 0 and not await_packets(rx, 10):
            continue
        reserve(w, rx.batch, rx.batch * slot_bytes)  # nobody reads: there is always room
        start = w.position
        for i in range(rx.batch):
            iovecs[2 * i].base = w.arena + ((start + i * slot_bytes) & (w.arena_bytes - 1))
            iovecs[2 * i].length = slot_bytes
            headers[i].control_length = CONTROL_BYTES
        taken = np.int64(recvmmsg(rx.fd, rx.headers, rx.batch, MSG_DONTWAIT, 0))
        rx.short = 1 if taken < rx.batch else 0
        received_ns = realtime_ns()
        number, size = w.number, np.int64(0)
        for i in range(taken):
            number, _ = describe_message(rx, w, i, number, start + i * slot_bytes, i, received_ns)
            size += headers[i].length
        if taken > 0:
            publish(w, taken, number, start + taken * slot_bytes, size)


def _live(ring: Ring) -> tuple[Any, int]:
    """(descriptors of the frames that are intact, oldest first; arena bytes from the first to the last)."""
    geometry, first, last = ring.geometry, int(ring.counters["floor"]), int(ring.counters["published"])
    memory = np.frombuffer(ring.segment.map(writable=False), np.uint8)
    everything = memory[geometry.descriptors :][: geometry.frames * DESCRIPTOR.itemsize].view(DESCRIPTOR)
    descriptors = everything[np.arange(first, last) & (geometry.frames - 1)]
    offsets = descriptors["offset"].astype(np.int64) * ALIGN
    steps = np.diff(offsets) % geometry.arena_bytes
    return descriptors, int(steps.sum()) + int(descriptors["length"][-1])


def _worker_memory(cpus: tuple[int, int], window_s: float) -> Figures:
    """Private memory of each worker of an engine after some time under load."""
    with Rxring(
        "run", "--listen", "udp://127.0.0.1:0", "--rx-cpu", str(cpus[0]), "--consumer", f"latency@{cpus[1]}"
    ) as engine:
        ready = engine.next("ready")
        with _flood(ready["receivers"][0]["port"], 8872, cpus[1]):
            while engine.next("interval")["receivers"][0]["packets"] == 0:
                pass
            time.sleep(window_s)
            workers = [*ready["receivers"], *ready["consumers"]]
            private = {worker["name"]: _private_bytes(worker["pid"]) for worker in workers}
        summary = engine.end()
    counts = summary["consumers"][0]
    return {"value": max(private.values()) / 1e6, "private_bytes": private, "ok": counts["delivered"] > 0}


def _private_bytes(pid: int) -> int:
    """Of /proc/PID/smaps_rollup, in kB there: what no other process shares."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        lines = [line.split() for line in rollup if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    return sum(int(words[1]) for words in lines) * 1024


def _compile() -> None:
    rx = Receiver.prepare(-1, batch=1, one_by_one=False, timestamps=True, packets=None)
    w: Any = np.zeros(1, WRITER_STATE)
    compile_for(receive, rx.state, w, 0, 0, False)
    compile_for(receive_into_slots, rx.state, w, 0, 0)
    Writer.compile()
