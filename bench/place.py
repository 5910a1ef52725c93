"""Where an experiment's packets go: over lo, over a cable between two namespaces, or to another machine.

    with open_place("veth") as place:
        with place.receive.rxring("run", …) as engine, place.send.rxring("send", …) as sender: …

A place has two sides, of the receiver and of the sender. On lo they are one. `veth` is a pair of virtual
Ethernet devices, each in a network namespace of its own, made here and removed at the end (root only):
packets pass a device and a softirq, as they would on a wire, but no wire.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from bench.commands import ROOT, Rxring
from engine.affinity import journal
from engine.affinity.topology import format_hex_mask
from engine.errors import Failed, Refused

_CLONE_NEWNET = 0x4000_0000
_NAMESPACES = Path("/run/netns")
_PREFIX = "rxring-bench"


@dataclass(slots=True)
class Side:
    """One end: what is started here has its packets go over `device`, and is reached at `host`.

    As a context, this process itself: sockets made and processes forked within stay there. Only a process
    with a single thread may do that.
    """

    device: str
    host: str
    namespace: str | None = None
    remote: ClassVar[bool] = False  # on another machine
    _home: list[int] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        """These words, to be run here. Within a namespace /sys shows its devices."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)

    def rxring(self, *arguments: str) -> Rxring:
        """`rxring ARGUMENTS --json`, here."""
        return Rxring(*arguments, prefix=self.command())

    def steer(self, cpu: int) -> None:
        """Have this CPU handle what comes over the device: a one-bit RPS mask on each of its queues."""
        script = 'for queue in /sys/class/net/"$1"/queues/rx-*; do echo "$2" >"$queue/rps_cpus"; done'
        _run(*self.command("sh", "-ec", script, "sh", self.device, format_hex_mask([cpu])))

    @contextmanager
    def layout(self, name: str) -> Iterator[None]:
        """Apply a layout to the device, by `rxring pin`, whose journal restores it even after a crash.

        Refused where one is applied already: it would be taken back with ours.
        """
        with self:
            if journal.journals():
                raise Refused(f"a layout is applied to {self.device}: take it back: rxring pin restore")
        self._pin("apply", name, "--device", self.device)
        try:
            yield
        finally:
            self._pin("restore")

    def _pin(self, *words: str) -> str:
        return _run(*self.command(sys.executable, "-m", "tools.cli", "pin", *words, "--json"))

    def __enter__(self) -> Self:
        self._home.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        if self.namespace:
            _enter(_NAMESPACES / self.namespace)
        return self

    def __exit__(self, *_: object) -> None:
        home = self._home.pop()
        if self.namespace:
            _enter(f"/proc/self/fd/{home}")
        os.close(home)


@dataclass(frozen=True, slots=True)
class Place:
    """name: lo, veth, or the device that leads to the other machine."""

    name: str
    receive: Side
    send: Side


LO = Place("lo", *[Side("lo", "127.0.0.1")] * 2)


@contextmanager
def open_place(name: str) -> Iterator[Place]:
    """lo or veth. Refused if this process may not, or there is no such place; what was made is removed."""
    if name == "lo":
        yield LO
    elif name == "veth":
        with _cable() as place:
            yield place
    else:
        raise Refused(f"no place {name!r}: give lo or veth")


@contextmanager
def _cable() -> Iterator[Place]:
    if os.geteuid() != 0:
        raise Refused("veth needs root, to make network namespaces: use sudo, or lo")
    _remove_dead()
    sides = [Side(f"rxv{i}", f"10.118.0.{i}", f"{_PREFIX}{os.getpid()}.{i}") for i in (1, 2)]  # 1 receives
    macs = {side.device: f"02:00:00:52:58:0{i}" for i, side in enumerate(sides, 1)}
    with ExitStack() as undo:
        for side in sides:
            _run("ip", "netns", "add", side.namespace or "")
            undo.callback(_run, "ip", "netns", "delete", side.namespace or "")
        one, two = sides
        cable = ("link", "add", one.device, "type", "veth", "peer", two.device, "netns", two.namespace or "")
        _run("ip", "-n", one.namespace or "", *cable)
        for side, other in ((one, two), (two, one)):
            here = ("ip", "-n", side.namespace or "")
            _run(*here, "link", "set", "lo", "up")
            _run(*here, "link", "set", side.device, "address", macs[side.device], "up")
            _run(*here, "address", "add", f"{side.host}/24", "dev", side.device)
            # Known from the start: packets that wait for an answer to "who has …?" would be lost.
            know = ("neigh", "replace", other.host, "lladdr", macs[other.device], "dev", side.device)
            _run(*here, *know, "nud", "permanent")
        yield Place("veth", one, two)


def _remove_dead() -> None:
    """What was left by one of us who was killed; the cable goes with its ends."""
    for namespace in _NAMESPACES.glob(f"{_PREFIX}*.[12]"):
        pid = namespace.stem.removeprefix(_PREFIX)
        if not Path("/proc", pid).exists():
            _run("ip", "netns", "delete", namespace.name)


def _run(*words: str) -> str:
    """What it prints. Failed where it fails."""
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise Failed(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _enter(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(fd)
