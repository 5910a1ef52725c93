"""The other machine: an agent on the sender's starts `rxring send` and `rxring mirror` for one peer.

    sending machine      rxring bench NAME --role sender --peer RECEIVER
    receiving machine    rxring bench NAME --device eth0 --peer SENDER

A line of JSON on a TCP connection asks for a command: {"run": ["send", "--to", …]}. What it prints comes back
as it is, a line each, and at last {"type": "exit", "code": …, "error": …}. {"end": true}, or the end of the
connection, ends it. Only the peer may connect, only the flags below are taken, and packets go to the peer and
nowhere else. Nothing is unpickled, no shell is asked. It is neither encrypted nor proven who the peer is: for
a network of your own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from bench.commands import ROOT, Rxring
from bench.place import Place, Side
from engine.affinity import devices
from engine.errors import Failed, Refused

PORT = 5117
_LINE = 1 << 20  # bytes, at most
_CONNECT_S, _SILENCE_S, _GRACE_S = 5, 60, 10
_VALUE = re.compile(r"[A-Za-z0-9._,-]{1,64}")
_FLAGS = {
    "send": {"--to", "--name", "--size", "--rate", "--batch", "--gso", "--flows", "--packets", "--duration"}
    | {"--cpu", "--stamp", "--send", "--sndbuf"},
    "mirror": {"--listen", "--to", "--batch", "--rcvbuf", "--cpu", "--duration"},
}


def checked(words: object, peer: str) -> list[str]:
    """The arguments of a command that may be started for this peer. Refused, with the reason."""
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise Refused("give a command as a list of words")
    command, flags = words[0], words[1:]
    if command not in _FLAGS:
        raise Refused(f"{command!r} is not started for others: send or mirror")
    if len(flags) % 2:
        raise Refused(f"{flags[-1]!r} has no value")
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        if flag not in _FLAGS[command]:
            raise Refused(f"{flag!r} is not taken from others")
        if flag == "--to":
            _check_target(value, peer)
        elif flag == "--listen":
            if not re.fullmatch(r"udp://[0-9a-fA-F.:\[\]]{1,64}:\d{1,5}", value):
                raise Refused(f"{value!r} is nowhere to listen")
        elif not _VALUE.fullmatch(value):
            raise Refused(f"{value!r} is no value of {flag}")
    if command == "send" and "--to" not in flags[::2]:
        raise Refused("--to is missing")
    return words


def _check_target(value: str, peer: str) -> None:
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    if host.strip("[]") != peer or not port.isdecimal():
        raise Refused(f"packets go to {peer} only, not to {value!r}")


# ── the agent, on the sending machine ────────────────────────────────────────────────────────────────


def serve(peer: str, port: int = PORT) -> None:
    """Start commands for the peer, until SIGINT or SIGTERM. Refused where the port is taken."""
    address = resolve(peer)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(address, port))


def resolve(host: str) -> str:
    """Its address. Refused where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError as error:
        raise Refused(f"--peer {host}: {error.strerror}: give a host name or an address") from None
    return str(found)


async def _serve(peer: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            if str(ipaddress.ip_address(writer.get_extra_info("peername")[0])) == peer:
                await _attend(reader, writer, peer)
        except (OSError, ValueError):
            pass  # it has gone away, or never was one of ours
        finally:
            running.discard(task)
            writer.close()

    try:
        family = socket.AF_INET6 if ":" in peer else socket.AF_INET
        server = await asyncio.start_server(accept, port=port, family=family, limit=_LINE)
    except OSError as error:
        raise Refused(f"port {port}: {error.strerror}: give another --port on both machines") from None
    async with server:
        print(f"waits for {peer} on port {port}; Ctrl-C ends it", file=sys.stderr, flush=True)
        await stopped.wait()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
    """One command, from its first word to its exit code."""

    def say(view: dict[str, Any]) -> None:
        writer.write(json.dumps(view).encode() + b"\n")

    try:
        asked = json.loads(await reader.readline() or b"{}")
        words = checked(asked.get("run") if isinstance(asked, dict) else None, peer)
    except (Refused, ValueError) as refused:
        say({"type": "exit", "code": 2, "error": str(refused)})
        await writer.drain()
        return
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "tools.cli", *words, "--json"]
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe, limit=_LINE)
    assert child.stdout is not None
    assert child.stderr is not None
    ending = asyncio.create_task(_end_when_asked(reader, child))
    said = asyncio.create_task(child.stderr.read())
    try:
        async for line in child.stdout:
            writer.write(line)
            await writer.drain()
        error = (await said).decode(errors="replace").strip()
        say({"type": "exit", "code": await child.wait(), "error": error})
        await writer.drain()
    finally:
        ending.cancel()
        said.cancel()
        await _end(child)


async def _end_when_asked(reader: asyncio.StreamReader, child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(OSError, ValueError):
        await reader.readline()  # {"end": true}, or nobody is there any more
    if child.returncode is None:
        child.send_signal(signal.SIGTERM)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        return
    child.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(child.wait(), _GRACE_S)
    except TimeoutError:
        child.kill()
        await child.wait()


# ── its peer, on the receiving machine ───────────────────────────────────────────────────────────────


class RemoteRxring(Rxring):
    """A command on the other machine, read and ended as one of ours."""

    def __init__(self, host: str, port: int, *arguments: str) -> None:
        self._name = arguments[0]
        try:
            self._socket = socket.create_connection((host, port), _CONNECT_S)
        except OSError as error:
            raise Failed(f"{_no_agent(host, port)}: {error}") from None
        self._socket.settimeout(_SILENCE_S)
        self._lines = self._socket.makefile("r")
        self._say({"run": list(arguments)})

    def _say(self, view: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(view).encode() + b"\n")

    def next(self, kind: str) -> dict[str, Any]:
        try:
            for line in self._lines:
                found: dict[str, Any] = json.loads(line)
                if found["type"] == kind:
                    return found
                if found["type"] == "exit":
                    told = found["error"] or f"ended with {found['code']}"
                    raise Failed(f"rxring {self._name} on the other machine: {told}")
        except (OSError, ValueError) as error:
            raise Failed(f"the other machine does not answer: {error}") from None
        raise Failed("the agent on the other machine has closed the connection")

    def end(self) -> dict[str, Any]:
        self._say({"end": True})
        summary = self.next("summary")
        if (code := self.next("exit")["code"]) != 0:
            raise Failed(f"rxring {self._name} on the other machine ended with {code}")
        return summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()


@dataclass(slots=True)
class RemoteSide(Side):
    """The sender's end, on another machine."""

    remote: ClassVar[bool] = True
    port: int = PORT

    def command(self, *words: str) -> list[str]:
        raise Refused(
            f"`{words[0]}` would have to run on the sending machine: choose an experiment without it"
        )

    def rxring(self, *arguments: str) -> Rxring:
        return RemoteRxring(self.host, self.port, *arguments)

    def __enter__(self) -> Self:
        raise Refused(
            "sockets would have to be made on the sending machine: choose an experiment without them"
        )


def place(device: str, peer: str, port: int = PORT) -> Place:
    """This machine receives over the device, the peer sends. Refused where no agent answers there."""
    host = resolve(peer)
    if device not in devices.names():
        raise Refused(f"no network device {device!r}: choose from {', '.join(devices.names())}")
    try:
        with socket.create_connection((host, port), _CONNECT_S) as sock:
            ours = str(sock.getsockname()[0])  # as the peer sees us
    except OSError as error:
        raise Refused(f"{_no_agent(host, port)}: {error}") from None
    return Place(device, Side(device, ours), RemoteSide(device, host, port=port))


def _no_agent(host: str, port: int) -> str:
    return f"no agent on {host}, port {port}: start there `rxring bench NAME --role sender --peer …`"
