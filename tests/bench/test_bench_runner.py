"""The runner: the order of the runs, what is repeated, what counts, what is claimed."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bench import runner
from bench.progress import Progress, duration
from bench.runner import Case, Claim, Figures, Taken, judge, summary
from engine.errors import Failed


def measure(
    cases: list[Case], rounds: int, seed: int = 0, taken: dict[str, Taken] | None = None, **more: Any
) -> list[dict[str, Any]]:
    taken = taken or {case.name: Taken() for case in cases}
    with Progress({case.name: rounds for case in cases}, rounds, {}) as progress:
        runner.measure(cases, rounds, seed, taken, progress, **more)
    return [summary(case, taken[case.name]) for case in cases]


def constant(name: str, value: float, **more: Any) -> Case:
    return Case(name, "M/s", lambda: {"value": value, "ok": True, **more})


def recording(names: str, order: list[str]) -> list[Case]:
    def run(name: str) -> Callable[[], Figures]:
        def once() -> Figures:
            order.append(name)
            return {"value": 1.0, "ok": True}

        return once

    return [Case(name, "M/s", run(name)) for name in names]


def test_each_round_runs_each_case_once() -> None:
    order: list[str] = []
    measure(recording("ABCD", order), 25, 7)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 100, 4)]
    assert all(sorted(once) == list("ABCD") for once in rounds)
    assert len(set(rounds)) > 10  # in no fixed order


def test_a_seed_gives_the_same_order() -> None:
    orders: list[list[str]] = [[], [], []]
    for order, seed in zip(orders, (7, 7, 8), strict=True):
        measure(recording("ABCD", order), 10, seed)
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 1), (60.0, 5)])
def test_no_round_is_begun_that_would_pass_the_budget(budget_s: float, rounds: int) -> None:
    """The first is made whatever it takes; each whole, so that ratios can be taken."""
    found = measure([constant("A", 1.0), constant("B", 2.0)], 5, budget_s=budget_s)
    assert [len(case["runs"]) for case in found] == [rounds, rounds]


def test_statistics_of_a_case() -> None:
    values = iter([3.0, 1.0, 2.0, 5.0, 4.0])
    case = Case("A", "ns", lambda: {"value": next(values), "ok": True, "ledger_balanced": True}, {"n": 1})
    (found,) = measure([case], 5)
    assert [run["value"] for run in found["runs"]] == [3.0, 1.0, 2.0, 5.0, 4.0]
    assert (found["median"], found["min"], found["max"]) == (3.0, 1.0, 5.0)
    assert found["ci"] == (1.0, 5.0)
    assert found["quartiles"] == (2.0, 4.0)
    assert found["unit"] == "ns"
    assert found["parameters"] == {"n": 1}
    assert found["ledger_balanced"] is True


def test_what_fails_is_kept_and_not_repeated() -> None:
    calls = iter([True, False, True])

    def run() -> Figures:
        if next(calls):
            return {"value": 1.0, "ok": True}
        raise Failed("it fell over")

    (case,) = measure([Case("A", "M/s", run)], 3)
    assert [run["value"] for run in case["runs"]] == [1.0, None, 1.0]
    assert case["runs"][1]["error"] == "it fell over"
    assert case["repeated"] == []
    assert not case["valid"]


def in_turn(*found: Figures) -> Case:
    runs = iter(found)
    return Case("A", "M/s", lambda: {"ok": True, **next(runs)})


def test_a_wrong_answer_makes_it_invalid_at_once() -> None:
    (case,) = measure([in_turn({"value": 9.0, "ok": False, "flags": ["late"]}, {"value": 1.0})], 2)
    assert (case["ok"], case["valid"], case["repeated"]) == (False, False, [])
    assert case["median"] == 1.0  # of what is right


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"flags": ["the sender was late"]}, "the sender was late"),
        ({"ledger_balanced": False}, "does not balance"),
    ],
)
def test_a_doubtful_run_is_repeated_and_kept_with_why(fault: Figures, why: str) -> None:
    (case,) = measure([in_turn({"value": 9.0, **fault}, {"value": 1.0}, {"value": 2.0})], 2)
    assert [run["value"] for run in case["runs"]] == [1.0, 2.0]
    (repeated,) = case["repeated"]
    assert (repeated["value"], repeated["round"]) == (9.0, 1)
    assert why in repeated["why"][0]
    assert case["valid"]
    assert case["max"] == 2.0


def test_one_that_stays_doubtful_makes_it_invalid() -> None:
    doubtful = {"value": 9.0, "flags": ["late"]}
    (case,) = measure([in_turn(*[doubtful] * 3, {"value": 1.0}, {"value": 2.0})], 3)
    assert [run["value"] for run in case["runs"]] == [9.0, 1.0, 2.0]
    assert len(case["repeated"]) == 2
    assert not case["valid"]
    assert (case["median"], case["max"]) == (1.5, 2.0)


def test_where_nothing_is_sound_all_are_shown() -> None:
    (case,) = measure([in_turn(*[{"value": 9.0, "ledger_balanced": False}] * 3)], 1)
    assert (case["median"], case["valid"], case["ledger_balanced"]) == (9.0, False, False)


def test_it_goes_on_where_it_stopped() -> None:
    """The second time, the same runs follow in the same order; what was taken is not taken again."""
    whole: list[str] = []
    measure(recording("ABCD", whole), 5, 7)
    order: list[str] = []

    def stop() -> None:
        if len(order) == 9:
            raise KeyboardInterrupt

    cases = recording("ABCD", order)
    taken = {case.name: Taken() for case in cases}
    with pytest.raises(KeyboardInterrupt):
        measure(cases, 5, 7, taken, save=stop)
    found = measure(cases, 5, 7, taken)
    assert order == whole
    assert all(len(case["runs"]) == 5 for case in found)


def test_attempts_before_a_stop_count_after_it() -> None:
    case = in_turn({"value": 9.0, "flags": ["late"]})
    taken = {"A": Taken(repeated=[{"round": 1, "why": ["late"]}, {"round": 1, "why": ["late"]}])}
    (found,) = measure([case], 1, taken=taken)
    assert len(found["runs"]) == 1
    assert not found["valid"]


def test_a_warm_up_round_is_not_counted_and_leaves_the_order_as_it_is() -> None:
    order: list[str] = []
    cold: list[str] = []
    found = measure(recording("ABCD", order), 3, warm_up=True)
    measure(recording("ABCD", cold), 3)
    assert sorted(order[:4]) == list("ABCD")
    assert order[4:] == cold
    assert [len(case["runs"]) for case in found] == [3] * 4


def test_what_cannot_be_run_is_said() -> None:
    cases = [constant("A", 1.0), Case("B", "M/s", lambda: pytest.fail("it ran"), skip="no compiler")]
    found = measure(cases, 2)
    assert (found[1]["skip"], found[1]["runs"], found[1]["median"]) == ("no compiler", [], None)
    (claim,) = judge([Claim("A", against="B", at_least=1)], found)
    assert claim["holds"] is None


def test_ratios_are_taken_within_a_round() -> None:
    """The machine's speed changes by a factor of a thousand between rounds; the ratio does not."""
    a, b = iter([1.0, 1000.0, 10.0]), iter([2.0, 2000.0, 20.0])
    cases = [
        Case("A", "M/s", lambda: {"value": next(a), "ok": True}),
        Case("B", "M/s", lambda: {"value": next(b), "ok": True}),
    ]
    (claim,) = judge([Claim("A", against="B", at_least=0.5)], measure(cases, 3))
    assert claim["values"] == [0.5, 0.5, 0.5]
    assert claim["holds"]


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Claim("A", at_least=10), True),
        (Claim("A", at_least=10.1), False),
        (Claim("A", at_most=9.9), False),
        (Claim("A", figure="share", at_least=0.6), True),
        (Claim("A", figure="share", at_most=0.6), False),
    ],
)
def test_claims(claim: Claim, holds: bool) -> None:
    cases = measure([constant("A", 10.0, share=0.7)], 3)
    assert judge([claim], cases)[0]["holds"] is holds


def test_ratios_leave_out_rounds_that_are_not_sound() -> None:
    late = {"value": 100.0, "flags": ["late"]}
    a, b = in_turn({"value": 4.0}, *[late] * 3, {"value": 6.0}), constant("B", 2.0)
    (claim,) = judge([Claim("A", against="B", at_most=3)], measure([a, b], 3))
    assert claim["values"] == [2.0, 3.0]
    assert claim["holds"]


def progress(**more: Any) -> Progress:
    return Progress({"A": 4, "B": 2}, 4, more)


def test_time_left() -> None:
    assert progress().seconds_left() is None
    assert progress(A=10.0).seconds_left() == 60.0  # B is thought to take as long
    begun = progress(A=10.0, B=20.0)
    assert begun.seconds_left() == 80.0
    begun.ran("A", 1, {"value": 1.0, "ok": True, "took_s": 5.0}, "ns", again=False)
    assert begun.seconds_left() == 3 * 5.0 + 40.0
    begun.ran("A", 2, {"value": 1.0, "ok": True, "took_s": 7.0}, "ns", again=True)
    assert begun.seconds_left() == 3 * 6.0 + 40.0


def test_a_bar_on_a_terminal_needs_no_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("bench.progress._is_terminal", lambda: True)
    before = threading.active_count()
    with progress(A=1.0) as shown:
        shown.ran("A", 1, {"value": 1.0, "ok": True, "took_s": 300.0}, "ns", again=False)
        assert threading.active_count() == before
    err = capsys.readouterr().err
    assert "round 1/4  A: 1 ns" in err
    assert "about 25 min left" in err
    assert "1/6" in err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3500, "58 min"), (3900, "1 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
