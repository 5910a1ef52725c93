"""What a program does with writers, readers and rings beside the one thread that they are made in."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forked import Child, await_

import rings
from rings import RingError
from rings.ring import Ring

Fork = Callable[..., Child]


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=64, arena_bytes=4096) as made:
        yield made


@pytest.mark.parametrize("how", ["close", "abandon"])
def test_a_writer_closed_while_another_thread_waits_for_room(ring: Ring, how: str) -> None:
    with ring.reader("gates"):
        writer, errors = ring.writer(), list[str]()

        def fill() -> None:
            try:
                while True:
                    writer.write(b"x" * 40)
            except RingError as error:
                errors.append(str(error))

        thread = threading.Thread(target=fill)
        thread.start()
        await_(lambda: ring.counters["full_events"])
        getattr(writer, how)()
        thread.join(20)
        assert errors == [f"this writer of ring {ring.name} is closed: take another"]


def fill(writer: Any) -> None:
    while True:
        writer.write(b"x" * 40)


def test_a_writer_closed_by_a_signal_while_it_waits_for_room(ring: Ring) -> None:
    with ring.reader("gates"):
        writer = ring.writer()
        before = signal.signal(signal.SIGALRM, lambda *_: writer.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(RingError, match="is closed"):
                fill(writer)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert ring.state == "closed"


def test_threads_that_share_a_writer(name: str) -> None:
    with rings.create(name, frames=1024, arena_bytes=1 << 16) as ring, ring.reader("r") as reader:
        writer, each = ring.writer(), 5000

        def write(k: int) -> None:
            for i in range(each):
                writer.write(b"%d:%06d " % (k, i) * (1 + k))

        threads = [threading.Thread(target=write, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        got: Counter[bytes] = Counter()
        while got.total() < 3 * each:
            batch = reader.poll()
            got.update(payload.tobytes() for payload in batch or ())
        for thread in threads:
            thread.join()
        writer.close()
        assert got == Counter(b"%d:%06d " % (k, i) * (1 + k) for k in range(3) for i in range(each))


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_reader_closed_while_another_thread_iterates(name: str, policy: str) -> None:
    for round_ in range(20):
        with (
            rings.create(f"{name}.{round_}", frames=64, arena_bytes=1 << 14) as ring,
            ring.writer() as writer,
        ):
            reader, ended = ring.reader("r", policy=policy), threading.Event()

            def read(reader: Any = reader, ended: threading.Event = ended) -> None:
                with contextlib.suppress(RingError):
                    for batch in reader:
                        _ = [bytes(payload) for payload in batch], batch.matrix
                ended.set()

            threading.Thread(target=read, daemon=True).start()
            for n in range(200 + 10 * round_):
                writer.write(b"%03d" % n, timeout_s=1)
            reader.close()
            assert ended.wait(20)


@pytest.mark.parametrize("way", ["sys.exit", "close", "exception"])
def test_a_child_does_not_take_its_parents_ring_along(ring: Ring, name: str, way: str) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if way == "close":
                ring.close()
            with ring:
                if way == "exception":
                    raise RuntimeError
                sys.exit(0)
        rings.ring._remove_owned()  # as at the end of an interpreter
        os._exit(0)
    os.waitpid(pid, 0)
    rings.attach(name).forget()
    assert ring.state == "orphaned"


def test_a_child_does_not_keep_a_dead_owners_ring_owned(name: str, fork: Fork, board: Any) -> None:
    def own() -> None:
        made = rings.create(name, frames=64, arena_bytes=4096)
        child = os.fork()
        if child == 0:
            board[0] = os.getpid()
            signal.pause()
        assert made.segment.fd >= 0
        signal.pause()

    owner = fork(own)
    await_(lambda: board[0])
    await_(lambda: any(info.name == name and info.owned for info in rings.list()))
    owner.kill()
    try:
        (info,) = (info for info in rings.list() if info.name == name)
        assert not info.owned
        with rings.create(name, frames=64, arena_bytes=4096):
            pass
    finally:
        os.kill(int(board[0]), signal.SIGKILL)


def test_the_end_of_a_process_removes_what_it_owns(name: str, fork: Fork) -> None:
    def make() -> None:
        made = rings.create(name, frames=64, arena_bytes=4096)
        rings.ring._remove_owned()
        assert made.segment.fd < 0

    assert fork(make).wait() == 0
    with pytest.raises(RingError, match="no ring"):
        rings.attach(name)


def test_which_of_several_rings_is_to_be_said(name: str) -> None:
    with rings.create(name, frames=64, arena_bytes=4096):
        rings.attach(name).close()
        with rings.create(name, number=1, frames=64, arena_bytes=4096):
            with pytest.raises(RingError, match="has rings 0, 1: say which"):
                rings.attach(name)
            rings.attach(name, 1).close()


@pytest.mark.parametrize("wrong", [2.5, "2", None])
def test_numbers_are_whole(ring: Ring, name: str, wrong: Any) -> None:
    with ring.writer() as writer, ring.reader("r") as reader:
        writer.write(b"x")
        batch = reader.poll()
        assert batch is not None
        for attempt in (
            lambda: batch.release(wrong),
            lambda: writer.write(b"x", flow=wrong),
            lambda: writer.write(b"x", time_ns=wrong),
            lambda: ring.reader("s", split=wrong),
            lambda: rings.create(name, number=wrong),
        ):
            with pytest.raises(TypeError):
                attempt()
        assert ring.readers()[0].delivered == 0


def test_time_outs_without_end_and_without_sense(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("r") as reader:
        assert writer.write(b"x", timeout_s=float("inf"))
        assert reader.wait(float("inf"))
        assert reader.wait(1e300)
        batch = reader.poll(1 << 70)
        assert batch is not None
        assert reader.poll() is None
        for wrong in ("x", float("nan")):
            with pytest.raises(RingError, match="give seconds"):
                reader.wait(wrong)  # type: ignore[arg-type]


def test_a_closed_ring_says_so(name: str) -> None:
    ring = rings.create(name, frames=64, arena_bytes=4096)
    ring.close()
    for attempt in (ring.reader, ring.writer, ring.published, lambda: ring.state, lambda: ring.counters):
        with pytest.raises(RingError, match="is closed: attach it anew"):
            attempt()
