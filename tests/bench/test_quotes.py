"""The experiment `quotes` in small: each quote is matched with its copy, and both relays' ledgers balance."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from told import text_of

from bench import quotes
from bench.place import open_place
from bench.quotes import BURST, PAIRS, RATES, SIZES, Cpus, Duel, schedule
from bench.runner import Case, Setting, Taken, summary

CPUS = sorted(os.sched_getaffinity(0))


def test_the_feed_is_the_same_every_time_and_keeps_its_mean_rate() -> None:
    sizes, due_ns = schedule(10_000, 50_000)
    again = schedule(10_000, 50_000)
    assert (sizes == again[0]).all()
    assert (due_ns == again[1]).all()
    assert (sizes.min(), sizes.max()) == SIZES
    gaps = np.diff(due_ns)
    assert gaps.min() >= 0
    assert np.isclose(gaps.mean(), BURST / 50_000 * 1e9, rtol=1e-6)
    assert gaps.std() > gaps.mean() / 2  # bursts that come at random
    assert len(schedule(BURST, 50_000)[1]) == 1


@pytest.fixture(params=["lo", pytest.param("veth", marks=pytest.mark.root)])
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    if len(CPUS) < 2:
        pytest.skip("two CPUs are needed, this process may use only one")
    if request.param == "veth" and os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place(request.param) as place:
        assert list(quotes.cases(Setting(True, (place,))))  # compiled, for all that are forked
        yield place


def test_every_quote_is_matched_or_counted(place: Any) -> None:
    figures = Duel(place, 5_000, "one by one", Cpus.here(), 0.2).run()
    assert figures["ok"]
    assert figures["ledger_balanced"]
    arrived = [[hop["received"] for hop in leg["hops"]] for leg in figures["legs"]]
    assert all(0 < count <= 1_000 for leg in arrived for count in leg)
    assert 0 < figures["paired"] <= 2 * 900  # without the warm-up
    percentiles = figures["percentiles_us"]
    assert percentiles == sorted(percentiles)
    assert figures["a_latency"]["p50_us"] > 0
    mean_us = figures["a_latency"]["mean_us"] - figures["b_latency"]["mean_us"]
    if not figures["a_lost"] and not figures["b_lost"]:
        assert mean_us == pytest.approx(figures["value"], abs=0.1)


def _run(mean_us: float) -> dict[str, Any]:
    latency = {"mean_us": 100.0, "p50_us": 90.0, "p99_us": 200.0}
    return {
        "value": mean_us,
        "median_us": mean_us,
        "b_first": 0.5,
        "percentiles_us": [mean_us + p for p in range(-49, 50)],
        "quotes_per_second": 50_000.0,
        "a_latency": latency,
        "b_latency": latency,
        "a_lost": 0.0,
        "b_lost": 0.0,
        "legs": [{"mean_us": mean_us + 5}, {"mean_us": mean_us - 5}],
        "ok": True,
    }


def _said(one_by_one: list[float], control: list[float]) -> str:
    cases = []
    for pair in PAIRS:
        for rate in RATES:
            cpus = {"feed": 0, "meter": 0, "relays": (1, 1)}
            parameters = {"place": "lo", "rate": rate, "pair": pair, "cpus": cpus}
            values = control if pair == "control" else one_by_one
            case = Case(f"lo, {rate}, {pair}", "µs", dict, parameters)
            cases.append(summary(case, Taken([_run(value) for value in values])))
    return text_of(quotes.tell({"cases": cases}))


def test_what_it_says_follows_from_the_data() -> None:
    little = _said([40.0, 50.0, 60.0], [-1.0, 0.0, 1.0])
    assert "recvmmsg is 50 µs faster" in little
    assert "but 20 times less" in little
    assert "holds 0, as it must" in little
    assert "Who is started first is 5 µs behind" in little
    assert "both relays share CPU 1" in little
    much = _said([900.0, 1000.0, 1100.0], [-1.0, 0.0, 1.0])
    assert "; as in 2009. " in much
    wrong = _said([-900.0, -1000.0, -1100.0], [-1.0, 0.0, 1.0])
    assert "1000 µs slower" in wrong
    assert "does not agree with 2009" in wrong
    nothing = _said([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert "not to be told apart from two that are alike" in nothing
    assert "does not hold 0" in nothing
