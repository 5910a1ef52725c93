"""The engine against other ways to receive, under the same flood.

`rxring send` sends packets of 100 bytes as fast as it can, as GSO messages of 64, from one CPU. On the
other one, in turn: `rxring run` as it comes, and with `--gro off`; plain recvmmsg loops in C that ask the
kernel for the same (GRO and timestamps; timestamps), and for nothing; a tight loop around
`socket.recv_into`; an asyncio datagram protocol. The engine has a blocking `latency` consumer, which with
two CPUs must share one: the receiver's, or ("apart") the sender's, which then sends less. How it is counted,
and what `spare` is, stands in bench/flood.py.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import Iterator

from bench import native
from bench.flood import BATCH, SILENCE_S, Flood, figures
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures, Setting
from engine.errors import Failed

PLACES = ("lo",)
CLAIMS = (
    Claim("rxring --gro off", against="C, timestamps", at_least=0.95),
    Claim("rxring --gro off", against="C", at_least=0.90),
    Claim("rxring --gro off", against="recv_into", at_least=1.5),
    Claim("rxring", against="C, timestamps", at_least=0.95),
    Claim("rxring", against="recv_into", at_least=1.5),
    Claim("rxring", against="asyncio", at_least=20),
    Claim("rxring", against="C, GRO, timestamps", at_least=0.5),
)

SIZE, SEGMENTS = 100, 64


def cases(setting: Setting) -> Iterator[Case]:
    warm_s, window_s = (0.25, 0.5) if setting.quick else (1.0, 2.0)
    receiver, sender = two_cpus()
    flood = Flood(SIZE, SEGMENTS, receiver, sender, warm_s, window_s)
    base = flood.parameters

    for gro, suffix in (("auto", ""), ("off", " --gro off")):
        for place, consumer in (("", receiver), (", apart", sender)):
            engine = functools.partial(flood.engine, consumer, gro)
            parameters = base | {"consume_cpu": consumer, "gro": gro}
            yield Case(f"rxring{suffix}{place}", "M/s", engine, parameters)
    c_cases = (("C, GRO, timestamps", True, True), ("C, timestamps", True, False), ("C", False, False))
    for name, timestamps, with_gro in c_cases:
        loop = functools.partial(flood.c, timestamps=timestamps, gro=with_gro)
        yield Case(name, "M/s", loop, base | {"batch": BATCH}, native.missing())
    for name, receive in (("recv_into", _recv_into), ("asyncio", _asyncio)):
        peer = functools.partial(flood.peer, functools.partial(receive, flood))
        yield Case(name, "M/s", peer, base)


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
    sock.setblocking(False)
    loop = Pinned(flood.receive_cpu, lambda: asyncio.run(_asyncio_loop(sock, flood.warm_s, flood.window_s)))
    return figures(*loop.result())


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
    try:
        await asyncio.wait_for(counter.came.wait(), SILENCE_S)
    except TimeoutError:
        raise Failed("no packet came") from None
    await asyncio.sleep(warm_s)
    begin, cpu_begin, packets, size = time.monotonic(), time.process_time(), counter.packets, counter.size
    await asyncio.sleep(window_s)
    packets, size = counter.packets - packets, counter.size - size
    transport.close()
    return packets, time.monotonic() - begin, time.process_time() - cpu_begin, size - packets * SIZE
