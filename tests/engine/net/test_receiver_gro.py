"""GRO: one receive brings many packets. What is read, and what is counted, are packets."""

from __future__ import annotations

import random
import socket
import struct

import pytest
from link import Link, segments

from engine.net.libc import SOL_UDP, UDP_SEGMENT
from engine.net.receiver import FINISHED, SLICE, give_up
from engine.net.sockets import SO_TIMESTAMPNS
from rings.layout import FrameFlag

# (length of a message, of its packets): the last one whole, shorter, of one byte; one packet; many; maximal.
MESSAGES = [
    (length, segment)
    for segment in (1, 15, 16, 100, 1400, 1472)
    for length in (0, 1, segment, segment + 1, 2 * segment, 3 * segment - 1, 40 * segment, 60 * segment - 1)
    if length <= 65507
]


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize(("one_by_one", "batch"), [(True, 1), (False, 1), (False, 8), (False, 64)])
def test_packets_arrive_whole_and_in_order(name: str, one_by_one: bool, batch: int, timestamps: bool) -> None:
    messages = MESSAGES * 2
    random.Random(3).shuffle(messages)
    with Link(name, gro=True, batch=batch, one_by_one=one_by_one, timestamps=timestamps) as link:
        for length, segment in MESSAGES + messages:
            sent = link.send_gso([length], segment)
            assert link.take_all() == sent
        for i in range(0, len(messages), 10):  # several a call
            sent = [
                packet
                for message in messages[i : i + 10]
                for packet in link.send_gso([message[0]], message[1])
            ]
            assert link.take_all() == sent
        link.check_balance()
        assert not link.refused
        assert link.ring.counters["frames"] < link.received


def test_a_message_is_one_frame(name: str) -> None:
    with Link(name, gro=True) as link:
        link.send_gso([6400, 450, 100, 0], 100)
        link.take()
        frames = link.descriptors()
        assert [int(d["length"]) for d in frames] == [6400, 450, 100, 0]
        assert [int(d["segment"]) for d in frames] == [100, 100, 0, 0]
        assert [int(d["number"]) for d in frames] == [0, 64, 69, 70]
        assert link.ring.counters["frames"] == 4
        assert link.received == link.published == 71


@pytest.mark.parametrize("timestamps", [True, False])
def test_its_kernel_time_is_known_if_asked_for(name: str, timestamps: bool) -> None:
    with Link(name, gro=True, timestamps=timestamps) as link:
        link.send_gso([6400, 100, 6400], 100)
        link.take()
        flags = {int(d["flags"]) for d in link.descriptors()}
        assert flags == {0 if timestamps else int(FrameFlag.NO_KERNEL_TIME)}


def test_a_message_inherits_nothing_from_the_one_before_it_in_the_same_buffers(name: str) -> None:
    with Link(name, gro=True, batch=1) as link:
        link.send_gso([6400, 6300], 100)
        link.take()
        link.sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 0)
        link.send([6400])
        link.take()
        *_, last = link.descriptors()
        assert (int(last["segment"]), int(last["flags"])) == (0, int(FrameFlag.NO_KERNEL_TIME))


def test_without_gro_the_same_messages_are_frames_of_one_packet(name: str) -> None:
    with Link(name) as link:
        sent = link.send_gso([6400, 450], 100)
        link.take()
        assert link.read() == sent
        assert link.ring.counters["frames"] == link.received == 69


def test_flows_are_kept_apart(name: str) -> None:
    """Each frame is of one flow, so that who splits by flow need not look into it."""
    with Link(name, gro=True) as link, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.connect(link.address)
        other.setsockopt(SOL_UDP, UDP_SEGMENT, 10)
        for _ in range(3):
            link.send_gso([100], 10)
            other.send(b"x" * 40)
        link.sent += 12
        link.take()
        assert [int(d["length"]) for d in link.descriptors()] == [100, 40] * 3
        link.check_balance()


def test_packets_ends_it_with_the_call_that_brings_the_last(name: str) -> None:
    with Link(name, gro=True, batch=2, packets=100) as link:
        link.send_gso([640], 10)
        assert link.take(0.02, drain=False) == SLICE
        link.send_gso([640, 640, 640], 10)
        assert link.take(drain=False) == FINISHED
        assert link.received == link.published == 192  # a call of one message, one of two
        assert link.discard() == 64


def test_what_found_no_room_at_the_end_is_refused_by_the_packet(name: str) -> None:
    with Link(name, gro=True, size_bytes=160 << 10, batch=4) as link:
        link.rx.state[0]["stride"] = 64  # all of a call overflow: they are published one by one
        link.send_gso([40_000] * 4, 1000)
        assert link.take(0.3) == SLICE
        assert link.received == 160
        give_up(link.rx.state, link.writer.record)
        assert link.refused == {"ring_full": 160 - link.published}
        assert 0 < link.published < 160
        link.check_balance()


def test_dropped_frames_are_counted_as_frames(name: str) -> None:
    """Why a ledger with GRO is in frames once the socket has dropped any."""
    with Link(name, gro=True, rcvbuf=40_000) as link:
        link.send_gso([6400] * 50, 100)
        dropped = link.drops.read()
        link.take()
        assert 0 < dropped < 50
        assert link.received == (50 - dropped) * 64


def test_segments_of_a_message() -> None:
    assert segments(250, 100) == [100, 100, 50]
    assert segments(200, 100) == [100, 100]
    assert segments(0, 100) == [0]
    assert segments(70, 0) == [70]


def test_the_size_that_the_kernel_tells_is_an_int(name: str) -> None:
    """In 4 bytes, where that for sending has 2."""
    with Link(name, gro=True) as link:
        link.send_gso([64_000], 1000)
        _, ancillary, _, _ = link.sock.recvmsg_into([bytearray(65536)], 256)
        assert [struct.unpack("i", data) for _, _, data in ancillary if len(data) == 4] == [(1000,)]
