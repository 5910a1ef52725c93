"""The experiment `scale` in small: several consumers and receivers are really there; what it tells."""

import os
from typing import Any

import pytest

from bench import scale
from bench.runner import Setting

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
CASES = {case.name: case for case in scale.cases(Setting(quick=True))} if len(CPUS) > 1 else {}


@pytest.mark.parametrize(("name", "consumers"), [("consumers 4", 4), ("receivers 2", 1)])
def test_it_runs(name: str, consumers: int) -> None:
    figures = CASES[name].run()
    assert figures["ok"]
    assert figures["ledger_balanced"]
    assert len(figures["ledger"]["consumers"]) == consumers
    costs = (figures["receiver_ns"], figures["consumer_ns"])
    assert figures["engine_ns"] == (None if None in costs else sum(costs))  # None: nothing in the window
    assert not [told for told in figures["flags"] if "not on" in told], "a worker is elsewhere"


def test_who_runs_where_is_said() -> None:
    for case in CASES.values():
        cpus = case.parameters["cpus"]
        assert cpus["sender"] == CPUS[1]
        assert CPUS[1] not in cpus["consumers"]


def case(name: str, axis: str, rates: list[float], ns: float) -> dict[str, Any]:
    run = {"receiver_ns": ns, "consumer_ns": ns / 4, "engine_ns": 1.25 * ns, "softirq_ns": 1.0, "lost": 0.0}
    spread = {"median": rates[0], "min": min(rates), "max": max(rates), "ci": (min(rates), max(rates))}
    return {"name": name, "parameters": {"axis": axis}, "runs": [run] * 2, **spread}


def test_it_tells_how_much_more_a_packet_costs() -> None:
    base = case("base", "base", [1.0, 1.1], 400)
    more = case("consumers 4", "consumers", [0.5, 0.6], 800)
    alike = case("flows 1000", "flows", [1.05, 1.2], 400)
    (section,) = scale.tell({"cases": [base, more, alike]})
    cost = "ns a packet for receivers and consumers"
    assert section.text == (
        f"consumers 4: 1000 {cost}, 2.00 of the base's; the rate is not the base's.",
        f"flows 1000: 500 {cost}, 1.00 of the base's; the rate cannot be told from the base's.",
    )
    assert section.table is not None
    assert section.table.rows[1][-1] == "2.00"
