"""Case 8 (envoy#7165): SO_RXQ_OVFL is cumulative and 32 bits wide, and was taken for a count of drops.

Here SO_MEMINFO decides: the supervisor asks the socket, while it runs and at the end, and carries the count
across its wrap. No test can drop 2³² packets: a stand-in has the 36 bytes that the kernel would give.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.net.sockets import DropCount, ReceiveBuffer, discard
from engine.receiving import Receiving
from engine.snapshot import ReceiverPart
from engine.spec import Listen, ReceiverSpec
from rings.ring import create

SO_RXQ_OVFL = 40


class FarSocket:
    """Answers for SO_MEMINFO alone: nine u32, the last of them the drops."""

    def __init__(self, drops: int = 0) -> None:
        self.drops = drops

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.SOL_SOCKET, 55, 36)
        return struct.pack("9I", 212992, *[7] * 7, self.drops & 0xFFFFFFFF)


def drop_count(sock: FarSocket) -> DropCount:
    return DropCount(cast(socket.socket, sock))


def test_the_count_goes_on_over_the_wrap() -> None:
    sock = FarSocket()
    count = drop_count(sock)
    for drops in (0, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 33) - 1, (1 << 33) - 1, 1 << 33):
        sock.drops = drops
        assert count.read() == drops


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=2, max_size=6), st.booleans())
def test_no_interval_and_no_end_is_wrong_for_it(rises: list[int], gro: bool) -> None:
    """What a run reports over several wraps, and the cut after them: exact, and never less than before."""
    sock = FarSocket()
    *during, after = rises
    spec = ReceiverSpec(listen=Listen("udp", "127.0.0.1", 0))
    with create(f"wraps{id(sock)}", frames=16, arena_bytes=4096) as ring:
        receiving = Receiving(spec, cast(Any, sock), cast(Any, None), ReceiveBuffer(None, 0), gro)
        part = ReceiverPart("rx0", receiving, ring)
        for rise in during:
            sock.drops += rise
            view = part.counts({})
            assert view["socket_dropped_frames"] == sock.drops
            assert view["socket_dropped"] == (None if gro and sock.drops else sock.drops)
            assert view["after_stop_frames"] == 0
        part.dropped_at_cut = receiving.dropped()
        sock.drops += after
        view = part.counts({})
        assert (view["socket_dropped_frames"], view["after_stop_frames"]) == (sum(during), after)


@pytest.fixture
def overflown() -> Any:
    """A socket with the smallest buffer and SO_RXQ_OVFL, to which 1000 packets were sent."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rx,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tx,
    ):
        rx.setblocking(False)
        rx.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        rx.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        rx.bind(("127.0.0.1", 0))
        for _ in range(1000):
            tx.sendto(b"x" * 100, rx.getsockname())
        yield rx


def test_what_the_socket_says_is_all_while_its_packets_know_of_no_drop(overflown: socket.socket) -> None:
    """SO_RXQ_OVFL is stamped when a packet is queued: those before the first drop tell nothing."""
    dropped = DropCount(overflown).read()
    stamps = []
    try:
        while True:
            stamps += overflown.recvmsg(200, 64)[1]
    except BlockingIOError:
        pass
    assert dropped > 900
    assert stamps == []
    assert DropCount(overflown).read() == dropped


def test_from_outside_it_is_the_same(overflown: socket.socket) -> None:
    dropped = DropCount(overflown).read()
    port = f":{overflown.getsockname()[1]:04X}"
    rows = map(str.split, Path("/proc/net/udp").read_text().splitlines())
    (row,) = (words for words in rows if words[1].endswith(port))
    assert int(row[-1]) == dropped == 1000 - discard(overflown)[0]
