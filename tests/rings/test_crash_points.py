"""A real process is stopped at every place of an operation, and then goes on, or is killed there.

A place is a line of the ring's own code when it is first come to, or any operation on shared memory: what is
compiled runs in slow motion (slow_motion.py). While the process stands there, and after it went on or died,
the others look at the ring and use it: accounts add up, no byte is torn, nobody waits for a dead process, and
in the end the memory is gone. Every instruction, where a receive is under way:
tests/engine/net/test_receiver_killed.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from forked import Child
from slow_motion import Stepper, flow_of
from test_interleavings import M, N, World, payload

import rings
from rings import libc, locks
from rings import reader as reader_module
from rings import wait as wait_module
from rings import writer as writer_module
from rings.layout import LOCK_JOIN
from rings.libc import monotonic_ns
from rings.segment import object_name, remove_if_dead

RINGS = str(Path(rings.__file__).parent)
MOST = 2000  # places of one operation
SOON_NS = 100_000_000  # for most; a busy machine may take longer now and then, but not
LATE_NS = 20 * SOON_NS

Fork = Callable[..., Child]
Operation = Callable[[], object]

both = pytest.mark.parametrize("then", [signal.SIGKILL, signal.SIGCONT], ids=["killed", "goes on"])


# Stopping there -------------------------------------------------------------------------------------------


class _Places(Stepper):
    """The `at`-th place of what a process does from `begin(at)` to `end()`: there it stops itself.

    Made before it forks, so that a hundred processes need not.
    """

    def __init__(self) -> None:
        self.left = 0
        self._seen: set[tuple[Any, int]] = set()
        self._slowly: list[tuple[ModuleType, str, Any, Any]] = []
        super().__init__(self, reader_module, writer_module, wait_module)
        for call in ("futex_wait", "sleep_ns"):
            self.setattr(wait_module, call, self._counted(getattr(libc, call)))

    def setattr(self, module: ModuleType, name: str, value: Any) -> None:
        """What a Stepper replaces is replaced when this begins."""
        self._slowly.append((module, name, value, getattr(module, name)))

    def begin(self, at: int) -> None:
        self.left = at
        self._seen.clear()
        for module, name, slow, _ in self._slowly:
            setattr(module, name, slow)
        sys.settrace(self._trace)

    def end(self) -> None:
        sys.settrace(None)
        for module, name, _, fast in self._slowly:
            setattr(module, name, fast)

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(RINGS):
            return None
        place = (frame.f_code, frame.f_lineno)
        if event == "line" and place not in self._seen:
            self._seen.add(place)
            self._step()
        return self._trace


def _go(places: _Places, first: int, prepare: Callable[[], Operation]) -> None:
    """The operation again and again, with a stop before each time and at one place further, to its end."""
    gc.disable()  # it would go through, and so copy, all the memory that is shared with us
    before, kept = _descriptors(), []
    for at in range(first, MOST):
        os.kill(os.getpid(), signal.SIGSTOP)
        operation = prepare()
        places.begin(at)
        kept += [operation, operation()]
        places.end()
        for fd in _descriptors() - before:  # as if it had ended; nobody else closes what is kept
            os.close(fd)
        if places.left > 0:
            return


def _descriptors() -> set[int]:
    with os.scandir("/proc/self/fd") as entries:
        found = {int(entry.name) for entry in entries}
    return {fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")}


def _stops(child: Child) -> bool:
    """Wait until it stands still; False if it has ended."""
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        child.status = os.waitstatus_to_exitcode(status)
    return os.WIFSTOPPED(status)


def _at_every_place(fork: Fork, prepare: Callable[[], Operation]) -> Iterator[Child]:
    """A process that stands at the first place of an operation, at the second … and one that has ended.

    `prepare` runs in that process before, at full speed, and returns the operation.
    """
    places, child = _Places(), None
    for at in range(1, MOST):
        if child is None or child.status is not None:
            child = fork(_go, places, at, prepare)
            assert _stops(child)
        child.send(signal.SIGCONT)
        stands = _stops(child)
        yield child
        if not stands:
            return
    raise AssertionError("an operation without an end")


def _let(child: Child, then: signal.Signals) -> None:
    """It goes on to the end of the operation, or dies where it stands."""
    child.send(then)
    if child.status is None and then == signal.SIGCONT:
        assert _stops(child)
    else:
        assert child.wait() in (0, -then)


# Who goes on beside it ------------------------------------------------------------------------------------


class Scene:
    """A ring that has gone round, its writer, and a gating reader that must get everything."""

    def __init__(self, name: str, *, sources: bool = False) -> None:
        self.world = World(name, sources=sources)
        self.name = name
        self.steady = self.world.ring.reader(name="steady")
        self.delays_ns: list[int] = []
        for _ in range(5):
            self.write(N - 1)

    def drain(self) -> None:
        with contextlib.suppress(StopIteration):  # the writer has closed it, and all is read
            while (batch := self.steady.poll()) is not None:
                self.world.check(batch)

    def write(self, frames: int) -> int:
        """What there is room for of `frames`, none of it held up by the steady reader."""
        self.drain()
        wrote = self.world.write(frames)
        self.drain()
        return wrote

    def check(self) -> None:
        self.drain()
        self.world.balanced()
        info = next(info for info in self.world.ring.readers() if info.name == "steady")
        assert (info.skipped, info.unread, info.state) == (0, 0, "active")

    def check_goes_on(self) -> None:
        """Of the others' time, not of the dead process's, no more is lost than a look takes."""
        began_ns = monotonic_ns()
        while self.write(1) == 0:
            assert monotonic_ns() - began_ns < LATE_NS
        self.delays_ns.append(monotonic_ns() - began_ns)
        assert self.write(N - 1) == N - 1
        self.check()

    def close(self) -> None:
        self.steady.close()
        self.world.close()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """What slow motion calls: children that are forked from now on need not compile it."""
    libc.futex_wait(np.zeros(1, np.uint32).ctypes.data, 1, 1)
    libc.sleep_ns(1)
    with pytest.MonkeyPatch.context() as patch:
        Stepper(patch, reader_module, writer_module)
        with rings.create(f"t{os.getpid()}.slow", frames=N, arena_bytes=M) as ring:
            readers = [ring.reader(name=policy, policy=policy) for policy in ("gate", "skip")]
            with ring.writer() as writer:
                writer.write(payload(0))
                for reader in readers:
                    reader.poll()
                    reader.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest, name: str) -> Iterator[Scene]:
    made = Scene(name, sources=getattr(request, "param", "") == "sources")
    yield made
    made.close()
    assert sorted(made.delays_ns)[len(made.delays_ns) // 2] < SOON_NS
    assert not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))


# Readers --------------------------------------------------------------------------------------------------


def _attach(name: str, policy: str) -> Operation:
    return lambda: rings.attach(name)


def _join(name: str, policy: str) -> Operation:
    attached = rings.attach(name)
    return lambda: attached.reader(name="one", policy=policy)


def _read(name: str, policy: str) -> Operation:
    """Some of a batch is released, and then the rest."""
    reader = rings.attach(name).reader(name="one", policy=policy)

    def read() -> None:
        for _ in range(2):
            batch = reader.poll(3)
            if batch is not None:
                batch.release(1)

    return read


def _sleep(name: str, policy: str) -> Operation:
    reader = rings.attach(name).reader(name="one", policy=policy)
    while reader.poll() is not None:
        pass
    return lambda: reader.wait(0.001)


def _leave(name: str, policy: str) -> Operation:
    reader = rings.attach(name).reader(name="one", policy=policy)
    reader.poll(2)
    return reader.close


READERS = [
    (_attach, "gate", "left"),
    *itertools.product([_join], ["gate", "skip"], ["left", "died"]),
    *[(_read, "gate", "left"), (_read, "gate", "died"), (_read, "skip", "left")],
    (_sleep, "gate", "left"),
    *[(_leave, "gate", "left"), (_leave, "skip", "left")],
]


@both
@pytest.mark.parametrize(("operation", "policy", "before"), READERS)
def test_a_reader(
    scene: Scene, operation: Any, policy: str, before: str, then: signal.Signals, fork: Fork
) -> None:
    """Stopped, it holds up nobody but who waits for a gate; dead, nobody at all, and it can come back."""
    places = 0
    one = scene.world.ring.reader(name="one", policy=policy)
    one._segment.forget() if before == "died" else one.close()
    scene.write(3)
    for child in _at_every_place(fork, lambda: operation(scene.name, policy)):
        places += 1
        scene.check()
        wrote = scene.write(3)
        assert wrote == 3 or policy == "gate"
        scene.check()
        _let(child, then)
        scene.check()
        scene.check_goes_on()
        one = scene.world.ring.reader(name="one", policy=policy)
        scene.write(3)
        sequence = -1
        while (batch := one.poll()) is not None:
            assert batch.first == sequence or sequence < 0
            sequence = scene.world.check(batch)
        assert sequence == scene.world.head
        one._segment.forget() if before == "died" else one.close()
        scene.write(3)
    assert places > 15
    other = scene.world.ring.segment.reopen()
    assert not locks.held_by_other(other.fd, LOCK_JOIN)
    other.forget()


MEMBER = {"name": "one", "split": 2, "member": 1, "by": "flow"}


def _take(name: str, policy: str) -> Operation:
    """A member passes others' flows, and releases one of its own frames."""
    reader = rings.attach(name).reader(policy=policy, **MEMBER)

    def take() -> None:
        batch = reader.poll(2)
        if batch is not None:
            batch.release(1)

    return take


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("scene", ["sources"], indirect=True)
def test_a_member_by_flow_is_killed(scene: Scene, policy: str, fork: Fork) -> None:
    """Its successor goes on with the same flows: each is handled, or said to be skipped."""
    places, world = 0, scene.world
    world.ring.reader(policy=policy, **MEMBER)._segment.forget()
    scene.write(5)
    for child in _at_every_place(fork, lambda: _take(scene.name, policy)):
        places += 1
        scene.check()
        assert scene.write(3) == 3 or policy == "gate"
        world.check_share("one", 2, 1)
        _let(child, signal.SIGKILL)
        scene.check_goes_on()
        one = world.ring.reader(policy=policy, **MEMBER)
        scene.write(3)
        while (batch := one.poll()) is not None:
            world.check(batch)
            assert {flow_of(batch.first + i, N) % 2 for i in range(batch.frames)} == {1}
        assert int(one.record[0]["cursor"]) == world.head
        world.check_share("one", 2, 1)
        scene.check()
        one._segment.forget()
        scene.write(5)
    assert places > 15
    info = next(info for info in world.ring.readers() if info.name == "one")
    assert min(info.delivered, info.passed) > places


# Writers --------------------------------------------------------------------------------------------------


def _write(name: str) -> Operation:
    """reserve, evict who died in the way, publish, wake who sleeps; three times, and round the arena."""
    ring = rings.attach(name)
    writer = ring.writer()

    def write() -> None:
        for _ in range(3):
            assert writer.write(payload(ring.published()[0]), timeout_s=0)

    return write


def _restart(name: str) -> Operation:
    return rings.attach(name).writer


def _close(name: str) -> Operation:
    return rings.attach(name).writer().close


@both
@pytest.mark.parametrize("operation", [_write, _restart, _close])
def test_a_writer(scene: Scene, operation: Any, then: signal.Signals, fork: Fork) -> None:
    """Stopped, it keeps its place, and readers what it published; dead, the next goes on behind that."""
    places, evicted = 0, 0
    world, counters = scene.world, scene.world.ring.counters
    world.writer.abandon()
    _in_the_way(scene)
    head, floor = world.head, int(counters["floor"])
    for child in _at_every_place(fork, lambda: operation(scene.name)):
        places += 1
        assert head <= world.head <= head + 3
        assert int(counters["floor"]) >= floor
        scene.check()
        if child.status is None and world.ring.state == "live":
            with pytest.raises(rings.RingError, match="has a writer"):
                world.ring.writer()
        _let(child, then)
        scene.check()
        if then == signal.SIGCONT and operation is _write:
            assert world.head == head + 3
        evicted += "one" not in [info.name for info in world.ring.readers() if info.holds]
        began_ns = monotonic_ns()
        world.writer = world.ring.writer()
        assert world.ring.state == "live"
        assert monotonic_ns() - began_ns < LATE_NS
        scene.check_goes_on()
        world.writer.abandon()
        _in_the_way(scene)
        head, floor = world.head, int(counters["floor"])
    assert places > 15
    assert evicted > 0 or operation is not _write
    assert int(counters["packets"]) == head
    world.writer = world.ring.writer()


def _in_the_way(scene: Scene) -> None:
    """The next frame needs the place of one that a dead gate had not read, and somebody sleeps."""
    writer = scene.world.ring.writer()
    one = scene.world.ring.reader(name="one")
    while one.poll() is not None:
        pass
    one._segment.forget()
    scene.world.writer = writer
    assert scene.write(N - 1) == N - 1
    writer.abandon()
    scene.steady._shared[:4].view(np.uint32)[0] = 1


# Owners ---------------------------------------------------------------------------------------------------


def _create_one(name: str) -> rings.Ring:
    return rings.create(name, frames=N, arena_bytes=M, readers=1)


def _create(name: str) -> Operation:
    def create() -> None:
        with contextlib.suppress(rings.RingError):  # another was faster
            assert _create_one(name).segment.is_linked()

    return create


def _remove(name: str) -> Operation:
    _create_one(name).forget()

    def remove() -> None:
        with contextlib.suppress(rings.RingError):
            rings.remove(name)

    return remove


def _close_and_remove(name: str) -> Operation:
    return _create_one(name).close


def _try_to_create(name: str) -> tuple[rings.Ring | None, str]:
    try:
        return _create_one(name), ""
    except rings.RingError as error:
        return None, str(error)


@both
@pytest.mark.parametrize("operation", [_create, _remove, _close_and_remove])
def test_an_owner(name: str, operation: Any, then: signal.Signals, fork: Fork) -> None:
    """Stopped, its name is its own or another's, never both; dead, its name is anybody's."""
    places, refused, got = 0, 0, 0
    for child in _at_every_place(fork, lambda: operation(name)):
        places += 1
        with contextlib.suppress(rings.RingError):  # not there, not yet, or whole
            rings.attach(name, timeout_s=0).forget()
        mine, why = _try_to_create(name)
        if mine is None:
            assert "is in use" in why
            assert child.status is None  # who has ended holds nothing
            refused += 1
        got += mine is not None
        _let(child, then)
        began_ns = monotonic_ns()
        mine = mine or _create_one(name)
        assert monotonic_ns() - began_ns < LATE_NS
        assert mine.segment.is_linked()
        assert not remove_if_dead(object_name(name, 0))
        with mine.writer() as writer, rings.attach(name).reader() as reader:
            writer.write(payload(0))
            batch = reader.poll()
            assert batch is not None
            assert batch.payload(0).tobytes() == payload(0)
        mine.close()
        assert not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))
    assert places > 10
    assert refused > 0
    assert got > 0
