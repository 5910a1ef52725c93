"""Standard streams that are closed, and those whose other end goes away while a command works."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.signals import END_SIGNALS

ROOT = Path(__file__).resolve().parents[2]
RXRING = [sys.executable, "-m", "tools.cli"]
CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.fixture
def sink() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(60)
        yield sock


def address_of(sock: socket.socket) -> str:
    return f"127.0.0.1:{sock.getsockname()[1]}"


def taken(sock: socket.socket) -> list[bytes]:
    """What is there; loopback delivers within the send."""
    packets = []
    sock.setblocking(False)
    while True:
        try:
            packets.append(sock.recv(65536))
        except BlockingIOError:
            return packets


def closes(packet: bytes) -> bool:
    return packet[7] & 0x80 != 0


def in_shell(redirections: str, *args: str) -> Any:
    command = f"{shlex.join([*RXRING, *args])} {redirections}"
    return subprocess.run(["sh", "-c", command], check=False, cwd=ROOT, capture_output=True, timeout=90)


@pytest.mark.parametrize("redirections", CLOSED)
def test_the_run_goes_without(redirections: str, name: str) -> None:
    listen = ("--listen", "udp://127.0.0.1:0", "--duration", "0.1")
    done = in_shell(redirections, "run", "--name", name, "--json", *listen)
    assert done.returncode == 0
    kinds = [json.loads(line)["type"] for line in done.stdout.splitlines()]
    assert kinds == ([] if ">&-" in redirections.split() else ["ready", "summary"])


@pytest.mark.parametrize("redirections", CLOSED)
def test_the_sender_goes_without(redirections: str, sink: socket.socket) -> None:
    """The short packets make it say something on stderr: into no packet, and not among the JSON."""
    to = ("--to", address_of(sink), "--packets", "5", "--size", "16")
    done = in_shell(redirections, "send", *to, "--json")
    assert done.returncode == 0
    packets = taken(sink)
    assert [(len(packet), packet[:4], closes(packet)) for packet in packets] == [
        (16, b"RXR1", i >= 5) for i in range(8)
    ]
    kinds = [json.loads(line)["type"] for line in done.stdout.splitlines()]
    assert kinds == ([] if ">&-" in redirections.split() else ["ready", "summary"])
    said = b"packets of 16 bytes carry no whole rxring stamp: 32 are needed\n"
    assert done.stderr == (b"" if "2>&-" in redirections else said)


@pytest.mark.parametrize("redirections", CLOSED)
def test_looking_goes_without(redirections: str) -> None:
    done = in_shell(redirections, "rings", "ls", "--json")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_sender_whose_reader_goes_away_sends_to_its_end(flags: list[str], sink: socket.socket) -> None:
    command = [*RXRING, "send", "--to", address_of(sink), "--rate", "100", "--duration", "1.3", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()  # it will speak of its first second, and at the end
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
    packets = taken(sink)
    assert len(packets) == 133
    assert all(map(closes, packets[-3:]))


def test_a_mirror_whose_reader_goes_away_mirrors_to_its_end(sink: socket.socket) -> None:
    command = [*RXRING, "mirror", "--listen", "udp://127.0.0.1:0", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = json.loads(process.stdout.readline())["port"]
        json.loads(process.stdout.readline())
        process.stdout.close()
        descriptor = f"/proc/{process.pid}/fd/1"
        while os.readlink(descriptor) != os.devnull:  # it has noticed
            sink.sendto(b"x", ("127.0.0.1", port))
            assert sink.recv(9) == b"x"
        sink.sendto(b"y", ("127.0.0.1", port))
        assert sink.recv(9) == b"y"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


_ON_A_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "runpy.run_module('tools.cli', run_name='__main__', alter_sys=True)"
)


@pytest.mark.skipif(signal.SIGHUP not in END_SIGNALS, reason="SIGHUP is ignored here, as nohup does")
def test_a_terminal_that_closes_ends_the_sender_in_order(sink: socket.socket) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _ON_A_TERMINAL, "send", "--to", address_of(sink), "--rate", "100"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        sink.recv(65536)
        os.close(ours)
        assert process.wait(60) == 0
    assert list(map(closes, taken(sink)))[-3:] == [True, True, True]
