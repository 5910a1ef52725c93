"""The experiment `batch` in small: packets come back, and both hops balance."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from told import text_of

from bench import batch
from bench.batch import Cpus, Round, account
from bench.place import open_place
from bench.runner import Case, Setting, Taken, summary

CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")


@pytest.fixture(params=["lo", pytest.param("veth", marks=pytest.mark.root)])
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "veth" and os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place(request.param) as place:
        assert list(batch.cases(Setting(True, (place,))))  # compiled, for all that are forked
        yield place


@needs_two
def test_packets_come_back_and_both_hops_balance(place: Any) -> None:
    for call, rate in (("recvmmsg", None), ("recvmsg", 5_000)):
        figures = Round(place, 100, 30, call, rate, Cpus.here(), 0.05, 0.3).run()
        assert figures["ok"]
        assert figures["ledger_balanced"]
        assert figures["hops"]["received"] > 0
        assert 0 < figures["curve_us"]["500"] <= figures["curve_us"]["999"]
        assert figures["latency"]["total"]["count"] > 0
        calls = figures["mirror_packets_per_call"], figures["receiver_packets_per_call"]
        assert (calls == (1, 1)) == (call == "recvmsg")


SENT = {"sent": 100}
BOUNCED = {"received": 90, "socket_dropped": 7, "after_stop": 2, "unforwarded": 1}
BOUNCED |= {"forwarded": 88, "truncated": 1, "failed": 1}
BACK = {"packets": 80, "socket_dropped": 5, "after_stop": 3}
LEDGER = {"nic_dropped": 0, "softnet_dropped": 0, "other_errors": 0}


@pytest.mark.parametrize(
    ("bounced", "back", "ledger", "residual"),
    [
        ({}, {}, {}, 0),
        ({"socket_dropped": 6}, {}, {}, 1),  # gone on the way there
        ({"forwarded": 87}, {}, {}, 2),  # the mirror lost it, and yet it came back
        ({}, {"packets": 79}, {}, 1),  # gone on the way back
        ({}, {"packets": 79}, {"softnet_dropped": 10}, 0),
        ({"socket_dropped": 6}, {"packets": 81}, {}, 2),  # one does not make up for the other
    ],
)
def test_the_ledger_of_both_hops(
    bounced: dict[str, int], back: dict[str, int], ledger: dict[str, int], residual: int
) -> None:
    summary = {"receivers": [BACK | back], "ledger": LEDGER | ledger}
    assert account(SENT, BOUNCED | bounced, summary)["residual"] == residual


def _run(value: float, rate: float, mean_us: float) -> dict[str, Any]:
    stages = {
        stage: {"count": 9, "mean_us": mean_us, "stddev_us": 1.0} for stage in ("network", "socket", "ring")
    }
    return {
        "value": value,
        "packets_per_second": rate,
        "latency": stages | {"total": {"count": 9, "mean_us": mean_us, "stddev_us": 1.0}},
        "curve_us": {str(p): mean_us for p in batch.PERCENTILES},
        "in_flight": mean_us / 1e6 * rate,
        "lost": 0.0,
        "lost_at_mirror": 0.0,
        "lost_at_receiver": 0.0,
        "mirror_packets_per_call": 3.0,
        "receiver_packets_per_call": 2.0,
        "ok": True,
    }


def _result(many: list[float], one: list[float]) -> dict[str, Any]:
    """Of cases whose rates these are, by call."""
    cases = []
    for size in batch.SIZES:
        for number in batch.BATCHES:
            for call, rates in zip(batch.CALLS, (many, one), strict=True):
                for pace in (None, batch.RATE):
                    parameters = {"place": "lo", "size": size, "batch": number, "call": call, "rate": pace}
                    parameters["cpus"] = {"send": 0, "mirror": 1, "receive": 1, "consume": 1}
                    case = Case(f"{size} {number} {call} {pace}", "packets/s", dict, parameters)
                    runs = [_run(300.0 if pace else rate, rate, 300.0) for rate in rates]
                    cases.append(summary(case, Taken(runs)))
    return {"cases": cases}


def test_what_it_says_follows_from_the_data() -> None:
    def verdicts(many: list[float], one: list[float]) -> str:
        return text_of(batch.tell(_result(many, one)))

    faster = verdicts([300e3, 310e3], [200e3, 205e3])
    assert "100 B, batch 30: recvmmsg brings 1.506 of recvmsg's rate" in faster
    assert "(2009: 1.17, 680 ns): faster, as in 2009." in faster
    assert "does not agree" not in faster
    assert "CPU 1: mirror, receiver, consumer" in faster
    assert "makes 76 packets on their way" in faster  # 300 µs × 305,000/s and 202,500/s
    slower = verdicts([200e3, 205e3], [300e3, 310e3])
    assert "slower; that does not agree" in slower
    assert "faster, as in 2009" not in slower
    alike = verdicts([200e3, 300e3], [250e3, 260e3])
    assert "not to be told apart" in alike
