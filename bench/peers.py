"""The engine against other ways to receive, under the same flood.

`rxring send` sends packets of 100 bytes as fast as it can, as GSO messages of 64, from one CPU. On the
other one, in turn: `rxring run` as it comes, and with `--gro off`; plain recvmmsg loops in C that ask the
kernel for the same (GRO and timestamps; timestamps), and for nothing; a tight loop around
`socket.recv_into`; an asyncio datagram protocol. The engine has a blocking `latency` consumer, which with
two CPUs must share one: the receiver's, or ("apart") the sender's, which then sends less. All have the same
receive buffer. Counted is what comes in a window that begins some time after the first packet. `spare` is
the part of it that the receiving thread slept through: where there is much, the sender was the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench import native
from bench.commands import Rxring
from bench.machine import two_cpus
from bench.pinned import Pinned
from bench.runner import Case, Claim, Figures
from engine.errors import Failed
from engine.net.sockets import ask_for_gro, bind_udp, open_udp
from engine.spec import Listen

CLAIMS = (
    Claim("rxring --gro off", against="C, timestamps", at_least=0.95),
    Claim("rxring --gro off", against="C", at_least=0.90),
    Claim("rxring --gro off", against="recv_into", at_least=1.5),
    Claim("rxring", against="C, timestamps", at_least=0.95),
    Claim("rxring", against="recv_into", at_least=1.5),
    Claim("rxring", against="asyncio", at_least=20),
    Claim("rxring", against="C, GRO, timestamps", at_least=0.5),
)

SIZE, SEGMENTS, BATCH = 100, 64, 64
RCVBUF = 8 << 20
ANYWHERE = Listen("udp", "127.0.0.1", 0)
_SENDER = f"bench{os.getpid()}"
_SILENCE_S = 10  # no packet for so long: there is no sender


def cases(quick: bool) -> Iterator[Case]:
    warm_s, window_s = (0.25, 0.5) if quick else (1.0, 2.0)
    receiver, sender = two_cpus()
    base = {"size": SIZE, "gso": SEGMENTS, "rcvbuf": RCVBUF, "warm_s": warm_s, "window_s": window_s}
    base |= {"receive_cpu": receiver, "send_cpu": sender}

    def engine(consumer: int, gro: str) -> Callable[[], Figures]:
        return lambda: _engine(receiver, consumer, sender, gro, warm_s, window_s)

    def peer(
        receive: Callable[..., Figures], timestamps: bool = False, gro: bool = False
    ) -> Callable[[], Figures]:
        return lambda: _measure(receive, timestamps, gro, receiver, sender, warm_s, window_s)

    for gro, suffix in (("auto", ""), ("off", " --gro off")):
        for place, consumer in (("", receiver), (", apart", sender)):
            parameters = base | {"consume_cpu": consumer, "gro": gro}
            yield Case(f"rxring{suffix}{place}", "M/s", engine(consumer, gro), parameters)
    c_cases = (("C, GRO, timestamps", True, True), ("C, timestamps", True, False), ("C", False, False))
    for name, timestamps, with_gro in c_cases:
        receive = peer(functools.partial(_c, timestamps, with_gro), timestamps, with_gro)
        yield Case(name, "M/s", receive, base | {"batch": BATCH}, native.missing())
    yield Case("recv_into", "M/s", peer(_recv_into), base)
    yield Case("asyncio", "M/s", peer(_asyncio), base)


def _figures(packets: float, seconds: float, cpu_seconds: float, wrong: float) -> Figures:
    return {
        "value": packets / seconds / 1e6,
        "packets": packets,
        "seconds": seconds,
        "cpu_ns_per_packet": cpu_seconds / packets * 1e9,
        "spare": 1 - cpu_seconds / seconds,
        "ok": wrong == 0,
    }


def _flood(port: int, cpu: int) -> Rxring:
    to, size, gso = f"127.0.0.1:{port}", str(SIZE), str(SEGMENTS)
    return Rxring("send", "--name", _SENDER, "--to", to, "--size", size, "--gso", gso, "--cpu", str(cpu))


def _engine(
    rx_cpu: int, consumer_cpu: int, sender_cpu: int, gro: str, warm_s: float, window_s: float
) -> Figures:
    """One run of the engine; its packets in the window are read from its intervals."""
    arguments = [
        "--gro",
        gro,
        "--listen",
        "udp://127.0.0.1:0",
        "--rx-cpu",
        str(rx_cpu),
        "--rcvbuf",
        str(RCVBUF),
    ]
    arguments += ["--consumer", f"latency@{consumer_cpu}", "--sender", _SENDER, "--every", str(warm_s)]
    with Rxring("run", *arguments) as engine:
        port = engine.next("ready")["receivers"][0]["port"]
        with _flood(port, sender_cpu) as sender:
            while engine.next("interval")["receivers"][0]["packets"] == 0:
                pass
            begin = end = engine.next("interval")
            while end["seconds"] < begin["seconds"] + window_s:
                end = engine.next("interval")
            sent = sender.end()
        summary = engine.end()
    packets, cpu_ns = (end["receivers"][0][key] - begin["receivers"][0][key] for key in ("packets", "cpu_ns"))
    ledger, result = summary["ledger"], summary["consumers"][0]["result"]
    return {
        **_figures(packets, end["seconds"] - begin["seconds"], cpu_ns / 1e9, 0),
        "ok": _adds_up(summary),
        "ledger_balanced": bool(ledger["balanced"]),
        "sent_per_second": sent["packets_per_second"],
        "ledger": ledger,
        "socket_p50_ns": result["socket"]["p50_ns"],
        "ring_p50_ns": result["ring"]["p50_ns"],
    }


def _adds_up(summary: dict[str, Any]) -> bool:
    """Is all that left the socket in the ring, or refused, and all that is in the ring accounted for?"""
    ledger = summary["ledger"]
    counts = [sum(account.values()) for account in ledger["consumers"].values()]
    return ledger["received"] == ledger["published"] + ledger["refused"] and all(
        count == ledger["published"] for count in counts
    )


def _measure(
    receive: Callable[..., Figures],
    timestamps: bool,
    gro: bool,
    rx_cpu: int,
    sender_cpu: int,
    warm_s: float,
    window_s: float,
) -> Figures:
    """One run of a peer, on a socket that is set up as the engine's."""
    sock, _ = open_udp(ANYWHERE, timestamps=timestamps, rcvbuf=RCVBUF)
    with contextlib.closing(sock):
        if gro and not ask_for_gro(sock):
            raise Failed("this kernel has no UDP GRO")
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _SILENCE_S, 0))
        port = bind_udp(sock, ANYWHERE)[1]
        with _flood(port, sender_cpu) as sender:
            figures = receive(sock, rx_cpu, warm_s, window_s)
            return {**figures, "sent_per_second": sender.end()["packets_per_second"]}


def _c(timestamps: bool, gro: bool, sock: socket.socket, cpu: int, warm_s: float, window_s: float) -> Figures:
    asks, window = (int(timestamps), int(gro)), (int(warm_s * 1e9), int(window_s * 1e9))
    fd = sock.fileno()
    return _figures(*native.run("receive", fd, cpu, BATCH, *asks, SIZE, *window, pass_fds=(fd,)))


def _recv_into(sock: socket.socket, cpu: int, warm_s: float, window_s: float) -> Figures:
    return _figures(*Pinned(cpu, _recv_into_loop, sock, warm_s, window_s).result())


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


def _asyncio(sock: socket.socket, cpu: int, warm_s: float, window_s: float) -> Figures:
    sock.setblocking(False)
    return _figures(*Pinned(cpu, lambda: asyncio.run(_asyncio_loop(sock, warm_s, window_s))).result())


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
        await asyncio.wait_for(counter.came.wait(), _SILENCE_S)
    except TimeoutError:
        raise Failed("no packet came") from None
    await asyncio.sleep(warm_s)
    begin, cpu_begin, packets, size = time.monotonic(), time.process_time(), counter.packets, counter.size
    await asyncio.sleep(window_s)
    packets, size = counter.packets - packets, counter.size - size
    transport.close()
    return packets, time.monotonic() - begin, time.process_time() - cpu_begin, size - packets * SIZE
