"""Every interleaving of small histories: writer and readers, one shared-memory operation at a time.

test_interleavings.py lets one whole action happen at each place of a step. Here the steps of two or three
processes are mixed in every order there is, each of which may also die at any place, on a ring of four
frames that has gone round. The order of operations is that of the program, as on one core; what another
machine may reorder is test_barriers.py's.

A state is what is in shared memory and what each process has seen so far, which decides what it does next.
States that were seen before are not gone through again, so the search ends: then it was all of them.
"""

from __future__ import annotations

import _thread
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from slow_motion import Died, Stepper, _copy

import rings
from rings import locks
from rings import reader as reader_module
from rings import wait as wait_module
from rings import writer as writer_module
from rings.layout import DESCRIPTOR, LOCK_READER, SlotState
from rings.reader import Reader

N, LENGTH = 4, 24  # of the ring; its arena is as large as that N − 1 frames of LENGTH bytes fill both
BEFORE = 6  # frames that were written before
BUFFERS = [np.full(LENGTH, sequence, np.uint8) for sequence in range(64)]
Choice = tuple[int, bool]  # which process does its next operation, or dies before it


class Process:
    """One of those whose steps are mixed: a thread that stands still before each of its operations."""

    def __init__(
        self, explorer: Explorer, run: Callable[[], object], die: Callable[[], object] | None
    ) -> None:
        self.explorer, self.run, self.die = explorer, run, die
        self.seen = 0  # a fingerprint of all that its operations returned
        self.ended = self.dead = False
        self.error: BaseException | None = None
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()
        self.advance()

    def _live(self) -> None:
        self._go.acquire()
        try:
            self.run()
        except Died:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()

    def advance(self) -> None:
        """To its next operation, or its end."""
        self.explorer.current = self
        self._go.release()
        self._back.acquire()
        self.explorer.current = None
        if self.error is not None:
            raise self.error

    def stand(self) -> None:
        """Of its own thread: until it may go on."""
        self._back.release()
        self._go.acquire()
        if self.dead:
            raise Died
        self.saw("a step")  # also where it changes nothing

    def end(self) -> None:
        if not self.ended:
            self.dead = True
            self.advance()
        self._thread.join()

    def saw(self, what: object) -> None:
        self.seen = hash((self.seen, what))


class Explorer(Stepper):
    """A ring and, again and again from its beginning, processes that work on it in one more order."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, frames: int) -> None:
        self.current: Process | None = None
        self.ring = rings.create(name, frames=frames, arena_bytes=32 * frames, readers=2)
        self.writer = self.ring.writer()
        self.readers: dict[str, Reader] = {}
        super().__init__(monkeypatch, reader_module, writer_module, wait_module)
        monkeypatch.setattr(writer_module, "monotonic_ns", lambda: 1)
        monkeypatch.setattr(wait_module, "monotonic_ns", lambda: 1)
        monkeypatch.setattr(writer_module, "_is_locked", self._counted(writer_module._is_locked))
        monkeypatch.setattr(wait_module, "futex_wait", self._counted(self._fall_asleep))
        self.joined: list[Reader] = []
        self.asleep: dict[Process | None, int] = {}  # on which value of the futex word
        for _ in range(BEFORE):
            assert self.append()

    def _slow(self, name: str, value: Any) -> Any:
        # In the order of the program a fence does nothing.
        return (lambda: None) if name.startswith("fence_") else super()._slow(name, value)

    # One operation ----------------------------------------------------------------------------------

    def _step(self) -> None:
        if self.current is not None:
            self.current.stand()

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: int) -> Any:
            self._step()
            result = operation(*(int(a) for a in arguments))
            if self.current is not None:
                self.current.saw(result)
            return result

        return counted

    def _copy(self, target: int, source: int, size: int) -> None:
        """In two parts, as in slow motion."""
        half, size = int(size) // 2, int(size)
        for begin, count in ((0, half), (half, size - half)):
            self._step()
            if self.current is not None:
                self.current.saw(ctypes.string_at(int(source) + begin, count))
            _copy(int(target) + begin, int(source) + begin, count)

    def _fall_asleep(self, address: int, expected: int, timeout_ns: int) -> int:
        self.asleep[self.current] = expected
        return -1

    # What the processes do --------------------------------------------------------------------------

    def record(self, of: Any) -> Any:
        return of.record.view(np.recarray)[0]

    @property
    def head(self) -> int:
        return int(self.ring.counters["published"])

    def reader(self, name: str, policy: str) -> Reader:
        self.readers[name] = self.ring.reader(name=name, policy=policy)
        return self.readers[name]

    def append(self) -> bool:
        w = self.record(self.writer)
        return bool(writer_module.append(w, BUFFERS[int(w.head)].ctypes.data, LENGTH, 1))

    def writes(self, frames: int) -> Callable[[], object]:
        return lambda: [self.append() for _ in range(frames)]

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

    def sleeps(self, name: str) -> Callable[[], object]:
        return lambda: wait_module._sleep(self.record(self.readers[name]), 1 << 62)

    def joins(self, policy: str) -> Callable[[], object]:
        return lambda: self.joined.append(self.ring.reader(name="guest", policy=policy))

    def leaves(self, name: str) -> Callable[[], object]:
        """What `close` does once its batch is released."""
        reader = self.readers[name]
        word = int(reader._slots["word"][reader._index])

        def leave() -> None:
            reader_module.claim(int(reader.record[0]["slot"]), word, word - SlotState.ACTIVE + SlotState.FREE)
            self.reader_dies(name)()

        return leave

    def check_batch(self, r: Any, count: int) -> None:
        if count > 0:
            raw = ctypes.string_at(int(r.batch_descriptors), count * DESCRIPTOR.itemsize)
            for i, descriptor in enumerate(np.frombuffer(raw, DESCRIPTOR)):
                payload = ctypes.string_at(int(r.batch_arena) + int(descriptor["offset"]) * 16, LENGTH)
                assert descriptor["number"] == r.cursor + i
                assert descriptor["length"] == LENGTH
                assert payload == bytes(BUFFERS[int(r.cursor) + i])

    def reader_dies(self, name: str) -> Callable[[], object]:
        reader = self.readers[name]
        return lambda: locks.release(reader._segment.fd, LOCK_READER + reader._index)

    # What must hold ---------------------------------------------------------------------------------

    def check_state(self) -> None:
        for info in self.ring.readers():
            assert min(info.delivered, info.skipped, info.unread) >= 0, info
            assert info.delivered + info.skipped + info.unread + info.joined_packets == self.head, info

    def check_end(self, processes: list[Process]) -> None:
        """Nobody sleeps over what he could read; a successor goes on; who lives reads to the end."""
        if self.head > self.began_at and not any(process.dead for process in processes):
            assert int(self.ring.counters["wake"]) not in self.asleep.values()
        writer_module.resume(self.record(self.writer))
        readers = [*self.readers.values(), *self.joined]
        for _ in range(N):
            self.append()
            for reader in readers:
                if locks.held_by_other(self.ring.segment.fd, LOCK_READER + reader._index):
                    self.reads(reader, 2)()
        self.check_state()
        for info in self.ring.readers():
            if info.state == "active":
                assert info.unread == 0, info
                assert info.policy != "gate" or info.skipped == 0, info

    # All of them ------------------------------------------------------------------------------------

    def explore(self, make: Callable[[], list[tuple[Callable[[], object], Any]]]) -> tuple[int, int]:
        """(states, ends) of all interleavings of the processes that `make` returns with how each may die."""
        beginning, self.began_at = self._keep(), self.head
        states: set[object] = set()
        ends = 0
        todo: list[tuple[Choice, ...]] = [()]
        while todo:
            way = todo.pop()
            self._put_back(beginning)
            processes = [Process(self, run, die) for run, die in make()]
            try:
                for choice in way:
                    self._do(processes, choice)
                while (state := self._state(processes)) not in states:
                    states.add(state)
                    self.check_state()
                    choices = [(i, False) for i, p in enumerate(processes) if not p.ended]
                    if not choices:
                        ends += 1
                        self.check_end(processes)
                        break
                    # One death is enough: it is the others who must go on.
                    if not any(p.dead for p in processes):
                        choices += [(i, True) for i, _ in choices if processes[i].die is not None]
                    todo += [(*way, choice) for choice in choices[1:]]
                    way = (*way, choices[0])
                    self._do(processes, choices[0])
            finally:
                for process in processes:
                    process.end()
        self._put_back(beginning)
        return len(states), ends

    def _do(self, processes: list[Process], choice: Choice) -> None:
        process = processes[choice[0]]
        if choice[1]:
            process.end()
            assert process.die is not None
            process.die()
        else:
            process.advance()

    def _state(self, processes: list[Process]) -> object:
        memory = hash(self.writer._memory.tobytes())
        return memory, tuple((p.seen, p.ended, p.dead) for p in processes)

    def _private(self) -> Iterator[Any]:
        yield from (self.writer._memory, self.writer.record)
        for reader in self.readers.values():
            yield from (reader.record, reader._copy)

    def _keep(self) -> list[Any]:
        return [array.copy() for array in self._private()]

    def _put_back(self, kept: list[Any]) -> None:
        for array, copy in zip(self._private(), kept, strict=True):
            array[:] = copy
        for reader in self.joined:
            reader._segment.forget()
        self.joined.clear()
        for reader in self.readers.values():
            locks.acquire(reader._segment.fd, LOCK_READER + reader._index)
        self.asleep.clear()

    def close(self) -> None:
        for reader in self.readers.values():
            reader._segment.forget()
        self.writer.abandon()
        self.ring.close()


def nothing() -> None:
    """What a writer's death changes for others: they see no more of it."""


@pytest.fixture
def explorer(
    request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Explorer]:
    made = Explorer(name, monkeypatch, getattr(request, "param", N))
    yield made
    made.close()


def _fill(explorer: Explorer, frames: int = N - 1) -> None:
    for _ in range(frames):
        assert explorer.append()


def _explored(explorer: Explorer, least: int, *processes: tuple[Callable[[], object], Any]) -> None:
    """All interleavings of these; how many states that were, and that they were not fewer than once."""
    states, ends = explorer.explore(lambda: list(processes))
    print(f"{states} states, {ends} ends")
    assert states >= least


def test_a_skipper_reads_while_it_is_lapped_and_either_may_die(explorer: Explorer) -> None:
    skip = explorer.reader("skip", "skip")
    _fill(explorer)
    _explored(
        explorer, 4591, (explorer.reads(skip), explorer.reader_dies("skip")), (explorer.writes(1), nothing)
    )


def test_a_gate_reads_while_the_writer_waits_for_it_and_either_may_die(explorer: Explorer) -> None:
    gate = explorer.reader("gate", "gate")
    _fill(explorer)
    _explored(
        explorer, 1979, (explorer.reads(gate), explorer.reader_dies("gate")), (explorer.writes(2), nothing)
    )


def test_a_gate_leaves_while_the_writer_waits_for_it(explorer: Explorer) -> None:
    explorer.reader("gate", "gate")
    _fill(explorer)
    _explored(explorer, 426, (explorer.leaves("gate"), None), (explorer.writes(2), nothing))


@pytest.mark.parametrize("explorer", [2], indirect=True)
def test_a_gate_joins_while_the_writer_goes_round(explorer: Explorer) -> None:
    """Two frames more, and what the guest took for the head is overwritten."""
    _explored(explorer, 7304, (explorer.joins("gate"), None), (explorer.writes(2), None))


def test_two_fall_asleep_while_one_packet_is_published(explorer: Explorer) -> None:
    explorer.reader("gate", "gate")
    explorer.reader("skip", "skip")
    _explored(
        explorer,
        1917,
        (explorer.sleeps("gate"), None),
        (explorer.sleeps("skip"), None),
        (explorer.writes(1), None),
    )


@pytest.mark.parametrize("explorer", [2], indirect=True)
def test_a_gate_leaves_and_a_skipper_reads_while_the_writer_writes(explorer: Explorer) -> None:
    explorer.reader("gate", "gate")
    skip = explorer.reader("skip", "skip")
    _fill(explorer, 1)
    _explored(
        explorer,
        2352,
        (explorer.leaves("gate"), None),
        (explorer.reads(skip), None),
        (explorer.writes(1), None),
    )
