"""Traffic of programs that others wrote, over a cable: the engine has what tcpdump saw on its device.

To the packet, and byte for byte in the same order: each sender stays on one CPU, which takes its packets up,
one after the other, for the capture and for the socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import await_
from namespaces import Namespace, Pair, make_pair  # noqa: F401 (the fixture `pair`)
from runs import Object, Run, warm

PORT = 5000
ATTEMPTS = 3  # at a capture that is complete
SHORT_BYTES = 76 - 8  # of payload: Linux checks such a packet before it looks for its socket
_LAST, _LAST_PORT = b"this was the last packet", 5001


def needs(program: str) -> pytest.MarkDecorator:
    missing = [each for each in (program, "tcpdump", "taskset") if shutil.which(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


class Seen(NamedTuple):
    """What was captured: the payload of each UDP packet to PORT; how many the capture itself lost."""

    payloads: list[bytes]
    dropped: int


class Capture:
    """tcpdump on a namespace's end of the cable."""

    def __init__(self, side: Namespace, path: Path) -> None:
        self.path = path
        command = ["tcpdump", "--immediate-mode", "-U", "-n", "-B", "32768", "-Z", "root", "-i", side.device]
        with side:
            self.process = subprocess.Popen(
                [*command, "-w", f"{path}", "udp"], stderr=subprocess.PIPE, text=True
            )
        assert self.process.stderr is not None
        while "listening on" not in self.process.stderr.readline():
            assert self.process.poll() is None, "tcpdump ended"

    def await_last(self, sender: Namespace, to: Namespace) -> None:
        """Until it has all that came so far."""
        with sender, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.sendto(_LAST, (to.ipv4, _LAST_PORT))
        await_(lambda: _LAST in self.path.read_bytes())

    def end(self) -> Seen:
        self.process.send_signal(signal.SIGINT)
        _, told = self.process.communicate(timeout=60)
        dropped = re.search(r"(\d+) packets? dropped by kernel", told)
        assert dropped, told
        payloads = [payload for port, payload in udp_packets(self.path.read_bytes()) if port == PORT]
        return Seen(payloads, int(dropped[1]))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def udp_packets(pcap: bytes) -> Iterator[tuple[int, bytes]]:
    """(port, payload) of each UDP packet in a capture of whole Ethernet frames."""
    magic, _, _, _, _, _, link = struct.unpack_from("<IHHiIII", pcap)
    assert (magic, link) == (0xA1B2C3D4, 1)
    at = 24
    while at < len(pcap):
        length, full = struct.unpack_from("<8xII", pcap, at)
        assert length == full
        frame = pcap[at + 16 : at + 16 + length]
        at += 16 + length
        ipv4 = frame[12:14] == b"\x08\x00"
        udp = frame[14 + 4 * (frame[14] & 15) if ipv4 else 14 + 40 :]
        port, size = struct.unpack_from("!2xHH", udp)
        yield port, udp[8:size]


class Peers:
    """The engine at the right end of the cable, the capture beside it, the sender at the left."""

    def __init__(self, pair: Pair, name: str, folder: Path) -> None:
        self.pair, self.name, self.folder = pair, name, folder
        self.view: Object = {}
        self.seen = Seen([], 0)

    def send(self, *command: object) -> str:
        """Run a sender; what it prints."""
        cpu = min(os.sched_getaffinity(0))
        with self.pair.left:
            done = subprocess.run(
                ["taskset", "-c", f"{cpu}", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 0, done.stdout
        return done.stdout

    @property
    def dump(self) -> Path:
        return self.folder / "dump"

    def compare(self, host: str, send: Callable[[], object], *flags: str) -> None:
        """Receive and capture what `send` sends, again where the capture lost something; they are equal.

        But for what UDP dropped.
        """
        for _ in range(ATTEMPTS):
            self.view, self.seen = self._receive(host, send, flags)
            if not self.seen.dropped:
                break
        assert self.seen.dropped == 0, "tcpdump did not see all"
        ledger, (written, rate) = self.view["ledger"], self.view["consumers"]
        dropped = ledger["socket_dropped"] + ledger["other_errors"]  # the namespace's: here they are ours
        assert ledger["received"] == len(self.seen.payloads) - dropped
        assert written["delivered"] == rate["delivered"] == ledger["received"]
        assert ledger["after_stop"] == 0
        if not dropped:
            assert self.dump.read_bytes() == b"".join(self.seen.payloads)
            sizes = Counter(map(len, self.seen.payloads))
            assert rate["result"]["sizes"] == {str(size): count for size, count in sizes.items()}

    def _receive(self, host: str, send: Callable[[], object], flags: tuple[str, ...]) -> tuple[Object, Seen]:
        consumers = ("--consumer", f"dump={self.dump}", "--consumer", "rate")
        with contextlib.ExitStack() as stack:
            with self.pair.right:
                run = Run(self.name, *consumers, *flags, listen=f"udp://{host}:{PORT}")
            stack.enter_context(run)
            assert run.ready
            capture = Capture(self.pair.right, self.folder / "capture.pcap")
            stack.callback(capture.close)
            send()
            capture.await_last(self.pair.left, self.pair.right)
            return run.end(), capture.end()


@pytest.fixture
def peers(pair: Pair, name: str, tmp_path: Path) -> Peers:
    warm()
    return Peers(pair, name, tmp_path)


@needs("socat")
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_socat(peers: Peers, ipv6: bool) -> None:
    """A file, in datagrams of 1000 bytes."""
    file = peers.folder / "file"
    file.write_bytes(os.urandom(2_000_500))
    host, kind = (f"[{peers.pair.right.ipv6}]", "UDP6") if ipv6 else (peers.pair.right.ipv4, "UDP4")
    peers.compare(host, lambda: peers.send("socat", "-u", "-b", 1000, file, f"{kind}-SENDTO:{host}:{PORT}"))
    assert len(peers.seen.payloads) == 2001
    assert peers.dump.read_bytes() == file.read_bytes()


@needs("ffmpeg")
def test_ffmpeg(peers: Peers) -> None:
    """A transport stream: seven of its packets fill a datagram."""
    host = peers.pair.right.ipv4
    peers.compare(
        host,
        lambda: peers.send(
            *("ffmpeg", "-hide_banner", "-loglevel", "error", "-nostdin", "-re"),
            *("-f", "lavfi", "-i", "testsrc=size=640x360:rate=25:duration=1", "-b:v", "6M"),
            *("-f", "mpegts", f"udp://{host}:{PORT}?pkt_size=1316"),
        ),
    )
    assert len(peers.seen.payloads) > 20
    assert {len(payload) % 188 for payload in peers.seen.payloads} == {0}


@needs("logger")
def test_a_flood_of_syslog(peers: Peers) -> None:
    lines = [f"message {i} of many" for i in range(5000)]
    file = peers.folder / "lines"
    file.write_text("".join(f"{line}\n" for line in lines))
    host = peers.pair.right.ipv4
    peers.compare(
        host,
        lambda: peers.send("logger", "-d", "-n", host, "-P", PORT, "--rfc3164", "-t", "peer", "-f", file),
    )
    assert [payload.decode().split(" peer: ")[1] for payload in peers.seen.payloads] == lines


@needs("dnsperf")
def test_a_load_of_dns(peers: Peers) -> None:
    """Nobody answers: each query is sent once, and given up."""
    queries = peers.folder / "queries"
    queries.write_text("".join(f"host{i}.example.com {['A', 'AAAA', 'MX'][i % 3]}\n" for i in range(3000)))
    host = peers.pair.right.ipv4
    told: list[str] = []
    peers.compare(
        host,
        lambda: told.append(
            peers.send(
                *("dnsperf", "-s", host, "-p", PORT, "-d", queries, "-n", 1),
                *("-c", 1, "-T", 1, "-q", 3000, "-t", 1),
            )
        ),
    )
    sent = re.search(r"Queries sent: +(\d+)", told[-1])
    assert sent
    assert int(sent[1]) == len(peers.seen.payloads) == 3000
    assert all(b"\7example\3com\0" in payload for payload in peers.seen.payloads)


# ── tcpreplay ────────────────────────────────────────────────────────────────────────────────────────


def checksum(data: bytes) -> int:
    """Of the Internet (RFC 1071)."""
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(left: Namespace, right: Namespace, source_port: int, payload: bytes, wrong: int = 0) -> bytes:
    """An Ethernet frame with an IPv4 UDP packet from the left to PORT on the right.

    wrong: how much its UDP checksum is off.
    """
    macs = (bytes.fromhex(side.mac.replace(":", "")) for side in (right, left))
    addresses = b"".join(socket.inet_aton(side.ipv4) for side in (left, right))
    size = 8 + len(payload)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + size, 0, 0x4000, 64, socket.IPPROTO_UDP, 0) + addresses
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    udp = struct.pack("!HHHH", source_port, PORT, size, 0) + payload
    pseudo_header = addresses + struct.pack("!BBH", 0, socket.IPPROTO_UDP, size)
    right_sum = checksum(pseudo_header + udp) or 0xFFFF
    sum_ = (right_sum + wrong - 1) % 0xFFFF + 1  # 0 would say that there is none
    return b"".join(macs) + b"\x08\x00" + ip + udp[:6] + struct.pack("!H", sum_) + udp[8:]


def write_pcap(path: Path, frames: list[bytes]) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        for i, each in enumerate(frames):
            file.write(struct.pack("<IIII", 0, i, len(each), len(each)) + each)


@needs("tcpreplay")
@pytest.mark.parametrize("wrong", [0, 7], ids=["all right", "some checksums wrong"])
def test_tcpreplay(peers: Peers, wrong: int) -> None:
    """Packets of 0 to 1472 bytes from a file. A wrong checksum drops one: of a short one no socket knows."""
    left, right = peers.pair.left, peers.pair.right
    payloads = [os.urandom(i * 37 % 1473) for i in range(3000)]
    spoilt = range(99, 3000, 100) if wrong else range(0)
    frames = [
        frame(left, right, 7000 + i % 50, payload, wrong=wrong * (i in spoilt))
        for i, payload in enumerate(payloads)
    ]
    pcap = peers.folder / "replay.pcap"
    write_pcap(pcap, frames)
    replay = ("tcpreplay", "-i", left.device, "-p", 20_000, pcap)
    peers.compare(right.ipv4, lambda: peers.send(*replay), "--gro", "off")
    assert peers.seen.payloads == payloads
    short = sum(len(payloads[i]) <= SHORT_BYTES for i in spoilt)
    ledger = peers.view["ledger"]
    assert (ledger["socket_dropped"], ledger["other_errors"]) == (len(spoilt) - short, short)
    assert peers.dump.read_bytes() == b"".join(p for i, p in enumerate(payloads) if i not in spoilt)
