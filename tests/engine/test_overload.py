"""One overloaded run of each kind (`python -m overload` does many), and that it would say so if one lied."""

from __future__ import annotations

import copy
import random
from typing import Any

import overload
import pytest
from overload import KINDS, Kind, Violated

from engine.net.sockets import DropCount

SEED = 5
GRO_OFF, GRO_ON = KINDS[0], KINDS[1]


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    overload.prepare()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_packet_is_accounted_for(kind: Kind) -> None:
    counts, _ = overload.run_kind(kind, 1, SEED)
    assert counts.residual == 0
    assert counts.sent > counts.received + counts.dropped if kind.stopped else counts.dropped > 0


def test_the_same_lots_are_drawn_again() -> None:
    first, second, other = (
        [overload.draw_flags(chance, GRO_ON) + overload.draw_plan(chance, GRO_ON) for _ in range(5)]
        for chance in map(random.Random, (SEED, SEED, SEED + 1))
    )
    assert first == second != other


def test_a_violation_ends_it_with_the_summary_and_the_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket's drop count forgets one."""
    read = DropCount.read
    monkeypatch.setattr(DropCount, "read", lambda count: max(read(count) - 1, 0))
    assert overload.main(["--runs", "1", "--seed", f"{SEED}"]) == 1
    told = capsys.readouterr()
    assert told.out == f"seed {SEED}\nVIOLATED: seed {SEED}\n"
    assert '"socket_dropped": ' in told.err


def _one_less(view: Any, path: tuple[str | int, ...]) -> None:
    for key in path[:-1]:
        view = view[key]
    if view[path[-1]] is not None:
        view[path[-1]] -= 1


LIES: dict[str, list[tuple[str | int, ...]]] = {
    "received": [("receivers", 0, "packets"), ("receivers", 0, "frames"), ("ledger", "received")],
    "dropped": [("receivers", 0, "socket_dropped"), ("receivers", 0, "socket_dropped_frames")],
    "lost": [("consumers", 0, "result", "lost")],
    "delivered": [("consumers", 0, "delivered"), ("ledger", "consumers", "gaps", "delivered")],
}


@pytest.mark.parametrize("kind", [GRO_OFF, GRO_ON], ids=str)
def test_its_own_sums_find_what_a_ledger_hides(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `balanced` says."""
    told: list[tuple[Any, ...]] = []
    check = overload.check
    monkeypatch.setattr(overload, "check", lambda *given: told.append(given) or check(*given))
    overload.run_kind(kind, 1, SEED)
    monkeypatch.setattr(overload, "check_ledger", lambda view: None)
    kind, view, sent, late = told[-1]
    assert check(kind, copy.deepcopy(view), sent, late)
    for paths in LIES.values():
        lie = copy.deepcopy(view)
        for path in paths:
            _one_less(lie, path)
        with pytest.raises((AssertionError, Violated)):
            check(kind, lie, sent, late)
