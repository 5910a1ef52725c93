"""A flood of packets of one size, and how fast the engine, or another receiver, takes it.

`rxring send` sends as fast as it can, from one CPU; received is on another one. All receivers have the same
receive buffer. Counted is what comes in a window that begins some time after the first packet. `spare` is the
part of it that the receiving thread slept through: where there is much, the sender was the limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bench import native
from bench.commands import Rxring
from bench.runner import Figures
from engine.errors import Failed
from engine.net.sockets import ask_for_gro, bind_udp, open_udp
from engine.spec import Listen

BATCH = 64
RCVBUF = 8 << 20
ANYWHERE = Listen("udp", "127.0.0.1", 0)
SILENCE_S = 10  # no packet for so long: there is no sender
_SENDER = f"bench{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Flood:
    """size: of a packet, bytes. gso: packets in a message; 1: without GSO."""

    size: int
    gso: int
    receive_cpu: int
    send_cpu: int
    warm_s: float
    window_s: float

    @property
    def parameters(self) -> dict[str, Any]:
        return asdict(self) | {"rcvbuf": RCVBUF}

    def _send(self, port: int) -> Rxring:
        to, gso = f"127.0.0.1:{port}", str(self.gso) if self.gso > 1 else "off"
        what = ("--size", str(self.size), "--gso", gso)
        return Rxring("send", "--name", _SENDER, "--to", to, *what, "--cpu", str(self.send_cpu))

    def engine(self, consumer_cpu: int, gro: str) -> Figures:
        """One run of the engine with a `latency` consumer; what came in the window is read from intervals."""
        arguments = ["--gro", gro, "--listen", "udp://127.0.0.1:0", "--rx-cpu", str(self.receive_cpu)]
        arguments += ["--rcvbuf", str(RCVBUF), "--consumer", f"latency@{consumer_cpu}"]
        arguments += ["--sender", _SENDER, "--every", str(self.warm_s)]
        with Rxring("run", *arguments) as engine:
            port = engine.next("ready")["receivers"][0]["port"]
            with self._send(port) as sender:
                while engine.next("interval")["receivers"][0]["packets"] == 0:
                    pass
                begin = end = engine.next("interval")
                while end["seconds"] < begin["seconds"] + self.window_s:
                    end = engine.next("interval")
                sent = sender.end()
            summary = engine.end()
        before, after = begin["receivers"][0], end["receivers"][0]
        packets, frames, cpu_ns = (after[key] - before[key] for key in ("packets", "frames", "cpu_ns"))
        ledger, result = summary["ledger"], summary["consumers"][0]["result"]
        return {
            **figures(packets, end["seconds"] - begin["seconds"], cpu_ns / 1e9, 0),
            "ok": _adds_up(summary),
            "ledger_balanced": bool(ledger["balanced"]),
            "gro": after["gro"],
            "packets_per_frame": packets / frames if frames else None,
            "sent_per_second": sent["packets_per_second"],
            "ledger": ledger,
            "socket_p50_ns": result["socket"]["p50_ns"],
            "ring_p50_ns": result["ring"]["p50_ns"],
        }

    def peer(
        self, receive: Callable[[socket.socket], Figures], *, timestamps: bool = False, gro: bool = False
    ) -> Figures:
        """One run of another receiver, on a socket that is set up as the engine's."""
        sock, _ = open_udp(ANYWHERE, timestamps=timestamps, rcvbuf=RCVBUF)
        with contextlib.closing(sock):
            if gro and not ask_for_gro(sock):
                raise Failed("this kernel has no UDP GRO")
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", SILENCE_S, 0))
            port = bind_udp(sock, ANYWHERE)[1]
            with self._send(port) as sender:
                found = receive(sock)
                return {**found, "sent_per_second": sender.end()["packets_per_second"]}

    def c(self, *, timestamps: bool, gro: bool) -> Figures:
        """One run of the recvmmsg loop in C."""

        def receive(sock: socket.socket) -> Figures:
            asks, window = (int(timestamps), int(gro)), (int(self.warm_s * 1e9), int(self.window_s * 1e9))
            arguments = (sock.fileno(), self.receive_cpu, BATCH, *asks, self.size, *window)
            return figures(*native.run("receive", *arguments, pass_fds=(sock.fileno(),)))

        return self.peer(receive, timestamps=timestamps, gro=gro)


def figures(packets: float, seconds: float, cpu_seconds: float, wrong: float) -> Figures:
    return {
        "value": packets / seconds / 1e6,
        "packets": packets,
        "seconds": seconds,
        "cpu_ns_per_packet": cpu_seconds / packets * 1e9 if packets else None,
        "spare": 1 - cpu_seconds / seconds,
        "ok": wrong == 0,
    }


def _adds_up(summary: dict[str, Any]) -> bool:
    """Is all that left the socket in the ring, or refused, and all that is in the ring accounted for?"""
    ledger = summary["ledger"]
    counts = [sum(account.values()) for account in ledger["consumers"].values()]
    return ledger["received"] == ledger["published"] + ledger["refused"] and all(
        count == ledger["published"] for count in counts
    )
