"""A receiver that is killed at any instruction: its successor accounts for every packet."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
from collections.abc import Callable

import numpy as np
import pytest
from forked import Child, await_, readable
from link import Link, payload, segments
from numpy.typing import NDArray
from ring_loops import reserve_only
from stepping import CLOCK_GETTIME, POLL, steps, traced

from engine.net.receiver import (
    _CALLING,
    _IDLE,
    _MOVING,
    _PRIVATE,
    _SETTLING,
    FINISHED,
    SLICE,
    give_up,
    take_up,
)
from engine.net.sockets import SO_MEMINFO
from rings.layout import DESCRIPTOR, SOURCE
from rings.writer import start_writing

Fork = Callable[..., Child]
KILL_ROUNDS = int(os.environ.get("RXRING_KILL_ROUNDS", "6"))
OVERFLOW_BYTES = 20_480  # of each message's overflow buffer: more is not used here


class Scene:
    """A link whose shared memory can be kept and put back, and a life to be stepped through."""

    def __init__(self, link: Link) -> None:
        self.link = link
        rx = link.rx
        # Writable views of all that receiver and successor share.
        self.shared: list[NDArray[np.uint8]] = [
            link.writer._memory,
            rx.state.view(np.uint8),
            rx.messages.headers.view(np.uint8),
            rx.messages.iovecs.view(np.uint8),
            rx.messages.control,
            rx.messages.names,
            rx.overflow[:, :OVERFLOW_BYTES],
        ]

    def keep(self) -> list[NDArray[np.uint8]]:
        return [view.copy() for view in self.shared]

    def put_back(self, kept: list[NDArray[np.uint8]]) -> None:
        for view, copy in zip(self.shared, kept, strict=True):
            view[:] = copy

    def is_as(self, kept: list[NDArray[np.uint8]]) -> bool:
        return all(np.array_equal(view, copy) for view, copy in zip(self.shared, kept, strict=True))

    def succeed(self) -> None:
        """What a successor does, up to its first look at the socket."""
        start_writing(self.link.writer.record)
        take_up(self.link.rx.state, self.link.writer.record)

    def finish(self) -> None:
        """As if the run had all its packets: what waits for room is published, or given up."""
        self.link.rx.state[0]["packets"] = 0
        if self.link.take(0.5, drain=False) == SLICE:
            give_up(self.link.rx.state, self.link.writer.record)

    @property
    def phase(self) -> int:
        return int(self.link.rx.state[0]["phase"])

    @property
    def is_taken(self) -> bool:
        """Has the call emptied the socket's queue?"""
        return struct.unpack("9I", self.link.sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36))[0] == 0

    def packets(self, since: int) -> list[bytes]:
        """All from frame `since` on."""
        ring = self.link.ring
        table = ring._memory[ring.geometry.descriptors :][: ring.geometry.frames * DESCRIPTOR.itemsize]
        found = []
        for sequence in range(since, int(ring.counters["published"])):
            d = table.view(DESCRIPTOR)[sequence & (ring.geometry.frames - 1)]
            at = ring.geometry.arena + int(d["offset"]) * 16
            for length in segments(int(d["length"]), int(d["segment"])):
                found.append(ring._memory[at : at + length].tobytes())
                at += length
            if ring.geometry.sources:
                records = ring._memory[ring.geometry.source_records :][
                    : ring.geometry.frames * SOURCE.itemsize
                ]
                record = records.view(SOURCE)[sequence & (ring.geometry.frames - 1)]
                assert record["port"] == self.link.out.getsockname()[1]
        return found


def step_through(
    scene: Scene, child: Child, after: int, check: Callable[[], None]
) -> dict[int, list[NDArray[np.uint8]]]:
    """Call `check` on what the child leaves at every instruction; one state of each phase that was seen.

    check may change what is shared: the child does not notice.
    """
    seen: dict[int, list[NDArray[np.uint8]]] = {}
    last = None
    for _ in steps(child, after):
        if last is None or not scene.is_as(last):
            last = scene.keep()
            seen[scene.phase] = last
            check()
            scene.put_back(last)
    child.kill()
    return seen


# Lengths sent, and what of the receiver is set before. An eighth of the arena, 4096 bytes, is for one call.
SCENES = {
    "even": ([100, 100, 100], {"stride": 112}),
    "with holes": ([700, 20, 0, 30], {"stride": 704}),
    "overflowing": ([100, 3000, 0, 90], {"stride": 64}),
    "one by one": ([1200], {"one_by_one": 1}),
    "one by one, overflowing": ([1200], {"one_by_one": 1, "stride": 64}),
    "too large": ([100, 20_000, 90], {"stride": 64}),
    "truncated": ([100, 3000, 90], {"room": 2048, "stride": 64}),
    "all truncated": ([3000, 3000], {"room": 2048, "stride": 2048}),
    "the last packets": ([100, 1200, 100, 100], {"packets": 154, "stride": 64}),
    "whose": ([100, 100, 100], {"stride": 112}),
    "whose, overflowing": ([100, 3000, 0, 90], {"stride": 64}),
    "gro": ([1000, 1010, 400], {"stride": 1024}),
    "gro with holes": ([1000, 20, 250, 0], {"stride": 1008}),
    "gro, overflowing": ([100, 3000, 0, 250], {"stride": 64}),
}
SEGMENT = 100  # of the messages in the scenes with GRO


def begin(link: Link, case: str) -> tuple[Scene, int, list[bytes]]:
    """(scene, how many frames were published before, the packets that are queued)"""
    for _ in range(150):  # round the arena three times: a successor's positions count from another base
        link.send([700])
        link.take()
    lengths, changes = SCENES[case]
    sent = link.send_gso(lengths, SEGMENT) if link.rx.state[0]["gro"] else link.send(lengths)
    assert readable(link.sock.fileno(), 10.0)
    for field, value in changes.items():
        link.rx.state[0][field] = value
    link.rx.state[0]["short"] = 1  # it polls first: from there on we look
    return Scene(link), link.published, sent


def check_settled(scene: Scene, before: int, sent: list[bytes], *, may_lose: bool) -> None:
    """After a successor: every packet that was taken is in one place, whole and once."""
    counters = scene.link.ring.counters
    refused, lost = int(sum(counters["refused"])), int(counters["lost_in_flight"])
    taken = sent if scene.is_taken else []
    last, *packets = scene.packets(before - 1)
    assert scene.phase == _IDLE
    assert last == payload(before - 1, 700)
    assert counters["received"] == before + len(taken)
    assert len(packets) + refused + lost == len(taken)
    whole = [p for p in taken if len(p) <= min(scene.link.rx.state[0]["room"], 16_384)]
    if packets != whole:
        assert may_lose
        assert packets == []
    elif lost > 0:  # it was to be refused, and was killed before it had counted that
        assert lost <= len(taken) - len(whole)
    # It knows where the oldest bytes lie: a little room takes no more than that from the readers.
    assert reserve_only(scene.link.writer.record, 1, 16)
    assert counters["published"] - counters["floor"] > 20


@pytest.mark.parametrize("case", SCENES)
def test_at_every_instruction_of_a_call_and_of_its_successor(name: str, fork: Fork, case: str) -> None:
    kind = {"gro": case.startswith("gro"), "sources": case.startswith("whose")}
    with Link(name, size_bytes=64 << 10, batch=4, policy=None, **kind) as link:
        scene, before, sent = begin(link, case)
        may_lose = False

        def check() -> None:
            moving = scene.phase == _MOVING
            scene.succeed()
            scene.finish()
            check_settled(scene, before, sent, may_lose=may_lose or moving)

        # recvmsg's answer, the length, is in no memory yet when it returns.
        may_lose = case.startswith("one by one")
        seen = step_through(scene, fork(traced, link.receive, 10.0), POLL, check)
        assert {_IDLE, _CALLING} <= set(seen)
        assert scene.is_taken
        for phase in {_CALLING, _MOVING, _PRIVATE} & set(seen):
            may_lose = phase == _MOVING
            scene.put_back(seen[phase])
            seen |= step_through(scene, fork(traced, scene.succeed), CLOCK_GETTIME, check)
        assert (_MOVING in seen) == ("with holes" in case)
        assert _SETTLING in seen or "with holes" not in case
        assert (_PRIVATE in seen) == (link.ring.counters["overflowed"] > 0)


def receive_until_stopped(link: Link) -> None:
    """A receiver's life, in a process of its own."""
    link.writer = link.ring.writer()
    take_up(link.rx.state, link.writer.record)
    while link.take(0.05, drain=False) == SLICE:
        pass
    while link.take(0.05, drain=True) != FINISHED:
        pass


def has_ended(child: Child) -> bool:
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.parametrize(("one_by_one", "largest"), [(False, 300), (False, 20_000), (True, 300)])
def test_at_random_under_load(name: str, fork: Fork, one_by_one: bool, largest: int) -> None:
    """Many receivers, one after the other: what was sent is delivered in order, or counted."""
    chance = random.Random(largest)
    with Link(name, batch=16, one_by_one=one_by_one) as link:
        link.writer.abandon()
        child = fork(receive_until_stopped, link)
        got: list[bytes] = []
        sent: list[bytes] = []
        for _ in range(5 * KILL_ROUNDS):
            for _ in range(chance.randrange(1, 8)):
                sent += link.send([chance.randrange(largest) for _ in range(50)])
                got += link.read()
            child.kill()
            child = fork(receive_until_stopped, link)
        link.stop[0] = 1
        while not has_ended(child):
            got += link.read()
        assert child.wait() == 0
        got += link.read()
        rest = iter(sent)
        assert all(packet in rest for packet in got)
        assert len(got) == link.published
        link.check_balance()
        # A call takes 16 at most, and a kill loses no more than that.
        assert 0 <= link.ring.counters["lost_in_flight"] <= 16 * 5 * KILL_ROUNDS


def test_what_is_queued_is_not_lost_with_the_receiver(name: str, fork: Fork) -> None:
    with Link(name) as link:
        link.writer.abandon()
        child = fork(receive_until_stopped, link)
        sent = link.send([100])
        await_(lambda: link.published == 1)
        child.send(signal.SIGSTOP)
        sent += link.send([200] * 100)
        child.kill()
        link.stop[0] = 1
        assert fork(receive_until_stopped, link).wait() == 0
        assert link.read() == sent
        assert link.ring.counters["lost_in_flight"] == 0
