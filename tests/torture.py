"""The ring under everything that can happen to its processes, at random, for as long as one likes.

    make torture                                        five minutes
    make torture ARGS="--seconds 3600 --seed 7"
    PYTHONPATH=tests python -m torture --seconds 3600   without make's environment

One round after the other, each with a ring of its own: sizes, batches, policies and waits are drawn by lot.
A writer and several readers run at full speed, every byte made and checked from its frame's sequence
(ring_loops.py). Meanwhile readers leave and come back, are stopped, killed and restarted under their
names, and so is the writer; gating readers may be demoted; the first few readers may be members that
share the work, by blocks, or by flows where the ring says whose its frames are. After each such step
every reader's account must add up, and at the end of a round everything must have been read, by every
life of every reader, to the packet, and by members what is their own, each frame by one.

A violation ends it with exit code 1 and the seed, which draws the same lots again; the processes' timing
is the machine's.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ring_loops as loops
from forked import Child, await_
from numpy.typing import NDArray
from ring_loops import CLOSED, ENOUGH, FRAMES, PACKETS, TORN, flow_of

import rings
from rings.jit import compile_for, jit
from rings.libc import monotonic_ns
from rings.reader import BLOCK_FRAMES
from rings.ring import ReaderInfo
from rings.writer import WRITER_STATE

LIVES, LEAVE, STRAY = 5, 6, 7  # on a reader's part of the board, beside what `loops.read` writes there
PART = 8
FOREVER = 1 << 62
SLICE_NS = 20_000_000  # a reader looks that often whether it should leave
LOOKS = 5  # a look at an account while its reader joins anew may mix two lives
HANG_S = 30.0
EVERY_S = 2.0


@dataclass
class Totals:
    """What has happened so far."""

    rounds: int = 0
    packets: int = 0
    checks: int = 0
    steps: dict[str, int] = field(default_factory=dict)

    def did(self, step: str) -> None:
        self.steps[step] = self.steps.get(step, 0) + 1

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {count}" for name, count in sorted(self.steps.items()))
        return f"{self.packets:,} packets checked, {self.checks:,} accounts; {steps}"


@dataclass
class Lots:
    """One round's ring, drawn by lot."""

    frames: int
    arena_bytes: int
    most: int  # bytes of the longest payload
    batch: int  # frames the writer publishes at once, at most
    readers: int
    split: int  # the first so many of the readers share the work
    flows: int  # how many; 0: the ring does not say whose its frames are

    @classmethod
    def draw(cls, chance: random.Random) -> Lots:
        frames = 1 << chance.randrange(2, 13)
        arena_bytes = 1 << chance.randrange(10, 19)
        most = chance.choice([8, 40, 120, 700, 1472])
        # A batch takes at most half of either, so that the writer and a gate can both move.
        batch = max(min(frames // 2, arena_bytes // 2 // (most + 16), chance.choice([1, 4, 64])), 1)
        readers = chance.randrange(2, 6)
        split = chance.choice([1, min(2, readers), min(3, readers)])
        flows = chance.choice([0, 2, 7, 1000])
        return cls(frames, arena_bytes, min(most, arena_bytes // 4), batch, readers, split, flows)

    def __str__(self) -> str:
        sizes = f"{self.frames} frames, {self.arena_bytes >> 10} KiB, 0 to {self.most} bytes"
        by = f" {self.flows} flows" if self.flows else ""
        members = f", {self.split} of them share{by}" if self.split > 1 else ""
        return f"{sizes}, batches of {self.batch}, {self.readers} readers{members}"


@jit
def _owns(sequence, flows, split, member):  # type: ignore[no-untyped-def]
    """Is a frame this member's?"""
    whose = sequence // BLOCK_FRAMES if flows == 0 else flow_of(sequence, flows)
    return whose % split == member


@jit
def _read_own(state, strategy, most, share, board, at, flows, split, member, deadline_ns):  # type: ignore[no-untyped-def]
    """`loops.read`, one batch after the other; the board gets how many frames were another member's, or came
    after one behind them."""
    r = state[0]
    after = r.cursor
    while True:
        frames = board[at + FRAMES]
        why = loops.read(state, strategy, most, share, board, at, frames + 1, deadline_ns)
        for sequence in range(r.cursor - (board[at + FRAMES] - frames), r.cursor):
            board[at + STRAY] += sequence < after or not _owns(sequence, flows, split, member)
            after = sequence + 1
        if why != ENOUGH:
            return why


@jit
def _own_packets(first, last, most, flows, split, member):  # type: ignore[no-untyped-def]
    """How many packets of the frames first … last − 1 are a member's."""
    packets = 0
    for sequence in range(first, last):
        if _owns(sequence, flows, split, member):
            packets += loops.packets_of(sequence, most)
    return packets


def _write(name: str, lots: Lots) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = rings.attach(name).writer()
    loops.write(writer.record, FOREVER, lots.most, lots.batch, FOREVER, max(lots.flows, 1))


def _read(name: str, lots: Lots, board: NDArray[Any], at: int, share: int, options: dict[str, Any]) -> None:
    """One life of a reader: until the ring is closed, or it is to leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader = rings.attach(name).reader(**options)
    r = reader.record[0]
    fresh = reader._slots["restarts"][reader._index] == 0  # not taken over from one who died
    delivered, packets, seen = int(r["delivered"]), int(r["packets"]), int(board[at + PACKETS])
    counted = int(r["delivered"] + r["skipped"] + r["passed"])
    board[at + LIVES] += 1
    whose = lots.flows, options["split"], options["member"]
    why = -1
    while why != CLOSED and not board[at + LEAVE]:
        end_ns = monotonic_ns() + SLICE_NS
        why = _read_own(reader.record, reader.strategy, lots.most, share, board, at, *whose, end_ns)
    assert board[at + TORN] == board[at + STRAY] == 0
    assert r["delivered"] - delivered == board[at + PACKETS] - seen
    assert r["delivered"] + r["skipped"] + r["passed"] - counted == r["packets"] - packets
    assert not (fresh and options["policy"] == "gate" and options["demote_s"] is None and r["skipped"])
    reader.close()


class Reading:
    """A reader's name, its part of the work, and its present life, if any."""

    def __init__(self, index: int, split: int) -> None:
        self.name, self.at = f"reader{index}", PART * index
        self.split, self.member = (split, index) if index < split else (1, 0)
        self.child: Child | None = None
        self.stopped = False
        self.gates = False


class Round:
    def __init__(self, chance: random.Random, totals: Totals, name: str) -> None:
        self.chance, self.totals, self.name = chance, totals, name
        self.lots = Lots.draw(chance)
        self.board: NDArray[Any] = np.frombuffer(mmap.mmap(-1, PART * self.lots.readers * 8), np.int64)
        self.ring = rings.create(
            name,
            frames=self.lots.frames,
            arena_bytes=self.lots.arena_bytes,
            readers=self.lots.readers,
            sources=self.lots.flows > 0,
        )
        self.readings = [Reading(i, self.lots.split) for i in range(self.lots.readers)]
        self.writer: Child | None = None
        self.writer_stopped = False
        self.before = 0

    # What can happen --------------------------------------------------------------------------------

    def start(self, reading: Reading) -> None:
        policy = self.chance.choice(["gate", "skip"])
        demote_s = self.chance.choice([None, 0.001, 0.02])
        options = {
            "name": reading.name,
            "policy": policy,
            "demote_s": demote_s if policy == "gate" else None,
            "split": reading.split,
            "member": reading.member,
            "by": "flow" if self.lots.flows else "block",
            "wait": self.chance.choice(["block", "block", "yield", "spin"]),
            "max_frames": self.chance.choice([None, 1, 7, 100]),
            "max_bytes": self.chance.choice([None, None, 500]),
        }
        share = self.chance.randrange(1, 5)
        self.board[reading.at + LEAVE] = 0
        reading.gates = policy == "gate"
        reading.child = Child(_read, self.name, self.lots, self.board, reading.at, share, options)

    def leave(self, reading: Reading) -> None:
        assert reading.child is not None
        self.resume(reading)
        self.board[reading.at + LEAVE] = 1
        assert reading.child.wait(HANG_S) == 0, f"{reading.name} did not leave in order"
        reading.child = None

    def kill(self, reading: Reading) -> None:
        assert reading.child is not None
        reading.child.kill()
        reading.child, reading.stopped = None, False

    def stop(self, reading: Reading) -> None:
        assert reading.child is not None
        reading.child.send(signal.SIGSTOP)
        reading.stopped = True

    def resume(self, reading: Reading) -> None:
        if reading.child is not None:
            reading.child.send(signal.SIGCONT)
        reading.stopped = False

    def start_writer(self) -> None:
        self.writer = Child(_write, self.name, self.lots)

    def kill_writer(self) -> None:
        if self.writer is not None:
            self.writer.kill()
        self.writer, self.writer_stopped = None, False

    def stop_writer(self) -> None:
        if self.writer is not None:
            self.writer.send(signal.SIGSTOP)
            self.writer_stopped = True

    def resume_writer(self) -> None:
        if self.writer is not None:
            self.writer.send(signal.SIGCONT)
        self.writer_stopped = False

    def step(self) -> None:
        """One thing that happens, to the writer in one of six."""
        name, action = self.choose()
        self.totals.did(name)
        action()

    def choose(self) -> tuple[str, Callable[[], None]]:
        if self.chance.random() < 1 / 6:
            if self.writer is None:
                return "restart writer", self.start_writer
            if self.writer_stopped:
                return "resume writer", self.resume_writer
            return self.chance.choice([("kill writer", self.kill_writer), ("stop writer", self.stop_writer)])
        reading = self.chance.choice(self.readings)
        if reading.child is None:
            return "start", lambda: self.start(reading)
        if reading.stopped and self.chance.random() < 0.7:
            return "resume", lambda: self.resume(reading)
        name, action = self.chance.choice([("kill", self.kill), ("stop", self.stop), ("leave", self.leave)])
        return name, lambda: action(reading)

    # What must hold ---------------------------------------------------------------------------------

    def check(self) -> list[ReaderInfo]:
        """Every account adds up to what is published, whoever has just died."""
        for look in range(1, LOOKS + 1):
            least = self.ring.published()[1]
            infos = self.ring.readers()
            most = self.ring.published()[1]
            wrong = [info for info in infos if not least <= _total(info) <= most or _negative(info)]
            if not wrong:
                break
            assert look < LOOKS, f"{wrong[0]} does not add up to {least} … {most}"
        self.totals.checks += len(infos)
        assert not self.board[TORN::PART].any(), "torn"
        assert not self.board[STRAY::PART].any(), "another member's frames were handled"
        self.count_demoted(infos)
        return infos

    def count_demoted(self, infos: list[ReaderInfo]) -> None:
        """Gates of old that skip now, each life once."""
        policies = {info.pid: info.policy for info in infos}
        for reading in self.readings:
            if reading.child and reading.gates and policies.get(reading.child.pid) == "skip":
                reading.gates = False
                self.totals.did("demoted")

    def check_alive(self) -> None:
        everyone = [("the writer", self.writer), *((each.name, each.child) for each in self.readings)]
        for name, child in everyone:
            if child is not None:
                ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                assert ended is None, f"{name} ended by itself"

    def check_goes_on(self) -> None:
        """Nobody hangs: with all awake, the head moves."""
        for reading in self.readings:
            self.resume(reading)
        self.resume_writer()
        if self.writer is None:
            self.start_writer()
        before = self.ring.published()[0]
        await_(lambda: self.ring.published()[0] > before + 2 * self.lots.frames, HANG_S)
        self.check_alive()

    def finish(self) -> None:
        """All is read, by everyone who lives."""
        self.check_goes_on()
        self.kill_writer()
        self.ring.writer().close()
        living = [reading for reading in self.readings if reading.child is not None]
        for reading in living:
            assert reading.child is not None
            assert reading.child.wait(HANG_S) == 0, f"{reading.name} did not end in order"
            reading.child = None
        for info in self.check():
            assert _total(info) == self.ring.published()[1], info
            assert info.unread == 0 or info.name not in [reading.name for reading in living], info
            self.check_share(info)

    def check_share(self, info: ReaderInfo) -> None:
        """A member has handled all that is its own since it joined, but what it says that it skipped."""
        reading = next(each for each in self.readings if each.name == info.name)
        joined = int(self.ring.slots[info.index]["joined_frame"])
        if info.delivered + info.skipped + info.passed > 0:  # else it may have died while it joined
            whose = self.lots.flows, reading.split, reading.member
            own = _own_packets(joined, info.cursor, self.lots.most, *whose)
            assert own - info.skipped <= info.delivered <= own, f"{info}: {own} were its own"

    def run(self, end: float, tell: Callable[[str], None]) -> None:
        self.start_writer()
        for reading in self.readings:
            self.start(reading)
        while time.monotonic() < end:
            for _ in range(self.chance.randrange(1, 20)):
                self.step()
                self.check()
                self.check_alive()
                time.sleep(self.chance.random() ** 3 * 0.03)
            self.check_goes_on()
            self.count()
            tell(f"round {self.totals.rounds + 1}: {self.lots}; {self.totals}")
        self.finish()
        self.count()
        self.totals.rounds += 1

    def count(self) -> None:
        packets = int(self.board[PACKETS::PART].sum())
        self.totals.packets += packets - self.before
        self.before = packets

    def close(self) -> None:
        for child in (self.writer, *(reading.child for reading in self.readings)):
            if child is not None:
                child.kill()
        self.ring.close()


def _total(info: ReaderInfo) -> int:
    return info.delivered + info.skipped + info.passed + info.unread + info.joined_packets


def _negative(info: ReaderInfo) -> bool:
    return min(info.delivered, info.skipped, info.passed, info.unread) < 0


def compile_all() -> None:
    """What the children run."""
    loops.compile_all()
    _own_packets(0, 1, 8, 0, 1, 0)
    compile_for(loops.write, np.zeros(1, WRITER_STATE), 0, 0, 0, 0, 1)
    with rings.create(f"t{os.getpid()}.torture", frames=16, arena_bytes=4096) as ring:
        ring.writer().close()
        with ring.reader() as reader:
            _read_own(reader.record, reader.strategy, 8, 1, np.zeros(PART, np.int64), 0, 0, 1, 0, 0)


def run(seconds: float, seed: int, tell: Callable[[str], None] = lambda line: None) -> Totals:
    """Rounds of 1 to 10 s until `seconds` have passed. AssertionError at the first violation."""
    chance, totals = random.Random(seed), Totals()
    compile_all()
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        round_ = Round(chance, totals, f"t{os.getpid()}.torture")
        try:
            round_.run(min(now + chance.uniform(1, 10), end), tell)
        finally:
            round_.close()
    return totals


class Progress:
    """A line each EVERY_S."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self.last >= EVERY_S:
            self.last = now
            print(f"{now - self.began:.0f} s, {line}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torture", description="The ring under random deaths and restarts.")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long (300)")
    parser.add_argument("--seed", type=int, help="which lots to draw (random, and printed)")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    try:
        totals = run(options.seconds, seed, Progress())
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        print(f"VIOLATED: seed {seed}", flush=True)
        return 1
    print(f"nothing violated in {totals.rounds} rounds: {totals}; seed {seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
