from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import await_, descriptors_of

import rings
from rings import RingError, locks
from rings import reader as reader_module
from rings.atomics import store_relaxed
from rings.jit import jit
from rings.layout import LOCK_JOIN, LOCK_READER, PAGE, SlotState
from rings.reader import Reader
from rings.ring import Ring


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=16, arena_bytes=4096, readers=3) as made:
        yield made


def _drain(reader: Reader) -> list[bytes]:
    got: list[bytes] = []
    while (batch := reader.poll()) is not None:
        got += [batch.payload(i).tobytes() for i in range(len(batch))]
    return got


def _balanced(ring: Ring) -> None:
    for info in ring.readers():
        total = info.delivered + info.skipped + info.passed + info.unread + info.joined_packets
        assert total == ring.published()[1]


def _die(reader: Reader) -> None:
    """What the others see of a death: the lock is gone, and nothing was said."""
    reader._segment.forget()


# Joining ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": "wait"}, "policy 'wait': use gate or skip"),
        ({"wait": "sleep"}, "wait 'sleep': use block, yield or spin"),
        ({"name": ""}, "reader name '': use 1 to 32 bytes"),
        ({"name": "a" * 33}, "use 1 to 32 bytes"),
        ({"name": "ä" * 17}, "use 1 to 32 bytes"),
        ({"name": "a\0b"}, "use 1 to 32 bytes"),
    ],
)
def test_bad_options_are_refused_and_leave_no_slot(ring: Ring, options: Any, what: str) -> None:
    with pytest.raises(RingError, match=re.escape(what)):
        ring.reader(**options)
    assert ring.readers() == []


def test_a_reader_starts_at_the_head(ring: Ring) -> None:
    with ring.writer() as writer:
        writer.write(b"before")
        reader = ring.reader(name="ä" * 16)
        writer.write(b"after")
        assert _drain(reader) == [b"after"]
        (info,) = ring.readers()
        assert (info.name, info.index, info.policy, info.state) == ("ä" * 16, 0, "gate", "active")
        assert (info.pid, info.restarts, info.joined_packets) == (os.getpid(), 0, 1)
        reader.close()


def test_a_living_readers_name_is_refused(ring: Ring, name: str) -> None:
    reader = ring.reader(name="one")
    with pytest.raises(RingError, match=f"reader 'one' of {name} lives: use another name"):
        ring.reader(name="one")
    reader.close()
    ring.reader(name="one").close()


def test_names_default_to_the_process(ring: Ring) -> None:
    with ring.reader() as reader:
        assert reader.name == f"reader-{os.getpid()}"


def test_more_readers_than_slots(ring: Ring, name: str) -> None:
    readers = [ring.reader(name=f"{i}") for i in range(3)]
    with pytest.raises(RingError, match=f"all 3 reader slots of {name} are taken: create it with more"):
        ring.reader(name="one too many")
    readers[1].close()
    with ring.reader(name="in time") as reader:
        assert reader._index == 1
    readers[0].close()
    readers[2].close()


def test_a_fresh_slot_is_preferred_then_one_that_was_left_then_a_dead_ones(ring: Ring) -> None:
    order = []
    ring.reader(name="left").close()
    dead = ring.reader(name="dead")
    _die(dead)
    for name in ("a", "b", "c"):
        reader = ring.reader(name=name)
        order.append(reader._index)
        _die(reader) if name != "c" else reader.close()
        if name == "c":
            break
    assert order[:2] == [2, 0]
    assert [info.name for info in ring.readers()][order[2]] == "c"


def test_a_refused_join_lets_go_of_everything(ring: Ring, name: str) -> None:
    readers = [ring.reader(name=f"{i}") for i in range(3)]
    before = descriptors_of(name)
    for _ in range(5):
        with pytest.raises(RingError):
            ring.reader(name="x")
    gc.collect()
    assert descriptors_of(name) == before
    assert not locks.held_by_other(ring.segment.fd, LOCK_JOIN)
    for reader in readers:
        reader.close()


def test_joins_are_made_one_at_a_time(ring: Ring, name: str, fork: Any, board: Any) -> None:
    """Of many that want one name at once, one gets it."""

    def join(mine: int) -> None:
        attached = rings.attach(name)
        await_(lambda: board[0])
        try:
            reader = attached.reader(name="one")
        except RingError:
            board[mine] = 2
            return
        board[mine] = 1
        await_(lambda: board[0] == 2)
        reader.close()

    for _ in range(5):
        board[:] = 0
        children = [fork(join, i) for i in range(1, 5)]
        board[0] = 1
        await_(lambda: 0 not in board[1:5])
        assert sorted(board[1:5]) == [1, 2, 2, 2]
        board[0] = 2
        assert [child.wait() for child in children] == [0] * 4


def test_a_forked_child_attaches_with_locks_of_its_own(ring: Ring, name: str, fork: Any, board: Any) -> None:
    def read() -> None:
        reader = ring.reader(name="child")  # of the ring it inherited
        board[0] = 1
        signal.pause()
        reader.close()

    child = fork(read)
    await_(lambda: board[0])
    assert ring.readers()[0].state == "active"
    child.kill()
    assert ring.readers()[0].state == "dead"


# Leaving and dying ------------------------------------------------------------------------------------


def test_leaving_counts_the_last_batch_and_frees_the_slot(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader(name="one")
    writer.write(b"a")
    writer.write(b"b")
    assert reader.poll(1) is not None
    reader.close()
    reader.close()
    (info,) = ring.readers()
    assert (info.state, info.delivered, info.unread, info.lag) == ("left", 1, 1, 1)
    assert int(ring.slots["word"][0]) & 0xFF == SlotState.FREE
    assert not locks.held_by_other(ring.segment.fd, LOCK_READER)
    with ring.reader(name="one"):
        (info,) = ring.readers()
        assert (info.delivered, info.joined_packets, info.restarts) == (0, 2, 0)


def test_a_batch_kept_over_the_end_holds_no_lock(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader(name="one")
    writer.write(b"kept")
    batch = reader.poll()
    assert batch is not None
    view = batch.payload(0)
    reader.close()
    assert not locks.held_by_other(ring.segment.fd, LOCK_READER)
    assert view.tobytes() == b"kept"
    ring.reader(name="one").close()


def test_a_reader_that_is_dropped_stops_nobody(ring: Ring) -> None:
    writer = ring.writer()
    for batch in _one_batch_of_a_dropped_reader(ring, writer):
        assert len(batch) == 1
    del batch
    gc.collect()
    assert ring.readers()[0].state == "dead"
    assert all(writer.write(b"") for _ in range(100))


def _one_batch_of_a_dropped_reader(ring: Ring, writer: Any) -> Iterator[Any]:
    reader = ring.reader(name="dropped")
    writer.write(b"x")
    for batch in reader:
        yield batch
        return


def test_after_close_nothing_is_read(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader(name="one")
    writer.write(b"x")
    reader.close()
    for use in (reader.poll, lambda: next(reader), lambda: reader.wait(0), lambda: reader.release(1)):
        with pytest.raises(RingError, match="reader 'one' is closed: attach another"):
            use()
    with pytest.raises(RingError, match="is closed"):
        _ = reader.state
    (info,) = ring.readers()
    assert (info.delivered, info.unread) == (0, 1)


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_the_next_of_its_name_goes_on(ring: Ring, policy: str) -> None:
    writer, reader = ring.writer(), ring.reader(name="one", policy=policy)
    for i in range(6):
        writer.write(bytes([i]))
    batch = reader.poll(4)
    assert batch is not None
    batch.release(2)
    _die(reader)
    assert ring.readers()[0].state == "dead"
    after = ring.reader(name="one", policy=policy)
    assert _drain(after) == [bytes([i]) for i in range(2, 6)]  # handled and not released: handled again
    (info,) = ring.readers()
    assert (info.state, info.delivered, info.skipped, info.restarts) == ("active", 6, 0, 1)
    assert info.joined_packets == 0
    after.close()


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_what_was_overwritten_meanwhile_is_skipped(ring: Ring, policy: str) -> None:
    writer, reader = ring.writer(), ring.reader(name="one", policy=policy)
    for i in range(100):
        writer.write(bytes([i]))
        if i == 3:
            _drain(reader)
            _die(reader)
    after = ring.reader(name="one", policy=policy)
    assert _drain(after) == [bytes([i]) for i in range(85, 100)]
    (info,) = ring.readers()
    assert (info.delivered, info.skipped, info.unread) == (4 + 15, 81, 0)
    for i in range(100):
        assert writer.write(bytes([i]))
        assert _drain(after) == [bytes([i])]
        after.poll()
    after.close()


@pytest.mark.parametrize("lives", [1, 2, 3])
def test_lives_that_end_before_they_caught_up_read_nothing_torn(ring: Ring, lives: int) -> None:
    """Each comes back to an active slot whose cursor the writer had passed while it was free."""
    writer, reader = ring.writer(), ring.reader(name="one")
    writer.write(b"\0")
    _die(reader)
    for i in range(1, 100):
        assert writer.write(bytes([i]))
    for _ in range(lives):
        _die(ring.reader(name="one"))
    after = ring.reader(name="one")
    batch = after.poll(2)
    assert batch is not None
    assert [batch.payload(i).tobytes() for i in range(2)] == [bytes([85]), bytes([86])]
    _balanced(ring)
    assert ring.readers()[0].skipped == 85
    after.close()


def test_a_floor_decided_before_it_came_back_is_respected(ring: Ring) -> None:
    """The writer may pass the cursor of one who came back up to the head it saw last."""
    writer, reader = ring.writer(), ring.reader(name="one")
    for i in range(15):
        assert writer.write(bytes([i]))
    _die(reader)
    assert writer.write(bytes([15]))  # looks, evicts, and need not look again for 15 frames
    for _ in range(2):  # the second finds the slot active, its cursor not yet passed
        after = ring.reader(name="one")
        assert int(ring.counters["floor"]) == 1
        if _ == 0:
            _die(after)
    batch = after.poll(4)
    assert batch is not None
    got = [batch.payload(i).tobytes() for i in range(len(batch))]
    for i in range(16, 26):
        writer.write(bytes([i]))
    assert [batch.payload(i).tobytes() for i in range(len(batch))] == got
    rest = _drain(after)
    assert rest == [bytes([i]) for i in range(25 - len(rest) + 1, 26)]
    _balanced(ring)
    after.close()


def test_a_slot_that_the_writer_frees_in_that_moment(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the word and the CAS the writer evicts: no reason to refuse."""
    writer, reader = ring.writer(), ring.reader(name="one")
    for i in range(15):
        assert writer.write(bytes([i]))
    _die(reader)
    claim, calls = reader_module.claim, []

    def late(slot: int, expected: int, wanted: int) -> Any:
        calls.append(wanted)
        if len(calls) == 1:
            # Our lock is held by now; the writer had asked before. Its CAS is on the word it saw then.
            assert claim(slot, expected, expected - SlotState.ACTIVE + SlotState.FREE)
        return claim(slot, expected, wanted)

    monkeypatch.setattr(reader_module, "claim", late)
    after = ring.reader(name="one")
    monkeypatch.undo()
    assert len(calls) == 2
    assert _drain(after) == [bytes([i]) for i in range(15)]
    _balanced(ring)
    after.close()


@pytest.mark.parametrize(("first", "then"), [("gate", "skip"), ("skip", "gate")])
def test_coming_back_with_another_policy(ring: Ring, first: str, then: str) -> None:
    writer, reader = ring.writer(), ring.reader(name="one", policy=first)
    for i in range(5):
        writer.write(bytes([i]))
    _die(reader)
    after = ring.reader(name="one", policy=then)
    assert ring.readers()[0].policy == then
    wrote = [writer.write(bytes([i]), timeout_s=0) for i in range(5, 40)]
    assert all(wrote) == (then == "skip")
    got = _drain(after)
    assert len(got) == 15
    _balanced(ring)
    after.close()


def test_a_dead_readers_slot_is_taken_when_all_others_live(ring: Ring) -> None:
    writer = ring.writer()
    readers = [ring.reader(name=f"{i}") for i in range(3)]
    writer.write(b"x")
    _die(readers[1])
    with ring.reader(name="new") as reader:
        assert reader._index == 1
        assert [info.name for info in ring.readers()] == ["0", "new", "2"]
        assert _drain(reader) == []
        _balanced(ring)
    with ring.reader(name="1"):
        assert ring.readers()[1].joined_packets == 1  # what it had counted is gone with its slot
    for i in (0, 2):
        readers[i].close()


# Batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_batch_is_at_most_half_the_ring(ring: Ring, policy: str) -> None:
    writer, reader = ring.writer(), ring.reader(policy=policy)
    for _ in range(15):
        writer.write(b"")
    batch = reader.poll()
    assert batch is not None
    assert batch.frames == 8
    reader.close()
    reader = ring.reader(policy=policy)
    writer.write(b"")
    for _ in range(4):
        writer.write(bytes(1000))
    assert [batch.arena.size for batch in iter(reader.poll, None)] == [0, 2008, 2008]
    reader.close()


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_limits_are_of_the_reader_and_of_the_poll(ring: Ring, policy: str) -> None:
    writer = ring.writer()
    reader = ring.reader(policy=policy, max_frames=3, max_bytes=100)
    for length in [10] * 12 + [1000]:
        writer.write(bytes(length))
    assert [reader.poll(n).frames for n in (1, 2, 99)] == [1, 2, 3]  # type: ignore[union-attr]
    batches = [batch.frames for batch in iter(reader.poll, None)]
    assert sum(batches) == 7
    assert max(batches) <= 3
    reader.close()


def test_the_boundary_of_the_ring_ends_a_batch(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    for i in range(12):
        writer.write(bytes([i]))
        reader.poll()
    reader.poll()
    for i in range(12, 20):
        writer.write(bytes([i]))
    assert [batch.frames for batch in iter(reader.poll, None)] == [4, 4]
    reader.close()


def test_skipped_packets_are_counted_to_the_packet_whatever_the_frames_hold(ring: Ring) -> None:
    from ring_loops import put

    writer, reader = ring.writer(), ring.reader(policy="skip")
    lengths, segments = np.array([90, 0, 30]), np.array([20, 0, 7])
    for _ in range(10):
        put(writer.record, np.zeros(200, np.uint8), lengths, segments)
    assert ring.published() == (30, 10 * (5 + 1 + 5))
    batch = reader.poll()
    assert batch is not None
    assert batch.first == int(ring.counters["floor"])
    (info,) = ring.readers()
    assert info.skipped == int(batch.descriptors["number"][0])
    assert info.delivered == 0
    _balanced(ring)
    reader.close()


def test_iteration_ends_with_the_ring(ring: Ring) -> None:
    writer, reader = ring.writer(), ring.reader()
    for i in range(10):
        writer.write(bytes([i]))
    writer.close()
    got = [batch.payload(i).tobytes() for batch in reader for i in range(len(batch))]
    assert got == [bytes([i]) for i in range(10)]
    with pytest.raises(StopIteration):
        next(reader)
    writer = ring.writer()  # unless someone opens it again
    writer.write(b"again")
    assert next(reader).payload(0).tobytes() == b"again"
    reader.close()


def test_async_iteration(ring: Ring) -> None:
    async def main() -> list[bytes]:
        got: list[bytes] = []
        with ring.reader() as reader:
            async for batch in reader:
                got += [batch.payload(i).tobytes() for i in range(len(batch))]
        return got

    async def both() -> list[bytes]:
        reading = asyncio.create_task(main())
        await asyncio.sleep(0)
        with ring.writer() as writer:
            for i in range(30):
                while not writer.write(bytes([i])):
                    await asyncio.sleep(0)
                if i % 7 == 0:
                    await asyncio.sleep(0.005)
        return await reading

    assert asyncio.run(both()) == [bytes([i]) for i in range(30)]


@pytest.mark.parametrize("wait", ["block", "yield", "spin"])
def test_a_reader_closed_while_a_thread_waits_on_it(ring: Ring, wait: str) -> None:
    """As when an async iteration is cancelled: the thread must not look at memory that is gone."""
    writer = ring.writer()
    for _ in range(5):
        reader = ring.reader(wait=wait)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda reader=reader, into=answers: into.append(reader.wait(60)))
        thread.start()
        time.sleep(0.02)
        reader.close()
        thread.join(10)
        assert answers == [False]
    writer.close()


def test_cancelling_an_async_iteration(ring: Ring) -> None:
    async def main() -> None:
        with ring.writer() as writer, ring.reader(wait="spin") as reader:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(reader), 0.02)
            writer.write(b"x")
            assert (await anext(reader)).payload(0).tobytes() == b"x"

    asyncio.run(main())


@pytest.mark.parametrize("wait", ["block", "yield", "spin"])
def test_ctrl_c_ends_an_iteration(ring: Ring, wait: str) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    try:
        with ring.reader(wait=wait) as reader, ring.writer():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                next(reader)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 5


def test_the_ring_object_may_go_before_its_readers(ring: Ring, name: str) -> None:
    writer = ring.writer()
    reader = rings.attach(name).reader(name="one")
    gc.collect()
    writer.write(b"x")
    assert next(reader).payload(0).tobytes() == b"x"
    with rings.attach(name) as attached:
        other = attached.reader(name="two")
    writer.write(b"y")
    batch = other.poll()
    assert batch is not None
    assert batch.intact
    assert other.state == "live"
    reader.close()
    other.close()


# Rights and memory ------------------------------------------------------------------------------------


@jit
def poke(address):  # type: ignore[no-untyped-def]
    store_relaxed(address, 1)


@pytest.mark.parametrize("section", ["header", "writer", "descriptors", "arena", "waiting", "slots", "end"])
def test_what_a_reader_may_not_write_kills_it(ring: Ring, section: str, fork: Any) -> None:
    """Its big mapping is read-only throughout; only `waiting` and the slots have a second, writable one."""
    reader = ring.reader()
    offset = {
        "header": 0,
        "writer": ring.geometry.writer,
        "waiting": ring.geometry.waiting,
        "slots": ring.geometry.slots,
        "descriptors": ring.geometry.descriptors,
        "arena": ring.geometry.arena,
        "end": ring.geometry.total_bytes - 8,
    }[section]
    address = reader._memory.ctypes.data + offset

    def die() -> None:
        faulthandler.disable()
        poke(address)

    assert fork(die).wait() == -signal.SIGSEGV
    begin, size = reader._shared.ctypes.data, reader._shared.size
    assert size == ring.geometry.descriptors - ring.geometry.waiting
    assert fork(poke, begin).wait() == 0
    assert fork(poke, begin + size - 8).wait() == 0
    rights = _rights(ring.segment.object)
    assert sum(end - start for start, end, mode in rights if "w" in mode) == size
    reader.close()


def _rights(object_: str) -> list[tuple[int, int, str]]:
    rights = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(object_):
            span, mode = line.split()[:2]
            start, end = (int(part, 16) for part in span.split("-"))
            rights.append((start, end, mode))
    return rights


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_reader_of_a_large_ring_takes_little_memory(name: str, policy: str, fork: Any, loops: Any) -> None:
    """Its copy is only touched where it is used: a gating reader's not at all."""

    def private_bytes() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return sum(int(kb) for kb in re.findall(r"^Anonymous:\s+(\d+) kB", text, re.M)) * 1024

    with rings.create(name, size_bytes=40 << 20) as ring:

        def read() -> None:
            before = private_bytes()
            reader = rings.attach(name).reader(policy=policy)
            writer = ring.writer()
            board = np.zeros(8, np.int64)
            for _ in range(40):
                loops.write(writer.record, writer.record[0]["head"] + 5000, 1400, 8, 1 << 62)
                while reader.record[0]["cursor"] < writer.record[0]["head"]:
                    loops.read(reader.record, 0, 1400, 4, board, 0, 0, 1 << 62)
            assert board[loops.TORN] == 0
            reader.close()
            assert private_bytes() - before < 6 << 20

        assert fork(read).wait() == 0


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_the_copy_is_small_whatever_the_ring(ring: Ring, name: str, policy: str) -> None:
    """Also under mlockall, which makes every page of it real."""
    with ring.reader(policy=policy, max_bytes=100) as reader:
        assert reader._copy.size <= 65536 + PAGE
    with rings.create(name, number=1, size_bytes=40 << 20) as large, large.reader(policy=policy) as reader:
        assert reader._copy.size <= 300 * 1024


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_released_through_the_reader_or_the_batch_it_is_once(ring: Ring, policy: str) -> None:
    writer, reader = ring.writer(), ring.reader(policy=policy)
    for i in range(7):
        writer.write(bytes([i]))
    batch = reader.poll()
    assert batch is not None
    assert [reader.release(n) for n in (2, -1, 0)] == [2, 0, 0]
    batch.release(1)
    assert ring.readers()[0].delivered == 2
    batch.release(3)
    assert ring.readers()[0].delivered == 3
    assert reader.release(99) == 4
    batch.release(99)
    assert reader.poll() is None
    (info,) = ring.readers()
    assert (info.delivered, info.unread, info.cursor) == (7, 0, 7)
    reader.close()


@pytest.mark.parametrize("most", [0, -1])
def test_a_poll_of_nothing_is_refused(ring: Ring, most: int) -> None:
    with ring.writer() as writer, ring.reader() as reader:
        writer.write(b"x")
        with pytest.raises(RingError, match=f"a poll of {most} frames: ask for at least 1"):
            reader.poll(most)
        writer.close()
        assert [len(batch) for batch in reader] == [1]


# The life of a process --------------------------------------------------------------------------------


def test_two_lines_read_a_ring_from_another_program(ring: Ring, name: str) -> None:
    """A process of its own, as users write it; nobody tells it that the ring is done but the ring."""
    code = f"import rings\nfor batch in rings.attach({name!r}).reader(): print(batch.payload(0).tobytes())"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with ring.writer() as writer:
        await_(lambda: any(info.state == "active" and info.pid for info in ring.readers()), 120)
        writer.write(b"hello")
    assert program.communicate(timeout=60)[0] == "b'hello'\n"
    assert program.returncode == 0
    assert ring.readers()[0].state in ("dead", "left")


def test_a_child_that_is_forked_keeps_no_readers_lock(ring: Ring, fork: Any) -> None:
    """The reader dies with its own process: a child that lives on is not it, and cannot speak for it."""

    def read_and_leave_a_child() -> None:
        reader = ring.reader("parent")
        if os.fork() == 0:
            try:
                with pytest.raises(RingError, match="reader 'parent' is closed"):
                    reader.poll()
                reader.close()  # frees no slot
                assert ring.readers()[0].state == "active"
            except BaseException:
                os._exit(1)
            signal.pause()
        signal.pause()

    with ring.writer() as writer:
        child = fork(read_and_leave_a_child)
        await_(lambda: [info.state for info in ring.readers()] == ["active"])
        await_(lambda: children(child.pid))
        (orphan,) = children(child.pid)
        child.kill()
        await_(lambda: ring.readers()[0].state == "dead")
        assert Path(f"/proc/{orphan}").exists()
        for _ in range(100):
            assert writer.write(b"", timeout_s=20)
        os.kill(orphan, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_child_that_is_forked_is_no_writer(ring: Ring) -> None:
    with ring.writer() as writer:
        pid = os.fork()
        if pid == 0:
            try:
                writer.write(b"")
            except RingError:
                writer.close()  # closes no ring
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert ring.state == "live"
        assert writer.write(b"")


def test_iteration_ends_where_nothing_can_come_any_more(ring: Ring, fork: Any) -> None:
    with ring.reader() as reader:
        child = fork(lambda: (ring.writer(), signal.pause()))
        await_(lambda: reader.state == "live")
        child.kill()
        ring.segment.unlink()
        with pytest.raises(RingError, match="was removed, and its writer died"):
            next(reader)
