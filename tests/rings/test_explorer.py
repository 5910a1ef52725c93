"""Every interleaving of small histories: writer and readers, one shared-memory operation at a time.

test_interleavings.py lets one whole action happen at each place of a step. Here the steps of two or three
processes are mixed in every order there is, each of which may also die at any place, on a ring of a few
frames that has gone round. The order of operations is that of the program, as on one core; what another
machine may reorder is test_barriers.py's.

A state is what is in shared memory and what each process has seen so far, which decides what it does next.
So a process is taken one operation further by running it from its beginning: it is told what it saw, up to
that operation, which then finds the memory of the state. A state is gone on from once, so the search ends:
then it was all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from slow_motion import Stepper, as_record, flow_of

import rings
from rings import locks
from rings import reader as reader_module
from rings import wait as wait_module
from rings import writer as writer_module
from rings.layout import DESCRIPTOR, LOCK_READER, SlotState
from rings.reader import BLOCK_FRAMES, Reader
from rings.ring import Ring
from rings.writer import Writer

N, LENGTH = 4, 24  # of the ring; its arena is as large as that N − 1 frames of LENGTH bytes fill both
BEFORE = 6  # frames that were written before
BUFFERS = [np.full(LENGTH, sequence, np.uint8) for sequence in range(64)]


Words = tuple[tuple[int, int], ...]  # (address, expected value) of futexes


@dataclass(frozen=True)
class Process:
    """One of those whose steps are mixed."""

    run: Callable[[], object]
    die: Callable[[], object] | None = None  # what its death changes for others; None: it does not die


@dataclass(frozen=True)
class Past:
    """What a process has done so far: the results of its operations, the first of which is to begin."""

    saw: tuple[object, ...] = ()
    ended: bool = False
    dead: bool = False


@dataclass(frozen=True)
class State:
    memory: tuple[bytes, ...]  # of each ring
    held: tuple[bool, ...]  # which readers' locks
    asleep: dict[int, Words]  # who sleeps, and on what
    pasts: tuple[Past, ...]

    @property
    def key(self) -> object:
        return hash(self.memory), self.pasts


class _Paused(BaseException):
    """A process has come to its next operation."""


class Explorer(Stepper):
    """One ring or several, and the processes that work on them in every order."""

    def __init__(
        self,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        frames: int,
        *,
        number: int = 1,
        sources: bool = False,
    ) -> None:
        self.current: int | None = None  # which process runs
        size = {"frames": frames, "arena_bytes": 32 * frames, "readers": 2, "sources": sources}
        self.rings: list[Ring] = [rings.create(name, number=i, **size) for i in range(number)]
        self.writers = [ring.writer() for ring in self.rings]
        self.ring, self.writer = self.rings[0], self.writers[0]
        self.readers: dict[str, Reader] = {}
        super().__init__(monkeypatch, reader_module, writer_module, wait_module)
        monkeypatch.setattr(writer_module, "monotonic_ns", lambda: 1)
        monkeypatch.setattr(wait_module, "monotonic_ns", lambda: 1)
        monkeypatch.setattr(writer_module, "_is_locked", self._counted(writer_module._is_locked))
        monkeypatch.setattr(wait_module, "futex_wait", self._counted(self._fall_asleep))
        monkeypatch.setattr(wait_module, "futex_wait_any", self._fall_asleep_on_any)
        self.asleep: dict[int, Words] = {}
        for writer in self.writers * BEFORE:
            assert self.append(writer)

    def _slow(self, name: str, value: Any) -> Any:
        # In the order of the program a fence does nothing.
        return (lambda: None) if name.startswith("fence_") else super()._slow(name, value)

    # One operation ----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Before each operation of a process: known ones are done again, then a new one, and no more."""
        if self.current is None:
            return
        if self.done > self.known:
            raise _Paused
        if self.done == self.known:
            self._put(self.state)
            self.saw.append(None)
        self.done += 1

    def _saw(self, result: object) -> Any:
        """What the process is to see as the result of the operation."""
        if self.done > self.known:
            self.saw[-1] = result
        return self.saw[self.done - 1]

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: int) -> Any:
            self._step()
            result = operation(*(int(a) for a in arguments))
            return result if self.current is None else self._saw(result)

        return counted

    def _copy(self, target: int, source: int, size: int) -> None:
        """In two parts, as in slow motion."""
        half, size = int(size) // 2, int(size)
        for begin, count in ((0, half), (half, size - half)):
            self._step()
            data = ctypes.string_at(int(source) + begin, count)
            ctypes.memmove(int(target) + begin, data if self.current is None else self._saw(data), count)

    def _fall_asleep(self, address: int, expected: int, timeout_ns: int) -> int:
        assert self.current is not None
        self.asleep[self.current] = ((address, expected),)
        return -1

    def _fall_asleep_on_any(self, waiters: Any, deadline_ns: int) -> int:
        assert self.current is not None
        self._step()
        self.asleep[self.current] = tuple((int(address), int(expected)) for expected, address, _ in waiters)
        return int(self._saw(0))

    # What the processes do --------------------------------------------------------------------------

    def record(self, of: Any) -> Any:
        return as_record(of.record)

    @property
    def published(self) -> int:
        return sum(int(ring.counters["published"]) for ring in self.rings)

    def reader(self, name: str, policy: str, ring: Ring | None = None, **options: Any) -> Reader:
        self.readers[name] = (ring or self.ring).reader(name=name, policy=policy, **options)
        return self.readers[name]

    def append(self, writer: Writer | None = None) -> bool:
        w = self.record(writer or self.writer)
        flow = flow_of(int(w.head), int(w.frames))
        return bool(writer_module.append(w, BUFFERS[int(w.head)].ctypes.data, LENGTH, 1, flow))

    def writes(self, frames: int, writer: Writer | None = None) -> Callable[[], object]:
        return lambda: [self.append(writer) for _ in range(frames)]

    def reads(self, reader: Reader, polls: int = 1) -> Callable[[], object]:
        def read() -> None:
            r = self.record(reader)
            for _ in range(polls):
                count = int(reader_module.poll(r, N))
                self.check_batch(r, count)
                self._step()
                self.check_batch(r, count)  # still
                reader_module.release(r, count)

        return read

    def passes(self, reader: Reader) -> Callable[[], object]:
        """What a member does first in a poll."""
        return lambda: reader_module._pass_others(self.record(reader), N)

    def sleeps(self, name: str) -> Callable[[], object]:
        return lambda: wait_module._sleep(self.record(self.readers[name]), 1 << 62)

    def sleeps_on_all(self) -> Callable[[], object]:
        return lambda: wait_module._sleep_any([self.record(r) for r in self.readers.values()], 1 << 62)

    def joins(self, policy: str) -> Callable[[], object]:
        """A guest that has all but its slot, which will be the next."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reader, "_join", lambda _: len(self.readers))
            guest = self.reader("guest", policy)
        return guest._join

    def leaves(self, name: str) -> Callable[[], object]:
        """What `close` does once its batch is released."""
        reader = self.readers[name]
        word = int(reader._slots["word"][reader._index])

        def leave() -> None:
            reader_module.claim(int(reader.record[0]["slot"]), word, word - SlotState.ACTIVE + SlotState.FREE)
            self.reader_dies(name)()

        return leave

    def check_batch(self, r: Any, count: int) -> None:
        again = self.current is not None and self.done <= self.known  # it has been checked then
        if count > 0 and not again:
            raw = ctypes.string_at(int(r.batch_descriptors), count * DESCRIPTOR.itemsize)
            for i, descriptor in enumerate(np.frombuffer(raw, DESCRIPTOR)):
                payload = ctypes.string_at(int(r.batch_arena) + int(descriptor["offset"]) * 16, LENGTH)
                assert descriptor["number"] == r.cursor + i
                assert _owns(r, r.cursor + i)
                assert descriptor["length"] == LENGTH
                assert payload == bytes(BUFFERS[int(r.cursor) + i])

    def reader_dies(self, name: str) -> Callable[[], object]:
        reader = self.readers[name]
        return lambda: locks.release(reader._segment.fd, LOCK_READER + reader._index)

    # What must hold ---------------------------------------------------------------------------------

    def check_state(self) -> None:
        for ring in self.rings:
            for info in ring.readers():
                done = info.delivered + info.skipped + info.passed
                assert min(info.delivered, info.skipped, info.passed, info.unread) >= 0, info
                assert done + info.unread + info.joined_packets == ring.published()[1], info
                assert info.unread == info.lag, info  # a frame is a packet
                r, joined = self.record(self.readers[info.name]), int(ring.slots[info.index]["joined_frame"])
                if r.split > 1:
                    own = sum(_owns(r, sequence) for sequence in range(joined, info.cursor))
                    assert own - info.skipped <= info.delivered <= own, info

    def check_asleep(self, state: State) -> None:
        """Nobody sleeps over what he could read, but while it is being published."""
        others = [past for i, past in enumerate(state.pasts) if i not in state.asleep]
        at_rest = all((past.ended and not past.dead) or len(past.saw) == 1 for past in others)
        if at_rest and self.published > self.began_at:
            for words in state.asleep.values():
                assert any(ctypes.c_uint32.from_address(at).value != expected for at, expected in words)

    def check_end(self, state: State) -> None:
        """A successor goes on; who lives reads to the end."""
        self._begin()
        for i, past in enumerate(state.pasts):
            if not past.dead:
                assert self._run(i, past)
        self._put(state)
        for writer in self.writers:
            writer_module.resume(self.record(writer))
        for writer in self.writers * N:
            self.append(writer)
            for reader in self.readers.values():
                if locks.held_by_other(reader._ring.segment.fd, LOCK_READER + reader._index):
                    self.reads(reader, 2)()
        self.check_state()
        for info in (info for ring in self.rings for info in ring.readers()):
            if info.state == "active":
                assert info.unread == 0, info
                assert info.policy != "gate" or info.skipped == 0, info

    # All of them ------------------------------------------------------------------------------------

    def explore(self, *processes: Process) -> tuple[int, int]:
        """(states, ends) of all interleavings of these, in which one of them may die."""
        self.processes, self.began_at = processes, self.published
        self.private = [array.copy() for array in self._private()]
        self.state = self.beginning = self._now((Past(),) * len(processes))
        for i in range(len(processes)):
            self.state = self._further(self.state, i)
        todo, states, ends = [self.state], {self.state.key}, 0
        self.check_state()
        while todo:
            state = todo.pop()
            if all(past.ended for past in state.pasts):
                ends += 1
                self.check_end(state)
            for after in self._next(state):
                if after.key not in states:
                    states.add(after.key)
                    self.check_state()
                    self.check_asleep(after)
                    todo.append(after)
        self._begin()
        return len(states), ends

    def _next(self, state: State) -> Iterator[State]:
        """The states that may come next; each stands in the memory as it is given."""
        able = [i for i, past in enumerate(state.pasts) if not past.ended]
        for i in able:
            yield self._further(state, i)
        # One death is enough: it is the others who must go on.
        if not any(past.dead for past in state.pasts):
            for i in able:
                if (die := self.processes[i].die) is not None:
                    self._put(state)
                    die()
                    yield self._now(_with(state.pasts, i, replace(state.pasts[i], ended=True, dead=True)))

    def _further(self, state: State, i: int) -> State:
        """Process i does its next operation, and what it does before another."""
        self._begin()
        self.state = state
        ended = self._run(i, state.pasts[i])
        return self._now(_with(state.pasts, i, Past(tuple(self.saw), ended)))

    def _run(self, i: int, past: Past) -> bool:
        """Process i again from its beginning, and one operation more; is that its end?"""
        self.current, self.done, self.known, self.saw = i, 0, len(past.saw), list(past.saw)
        try:
            self._step()  # to begin is the first
            self.processes[i].run()
            return True
        except _Paused:
            return False
        finally:
            self.current = None

    def _now(self, pasts: tuple[Past, ...]) -> State:
        held = [
            locks.held_by_other(reader._ring.segment.fd, LOCK_READER + reader._index)
            for reader in self.readers.values()
        ]
        memory = tuple(writer._memory.tobytes() for writer in self.writers)
        return State(memory, tuple(held), dict(self.asleep), pasts)

    def _put(self, state: State) -> None:
        """What is shared is as in `state`."""
        for writer, memory in zip(self.writers, state.memory, strict=True):
            writer._memory[:] = np.frombuffer(memory, np.uint8)
        self.asleep = dict(state.asleep)
        for reader, held in zip(self.readers.values(), state.held, strict=True):
            change = locks.acquire if held else locks.release
            change(reader._segment.fd, LOCK_READER + reader._index)

    def _begin(self) -> None:
        """All is as before the first operation."""
        self._put(self.beginning)
        for array, copy in zip(self._private(), self.private, strict=True):
            array[:] = copy

    def _private(self) -> Iterator[Any]:
        for writer in self.writers:
            yield writer.record
        for reader in self.readers.values():
            yield from (reader.record, reader._copy)

    def close(self) -> None:
        for reader in self.readers.values():
            reader._segment.forget()
        for writer, ring in zip(self.writers, self.rings, strict=True):
            writer.abandon()
            ring.close()


def _owns(r: Any, sequence: int) -> bool:
    """Is this frame for the reader to handle?"""
    whose = flow_of(sequence, r.frames) if r.by_flow else sequence // BLOCK_FRAMES
    return bool(whose % r.split == r.member)


def _with(pasts: tuple[Past, ...], i: int, past: Past) -> tuple[Past, ...]:
    return (*pasts[:i], past, *pasts[i + 1 :])


def nothing() -> None:
    """What a writer's death changes for others: they see no more of it."""


@pytest.fixture
def explorer(
    request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Explorer]:
    made = Explorer(name, monkeypatch, getattr(request, "param", N))
    yield made
    made.close()


@pytest.fixture
def explorer_of_flows(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Explorer]:
    made = Explorer(name, monkeypatch, 2, sources=True)
    yield made
    made.close()


@pytest.fixture
def explorer_of_two(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Explorer]:
    """Rings; so large that no writer looks for room."""
    made = Explorer(name, monkeypatch, 16, number=2)
    yield made
    made.close()


def _fill(explorer: Explorer, frames: int = N - 1) -> None:
    for _ in range(frames):
        assert explorer.append()


def _explored(explorer: Explorer, least: int, *processes: Process) -> None:
    """All interleavings of these; how many states that were, and that they were not fewer than once."""
    states, ends = explorer.explore(*processes)
    print(f"{states} states, {ends} ends")
    assert states >= least


def test_a_skipper_reads_while_it_is_lapped_and_either_may_die(explorer: Explorer) -> None:
    skip = explorer.reader("skip", "skip")
    _fill(explorer)
    _explored(
        explorer,
        4591,
        Process(explorer.reads(skip), explorer.reader_dies("skip")),
        Process(explorer.writes(1), nothing),
    )


def test_a_gate_reads_while_the_writer_waits_for_it_and_either_may_die(explorer: Explorer) -> None:
    gate = explorer.reader("gate", "gate")
    _fill(explorer)
    _explored(
        explorer,
        1979,
        Process(explorer.reads(gate), explorer.reader_dies("gate")),
        Process(explorer.writes(2), nothing),
    )


def test_a_gate_leaves_while_the_writer_waits_for_it(explorer: Explorer) -> None:
    explorer.reader("gate", "gate")
    _fill(explorer)
    _explored(explorer, 426, Process(explorer.leaves("gate")), Process(explorer.writes(2), nothing))


@pytest.mark.parametrize("explorer", [2], indirect=True)
def test_a_gate_joins_while_the_writer_goes_round(explorer: Explorer) -> None:
    """Two frames more, and what the guest took for the head is overwritten."""
    _explored(explorer, 7304, Process(explorer.joins("gate")), Process(explorer.writes(2)))


def test_two_fall_asleep_while_one_packet_is_published(explorer: Explorer) -> None:
    explorer.reader("gate", "gate")
    explorer.reader("skip", "skip")
    _explored(
        explorer,
        1917,
        Process(explorer.sleeps("gate")),
        Process(explorer.sleeps("skip")),
        Process(explorer.writes(1)),
    )


@pytest.mark.parametrize("explorer", [2], indirect=True)
def test_a_gate_leaves_and_a_skipper_reads_while_the_writer_writes(explorer: Explorer) -> None:
    explorer.reader("gate", "gate")
    skip = explorer.reader("skip", "skip")
    _fill(explorer, 1)
    _explored(
        explorer,
        2352,
        Process(explorer.leaves("gate")),
        Process(explorer.reads(skip)),
        Process(explorer.writes(1)),
    )


@pytest.mark.parametrize("explorer", [2], indirect=True)
def test_a_skipper_that_was_lapped_is_lapped_once_more(explorer: Explorer) -> None:
    """What it finds at the floor is overwritten before it has read whose number it is."""
    skip = explorer.reader("skip", "skip")
    _fill(explorer, 2)
    _explored(
        explorer,
        4768,
        Process(explorer.reads(skip), explorer.reader_dies("skip")),
        Process(explorer.writes(1), nothing),
    )


@pytest.mark.parametrize(("policy", "frames", "least"), [("gate", 1, 1144), ("skip", 2, 10408)])
@pytest.mark.parametrize("explorer", [2], indirect=True)
def test_a_member_passes_the_frames_of_another_while_they_come(
    explorer: Explorer, policy: str, frames: int, least: int
) -> None:
    """All of them are the other's: whenever it looks, there is none for it."""
    member = explorer.reader("member", policy, split=2, member=1)
    _fill(explorer, 1)
    _explored(
        explorer,
        least,
        Process(explorer.reads(member), explorer.reader_dies("member")),
        Process(explorer.writes(frames), nothing),
    )


@pytest.mark.parametrize(("policy", "least"), [("gate", 1093), ("skip", 2709)])
def test_a_member_by_flow_passes_and_takes_while_frames_come(
    explorer_of_flows: Explorer, policy: str, least: int
) -> None:
    member = explorer_of_flows.reader("member", policy, split=2, member=0, by="flow")
    _fill(explorer_of_flows, 1)
    _explored(
        explorer_of_flows,
        least,
        Process(explorer_of_flows.reads(member), explorer_of_flows.reader_dies("member")),
        Process(explorer_of_flows.writes(1), nothing),
    )


def test_what_a_member_looks_at_becomes_its_own(explorer_of_flows: Explorer) -> None:
    """The writer laps it: where it looks lies another flow, and it has passed what it did not see."""
    member = explorer_of_flows.reader("member", "skip", split=2, member=0, by="flow")
    _fill(explorer_of_flows, 1)
    _explored(
        explorer_of_flows,
        5008,
        Process(explorer_of_flows.passes(member)),
        Process(explorer_of_flows.writes(2)),
    )


def test_one_falls_asleep_on_two_rings_while_both_bring_a_packet(explorer_of_two: Explorer) -> None:
    """Whichever comes first wakes it, though the other has not begun."""
    for i, ring in enumerate(explorer_of_two.rings):
        explorer_of_two.reader(f"of {i}", "gate", ring)
    _explored(
        explorer_of_two,
        3932,
        Process(explorer_of_two.sleeps_on_all()),
        *[Process(explorer_of_two.writes(1, writer)) for writer in explorer_of_two.writers],
    )
