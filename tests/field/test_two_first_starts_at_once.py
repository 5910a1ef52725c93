"""Case 18 (numba#4807, #10128): processes that created the compile cache at the same time crashed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from runs import Run, Source, check_ledger


def test_two_first_starts_at_once_both_work_and_so_does_the_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs as a user starts them. A third finds all compiled, and does not say that it compiles."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")

    def start(which: str) -> Run:
        flags = ("--consumer", "rate", "--sender", f"{name}{which}.s")
        return Run(name + which, *flags, command=True, cache=tmp_path)

    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(start(which)) for which in "ab"]
        for run in both:
            _await_ready(run)
        for run, which in zip(both, "ab", strict=True):
            _receive(run, f"{name}{which}.s")
        assert any("compiling for the first time" in run.stderr for run in both)
    compiled = _compiled(tmp_path)
    assert compiled
    assert not list(tmp_path.rglob("*.tmp*"))
    with start("c") as run:
        _await_ready(run)
        _receive(run, f"{name}c.s")
        assert "compiling" not in run.stderr
    assert _compiled(tmp_path) == compiled  # served, not made again


def _compiled(folder: Path) -> dict[Path, int]:
    """All compiled code there, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}


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
    assert [consumer["delivered"] for consumer in summary["consumers"]] == [20]
