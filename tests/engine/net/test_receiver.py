"""The receive loop on a real socket: what was sent is what stands in the ring, and the rest is counted."""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link import LENGTHS, Link

from engine.ledger import ERROR_NAMES
from engine.net.receiver import FAILED, FINISHED, SLICE, STOPPED, give_up
from engine.net.sockets import SO_TIMESTAMPNS
from rings.layout import FrameFlag

_GROUP_BYTES = 150_000  # sent before they are received: they fit the smallest socket buffer


def groups(lengths: list[int]) -> Iterator[list[int]]:
    """Cut into groups that a socket's queue has room for."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + 1000 * len(group) + length > _GROUP_BYTES:
            yield group
            group = []
        group.append(length)
    yield group


def pass_through(link: Link, lengths: list[int]) -> None:
    """Send, receive and read them, group by group; each must be whole and in its place."""
    for group in groups(lengths):
        sent = link.send(group)
        got = link.take_all()
        assert [len(p) for p in got] == [len(p) for p in sent]
        assert got == sent
    link.check_balance()


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize(
    ("one_by_one", "batch"), [(True, 1), (False, 1), (False, 8), (False, 64), (False, 3000)]
)
def test_every_kind_of_length_arrives_whole_and_in_order(
    name: str, one_by_one: bool, batch: int, timestamps: bool
) -> None:
    mixed = LENGTHS * 3
    random.Random(7).shuffle(mixed)
    with Link(name, size_bytes=8 << 20, batch=batch, one_by_one=one_by_one, timestamps=timestamps) as link:
        pass_through(link, LENGTHS)
        pass_through(link, LENGTHS[::-1])
        pass_through(link, mixed)
        assert not link.refused


def test_every_length_up_to_a_page_and_some_to_the_largest(name: str) -> None:
    with Link(name) as link:
        pass_through(link, list(range(4200)))
        pass_through(link, list(range(65507, 0, -331)))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_tiny_ring_takes_what_fits_half_of_it_and_names_the_rest(name: str, one_by_one: bool) -> None:
    with Link(name, size_bytes=64 << 10, batch=8, one_by_one=one_by_one) as link:
        half = link.ring.geometry.arena_bytes // 2
        fits = [n for n in LENGTHS if n <= half]
        pass_through(link, fits * 2 + fits[::-1])
        link.send([100, half + 1, 65507, half, 0])
        assert [len(p) for p in link.take_all()] == [100, half, 0]
        assert link.refused == {"too_large": 2}
        link.check_balance()
        pass_through(link, [100] * 100)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(
        st.one_of(st.sampled_from(LENGTHS), st.integers(0, 65507), st.integers(0, 300)), max_size=60
    ),
    size_kib=st.sampled_from([64, 96, 256, 1024]),
    batch=st.sampled_from([1, 3, 8, 64]),
    one_by_one=st.booleans(),
    timestamps=st.booleans(),
    policy=st.sampled_from(["gate", "skip"]),
)
def test_random_lengths_and_orders(
    name: str,
    lengths: list[int],
    size_kib: int,
    batch: int,
    one_by_one: bool,
    timestamps: bool,
    policy: str,
) -> None:
    with Link(
        name,
        size_bytes=size_kib << 10,
        batch=min(batch, size_kib // 8),
        one_by_one=one_by_one,
        timestamps=timestamps,
        policy=policy,
    ) as link:
        half = link.ring.geometry.arena_bytes // 2
        for group in groups(lengths):
            sent = link.send(group)
            got = link.take_all()
            expected = [p for p in sent if len(p) <= half]
            if policy == "gate":
                assert got == expected
            else:  # lapped, perhaps: a part of them, in order
                rest = iter(expected)
                assert all(packet in rest for packet in got)
        assert link.refused == (
            {"too_large": sum(n > half for n in lengths)} if any(n > half for n in lengths) else {}
        )
        link.check_balance()
        (info,) = link.ring.readers()
        assert info.delivered + info.skipped == link.published
        assert policy == "skip" or info.skipped == 0


@pytest.mark.parametrize("size", [1, 17, 100, 1472, 8872])
def test_the_arena_is_dense(name: str, size: int) -> None:
    """At least 60 % of the bytes between the first payload and the last are payload, if no smaller."""
    with Link(name, batch=8) as link:
        pass_through(link, [size] * 100)
        link.send([size] * 8)
        link.take()
        found = link.descriptors()
        first, last = found[0], found[-1]
        spanned = (int(last["offset"]) - int(first["offset"])) * 16 + int(last["length"])
        assert len(found) == 8
        assert spanned <= 8 * (size + 15)
        assert size < 27 or 8 * size / spanned > 0.6


def test_messages_are_moved_together_where_they_would_leave_holes(name: str) -> None:
    with Link(name) as link:
        lengths = [1400, 20, 30, 1400, 0, 0, 50, 1400, 0, 1]
        sent = link.send(lengths)
        link.take()
        assert link.reader is not None
        batch = link.reader.poll()
        assert batch is not None
        assert [batch.payload(i).tobytes() for i in range(len(batch))] == sent
        assert batch.arena.nbytes < sum(lengths) * 9 / 8 + 16 * len(lengths)
        assert link.ring.counters["moved"] > 0


def test_a_datagram_of_length_zero_is_a_packet(name: str) -> None:
    for one_by_one in (False, True):
        with Link(f"{name}.{one_by_one:d}", one_by_one=one_by_one) as link:
            sent = link.send([0, 0, 5, 0])
            assert link.take() == FINISHED
            assert link.read() == sent
            link.check_balance()


def test_kernel_times_lie_between_send_and_receive(name: str) -> None:
    with Link(name, batch=8) as link:
        for _ in range(3):
            before = time.time_ns()
            link.send([10] * 5)
            after = time.time_ns()
            link.take()
            received = time.time_ns()
            for d in link.descriptors():
                assert d["flags"] == 0
                assert before <= d["time_ns"] <= after
                assert after <= d["time_ns"] + int(d["socket_ns"]) <= received


def test_without_timestamps_it_says_when_it_was_received(name: str) -> None:
    with Link(name, timestamps=False) as link:
        link.send([10] * 5)
        before = time.time_ns()
        link.take()
        for d in link.descriptors():
            assert d["flags"] == FrameFlag.NO_KERNEL_TIME
            assert d["socket_ns"] == 0
            assert before <= d["time_ns"] <= time.time_ns()


def test_a_message_without_a_timestamp_inherits_none_and_takes_none_from_the_next(name: str) -> None:
    """The kernel shrinks what it was told of the room for a timestamp, where it puts none."""
    with Link(name, batch=4) as link:
        flags = []
        for on in (1, 0, 1):
            link.sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, on)
            link.send([10] * 4)
            link.take()
            flags += [int(d["flags"]) for d in link.descriptors()]
        assert flags == [0] * 4 + [FrameFlag.NO_KERNEL_TIME] * 4 + [0] * 4


def test_packets_wait_in_the_socket_while_the_ring_is_full_and_its_drops_are_counted(name: str) -> None:
    with Link(name, size_bytes=64 << 10, batch=8, rcvbuf=None) as link:
        for _ in range(50):
            link.send([200] * 100)
            link.take(0.001)
        assert link.take(0.02) == SLICE
        assert link.ring.counters["full_events"] >= 1
        assert link.drops.read() > 0
        assert link.discard() > 0
        link.check_balance()
        # The oldest are kept whole: what was dropped came later.
        kept = link.read()
        assert [int.from_bytes(p[:8], "little") for p in kept] == list(range(len(kept)))
        pass_through(link, [200] * 50)


@pytest.mark.parametrize(("one_by_one", "batch"), [(True, 1), (False, 1), (False, 64), (False, 100)])
def test_packets_ends_it_at_exactly_so_many(name: str, one_by_one: bool, batch: int) -> None:
    with Link(name, batch=batch, one_by_one=one_by_one, packets=100) as link:
        link.send([50] * 70)
        assert link.take(0.02, drain=False) == SLICE
        sent_more = link.send([50] * 70)
        assert link.take(drain=False) == FINISHED
        assert link.take(drain=False) == FINISHED
        assert link.received == link.published == 100
        assert link.read()[70:] == sent_more[:30]
        assert link.discard() == 40


def test_the_stop_word_ends_it_at_once(name: str) -> None:
    with Link(name) as link:
        link.send([50] * 10)
        link.stop[0] = 1
        assert link.take(drain=False) == STOPPED
        assert link.received == 0
        assert link.take(drain=True) == FINISHED
        assert link.received == 10


def test_a_refused_packet_of_ours_is_told_and_gone_on_with(name: str) -> None:
    """ICMP's port unreachable is reported once by a connected socket, for what it had sent."""
    with Link(name) as link, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        peer = other.getsockname()
        link.sock.connect(peer)
        other.connect(link.address)
        other.send(b"first")
        other.close()
        link.sock.send(b"to nobody")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(peer)
            again.connect(link.address)
            again.send(b"second")
            assert link.take() == FINISHED
        assert link.read() == [b"first", b"second"]
        counted = dict(zip(ERROR_NAMES, map(int, link.ring.counters["errors"]), strict=False))
        assert counted["ECONNREFUSED"] == 1
        assert sum(link.ring.counters["errors"]) == 1


def test_a_descriptor_that_is_no_socket_fails(name: str) -> None:
    with Link(name) as link, open(os.devnull) as null:
        link.rx.state[0]["fd"] = null.fileno()
        assert link.take(drain=False) == FAILED
        assert link.rx.state[0]["failure"] == errno.ENOTSOCK


def without_room_for_large_ones(link: Link) -> list[bytes]:
    """Fill most of the ring, then have the receiver take three large messages; these."""
    link.send([2000] * (link.ring.geometry.arena_bytes // 2 // 2048))
    assert link.take() == FINISHED
    sent = link.send([14_000] * 3)
    assert link.take(0.02, drain=False) == SLICE
    assert link.received - link.published in (1, 2)
    return sent


def test_large_messages_wait_for_room_and_the_stop_word_ends_the_wait(name: str) -> None:
    with Link(name, size_bytes=64 << 10, batch=4) as link:
        sent = without_room_for_large_ones(link)
        link.stop[0] = 1
        assert link.take(60, drain=False) == STOPPED
        assert link.take(0.02, drain=True) == SLICE
        link.stop[0] = 0
        assert (link.read() + link.take_all())[-3:] == sent
        link.check_balance()


def test_large_messages_that_never_find_room_are_refused_by_name(name: str) -> None:
    with Link(name, size_bytes=64 << 10, batch=4) as link:
        without_room_for_large_ones(link)
        waiting = link.received - link.published
        for _ in range(2):
            give_up(link.rx.state, link.writer.record)
            assert link.refused == {"ring_full": waiting}
        link.discard()
        link.check_balance()


def test_it_follows_the_largest_message_up_and_down(name: str) -> None:
    with Link(name) as link:
        seen = []
        for length, times in ((100, 3), (9000, 1), (100, 200)):
            for _ in range(times):
                link.send([length])
                link.take()
                link.read()
            seen.append(int(link.rx.state[0]["stride"]))
        assert seen == [2048, 9008, 112] or seen == [112, 9008, 112]


def test_lengths_that_alternate_between_two_batches(name: str) -> None:
    """The stride is of the batch before: each kind meets the other's."""
    pairs = itertools.product((0, 60, 1472, 9000, 65507), repeat=2)
    with Link(name, size_bytes=4 << 20) as link:
        for a, b in pairs:
            for lengths in ([a], [b], [a, b], [b] * 2):
                pass_through(link, lengths)
