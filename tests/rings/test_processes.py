"""A writer and readers as processes, at full speed, killed and restarted: every byte and every count."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from forked import await_
from ring_loops import CLOSED, FRAMES, GAPS, PACKETS, TORN

import rings
from rings.libc import monotonic_ns
from rings.ring import ReaderInfo, Ring

MOST = 120  # bytes of the longest payload
FOREVER = 1 << 62


def _write(name: str, loops: Any, last: int, batch: int = 8, close: bool = True) -> None:
    writer = rings.attach(name).writer()
    loops.write(writer.record, last, MOST, batch, FOREVER)
    writer.close() if close else writer.abandon()


def _read(name: str, loops: Any, board: Any, at: int, mine: str, share: int, options: Any) -> None:
    """Until the ring is closed. board[at + 5] says that it is there."""
    reader = rings.attach(name).reader(name=mine, **options)
    board[at + 5] += 1
    assert loops.read(reader.record, reader.strategy, MOST, share, board, at, FOREVER, FOREVER) == CLOSED
    reader.close()


def _infos(ring: Ring) -> dict[str, ReaderInfo]:
    infos = {info.name: info for info in ring.readers()}
    for info in infos.values():
        total = info.delivered + info.skipped + info.passed + info.unread + info.joined_packets
        assert total == ring.published()[1], info
    return infos


def test_every_byte_to_everyone(name: str, fork: Any, loops: Any, board: Any) -> None:
    frames = 1_000_000
    readers = [
        ("gate", 0, 1, {"wait": "block"}),
        ("steps", 8, 5, {"wait": "yield", "max_frames": 100}),
        ("skip", 16, 1, {"policy": "skip", "wait": "yield"}),
        ("small", 24, 3, {"policy": "skip", "wait": "block", "max_frames": 7, "max_bytes": 500}),
    ]
    with rings.create(name, frames=4096, arena_bytes=1 << 17) as ring:
        children = [
            fork(_read, name, loops, board, at, mine, share, options) for mine, at, share, options in readers
        ]
        await_(lambda: all(board[at + 5] for _, at, _, _ in readers))
        children.append(fork(_write, name, loops, frames))
        assert [child.wait() for child in children] == [0] * 5
        infos = _infos(ring)
        assert ring.published()[0] == frames
        for mine, at, _, options in readers:
            info = infos[mine]
            assert board[at + TORN] == 0
            assert info.delivered == board[at + PACKETS]
            assert info.unread == 0
            if options.get("policy") != "skip":
                assert board[at + FRAMES] == frames
                assert info.skipped == 0


@pytest.mark.parametrize("geometry", [(4, 512), (64, 4096)])
def test_lapped_all_the_time_and_never_torn(
    name: str, geometry: tuple[int, int], fork: Any, loops: Any, board: Any
) -> None:
    with rings.create(name, frames=geometry[0], arena_bytes=geometry[1]) as ring:
        children = [
            fork(_read, name, loops, board, at, f"{at}", 1, {"policy": "skip", "wait": "spin"})
            for at in (0, 8)
        ]
        await_(lambda: board[5] and board[13])
        children.append(fork(_write, name, loops, 3_000_000, geometry[0] // 8 + 1))
        assert [child.wait() for child in children] == [0] * 3
        infos = _infos(ring)
        for at in (0, 8):
            assert board[at + TORN] == 0
            assert board[at + GAPS] > 0
            assert infos[f"{at}"].delivered == board[at + PACKETS] > 0
            assert infos[f"{at}"].unread == 0


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_killed_readers_come_back(name: str, policy: str, fork: Any, loops: Any, board: Any) -> None:
    chance = random.Random(7)
    with rings.create(name, frames=256, arena_bytes=1 << 14) as ring:

        def start() -> Any:
            lives = board[5]
            child = fork(_read, name, loops, board, 0, "mortal", 3, {"policy": policy})
            await_(lambda: board[5] > lives)
            return child

        steady = fork(_read, name, loops, board, 8, "steady", 1, {})
        await_(lambda: board[8 + 5])
        mortal = start()
        writer = fork(_write, name, loops, FOREVER)
        for _ in range(25):
            time.sleep(chance.random() * 0.01)
            mortal.kill()
            if chance.random() < 0.7:
                time.sleep(chance.random() * 0.005)
            mortal = start()
        writer.kill()
        ring.writer().close()
        assert [mortal.wait(), steady.wait()] == [0, 0]
        infos = _infos(ring)
        assert board[TORN] == board[8 + TORN] == 0
        assert infos["mortal"].restarts == 25
        assert infos["mortal"].unread == infos["steady"].unread == 0
        # What was handled and not released is handled again, so more may have been seen than is counted.
        assert board[PACKETS] >= infos["mortal"].delivered
        assert (infos["steady"].delivered, infos["steady"].skipped) == (board[8 + PACKETS], 0)


def test_killed_writers_are_followed(name: str, fork: Any, loops: Any, board: Any) -> None:
    chance = random.Random(8)
    with rings.create(name, frames=256, arena_bytes=1 << 14) as ring:
        children = [
            fork(_read, name, loops, board, 0, "gate", 2, {}),
            fork(_read, name, loops, board, 8, "skip", 1, {"policy": "skip", "wait": "yield"}),
        ]
        await_(lambda: board[5] and board[13])
        for _ in range(30):
            before = ring.published()[0]
            writer = fork(_write, name, loops, FOREVER)
            await_(lambda before=before: ring.published()[0] > before)
            time.sleep(chance.random() * 0.005)
            writer.kill()
        ring.writer().close()
        assert [child.wait() for child in children] == [0, 0]
        infos = _infos(ring)
        assert int(ring.counters["epoch"]) == 31
        assert board[TORN] == board[8 + TORN] == 0
        assert board[FRAMES] == ring.published()[0]
        assert (infos["gate"].delivered, infos["gate"].skipped) == (board[PACKETS], 0)
        assert (infos["skip"].delivered, infos["skip"].unread) == (board[8 + PACKETS], 0)


def test_a_dead_reader_stops_the_writer_for_less_than_100_ms(
    name: str, fork: Any, loops: Any, board: Any
) -> None:
    def stall(mine: str) -> None:
        reader = rings.attach(name).reader(name=mine)
        board[5] += 1
        signal.pause()
        reader.close()

    with rings.create(name, frames=64, arena_bytes=4096) as ring:
        writer = fork(_write, name, loops, FOREVER)
        await_(lambda: ring.published()[0] > 0)
        stopped_ns = []
        for round_ in range(5):
            stalled = fork(stall, f"{round_}")
            await_(lambda round_=round_: board[5] == round_ + 1)
            await_(lambda: _stands(ring))
            before = ring.published()[0]
            began_ns = monotonic_ns()
            stalled.kill()
            while ring.published()[0] == before:
                assert monotonic_ns() - began_ns < 20_000_000_000
            stopped_ns.append(monotonic_ns() - began_ns)
        assert sorted(stopped_ns)[1] < 100_000_000  # the others may be of a busy machine
        assert int(ring.counters["full_events"]) >= 5
        writer.kill()
        assert {info.state for info in ring.readers()} == {"dead"}


def _stands(ring: Ring) -> bool:
    """Is the writer waiting for somebody?"""
    before = ring.published()
    time.sleep(0.005)
    return ring.published() == before


def test_joining_and_leaving_under_load(name: str, fork: Any, loops: Any, board: Any) -> None:
    """Nothing is lost for those who stay, and who comes and goes gets what lies between, whole."""
    times = 1200

    def come_and_go(at: int, policy: str) -> None:
        attached = rings.attach(name)
        for i in range(times):
            reader = attached.reader(name=f"{policy}{i % 2}", policy=policy)
            joined = int(reader.record[0]["packets"])
            before = int(board[at + PACKETS])
            loops.read(reader.record, 1, MOST, 2, board, at, board[at] + 1, FOREVER)
            r = reader.record[0]
            assert r["delivered"] == board[at + PACKETS] - before
            assert r["packets"] - joined == r["delivered"] + r["skipped"]
            if policy == "gate":
                assert r["skipped"] == 0
            if i % 3:
                reader.close()
            else:
                reader._segment.forget()
                reader = attached.reader(name=reader.name, policy=policy)
                assert reader.record[0]["packets"] >= r["packets"]
                reader.close()

    with rings.create(name, frames=256, arena_bytes=1 << 14, readers=4) as ring:
        steady = fork(_read, name, loops, board, 0, "steady", 2, {})
        await_(lambda: board[5])
        writer = fork(_write, name, loops, FOREVER)
        guests = [fork(come_and_go, 8, "gate"), fork(come_and_go, 16, "skip")]
        assert [guest.wait(120) for guest in guests] == [0, 0]
        writer.kill()
        ring.writer().close()
        assert steady.wait() == 0
        assert board[TORN] == board[8 + TORN] == board[16 + TORN] == 0
        assert board[FRAMES] == ring.published()[0]
        info = _infos(ring)["steady"]
        assert (info.delivered, info.skipped, info.unread) == (board[PACKETS], 0, 0)


def test_nothing_is_torn_while_writers_and_readers_are_stopped_and_go_on(
    name: str, fork: Any, loops: Any, board: Any
) -> None:
    chance = random.Random(9)
    with rings.create(name, frames=64, arena_bytes=4096) as ring:
        readers = [
            fork(_read, name, loops, board, 0, "gate", 1, {}),
            fork(_read, name, loops, board, 8, "skip", 1, {"policy": "skip"}),
        ]
        await_(lambda: board[5] and board[13])
        everyone = [*readers, fork(_write, name, loops, FOREVER)]
        for _ in range(60):
            child = chance.choice(everyone)
            child.send(signal.SIGSTOP)
            time.sleep(chance.random() * 0.004)
            child.send(signal.SIGCONT)
        everyone[-1].kill()
        ring.writer().close()
        assert [reader.wait() for reader in readers] == [0, 0]
        infos = _infos(ring)
        assert board[TORN] == board[8 + TORN] == 0
        assert (infos["gate"].delivered, infos["gate"].skipped) == (board[PACKETS], 0)
        assert infos["skip"].delivered == board[8 + PACKETS]


def test_sequences_far_along(name: str, fork: Any, loops: Any, board: Any) -> None:
    """Counting does not begin at 0 for a ring that has run for years."""
    far = (1 << 40) - 100
    with rings.create(name, frames=64, arena_bytes=4096) as ring:
        writer = ring.writer()
        writer.section["published"] = writer.section["floor"] = far
        at = ring.geometry.descriptors + (far & 63) * 32
        writer._memory[at : at + 8] = np.frombuffer(np.int64(far * 64).tobytes(), np.uint8)
        writer.abandon()
        assert ring.published() == (far, far * 64)
        children = [
            fork(_read, name, loops, board, 0, "gate", 1, {}),
            fork(_read, name, loops, board, 8, "skip", 1, {"policy": "skip"}),
        ]
        await_(lambda: board[5] and board[13])
        children.append(fork(_write, name, loops, far + 20_000))
        assert [child.wait() for child in children] == [0, 0, 0]
        infos = _infos(ring)
        assert board[TORN] == board[8 + TORN] == 0
        assert board[FRAMES] == 20_000
        assert infos["skip"].delivered == board[8 + PACKETS]
