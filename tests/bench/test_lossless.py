"""The experiment `lossless`: searches on receivers whose limit is known, one on a real one, its words."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from bench import lossless
from bench.lossless import FAILED, GOALS, LIMITED, Search, Trial
from bench.place import LO, open_place
from bench.runner import Setting

CPUS = sorted(os.sched_getaffinity(0))


def receiver(limit: int) -> Callable[[int], Trial]:
    """Loses what is above its limit."""
    return lambda rate: Trial(max(1 - limit / rate, 0.0))


@pytest.mark.parametrize("limit", [100_000, 640_000, 1_000_000, 1_234_567])
def test_it_brackets_the_limit(limit: int) -> None:
    found = Search(receiver(limit)).find(0.0)
    assert found.rate is not None
    assert found.rate <= limit < found.fails_at
    assert found.fails_at - found.rate <= found.rate / 8
    assert found.why == FAILED


def test_one_noise_event_fails_no_rate() -> None:
    """Every third trial of a rate is disturbed; a search that believed each would stop at the first."""

    def trial(rate: int) -> Trial:
        disturbed = not search.tried.get(rate)
        return Trial(0.01) if disturbed else receiver(10**6)(rate)

    search = Search(trial)
    found = search.find(0.0)
    assert found.rate is not None
    assert found.rate <= 10**6 < found.fails_at


def test_a_rate_that_mostly_fails_does_not_hold_though_it_once_did() -> None:
    lucky = {400_000: iter([0.0, 0.01, 0.01])}

    def trial(rate: int) -> Trial:
        return Trial(next(lucky[rate]) if rate in lucky else float(rate > 400_000))

    search = Search(trial, halvings=0)
    found = search.find(0.0)
    assert (found.rate, found.fails_at) == (200_000, 400_000)


def test_trials_serve_both_goals_and_a_small_loss_allows_more() -> None:
    search = Search(lambda rate: Trial(0.0005 if rate > 300_000 else 0.0) if rate < 900_000 else Trial(0.5))
    none = search.find(0.0)
    before = sum(map(len, search.tried.values()))
    small = search.find(GOALS["small_loss"])
    assert none.rate is not None
    assert small.rate is not None
    assert none.rate <= 300_000 < 800_000 <= small.rate < 900_000
    assert before > 0
    assert all(len(trials) <= 3 for trials in search.tried.values())


def test_a_sender_that_is_the_limit_is_said_to_be() -> None:
    search = Search(lambda rate: Trial(0.9, valid=False) if rate > 500_000 else Trial(0.0))
    found = search.find(0.0)
    assert found.rate is not None
    assert found.rate <= 500_000
    assert found.why == LIMITED


def test_nothing_holds() -> None:
    found = Search(lambda rate: Trial(1.0)).find(0.0)
    assert (found.rate, found.fails_at) == (None, lossless.LEAST)


@pytest.mark.root
@pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
def test_a_search_on_a_real_receiver() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place("veth") as place:
        cases = lossless.cases(Setting(quick=True, places=(place,)))
        figures = next(case for case in cases if not case.skip).run()
    assert figures["ok"]
    assert figures["ledger_balanced"]
    assert figures["trials"][0]["rate"] == lossless.LEAST
    assert set(figures["limit"]) == set(GOALS)


def test_every_layout_is_a_case_or_has_a_reason() -> None:
    names = {case.name.split(", ")[1] for case in lossless.cases(Setting(quick=True, places=(LO,)))}
    assert {"same", "split", "sibling", "split-package", "cross-node"} <= names


def case(layout: str, rates: list[float], why: str = FAILED) -> dict[str, Any]:
    runs = [{"value": rate, "small_loss": rate * 2, "limit": {"value": why}, "trials": [1]} for rate in rates]
    return {"name": layout, "parameters": {"place": "lo", "layout": layout}, "runs": runs, "skip": ""}


def test_it_tells_which_layout_takes_most_or_that_none_does() -> None:
    slow, fast = case("same", [0.1, 0.2]), case("split", [0.8, 0.9], LIMITED)
    told = " ".join(lossless.choose([slow, fast]))
    assert "Without loss `split` takes most: same 0.15 M/s (0.1 – 0.2); split 0.85 M/s (0.8 – 0.9)." in told
    assert "The sender was the limit in runs of split" in told
    told = " ".join(lossless.choose([case("same", [0.7, 0.85]), case("split", [0.8, 0.9])]))
    assert "same and split cannot be told apart" in told
    sections = list(lossless.tell({"cases": [slow, fast]}))
    assert [row[0] for row in sections[0].table.rows] == ["same", "split"]  # type: ignore[union-attr]
