"""The experiment `layouts`: its cases, a run of each kind in small, and what it tells of made-up results."""

import os
import subprocess
from typing import Any

import pytest

from bench import layouts
from bench.place import Place, Side, open_place
from bench.runner import Case, Setting
from engine.affinity.layouts import Layout

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
NOWHERE = Place("veth", Side("none", "192.0.2.1"), Side("none", "192.0.2.2"))  # cases are made, not run


@pytest.mark.parametrize(
    ("roles", "allowed", "send", "shared"),
    [
        ((1, 1, (0,)), (0, 1), 0, "CPU 0: send and process; CPU 1: interrupt and receive"),
        ((1, 0, (1,)), (0, 1), 1, "CPU 1: send and interrupt and process"),
        ((0, 1, (2, 3)), (0, 1, 2, 3), 3, ""),
        ((0, 0, (0,)), (0,), 0, "CPU 0: send and interrupt and receive and process"),
        ((1, 0, (0,)), (0, 1), 1, "CPU 1: send and interrupt; CPU 0: receive and process"),
    ],
)
def test_the_sender_takes_a_cpu_of_its_own_or_says_whose(
    roles: tuple[int, int, tuple[int, ...]], allowed: tuple[int, ...], send: int, shared: str
) -> None:
    found = layouts.cores(Layout("x", *roles), allowed)
    assert (found.send, found.shared) == (send, shared)


def test_every_layout_is_a_case_or_has_a_reason() -> None:
    cases = list(layouts.cases(Setting(quick=False, places=(NOWHERE,))))
    for name in layouts.NAMES:
        of_name = [case for case in cases if case.name.split(", ")[1] == name]
        assert of_name
        for case in of_name:
            assert case.skip or case.parameters["layout"] == name
    assert any(not case.skip for case in cases)


@pytest.mark.root
def test_a_run_has_its_packets_where_the_layout_says() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place("veth") as place:
        cases = layouts.cases(Setting(quick=True, places=(place,)))
        case: Case = next(case for case in cases if not case.skip)
        figures = case.run()
        rps = place.receive.command("cat", f"/sys/class/net/{place.receive.device}/queues/rx-0/rps_cpus")
        mask = subprocess.check_output(rps, text=True)
    assert int(mask.replace(",", ""), 16) == 0, "it was not taken back"
    assert figures["ok"]
    assert figures["ledger_balanced"]
    assert not [told for told in figures["flags"] if "as asked" in told and "packets" not in told]
    handled = figures["softirq_packets"]  # of all devices of the machine: somebody else's may be in it
    assert handled[str(case.parameters["interrupt_cpu"])] > 0.8 * sum(handled.values())
    assert figures["latency"]["total"]["count"] > 0
    assert figures["paced"]["asked_per_second"] == layouts.PACED


def case(layout: str, rates: list[float], p99_us: list[float], lost: float = 0.5) -> dict[str, Any]:
    stage = {f"p{p}_ns": 1000 for p in ("50", "75", "90", "95", "999")}
    ledger = {"sent": 100, "received": 100 - 100 * lost, "socket_dropped": 100 * lost}
    runs = [
        {"value": rate, "ok": True, "lost": lost, "ledger": ledger, "sent_per_second": 2e6}
        | {"latency": dict.fromkeys(layouts.STAGES, stage | {"p99_ns": p99 * 1e3})}
        for rate, p99 in zip(rates, p99_us, strict=True)
    ]
    cpus = {"interrupt_cpu": 1, "receive_cpu": 1 if layout == "same" else 0, "process_cpu": 0, "send_cpu": 0}
    parameters = {"place": "veth", "layout": layout, "wait": "block", "policy": "gate", "shared": "", **cpus}
    middle = sorted(rates)[len(rates) // 2]
    return {
        "name": f"veth, {layout}",
        "parameters": parameters,
        "runs": runs,
        "median": middle,
        "ci": (min(rates), max(rates)),
        "min": min(rates),
        "max": max(rates),
        "skip": "",
    }


FAST, SLOW = [1.4, 1.5, 1.6], [0.09, 0.1, 0.11]


@pytest.mark.parametrize(
    ("same", "split", "told"),
    [
        ((SLOW, [50, 51, 52]), (FAST, [90, 91, 92]), "Use `split`, because it receives most: 1.5 M/s"),
        ((FAST, [50, 51, 52]), (FAST, [90, 91, 92]), "Use `same`, because its 99th percentile"),
        ((FAST, [50, 91, 95]), (FAST, [90, 91, 92]), "Use whichever you like"),
    ],
)
def test_it_names_the_fastest_the_quickest_or_neither(same: Any, split: Any, told: str) -> None:
    text = " ".join(layouts.choose([case("same", *same), case("split", *split)]))
    assert told in text
    assert ("cannot be told apart" in text) == (same[0] == split[0])


def test_it_tells_where_the_receiver_starves_and_only_there() -> None:
    p99 = [50.0, 51.0, 52.0]
    split = case("split", FAST, p99)
    (text,) = layouts.starved([case("same", SLOW, p99, lost=0.9), split])
    assert "90 % is lost, 100 % of that at the socket" in text
    assert not list(layouts.starved([case("same", FAST, p99), split]))


def test_the_whole_of_it_can_be_told_and_drawn() -> None:
    pytest.importorskip("matplotlib")
    p99 = [50.0, 51.0, 52.0]
    missing = case("sibling", FAST, p99) | {"runs": [], "skip": "no core has two threads (SMT)"}
    result = {"cases": [case("same", SLOW, p99), case("split", FAST, p99), missing]}
    sections = list(layouts.tell(result))
    assert ("veth, sibling", missing["skip"]) in sections[-1].table.rows  # type: ignore[union-attr]
    for section in sections:
        if section.picture:
            assert section.picture.draw().axes
