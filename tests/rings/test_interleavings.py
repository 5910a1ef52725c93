"""Something happens between any two shared-memory operations of a protocol step, at every place in turn."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numba import carray
from ring_loops import put, reserve_only
from slow_motion import Died, Stepper, as_record, die, flow_of

import rings
from rings import locks
from rings import reader as reader_module
from rings import wait as wait_module
from rings import writer as writer_module
from rings.atomics import pointer
from rings.jit import jit
from rings.layout import LOCK_JOIN
from rings.reader import Reader
from rings.segment import Segment
from rings.writer import Writer

N, M = 8, 512
LENGTHS = (40, 0, 64, 17, 100)  # of frames, in turn


def payload(sequence: int) -> bytes:
    return bytes([sequence % 251]) * LENGTHS[sequence % 5]


@jit
def scribble(state, frames, size):  # type: ignore[no-untyped-def]
    """What a receive does between reserve and publish: bytes and descriptors of what nobody may see."""
    w = state[0]
    carray(pointer(w.arena + (w.position & (w.arena_bytes - 1))), size, np.uint8)[:] = 0xEE
    for i in range(frames):
        at = w.descriptors + ((w.head + i) & (w.frames - 1)) * 32
        carray(pointer(at), 4, np.int64)[1 if i == 0 else 0 :] = -0x1111111111111112
        if w.sources != 0:
            at = w.sources + ((w.head + i) & (w.frames - 1)) * 32
            carray(pointer(at), 4, np.int64)[:] = -0x1111111111111112
    last = w.descriptors + ((w.head + frames) & (w.frames - 1)) * 32
    carray(pointer(last), 1, np.int64)[0] = -0x1111111111111112


class World:
    """A ring, its writer, and what was written."""

    def __init__(self, name: str, *, number: int = 0, sources: bool = False) -> None:
        self.ring = rings.create(name, number=number, frames=N, arena_bytes=M, readers=3, sources=sources)
        self.writer = self.ring.writer()

    @property
    def head(self) -> int:
        return self.ring.published()[0]

    def write(self, frames: int) -> int:
        """As many as there is room for, of `frames`."""
        for done in range(frames):
            if self.ring.geometry.sources:
                if not self.writer.write(payload(self.head), flow=flow_of(self.head, N), timeout_s=0):
                    return done
                continue
            data = np.frombuffer(payload(self.head) + b"-", np.uint8)
            if not put(self.writer.record, data, np.array([data.size - 1]), np.zeros(1, np.int64)):
                return done
        return frames

    def start_a_batch(self, frames: int, size: int) -> None:
        """And never publish it."""
        if reserve_only(self.writer.record, frames, size):
            scribble(self.writer.record, frames, size)

    def check(self, batch: Any) -> int:
        """The batch is whole; the sequence after it."""
        got = [batch.payload(i).tobytes() for i in range(len(batch))]
        assert got == [payload(batch.first + i) for i in range(batch.frames)]
        assert batch.descriptors["number"].tolist() == [batch.first + i for i in range(batch.frames)]
        return int(batch.first) + batch.frames

    def balanced(self) -> None:
        for info in self.ring.readers():
            done = info.delivered + info.skipped + info.passed
            assert min(info.delivered, info.skipped, info.passed, info.unread) >= 0
            assert done + info.unread + info.joined_packets == self.head
            assert info.unread == info.lag  # a frame is a packet

    def check_share(self, name: str, split: int, member: int) -> None:
        """A member by flow has handled what is its own, but what it says that it skipped."""
        info = next(info for info in self.ring.readers() if info.name == name)
        joined = int(self.ring.slots[info.index]["joined_frame"])
        own = sum(flow_of(sequence, N) % split == member for sequence in range(joined, info.cursor))
        assert own - info.skipped <= info.delivered <= own

    def resume(self) -> None:
        self.writer.abandon()
        self.writer = self.ring.writer()

    def close(self) -> None:
        self.writer.abandon()
        self.ring.close()


@pytest.fixture
def world(name: str) -> Iterator[World]:
    made = World(name)
    yield made
    made.close()


@pytest.fixture
def world_of_flows(name: str) -> Iterator[World]:
    made = World(name, sources=True)
    yield made
    made.close()


@pytest.fixture
def two_worlds(name: str) -> Iterator[list[World]]:
    made = [World(name, number=number) for number in range(2)]
    yield made
    for world in made:
        world.close()


def _forget(reader: Reader) -> None:
    reader._segment.forget()


def _every_place(
    stepper: Stepper, step: Callable[[], object], action: Callable[[], object], most: int = 400
) -> Iterator[int]:
    """Run `step` again and again, with `action` at its first operation, its second … and after its last."""
    for at in range(most):
        stepper.arm(at, action)
        try:
            step()
        finally:
            happened = stepper.happened
            stepper.arm(-1, lambda: None)
        yield at
        if not happened:
            return
    raise AssertionError("a step without an end")


# A writer, while somebody polls --------------------------------------------------------------------------

# Frames published, then a batch begun and never published: how many frames and bytes of it.
BURSTS = [
    *[(0, (1, 0)), (0, (7, M - 16)), (1, (0, 0)), (1, (3, 200))],
    *[(5, (0, 0)), (7, (1, 0)), (8, (0, 0)), (16, (3, 200))],
]


@pytest.mark.parametrize("lag", [1, 4, N - 2, N - 1, N, N + 1, 3 * N])
def test_what_a_writer_does_during_a_skippers_poll_is_never_torn(
    world: World, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lag = capacity − 1, capacity, capacity + 1 among them, and the writer at any point of a batch."""
    reader = world.ring.reader(policy="skip")
    stepper = Stepper(monkeypatch, reader_module)
    seen = [0]

    def step() -> None:
        world.write(lag)
        head, floor, before = world.head, int(world.ring.counters["floor"]), seen[0]
        batch = reader.poll()
        if batch is None:
            return
        assert batch.first >= max(before, floor)
        assert batch.first + batch.frames <= world.head
        if not stepper.happened:
            assert batch.first == max(before, floor)
            assert head == world.head
        seen[0] = world.check(batch)

    places = 0
    for k, (frames, size) in BURSTS:

        def burst(k: int = k, frames: int = frames, size: int = size) -> None:
            world.write(k)
            if frames:
                world.start_a_batch(frames, size)

        for at in _every_place(stepper, step, burst):
            places = max(places, at)
            world.balanced()
            while (batch := reader.poll()) is not None:  # to the end, before the next place
                seen[0] = world.check(batch)
    assert places > 15
    (info,) = world.ring.readers()
    assert info.unread == 0
    assert info.delivered + info.skipped == world.head
    reader.close()


@pytest.mark.parametrize("lag", [1, N - 1])
def test_what_a_writer_does_while_a_member_looks_whose_frames_are(
    world_of_flows: World, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It handles its own flows and no others, and bills to the packet what it passes and what it lost."""
    world = world_of_flows
    reader = world.ring.reader("member", policy="skip", split=2, member=1, by="flow")
    stepper = Stepper(monkeypatch, reader_module)

    def take() -> bool:
        batch = reader.poll()
        if batch is not None:
            world.check(batch)
            assert {flow_of(batch.first + i, N) % 2 for i in range(batch.frames)} == {1}
        return batch is not None

    def step() -> None:
        world.write(lag)
        take()

    places = 0
    for k, (frames, size) in BURSTS:

        def burst(k: int = k, frames: int = frames, size: int = size) -> None:
            world.write(k)
            if frames:
                world.start_a_batch(frames, size)

        for at in _every_place(stepper, step, burst):
            places = max(places, at)
            world.balanced()
            while take():
                pass
            world.check_share("member", 2, 1)
    assert places > 15
    (info,) = world.ring.readers()
    assert info.unread == 0
    assert min(info.delivered, info.skipped, info.passed) > 0
    reader.close()


@pytest.mark.parametrize("evicted", [False, True])
def test_what_a_writer_does_while_a_dead_gate_comes_back(
    world: World, evicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins, polls to the end and dies; the writer comes in between at any place."""
    first = world.ring.reader(name="one")
    stepper = Stepper(monkeypatch, reader_module)
    seen = [0]
    _forget(first)

    def step() -> None:
        reader = world.ring.reader(name="one")
        for _ in range(3):
            batch = reader.poll(3)
            if batch is not None:
                seen[0] = world.check(batch)
        _forget(reader)

    for k, (frames, size) in [(1, (0, 0)), (7, (0, 0)), (20, (0, 0)), (0, (7, 0)), (3, (2, 300))]:

        def burst(k: int = k, frames: int = frames, size: int = size) -> None:
            world.write(k)
            if frames:
                world.start_a_batch(frames, size)

        for _ in _every_place(stepper, step, burst):
            world.balanced()
            world.write(N * 3 if evicted else 2)
    reader = world.ring.reader(name="one")
    while (batch := reader.poll()) is not None:
        world.check(batch)
    (info,) = world.ring.readers()
    assert info.delivered + info.skipped == world.head
    reader.close()


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("burst", [1, 6, 7, 30])
def test_a_writer_while_somebody_joins(
    world: World, policy: str, burst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who joins gets all from where it joined; a gate is waited for from then on."""
    stepper = Stepper(monkeypatch, reader_module)
    joined: list[Reader] = []

    def step() -> None:
        joined.append(world.ring.reader(name="one", policy=policy))

    for _ in _every_place(stepper, step, lambda: world.write(burst)):
        reader = joined.pop()
        sequence = int(reader.record[0]["cursor"])
        (info,) = world.ring.readers()
        slot = world.ring.slots[info.index]
        assert info.joined_packets == slot["joined_packets"] == slot["joined_frame"] == sequence
        wrote = world.write(3 * N)
        assert wrote == N - 1 - (world.head - wrote - sequence) if policy == "gate" else 3 * N
        while (batch := reader.poll()) is not None:
            if policy == "gate":
                assert batch.first == sequence
            sequence = world.check(batch)
        assert sequence == world.head
        world.balanced()
        reader.close()


# Somebody, while a writer writes ---------------------------------------------------------------------------


def _append(world: World) -> None:
    data = np.frombuffer(payload(world.head), np.uint8)
    writer_module.append_waiting(world.writer.record, data.ctypes.data, data.size, 0, 0)


@pytest.mark.parametrize("lag", [0, 3, N - 2, N - 1])
def test_a_gate_that_joins_or_releases_while_the_writer_writes(
    world: World, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any place of the writer's step: nothing that a gate still holds is overwritten."""
    stepper = Stepper(monkeypatch, writer_module)
    steady = world.ring.reader(name="steady")
    held: list[tuple[Reader, Any]] = []

    def join_and_hold() -> None:
        reader = world.ring.reader(name="guest")
        held.append((reader, reader.poll()))

    def release_one() -> None:
        batch = steady.poll(1)
        if batch is not None:
            world.check(batch)

    for action in (join_and_hold, release_one):
        for _ in _every_place(stepper, lambda: _append(world), action):
            for _ in range(2 * N):
                _append(world)
            for reader, _ in held:
                sequence = int(reader.record[0]["cursor"])
                while (batch := reader.poll()) is not None:
                    assert batch.first == sequence
                    sequence = world.check(batch)
                reader.close()
            held.clear()
            while world.head - int(steady.record[0]["cursor"]) > lag:
                release_one()
            world.balanced()
    steady.close()


# Death, at any place ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "unread"), [((40,), 3), ((100,), 3), ((0, 17, 100), 1), ((16,) * 7, 0)])
def test_a_writer_dies_anywhere_and_is_followed(
    world: World, batch: tuple[int, ...], unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published stays; the rest is not there; the floor never falls; the counts hold.

    The ring has gone round, and some batches are unread: the successor may not touch them.
    """
    skipper = world.ring.reader(name="skip", policy="skip")
    gate = world.ring.reader(name="gate")
    stepper = Stepper(monkeypatch, writer_module)
    round_the_end = 0

    def step() -> bool:
        w = as_record(world.writer.record)
        if not writer_module.reserve(w, len(batch), sum((n + 15) & -16 for n in batch)):
            return False
        number, position = w.number, w.position
        for i, length in enumerate(batch):
            at = world.ring.geometry.arena + (position & M - 1)
            world.writer._memory[at : at + length] = (w.head + i) % 251
            number, position = writer_module.describe(w, i, number, 1, position, length, 0, 0, 0)
        writer_module.publish(w, len(batch), number, position, sum(batch))
        return True

    def read(reader: Reader) -> None:
        while (polled := reader.poll()) is not None:
            got = [polled.payload(i).tobytes() for i in range(len(polled))]
            sequences = range(polled.first, polled.first + polled.frames)
            assert got == [bytes([s % 251]) * batch[s % len(batch)] for s in sequences]

    for at in itertools.count():
        for _ in range(11):  # more than N frames and M bytes, and each time to another place
            assert step()
            read(gate)
        assert all(step() for _ in range(unread))
        stepper.arm(at, die)
        floor, head = int(world.ring.counters["floor"]), world.head
        assert floor > 0
        try:
            step()
        except Died:
            world.resume()
            round_the_end += int(world.writer.record[0]["position"]) > M
        ended = not stepper.happened
        stepper.arm(-1, lambda: None)
        assert world.head in (head, head + len(batch))
        assert int(world.ring.counters["floor"]) >= floor
        while step():
            assert int(world.ring.counters["floor"]) >= floor
        read(gate)
        read(skipper)
        for info in world.ring.readers():
            assert info.delivered + info.skipped + info.unread == world.head
            assert info.unread == 0
        if ended:
            break
    assert round_the_end > 0 or not unread  # a batch alone lies in one piece
    skipped = {info.name: info.skipped for info in world.ring.readers()}
    assert skipped["skip"] > 0
    assert skipped["gate"] == 0
    assert int(world.ring.counters["packets"]) == world.head
    gate.close()
    skipper.close()


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("what", ["join", "read", "leave"])
def test_a_reader_dies_anywhere_and_comes_back(
    world: World, policy: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its account is valid and balanced at every moment, and the writer is never stopped."""
    stepper = Stepper(monkeypatch, reader_module)
    opened: list[Segment] = []
    reopen = Segment.reopen

    def remembered(segment: Segment) -> Segment:
        opened.append(reopen(segment))
        return opened[-1]

    monkeypatch.setattr(Segment, "reopen", remembered)
    delivered = [0]

    def step() -> None:
        reader = world.ring.reader(name="one", policy=policy)
        if what == "join":
            return
        for _ in range(2):
            batch = reader.poll(3)
            if batch is not None:
                world.check(batch)
                batch.release(1)
        if what == "leave":
            reader.close()

    for at in itertools.count():
        stepper.arm(at, die)
        with contextlib.suppress(Died):
            step()
        ended = not stepper.happened
        stepper.arm(-1, lambda: None)
        for segment in opened:  # as the kernel does
            segment.forget()
        opened.clear()
        world.balanced()
        assert world.write(5) == 5
        world.balanced()
        if at % 2:
            assert world.write(2 * N) == 2 * N  # the dead are evicted
        world.balanced()
        for info in world.ring.readers():
            delivered[0] = max(delivered[0], info.delivered)
            assert info.state in ("dead", "left")
        if ended:
            break
    assert at > 15
    if what != "join":
        assert delivered[0] > 0
    other = reopen(world.ring.segment)
    assert not locks.held_by_other(other.fd, LOCK_JOIN)
    other.forget()


def test_a_join_in_the_middle_of_an_eviction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer evicts a dead reader, and at any place of that its successor comes: it stays."""
    stepper = Stepper(monkeypatch, writer_module)
    back: list[Reader] = []
    _forget(world.ring.reader(name="one"))

    def step() -> None:
        for _ in range(N + 1):
            _append(world)

    for _ in _every_place(stepper, step, lambda: back.append(world.ring.reader(name="one"))):
        if not back:
            break
        reader = back.pop()
        world.balanced()
        world.write(3 * N)
        (info,) = world.ring.readers()
        assert info.state == "active"
        assert int(world.ring.slots["word"][0]) & 0xFF == 2
        got = sum(world.check(batch) - batch.first for batch in iter(reader.poll, None))
        assert got >= 1
        assert world.write(N - 1) == N - 1
        assert world.write(1) == 0  # it is waited for
        while (batch := reader.poll()) is not None:
            world.check(batch)
        world.balanced()
        _forget(reader)


def test_the_stepper_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without an action does what the compiled one does."""
    reader, skipper = world.ring.reader(name="g"), world.ring.reader(name="s", policy="skip")
    Stepper(monkeypatch, reader_module, writer_module)
    for _ in range(30):
        _append(world)
        for each in (reader, skipper):
            batch = each.poll()
            assert batch is not None
            assert world.check(batch) == world.head
            assert each.poll() is None
    assert isinstance(world.writer, Writer)
    reader.close()
    skipper.close()


# Sleep and wake ----------------------------------------------------------------------------------------


class Futex:
    """Stands for the sleep itself: would it begin, as the word stands?"""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, stepper: Stepper) -> None:
        self._world = world
        self._stepper = stepper
        self.expected = -1  # the word that it sleeps on
        monkeypatch.setattr(wait_module, "futex_wait", self._wait)

    @property
    def asleep(self) -> bool:
        """Every change of the word is followed by a wake of all."""
        return self.expected == int(self._world.ring.counters["wake"])

    def _wait(self, address: int, expected: int, timeout_ns: int) -> int:
        self._stepper._step()
        self.expected = int(expected)
        return -1


def test_a_publish_at_any_place_of_falling_asleep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps while there is something to read."""
    reader = world.ring.reader(name="sleeper")
    stepper = Stepper(monkeypatch, wait_module)
    futex = Futex(world, monkeypatch, stepper)
    places = []

    def step() -> None:
        futex.expected = -1
        wait_module._sleep(as_record(reader.record), 1 << 62)

    for at in _every_place(stepper, step, lambda: world.write(1)):
        if world.head == int(reader.record[0]["cursor"]):
            assert futex.asleep
            world.write(1)
        assert not futex.asleep
        places.append(at)
        while (batch := reader.poll()) is not None:
            world.check(batch)
    assert len(places) > 5
    reader.close()


def test_falling_asleep_at_any_place_of_a_publish(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read this packet, and falls asleep in the middle of its publish, is woken by the next."""
    reader, other = world.ring.reader(name="sleeper"), world.ring.reader(name="other")
    stepper = Stepper(monkeypatch, writer_module)
    futex = Futex(world, monkeypatch, Stepper(monkeypatch, wait_module))

    def read_and_sleep() -> None:
        while reader.poll() is not None:
            pass
        wait_module._sleep(as_record(reader.record), 1 << 62)

    def sleep_first() -> None:
        """Another sleeps already: this publish clears the flag."""
        while other.poll() is not None:
            pass
        other._shared[:4].view(np.uint32)[0] = 1

    def step() -> None:
        sleep_first()
        _append(world)

    for _ in _every_place(stepper, step, read_and_sleep):
        if futex.asleep and world.head == int(reader.record[0]["cursor"]):
            _append(world)
        assert not futex.asleep
        while reader.poll() is not None:
            pass
        futex.expected = -1
    reader.close()
    other.close()


def _fall_asleep_on_two(
    two_worlds: list[World], monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]
) -> Iterator[tuple[list[Reader], Callable[[], bool]]]:
    """Somebody falls asleep on two rings, and something happens at every place of it: (readers, asleep?)."""
    readers = [world.ring.reader(name="sleeper") for world in two_worlds]
    stepper = Stepper(monkeypatch, wait_module)
    expected: list[int] = []

    def futex_wait_any(waiters: Any, deadline_ns: int) -> int:
        stepper._step()
        expected[:] = waiters[:, 0].tolist()
        return 0

    def asleep() -> bool:
        return expected == [int(world.ring.counters["wake"]) for world in two_worlds]

    def step() -> None:
        expected.clear()
        wait_module._sleep_any([as_record(reader.record) for reader in readers], 1 << 62)

    monkeypatch.setattr(wait_module, "futex_wait_any", futex_wait_any)
    for _ in _every_place(stepper, step, happen):
        yield readers, asleep
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_publish_at_any_place_of_falling_asleep_on_two_rings(
    two_worlds: list[World], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, world = 0, two_worlds[which]
    for readers, asleep in _fall_asleep_on_two(two_worlds, monkeypatch, lambda: world.write(1)):
        if world.head == int(readers[which].record[0]["cursor"]):
            assert asleep()
            world.write(1)
        assert not asleep()
        places += 1
        while readers[which].poll() is not None:
            pass
    assert places > 8


@pytest.mark.parametrize("which", [0, 1])
def test_the_end_of_one_of_two_rings_at_any_place_of_falling_asleep(
    two_worlds: list[World], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes, once; who then sleeps on is woken by what comes in the other, and by its end."""
    ending, other = two_worlds[which], two_worlds[1 - which]
    places = 0

    def end() -> None:
        ending.writer.close()

    for readers, asleep in _fall_asleep_on_two(two_worlds, monkeypatch, end):
        records = [as_record(reader.record) for reader in readers]
        wait_module._sleep_any(records, 1 << 62)
        assert asleep()
        assert other.write(1) == 1
        assert not asleep()
        assert readers[1 - which].poll() is not None
        assert readers[1 - which].poll() is None
        ending.resume()
        places += 1
    assert places > 8
