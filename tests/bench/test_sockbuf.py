"""The experiment `sockbuf` in small: what crosses the cable is checked, and what the report makes of it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from windows import window

from bench import sockbuf
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
    ("mtu", "whole", "layout", "least", "most"),
    [
        (1500, False, sockbuf.SAME, 1000, 1500),
        (9000, False, sockbuf.DIFFERENT, 6000, 9000),
        (1500, True, sockbuf.DIFFERENT, 9000, 65536),
    ],
)
def test_a_packet_is_of_one_mtu_and_handled_where_it_should(
    place: Place, mtu: int, whole: bool, layout: str, least: float, most: float
) -> None:
    receiver, sender = CPUS[:2]
    interrupt_cpu = receiver if layout == sockbuf.SAME else sender
    bulk = sockbuf.Bulk(mtu, 128 << 10, whole, layout, receiver, interrupt_cpu, sender, window_s=0.3)
    figures = bulk.run(place)
    assert figures["ok"], figures
    assert figures["flags"] == []
    assert figures["value"] > 0
    assert least < figures["bytes_per_packet"] <= most
    assert figures["rcvbuf"] == figures["sndbuf"] == 256 << 10


def test_it_sets_devices_and_those_of_the_machine_are_not_its_own() -> None:
    with open_place("lo") as lo, pytest.raises(Refused, match="give --device veth"):
        list(sockbuf.cases(Setting(True, (lo,))))


SENT = {"bytes": 1000, "unconfirmed": 0, "sndbuf": {"granted": 1}}
RECEIVER = {"bytes": 1000, "packets": 9, "published": 9, "lengths": {}, "rcvbuf": {"granted": 1}}
RECEIVER |= {"connections": {"accepted": 1, "open": 0}}


@pytest.mark.parametrize(
    ("of_sender", "of_receiver", "ok"),
    [
        ({}, {}, True),
        ({}, {"bytes": 999}, False),
        ({"unconfirmed": 1}, {}, False),
        ({}, {"connections": {"accepted": 1, "open": 1}}, False),
        ({}, {"published": 8}, False),
    ],
)
def test_every_byte_must_come_and_the_stream_end(
    of_sender: dict[str, Any], of_receiver: dict[str, Any], ok: bool
) -> None:
    summary = {"receivers": [RECEIVER | of_receiver], "ledger": {"adds_up": True}}
    assert sockbuf._checked(SENT | of_sender, summary)["ok"] is ok


def test_the_columns_of_netperf() -> None:
    bulk = sockbuf.Bulk(1500, 1 << 16, False, sockbuf.SAME, 0, 0, 1, 1.0)
    figures = bulk._figures(window(came=1000, handled=1000))
    assert figures["value"] == 1024 * 1000 * 8 / 1e6
    assert figures["bytes_per_packet"] == 1024
    assert figures["cpu_percent"] == {"receiver": 50, "sender": 40, "interrupts": 35, "thread": 30}
    assert figures["us_per_kb"]["interrupts"] == 350


# What the report tells ---------------------------------------------------------------------------------


def found(mtu: int, buffer: int, layout: str, rates: list[float], whole: bool = False) -> dict[str, Any]:
    parameters = {"mtu": mtu, "buffer": buffer << 10, "layout": layout, "whole": whole}
    parameters |= {"receive_cpu": 0, "send_cpu": 1, "interrupt_cpu": 0 if layout == sockbuf.SAME else 1}
    costs = {"receiver": 50.0, "thread": 40.0, "sender": 30.0, "interrupts": 20.0}
    busy = {"0": {"own": 0.4, "softirq": 0.5}, "1": {"own": 0.3, "softirq": 0.0}}
    one = {"seconds": 1.0, "rcvbuf": 2048, "sndbuf": 2048, "bytes_per_packet": 1448.0, "busy": busy}
    runs = [one | {"value": rate, "cpu_percent": costs, "us_per_kb": costs} for rate in rates]
    name = f"{mtu}, {buffer} KiB, {layout}{', whole' if whole else ''}"
    ends = {"median": sorted(rates)[len(rates) // 2], "ci": (min(rates), max(rates))}
    return {"name": name, "parameters": parameters, "runs": runs, "min": 1, "max": 2, **ends}


def test_what_the_report_tells() -> None:
    cases = [
        found(9000, 64, "same", [1000.0, 1100.0, 1200.0]),
        found(9000, 64, "different", [2000.0, 2200.0, 2400.0]),
        found(9000, 1024, "same", [500.0, 550.0, 600.0]),
        found(9000, 1024, "different", [1000.0, 1100.0, 2400.0]),
        found(1500, 256, "same", [100.0]),
        found(1500, 256, "same", [400.0], whole=True),
    ]
    beside, *tables = sockbuf.tell({"cases": cases})
    collapse, spread, whole_is_best, author, whole = beside.text
    assert collapse == "MTU 9000, same: 1100 at 64 KiB, 550 at 1024 KiB: it collapses, to 0.50 of the best"
    assert spread.endswith("less, but within the spread of the runs")
    assert whole_is_best == "MTU 1500, same: 100 at 256 KiB, the largest buffer: no collapse"
    assert "give 2 of the throughput" in author
    assert "It agrees" in author
    assert "400 × 10⁶ bits/s pass instead of 100" in whole
    assert beside.table
    assert beside.table.rows[-1] == ("1500", "here, same", "100", "256", "100", "1.00")
    assert [section.title for section in tables] == [
        "MTU 9000, interrupts on CPU 0: the receiver's",
        "MTU 9000, interrupts on CPU 1: the sender's",
        "MTU 1500, interrupts on CPU 0: the receiver's",
    ]
    assert [len(section.table.rows) for section in tables if section.table] == [2, 2, 2]
    pytest.importorskip("matplotlib")
    assert beside.picture
    assert len(beside.picture.draw().axes) == 2
    assert list(sockbuf.tell({"cases": []})) == []


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        ((1.1, 1.3), "It agrees with"),
        ((0.9, 1.2), "makes no difference that could be told"),
        ((0.7, 0.9), "It does not agree"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_what_is_said_of_the_author(ratio: tuple[float, float], said: str, shared: bool) -> None:
    told = sockbuf._why(ratio, shared, (90.0, 30.0), (60.0, 80.0))
    assert said in told
    assert "busy with them and 60 % without, the sender's 30 and 80 %" in told
    assert ("with two CPUs it is the sender's" in told) is shared
