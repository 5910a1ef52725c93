"""The experiment `flows` in small: every layer counts the same packets, and what the report makes of it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from windows import window

from bench import flows
from bench.place import Place, open_place
from bench.runner import Setting
from engine.errors import Refused

CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place("veth") as place:
        yield place


@two_cpus
@pytest.mark.root
@pytest.mark.parametrize(
    ("count", "connected", "early_demux", "layout"),
    [(1, True, False, flows.OTHER), (64, False, True, flows.SAME)],
)
def test_every_layer_counts_the_same_packets(
    place: Place, count: int, connected: bool, early_demux: bool, layout: str
) -> None:
    receiver, sender = CPUS[:2]
    interrupt_cpu = receiver if layout == flows.SAME else sender
    flood = flows.Flows(count, connected, early_demux, layout, receiver, interrupt_cpu, sender, window_s=0.3)
    figures = flood.run(place)
    assert figures["ok"], figures
    assert figures["ledger_balanced"]
    assert figures["flags"] == []
    assert figures["value"] == figures["kpps"]["engine"] > 0
    whole = figures["whole_run"]
    assert (
        whole["sent"] <= whole["device"] + whole["lost"] < whole["sent"] + 100
    )  # devices say hello in IPv6, too
    assert whole["sent"] == whole["lost"] + whole["socket"]
    assert whole["engine"] <= whole["socket"]
    with place.receive:
        for demux in ("ip_early_demux", "udp_early_demux"):
            assert (flows._IPV4 / demux).read_text().strip() == str(int(early_demux))


@two_cpus
@pytest.mark.parametrize("quick", [True, False])
def test_who_is_connected_has_one_peer_and_names_say_all(quick: bool) -> None:
    cases = list(flows.cases(Setting(quick)))
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.parameters["flows"] == 1 for case in cases if case.parameters["connected"])
    same = [case for case in cases if case.parameters["layout"] == flows.SAME]
    assert all(case.parameters["interrupt_cpu"] == case.parameters["receive_cpu"] for case in same)
    assert same


def test_it_sets_devices_and_those_of_the_machine_are_not_its_own() -> None:
    with open_place("lo") as lo, pytest.raises(Refused, match="give --device veth"):
        list(flows.cases(Setting(True, (lo,))))


FLOOD = flows.Flows(1, False, True, flows.SAME, 0, 0, 1, 1.0)
LEDGER = {"adds_up": True, "balanced": True, "residual": 0, "received": 600}
LEDGER |= {"socket_dropped": 400, "sent": 1000}


@pytest.mark.parametrize(
    ("ledger", "published", "ok", "flags"),
    [
        ({}, 600, True, 0),
        ({}, 599, False, 0),
        ({"adds_up": False}, 600, False, 0),
        ({"received": 0}, 0, False, 0),
        ({"balanced": False, "residual": 3}, 600, True, 1),
    ],
)
def test_packets_that_are_nowhere_are_noticed(
    ledger: dict[str, Any], published: int, ok: bool, flags: int
) -> None:
    rose = window(1000, 1000, packets=600, calls=10, socket_dropped=400, published=600)
    summary = {
        "receivers": [{"published": published}],
        "ledger": LEDGER | ledger,
        "layers": rose.end["layers"],
    }
    figures = FLOOD._figures(rose, {"packets_per_second": 1.1e6}, summary)
    assert figures["ok"] is ok
    assert len(figures["flags"]) == flags
    assert figures["kpps"] == {"sent": 1100, "device": 1, "softirq": 1, "socket": 1, "engine": 0.6}
    assert (figures["value"], figures["dropped_kpps"], figures["packets_per_call"]) == (0.6, 0.4, 60)


# What the report tells ---------------------------------------------------------------------------------


def found(name: str, rates: list[float], dropped: float = 0.0) -> dict[str, Any]:
    parameters = {
        "flows": int(name.split()[0]),
        "connected": "connected" in name,
        "early_demux": "no early demux" not in name,
        "layout": name.rpartition(", ")[2],
        "receive_cpu": 0,
        "interrupt_cpu": 0 if name.endswith("same") else 1,
    }
    busy = {"0": {"own": 0.4, "softirq": 0.5}, "1": {"own": 0.3, "softirq": 0.0}}
    runs = [
        {
            "value": rate,
            "kpps": dict.fromkeys(("sent", "device", "softirq", "socket"), rate + dropped) | {"engine": rate},
            "dropped_kpps": dropped,
            "lost_kpps": dropped / 12,
            "packets_per_call": 64.0,
            "busy": busy,
            "seconds": 1.0,
        }
        for rate in rates
    ]
    return {"name": name, "parameters": parameters, "runs": runs, "median": sorted(rates)[len(rates) // 2]}


def test_what_the_report_tells() -> None:
    cases = [
        found("1 flow, other", [800.0, 900.0, 800.0]),
        found("2 flows, other", [960.0, 980.0, 970.0]),
        found("64 flows, other", [1000.0, 1000.0, 1000.0]),
        found("1 flow, connected, other", [880.0, 990.0, 880.0]),
        found("1 flow, connected, no early demux, other", [880.0, 980.0, 890.0]),
        found("1 flow, same", [100.0, 90.0, 100.0], dropped=600.0),
    ]
    beside, layers = flows.tell({"cases": cases})
    fewest, placement, connected, demux, limit = beside.text
    assert "within 5 %: `other`: 2 of 1, 2, 64; `same`: 1 of 1. " in fewest
    assert placement.startswith("Softirq on another CPU than the sink's: 8 (8 – 10) of the rate on the same.")
    assert (
        "the sink had time for 100 k packets/s; its socket dropped 600 k, the CPU's backlog 50 k" in placement
    )
    assert connected.endswith("1 flow, connected, other: 1.1 (1.1 – 1.1; in every round)")
    assert demux.endswith("cannot be told from it)")
    assert "softirq core pays for waking it" in limit
    assert beside.table
    assert beside.table.rows[1] == ("fewest that saturate", "1850", "3500", "970 (2)", "100 (1)")
    assert layers.table
    assert layers.table.rows[-1] == (
        "1 flow, same",
        "700",
        "50",
        *["700"] * 3,
        "600",
        "100",
        "64",
        "90",
        "90",
    )
    pytest.importorskip("matplotlib")
    assert layers.picture
    assert len(layers.picture.draw().axes) == 1
    assert list(flows.tell({"cases": []})) == []


def test_the_limit_is_told_within_a_run_not_between_medians() -> None:
    """One run of three lost much; in the others the sink took all."""
    case = found("1 flow, other", [400.0, 460.0, 450.0])
    for run, came, taken in zip(case["runs"], (470.0, 480.0, 405.0), (300.0, 480.0, 405.0), strict=True):
        run["kpps"] |= {"socket": came, "engine": taken}
        run["busy"]["0"]["own"] = 0.3
    beside, _ = flows.tell({"cases": [case]})
    assert "the softirq core (with two CPUs, the sender on it, too) is the limit" in beside.text[-1]


@pytest.mark.parametrize(
    ("dropped", "own", "said"),
    [
        (300.0, 0.3, "it is the limit here, as before the change of 2016"),
        (0.0, 0.3, "the softirq core (with two CPUs, the sender on it, too) is the limit"),
        (0.0, 0.5, "is the limit for certain"),
    ],
)
def test_who_is_the_limit(dropped: float, own: float, said: str) -> None:
    case = found("1 flow, other", [800.0], dropped)
    case["runs"][0]["busy"]["0"]["own"] = own
    beside, _ = flows.tell({"cases": [case]})
    assert said in beside.text[-1]
