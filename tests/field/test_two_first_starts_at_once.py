"""Case 18 (numba#4807, #10128): processes that created the compile cache at the same time crashed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from runs import Run, Source, check_ledger

import rings

PROGRAM = """
import sys, rings
ring = rings.create(sys.argv[1], frames=16, arena_bytes=4096)
with ring.writer() as writer:
    reader = ring.reader(wait=sys.argv[2])
    for i in range(10):
        assert writer.write(bytes([i]))
got = [batch.payload(i).tobytes() for batch in reader for i in range(len(batch))]
assert got == [bytes([i]) for i in range(10)], got
reader.close()
ring.close()
"""


def test_two_first_starts_at_once_both_work_and_so_does_the_next(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(rings.__file__).parent.parent)

    def start(which: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, name + which, "block"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = [start("a"), start("b")]
    for program in both:
        errors = program.communicate(timeout=300)[1]
        assert (program.returncode, errors) == (0, "")
    compiled = sorted(tmp_path.rglob("*.nbc"))
    assert compiled
    assert not list(tmp_path.rglob("*.tmp*"))
    last = start("c")
    assert last.communicate(timeout=300)[1] == ""
    assert last.returncode == 0
    assert sorted(tmp_path.rglob("*.nbc")) == compiled  # served, not made again


def test_two_engines_start_for_the_first_time_at_once(name: str, tmp_path: Path) -> None:
    """Whole runs as a user starts them. A third finds all compiled: it is ready soon, and does not say that
    it compiles."""

    def start(which: str) -> Run:
        flags = ("--consumer", "rate", "--consumer", "gaps", "--sender", f"{name}{which}.s")
        return Run(name + which, *flags, command=True, cache=tmp_path)

    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        both = [stack.enter_context(start(which)) for which in "ab"]
        for run in both:
            _await_ready(run)
        compiling_s = time.monotonic() - began
        for run, which in zip(both, "ab", strict=True):
            _receive(run, f"{name}{which}.s")
        assert any("compiling for the first time" in run.stderr for run in both)
    compiled = sorted(tmp_path.rglob("*.nbc"))
    began = time.monotonic()
    with start("c") as run:
        _await_ready(run)
        assert time.monotonic() - began < compiling_s / 3
        _receive(run, f"{name}c.s")
        assert "compiling" not in run.stderr
    assert sorted(tmp_path.rglob("*.nbc")) == compiled


def _await_ready(run: Run) -> None:
    """With more patience than `Run.ready` has by itself."""
    first = run.next(timeout_s=300)
    assert first is not None, run.errors
    run.ready = first
    assert first["type"] == "ready"


def _receive(run: Run, sender: str) -> None:
    with Source(sender) as source:
        source.connect(run)
        source.send([b"x" * 100] * 20)
        source.done()
        summary = run.end()
    assert run.errors == ""
    check_ledger(summary)
    assert [consumer["delivered"] for consumer in summary["consumers"]] == [20, 20]
