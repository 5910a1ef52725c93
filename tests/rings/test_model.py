"""The ring against a model of it in plain Python, by random histories.

The rings are tiny, so that they wrap and lap all the time. The model knows of every frame what it holds
and where it lies, so it says not only what each reader must get, but also when the writer has room.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ring_loops import put, reserve_only

import rings
from rings.batch import Batch
from rings.layout import ALIGN
from rings.reader import Reader

READERS = 3
NAMES = ("a", "b", "c", "d")
_numbers = itertools.count()


def aligned(length: int) -> int:
    return (length + ALIGN - 1) & -ALIGN


@dataclass
class Frame:
    payload: bytes
    segment: int
    number: int  # of its first packet
    position: int  # virtual, in the arena

    @property
    def packets(self) -> list[bytes]:
        if self.segment == 0:
            return [self.payload]
        cuts = range(0, max(len(self.payload), 1), self.segment)
        return [self.payload[at : at + self.segment] for at in cuts]


@dataclass
class Slot:
    """A reader's slot, as the model has it."""

    name: str
    policy: str
    cursor: int
    joined: int
    reader: Reader
    delivered: int = 0
    skipped: int = 0
    restarts: int = 0
    state: str = "active"  # active, dead, left
    gates: bool = False  # does the writer look at its cursor?
    batch: Batch | None = None
    held: int = 0  # frames of the batch that are not released


@dataclass
class Old:
    """A batch that has ended, and a view of it that was kept against the rules."""

    batch: Batch
    view: Any
    was: bytes


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.slots: dict[int, Slot] = {}
        self.old: list[Old] = []
        self.number = self.position = self.floor = self.gate = self.full_events = 0
        self.full = False

    # The model of the writer ------------------------------------------------------------------------

    @property
    def head(self) -> int:
        return len(self.frames)

    def first(self, sequence: int) -> int:
        return self.frames[sequence].number if sequence < self.head else self.number

    def where(self, sequence: int, start: int) -> int:
        return self.frames[sequence].position if sequence < self.head else start

    def lowest(self) -> int:
        return min([self.head, *(slot.cursor for slot in self.slots.values() if slot.gates)])

    def reserve(self, frames: int, size: int) -> bool:
        start = self.position
        if start % self.m + size > self.m:
            start += self.m - start % self.m
        floor = max(self.floor, self.head + frames + 1 - self.n)
        while self.where(floor, start) < start + size + ALIGN - self.m and floor < self.head:
            floor += 1
        if floor > self.gate and not self.look(floor):
            return False
        self.position, self.floor = start, floor
        return True

    def look(self, floor: int) -> bool:
        self.gate = self.lowest()
        if self.gate < floor:
            for slot in self.slots.values():
                if slot.state == "dead" and slot.cursor < floor:
                    slot.gates = False
            self.gate = self.lowest()
        self.full_events += self.gate < floor and not self.full
        self.full = self.gate < floor
        return not self.full

    def active(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.state == "active"]

    # Rules ------------------------------------------------------------------------------------------

    @initialize(n=st.sampled_from([2, 4, 8, 16]), m=st.sampled_from([64, 256, 1024, 4096]))
    def create(self, n: int, m: int) -> None:
        self.n, self.m = n, m
        self.ring = rings.create(
            f"t{os.getpid()}.m{next(_numbers)}", frames=n, arena_bytes=m, readers=READERS
        )
        self.writer = self.ring.writer()
        self.attach("a", "gate", None)
        self.attach("b", "skip", None)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        length = data.draw(st.one_of(st.integers(0, self.m // 2), st.sampled_from([0, self.m // 2])))
        payload = os.urandom(1) * length
        wrote = self.writer.write(payload, time_ns=self.head + 1, timeout_s=0)
        assert wrote == self.reserve(1, length)
        if wrote:
            self.publish(payload, 0)

    @rule(data=st.data())
    def write_batch(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.n - 1))
        most = (self.m - ALIGN) // count & -ALIGN
        lengths = data.draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
        segments = [data.draw(st.sampled_from([0, max(n // 3, 1), n + 1])) for n in lengths]
        payload = os.urandom(sum(lengths)) + b"-"
        wrote = put(
            self.writer.record, np.frombuffer(payload, np.uint8), np.array(lengths), np.array(segments)
        )
        assert wrote == self.reserve(count, sum(aligned(n) for n in lengths))
        if wrote:
            at = 0
            for length, segment in zip(lengths, segments, strict=True):
                self.publish(payload[at : at + length], segment)
                at += length

    def publish(self, payload: bytes, segment: int) -> None:
        self.frames.append(Frame(payload, segment, self.number, self.position))
        self.number += len(self.frames[-1].packets)
        self.position += aligned(len(payload))

    @rule(data=st.data())
    def receive_nothing(self, data: st.DataObject) -> None:
        frames = data.draw(st.integers(1, self.n - 1))
        size = data.draw(st.integers(0, (self.m - ALIGN) // ALIGN)) * ALIGN
        assert reserve_only(self.writer.record, frames, size) == self.reserve(frames, size)

    @rule()
    def restart_writer(self) -> None:
        """The writer dies; the next one goes on behind its last published frame."""
        self.writer.abandon()
        assert self.ring.state == "orphaned"
        self.writer = self.ring.writer()
        self.gate, self.full = self.floor, False
        base = self.position = 0
        if self.floor < self.head:
            base = self.frames[self.floor].position // self.m * self.m
            self.position = self.frames[-1].position + aligned(len(self.frames[-1].payload)) - base
        for frame in self.frames:
            frame.position -= base

    @rule(
        name=st.sampled_from(NAMES),
        policy=st.sampled_from(["gate", "skip"]),
        most=st.sampled_from([None, 1, 2, 3]),
    )
    def attach(self, name: str, policy: str, most: int | None) -> None:
        living = [slot.name for slot in self.slots.values() if slot.state == "active"]
        dead = [slot.name for slot in self.slots.values() if slot.state == "dead"]
        try:
            reader = self.ring.reader(name=name, policy=policy, max_frames=most)
        except rings.RingError:
            assert name in living or len(living) == READERS
            return
        assert name not in living
        slot = self.slots.get(reader._index)
        if name in dead:
            assert slot is not None
            assert slot.name == name
            slot.reader, slot.policy, slot.state = reader, policy, "active"
            slot.restarts += 1
        else:
            assert slot is None or slot.state != "active"
            slot = self.slots[reader._index] = Slot(name, policy, self.head, self.number, reader)
        slot.gates = policy == "gate"

    def end_batch(self, slot: Slot) -> None:
        """What a reader does first at each step."""
        if slot.batch is not None:
            self.old.append(Old(slot.batch, slot.batch.arena, slot.batch.arena.tobytes()))
            self.release_frames(slot, slot.held)
            slot.batch = None

    def release_frames(self, slot: Slot, frames: int) -> None:
        slot.delivered += self.first(slot.cursor + frames) - self.first(slot.cursor)
        slot.cursor += frames
        slot.held -= frames

    @precondition(active)
    @rule(data=st.data(), most=st.sampled_from([None, 1, 2, 5]))
    def poll(self, data: st.DataObject, most: int | None) -> None:
        slot = data.draw(st.sampled_from(self.active()))
        self.end_batch(slot)
        batch = slot.reader.poll(most)
        if slot.cursor < self.floor:
            slot.skipped += self.first(self.floor) - self.first(slot.cursor)
            slot.cursor = self.floor
        if slot.cursor == self.head:
            assert batch is None
            return
        assert batch is not None
        assert batch.frames <= min(slot.reader.record[0]["max_frames"], most or self.n)
        slot.batch, slot.held = batch, batch.frames
        self.check(slot)

    def check(self, slot: Slot) -> None:
        """The slot's batch, of which nothing is released, is what the writer wrote."""
        batch = slot.batch
        assert batch is not None
        assert batch.first == slot.cursor
        assert batch.intact
        frames = self.frames[batch.first :][: batch.frames]
        assert batch.frames == len(frames) >= 1
        assert batch.arena.size <= max(self.m // 2, len(frames[0].payload))
        assert batch.descriptors["number"].tolist() == [f.number for f in frames]
        assert batch.descriptors["length"].tolist() == [len(f.payload) for f in frames]
        packets = [p for f in frames for p in f.packets]
        assert [batch.payload(i).tobytes() for i in range(len(batch))] == packets
        matrix = batch.matrix
        if matrix is not None:
            assert [row.tobytes() for row in matrix] == packets

    @precondition(lambda self: any(slot.batch for slot in self.active()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.active() if slot.batch]))
        assert slot.batch is not None
        upto = data.draw(st.integers(0, slot.batch.frames))
        slot.batch.release(upto)
        self.release_frames(slot, max(upto - (slot.batch.frames - slot.held), 0))

    @precondition(active)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.active()))
        self.end_batch(slot)
        slot.reader.close()
        slot.state, slot.gates = "left", False

    @precondition(active)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.active()))
        slot.reader._segment.forget()
        slot.state, slot.batch, slot.held = "dead", None, 0

    # What always holds ------------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: hasattr(self, "ring"))
    def accounts_are_right(self) -> None:
        assert self.ring.published() == (self.head, self.number)
        counters = self.ring.counters
        assert int(counters["floor"]) == self.floor
        assert int(counters["packets"]) == self.number
        assert int(counters["bytes"]) == sum(len(f.payload) for f in self.frames)
        assert int(counters["full_events"]) == self.full_events
        infos = {info.index: info for info in self.ring.readers()}
        assert infos.keys() == self.slots.keys()
        for index, slot in self.slots.items():
            info = infos[index]
            assert info.delivered + info.skipped + info.passed + info.unread + slot.joined == self.number
            assert (info.name, info.state, info.policy) == (slot.name, slot.state, slot.policy)
            assert (info.cursor, info.joined_packets) == (slot.cursor, slot.joined)
            assert (info.delivered, info.skipped, info.restarts) == (
                slot.delivered,
                slot.skipped,
                slot.restarts,
            )

    @invariant()
    def batches_hold(self) -> None:
        """What is not released, or says that it is intact, is what it was."""
        for slot in self.slots.values():
            if slot.batch is not None and slot.held == slot.batch.frames:
                self.check(slot)
        self.old = [old for old in self.old[-4:] if old.batch.intact]
        for old in self.old:
            assert old.view.tobytes() == old.was

    def teardown(self) -> None:
        """Closed, everyone reads to the end, and nothing is missing."""
        if not hasattr(self, "ring"):
            return
        try:
            self.writer.close()
            for slot in self.active():
                self.end_batch(slot)
                for _ in slot.reader:
                    pass
                slot.reader.close()
            for info in self.ring.readers():
                if self.slots[info.index].state == "active":
                    assert info.unread == 0
                    assert info.delivered + info.skipped == self.number - self.slots[info.index].joined
        finally:
            self.old.clear()
            self.ring.close()


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
