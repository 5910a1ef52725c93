"""The engine against other ways to receive, under the same flood.

`rxring send` sends packets of 100 bytes as fast as it can, as GSO messages of 64, from one CPU. On the
other one, in turn: `rxring run` as it comes, and with `--gro off`; plain recvmmsg loops in C that ask the
kernel for the same (GRO and timestamps; timestamps), and for nothing; a tight loop around
`socket.recv_into`; a datagram protocol of asyncio, and the same on uvloop. The engine has a blocking
`latency` consumer, which with two CPUs must share one: the receiver's, or ("apart") the sender's, which then
sends less. How it is counted, and what `spare` is, stands in bench/flood.py.

Three take only what their own senders send, on the same CPUs, with the same packets and receive buffer:
iperf3 (`-u -b 0`), a call for each packet, no GSO; sockperf (`throughput`), likewise; spead2, whose packets
have 96 bytes (theirs are multiples of 8) and make heaps of 1,000, with GSO and GRO as it likes. What these
senders gave is in `sent_per_second`: where it is hardly more than what came, the sender was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench import native
from bench.flood import BATCH, RCVBUF, SILENCE_S, Flood, figures
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.place import LO, Side
from bench.runner import Case, Claim, Figures, Setting
from engine.errors import Failed

PLACES = ("lo",)
CLAIMS = (
    Claim("rxring --gro off", against="C, timestamps", at_least=0.95),
    Claim("rxring --gro off", against="C", at_least=0.90),
    Claim("rxring --gro off", against="recv_into", at_least=1.5),
    Claim("rxring", against="C", at_least=8),
    Claim("rxring", against="C, timestamps", at_least=0.95),
    Claim("rxring", against="recv_into", at_least=1.5),
    Claim("rxring", against="asyncio", at_least=20),
    Claim("rxring", against="C, GRO, timestamps", at_least=0.5),
)

SIZE, SEGMENTS = 100, 64
HEAP, IN_PACKET = 56_000, 56  # bytes of spead2's: of a heap, and of it in a packet, whose header has 40
_ITEM = 0x1000  # what is in a heap
_LONGEST_S = 60  # then a program is killed

Receive = Callable[[Flood, socket.socket], Figures]


def cases(setting: Setting) -> Iterator[Case]:
    warm_s, window_s = (0.25, 0.5) if setting.quick else (1.0, 2.0)
    receiver, sender = two_cpus()
    place = setting.places[0] if setting.places else LO
    flood = Flood(SIZE, SEGMENTS, receiver, sender, warm_s, window_s, place)
    base = flood.parameters

    for gro, suffix in (("auto", ""), ("off", " --gro off")):
        for where, consumer in (("", receiver), (", apart", sender)):
            engine = functools.partial(flood.engine, consumer, gro)
            parameters = base | {"consume_cpu": consumer, "gro": gro}
            yield Case(f"rxring{suffix}{where}", "M/s", engine, parameters)
    c_cases = (("C, GRO, timestamps", True, True), ("C, timestamps", True, False), ("C", False, False))
    for name, timestamps, with_gro in c_cases:
        loop = functools.partial(flood.c, timestamps=timestamps, gro=with_gro)
        yield Case(name, "M/s", loop, base | {"batch": BATCH}, native.missing())
    ours: tuple[tuple[str, Receive, str], ...] = (
        ("recv_into", _recv_into, ""),
        ("asyncio", _asyncio, ""),
        ("uvloop", _uvloop, _missing("uvloop")),
    )
    for name, receive, skip in ours:
        peer = functools.partial(flood.peer, functools.partial(receive, flood))
        yield Case(name, "M/s", peer, base, skip)
    theirs: tuple[tuple[str, Callable[[Flood], Figures], str], ...] = (
        ("iperf3", _iperf3, _not_there("iperf3")),
        ("sockperf", _sockperf, _not_there("sockperf")),
        ("spead2", _spead2, _missing("spead2")),
    )
    for name, run, skip in theirs:
        parameters = {
            key: value for key, value in base.items() if key not in ("gso", "flows", "rate", "paced")
        }
        yield Case(name, "M/s", functools.partial(run, flood), parameters | {"sender": f"{name}'s own"}, skip)


def _missing(module: str) -> str:
    return "" if find_spec(module) else f"{module} is not installed: pip install 'rxring[peers]'"


def _not_there(program: str) -> str:
    return "" if shutil.which(program) else f"there is no {program}: install it"


# ── receivers of our flood ───────────────────────────────────────────────────────────────────────────


def _recv_into(flood: Flood, sock: socket.socket) -> Figures:
    return figures(*Pinned(flood.receive_cpu, _recv_into_loop, sock, flood.warm_s, flood.window_s).result())


def _recv_into_loop(sock: socket.socket, warm_s: float, window_s: float) -> tuple[int, float, float, int]:
    """(packets, seconds, CPU seconds, bytes too many or missing). Looks at the clock every 256 packets."""
    buffer = bytearray(2048)
    recv_into = sock.recv_into
    recv_into(buffer)
    begin = time.monotonic() + warm_s
    while time.monotonic() < begin:
        for _ in range(256):
            recv_into(buffer)
    begin, cpu_begin, packets, size = time.monotonic(), time.process_time(), 0, 0
    while time.monotonic() < begin + window_s:
        for _ in range(256):
            size += recv_into(buffer)
        packets += 256
    return packets, time.monotonic() - begin, time.process_time() - cpu_begin, size - packets * SIZE


def _asyncio(flood: Flood, sock: socket.socket) -> Figures:
    return _on_loop(flood, sock, asyncio.new_event_loop)


def _uvloop(flood: Flood, sock: socket.socket) -> Figures:
    module: Any = importlib.import_module("uvloop")
    return _on_loop(flood, sock, module.new_event_loop)


def _on_loop(flood: Flood, sock: socket.socket, new: Callable[[], asyncio.AbstractEventLoop]) -> Figures:
    sock.setblocking(False)

    def receive() -> tuple[int, float, float, int]:
        with asyncio.Runner(loop_factory=new) as runner:
            return runner.run(_asyncio_loop(sock, flood.warm_s, flood.window_s))

    return figures(*Pinned(flood.receive_cpu, receive).result())


class _Counter(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.packets = self.size = 0

    def datagram_received(self, data: bytes, address: object) -> None:
        self.packets += 1
        self.size += len(data)
        self.came.set()


async def _asyncio_loop(sock: socket.socket, warm_s: float, window_s: float) -> tuple[int, float, float, int]:
    loop = asyncio.get_running_loop()
    transport, counter = await loop.create_datagram_endpoint(_Counter, sock=sock)
    with contextlib.closing(transport):
        try:
            await asyncio.wait_for(counter.came.wait(), SILENCE_S)
        except TimeoutError:
            raise Failed("no packet came") from None
        await asyncio.sleep(warm_s)
        begin, cpu_begin, packets, size = time.monotonic(), time.process_time(), counter.packets, counter.size
        await asyncio.sleep(window_s)
        packets, size = counter.packets - packets, counter.size - size
    return packets, time.monotonic() - begin, time.process_time() - cpu_begin, size - packets * SIZE


# ── those that bring their own sender ────────────────────────────────────────────────────────────────


def _iperf3(flood: Flood) -> Figures:
    """It tests for whole seconds. Packets that came: those it expected, without those it missed."""
    side, port, seconds = flood.place.receive, _free_port(flood.place.receive), _whole_seconds(flood)
    serve = side.command("iperf3", "-s", "-1", "-B", side.host, "-p", str(port))
    with _started(serve, flood.receive_cpu) as server:
        _await_socket(side, port, "tcp")
        what = ("-u", "-b", "0", "-l", str(SIZE), "-w", str(RCVBUF // 2), "-t", str(seconds), "-J")
        told = json.loads(_output(flood, "iperf3", "-c", side.host, "-p", str(port), *what))
        server.wait(_LONGEST_S)
    if "error" in told:
        raise Failed(f"iperf3: {told['error']}")
    came, sent = told["end"]["sum_received"], told["end"]["sum_sent"]
    packets = came["packets"] - came["lost_packets"]
    cpu_s = told["end"]["cpu_utilization_percent"]["remote_total"] / 100 * came["seconds"]
    found = figures(packets, came["seconds"], cpu_s, came["bytes"] - packets * SIZE)
    found["ok"] = found["ok"] and 0 < packets <= sent["packets"]
    return found | {"sent_per_second": sent["packets"] / sent["seconds"]}


def _sockperf(flood: Flood) -> Figures:
    """Its server counts from start to end; how long that was, its client says."""
    side, port, seconds = flood.place.receive, _free_port(flood.place.receive), _whole_seconds(flood)
    where = ("-i", side.host, "-p", str(port), "--buffer-size", str(RCVBUF // 2))
    with _started(side.command("sockperf", "server", *where), flood.receive_cpu) as server:
        _await_socket(side, port, "udp")
        said = _output(flood, "sockperf", "throughput", *where, "-m", str(SIZE), "-t", str(seconds))
        cpu_before = _cpu_of_children()  # the server's is not in it yet
        server.send_signal(signal.SIGINT)
        answer = server.communicate(timeout=_LONGEST_S)[0]
    sent = re.search(r"Total of (\d+) messages sent in ([\d.]+) sec", said)
    received = re.search(r"Total (\d+) messages received", answer)
    if not (sent and received):
        raise Failed(f"sockperf says nothing of what came: {answer.strip()[-200:]}")
    packets, lasted = int(received[1]), float(sent[2])
    found = figures(packets, lasted, _cpu_of_children() - cpu_before, 0)
    found["ok"] = 0 < packets <= int(sent[1])
    return found | {"sent_per_second": int(sent[1]) / lasted}


def _spead2(flood: Flood) -> Figures:
    host, port = flood.place.receive.host, _free_port(flood.place.receive)
    with flood.place.receive:
        receiving = Pinned(flood.receive_cpu, _receive_heaps, flood, host, port)
    _await_socket(flood.place.receive, port, "udp")
    with flood.place.send:
        sending = Pinned(
            flood.send_cpu, _send_heaps, flood.send_cpu, host, port, 3 * flood.warm_s + flood.window_s
        )
    *counted, came = receiving.result()
    packets, seconds = sending.result()
    found = figures(*counted)
    found["ok"] = found["ok"] and 0 < came <= packets
    return found | {"sent_per_second": packets / seconds}


def _receive_heaps(flood: Flood, host: str, port: int) -> tuple[int, float, float, int, int]:
    """(packets, seconds, CPU seconds, heaps of another size, all packets that came)."""
    spead2: Any = importlib.import_module("spead2")
    recv: Any = importlib.import_module("spead2.recv")
    logging.getLogger("spead2").setLevel(logging.ERROR)  # it tells of each heap that misses a packet
    pool = spead2.ThreadPool(1, [flood.receive_cpu])
    stream = recv.Stream(pool, ring_config=recv.RingStreamConfig(heaps=64))
    stream.add_udp_reader(port, max_size=65_536, buffer_size=RCVBUF // 2, bind_hostname=host)
    wrong = 0

    def take(until: Callable[[], bool]) -> None:
        nonlocal wrong
        while not until():
            try:
                heap = stream.get_nowait()
            except spead2.Empty:
                time.sleep(0.001)
            else:
                sizes = [len(memoryview(item)) for item in heap.get_items() if item.id == _ITEM]
                wrong += sizes not in ([HEAP], [])  # []: what the sender says at its end

    def passed(seconds: float) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    silent = passed(SILENCE_S)
    take(lambda: stream.stats["packets"] > 0 or silent())
    take(passed(flood.warm_s))
    before, begin, cpu_begin = stream.stats["packets"], time.monotonic(), time.process_time()
    take(passed(flood.window_s))
    packets, seconds = stream.stats["packets"] - before, time.monotonic() - begin
    cpu_s = time.process_time() - cpu_begin
    stream.stop()
    return packets, seconds, cpu_s, wrong, stream.stats["packets"]


def _send_heaps(cpu: int, host: str, port: int, seconds: float) -> tuple[int, float]:
    """(packets, seconds)."""
    spead2: Any = importlib.import_module("spead2")
    send: Any = importlib.import_module("spead2.send")
    config = send.StreamConfig(max_packet_size=40 + IN_PACKET, rate=0.0)
    stream = send.UdpStream(spead2.ThreadPool(1, [cpu]), [(host, port)], config, RCVBUF // 2)
    items = send.ItemGroup()
    items.add_item(_ITEM, "data", "zeros", shape=(HEAP,), dtype=np.uint8, value=np.zeros(HEAP, np.uint8))
    heap = items.get_heap(descriptors="none", data="all")
    begin, heaps = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        stream.send_heap(heap)
        heaps += 1
    return heaps * HEAP // IN_PACKET, time.monotonic() - begin


def _whole_seconds(flood: Flood) -> int:
    return max(1, round(flood.window_s))


def _free_port(side: Side) -> int:
    """One that no UDP socket has: what is to listen there is started right afterwards."""
    with side, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((side.host, 0))
        return int(sock.getsockname()[1])


def _await_socket(side: Side, port: int, protocol: str) -> None:
    """Until a socket is bound to the port. Failed after a while."""
    end = time.monotonic() + SILENCE_S
    with side:
        while f":{port:04X} " not in Path(f"/proc/self/net/{protocol}").read_text():
            if time.monotonic() > end:
                raise Failed(f"nobody listens on {protocol} port {port} after {SILENCE_S} s")
            time.sleep(0.005)


@contextlib.contextmanager
def _started(command: list[str], cpu: int) -> Iterator[subprocess.Popen[str]]:
    """A program on this CPU; it is gone afterwards."""
    with _on(cpu):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _output(flood: Flood, *words: str) -> str:
    """What a program says that sends from the sender's CPU."""
    with _started(flood.place.send.command(*words), flood.send_cpu) as process:
        return process.communicate(timeout=_LONGEST_S)[0]


@contextlib.contextmanager
def _on(cpu: int) -> Iterator[None]:
    """Processes started here have this CPU from their first instruction."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _cpu_of_children() -> float:
    """Seconds, of those that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
