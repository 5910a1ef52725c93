"""A short run of `make lapped`, and that it would say so if a packet were missing."""

from __future__ import annotations

from typing import Any

import lapped
import pytest

import rings


def test_all_are_accounted_for(loops: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lapped.main(["--frames", "3e6", "--gated", "1e6"]) == 0
    out = capsys.readouterr().out
    assert "3,000,000 frames, " in out
    assert "skip: torn 0, killed 0 times" in out
    assert "1,000,000 frames, " in out
    assert "gate: torn 0, killed" in out


@pytest.mark.parametrize(("frames", "gated"), [("1e5", "1"), ("1", "1e5")])
def test_a_packet_too_few_is_noticed(
    loops: Any, frames: str, gated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(name: str, reader: int, policy: str, board: Any) -> None:
        with rings.attach(name) as ring, ring.reader(name=f"r{reader}", policy=policy) as r:
            r.record[0]["delivered"] -= int(float(frames if policy == "skip" else gated) > 1)
            lapped.loops.read(r.record, r.strategy, lapped.MOST, 1, board, 0, lapped.FOREVER, lapped.FOREVER)

    monkeypatch.setattr(lapped, "_read", forgetful)
    with pytest.raises(AssertionError, match="ReaderInfo"):
        lapped.main(["--frames", frames, "--gated", gated])
