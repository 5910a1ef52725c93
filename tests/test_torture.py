"""A short run of `make torture`, and that it would say so if something were wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torture

from rings.reader import Reader

SEED = 0  # the first round of it has flows, and lasts longer than the run


def _left() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"rxring-*-t{os.getpid()}.torture-*")]


def test_five_seconds_violate_nothing(loops: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert torture.main(["--seconds", "5", "--seed", str(SEED)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"seed {SEED}\n")
    assert "nothing violated" in out
    assert "of them share" in out
    assert " flows" in out
    for step in ("kill", "stop", "resume", "leave", "start", "kill writer", "demoted"):
        assert f" {step} " in out
    assert not _left()


def _violated(capsys: pytest.CaptureFixture[str]) -> None:
    assert torture.main(["--seconds", "60", "--seed", str(SEED)]) == 1
    assert f"VIOLATED: seed {SEED}" in capsys.readouterr().out
    assert not _left()


def test_a_violation_ends_it_with_the_seed(
    loops: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back under his name forgets one packet of his account."""
    take_over = Reader._take_over

    def forget(reader: Reader, slot: Any) -> None:
        take_over(reader, slot)
        reader.record[0]["delivered"] -= 1

    monkeypatch.setattr(Reader, "_take_over", forget)
    _violated(capsys)


@pytest.mark.parametrize("flows", [0, 7])
def test_members_that_take_what_is_anothers_are_a_violation(
    loops: Any, flows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has those of the one before it: what they say of themselves adds up nevertheless."""
    draw, join = torture.Lots.draw, Reader._join
    monkeypatch.setattr(torture.Lots, "draw", lambda chance: replace(draw(chance), flows=flows))

    def astray(reader: Reader) -> int:
        r = reader.record[0]
        r["member"] = (r["member"] - 1) % r["split"]
        return join(reader)

    monkeypatch.setattr(Reader, "_join", astray)
    _violated(capsys)
