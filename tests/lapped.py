"""Very many frames, each byte checked, by readers that are lapped, or killed: every packet accounted for.

    make lapped                                    10⁹ frames past a skip reader, 10⁸ past two gates
    make lapped ARGS="--frames 1e7 --gated 1e6"

First a writer at full speed and one `skip` reader, which it laps all the time: what that was delivered and
what it skipped must be all there was. Then two `gate` readers, each killed and restarted under its name
every second: both their accounts must add up to what was published. Nothing may be torn.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from typing import Any

import numpy as np
import ring_loops as loops
from forked import Child
from numpy.typing import NDArray
from ring_loops import CLOSED, TORN

import rings

MOST = 64  # bytes of the longest payload
BATCH = 64
PART = 8  # words of the board for each reader
FOREVER = 1 << 62
KILL_EVERY_S = 1.0


def _pin(index: int) -> None:
    """Each on a CPU of its own, as far as there are enough."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[index % len(cpus)]})


def _write(name: str, frames: int) -> None:
    _pin(0)
    with rings.attach(name) as ring, ring.writer() as writer:
        loops.write(writer.record, frames, MOST, BATCH, FOREVER)


def _read(name: str, reader: int, policy: str, board: NDArray[Any]) -> None:
    _pin(1 + reader)
    with rings.attach(name) as ring, ring.reader(name=f"r{reader}", policy=policy, wait="block") as r:
        assert loops.read(r.record, r.strategy, MOST, 1, board, PART * reader, FOREVER, FOREVER) == CLOSED


def _run(frames: int, policy: str, readers: int) -> None:
    """Write `frames` frames past so many readers; those that gate are killed every second."""
    name = f"t{os.getpid()}.lapped"
    board: NDArray[Any] = np.frombuffer(mmap.mmap(-1, PART * readers * 8), np.int64)
    began, kills = time.monotonic(), 0
    with rings.create(name, frames=4096, arena_bytes=1 << 19) as ring:
        reading = [Child(_read, name, i, policy, board) for i in range(readers)]
        while len(ring.readers()) < readers:
            time.sleep(0.001)
        writing = Child(_write, name, frames)
        while not _ended(writing, KILL_EVERY_S):
            for i in range(readers if policy == "gate" else 0):
                reading[i].kill()
                reading[i] = Child(_read, name, i, policy, board)
                kills += 1
            print(f"{time.monotonic() - began:.0f} s, {ring.published()[0]:,} frames", flush=True)
        assert [child.wait() for child in (writing, *reading)] == [0] * (1 + readers)
        published, packets = ring.published()
        assert published == frames, f"{published:,} frames were published"
        for info in ring.readers():
            got = info.delivered + info.skipped
            print(f"{info.name}: delivered {info.delivered:,} + skipped {info.skipped:,} = {got:,}")
            assert got + info.joined_packets + info.unread == packets, f"{info} of {packets:,}"
    torn = int(board[TORN::PART].sum())
    print(
        f"{frames:,} frames, {packets:,} packets, {policy}: torn {torn}, killed {kills} times, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    assert torn == 0


def _ended(child: Child, timeout_s: float) -> bool:
    try:
        child.wait(timeout_s)
    except AssertionError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lapped", description="Very many frames, all accounted for.")
    parser.add_argument("--frames", type=float, default=1e9, help="past a reader that is lapped (1e9)")
    parser.add_argument("--gated", type=float, default=1e8, help="past two that are killed (1e8)")
    options = parser.parse_args(arguments)
    loops.compile_all()
    _run(int(options.frames), "skip", 1)
    _run(int(options.gated), "gate", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
