"""Two network namespaces joined by a cable (veth), for tests with peers that are not on one machine.

    with pair.left: sock = socket.socket(…)     # lives there, also after the block

What is made within the block stays in that namespace: sockets, forked children and what they start.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

_CLONE_NEWNET = 0x4000_0000
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def _ip(*words: object) -> str:
    done = subprocess.run(
        ["ip", *map(str, words)], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stdout}"
    return done.stdout


def _move_to(path: Path | str) -> None:
    """This thread, the only one, goes into a namespace."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)


@dataclass
class Namespace:
    """device: its end of the cable, with an IPv4, a global and a link-local IPv6 address."""

    name: str
    device: str
    mac: str
    ipv4: str
    ipv6: str
    link_local: str
    _home: list[int] = field(default_factory=list)

    def ip(self, *words: object) -> str:
        """`ip WORDS` there; what it prints."""
        return _ip("-n", self.name, *words)

    def dropped(self) -> int:
        """What its end of the cable was given to send and did not."""
        path = f"/sys/class/net/{self.device}/statistics/tx_dropped"
        return int(_ip("netns", "exec", self.name, "cat", path))

    def __enter__(self) -> Self:
        self._home.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        _move_to(f"/run/netns/{self.name}")
        return self

    def __exit__(self, *_: object) -> None:
        home = self._home.pop()
        _move_to(f"/proc/self/fd/{home}")
        os.close(home)

    def add(self, address: str) -> None:
        """One more address, from which only those send who ask for it."""
        self._add(address, "preferred_lft", 0)

    def _add(self, address: str, *more: object) -> None:
        size, how = ("/64", ["nodad"]) if ":" in address else ("/24", [])
        self.ip("address", "add", address + size, "dev", self.device, *how, *more)

    def pull(self) -> None:
        """Take its end of the cable down; Linux forgets its IPv6 addresses then."""
        self.ip("link", "set", self.device, "down")

    def put_back(self, peer: Namespace) -> None:
        self.ip("link", "set", self.device, "up")
        for address in (self.ipv6, self.link_local):
            self._add(address)
        self._know(peer)

    def _know(self, peer: Namespace) -> None:
        """Where the other end is, lest packets are lost while Linux asks for it."""
        for address in (peer.ipv4, peer.ipv6, peer.link_local):
            self.ip("neigh", "replace", address, "lladdr", peer.mac, "dev", self.device, "nud", "permanent")

    def _set_up(self, peer: Namespace) -> None:
        self.ip("link", "set", "lo", "up")
        self.ip("link", "set", self.device, "address", self.mac, "addrgenmode", "none", "up")
        for address in (self.ipv4, self.ipv6, self.link_local):
            self._add(address)
        self._know(peer)


@dataclass
class Pair:
    left: Namespace
    right: Namespace

    def set_mtu(self, size: int) -> None:
        for side in (self.left, self.right):
            side.ip("link", "set", side.device, "mtu", size)


@pytest.fixture(name="pair")
def make_pair() -> Iterator[Pair]:
    """Removed, with the cable, whatever happens."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    number = next(_numbers)
    left, right = (
        Namespace(
            f"rxring-t{os.getpid()}.{number}{side}",
            f"v{side}",
            f"02:00:00:00:00:0{i}",
            f"10.77.0.{i}",
            f"fd77::{i}",
            f"fe80::{i}",
        )
        for i, side in enumerate("lr", 1)
    )
    with ExitStack() as undo:
        for side in (left, right):
            _ip("netns", "add", side.name)
            undo.callback(_ip, "netns", "delete", side.name)
        left.ip("link", "add", left.device, "type", "veth", "peer", right.device, "netns", right.name)
        left._set_up(right)
        right._set_up(left)
        yield Pair(left, right)
