"""What is recorded of the machine, and how it is seen that something changed."""

import json
import os
from pathlib import Path

import pytest

from bench import machine, noise, offloads
from bench.place import open_place

root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def changes(before: object, after: object) -> list[tuple[str, object, object]]:
    return [(one["key"], one["before"], one["after"]) for one in machine.changes(before, after)]


def test_changes_are_named_by_their_way() -> None:
    before = {"a": {"b": 1, "c": 2}, "load": 1.0, "gone": "x"}
    after = {"a": {"b": 1, "c": [3]}, "load": 9.0, "new": {"d": None}}
    assert changes(before, after) == [("a.c", 2, [3]), ("gone", "x", None), ("new", None, {"d": None})]
    assert changes(before, before) == []
    assert changes({"offloads": ["a", "b", "c"]}, {"offloads": ["b", "d"]}) == [
        ("offloads", ["a", "c"], ["d"])
    ]


def test_it_reads_the_same_twice_and_is_json() -> None:
    with open_place("lo") as place:
        once = json.loads(json.dumps(machine.config((place,))))
        assert changes(once, json.loads(json.dumps(machine.config((place,))))) == []
    assert once["sides"]["lo"]["mtu"] == "65536"
    assert not any(key.startswith("net.core.bpf") for key in once["sysctl"])


@root
def test_both_sides_of_a_cable_are_read_within_their_namespaces() -> None:
    """A mask, an MTU and a sysctl that move during the runs are seen."""
    with open_place("veth") as place:
        before = machine.config((place,))
        side = place.receive.command
        mask = Path("/sys/class/net") / place.receive.device / "queues/rx-0/rps_cpus"
        for words in (
            side("sh", "-c", f"echo 1 > {mask}"),
            side("sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_early_demux"),
            place.send.command("ip", "link", "set", place.send.device, "mtu", "1400"),
        ):
            assert os.spawnvp(os.P_WAIT, words[0], words) == 0
        found = changes(before, machine.config((place,)))
    assert found == [
        ("sides.veth, receiver.rps.rx-0", "", "0"),
        ("sides.veth, receiver.sysctl.net.ipv4.ip_early_demux", "1", "0"),
        ("sides.veth, sender.mtu", "1500", "1400"),
    ]


def test_offloads_of_lo() -> None:
    found = offloads.active("lo")
    assert found is not None
    assert "loopback" in found
    assert offloads.active("no-such") is None


def test_noise_of_each_cpu() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    found = noise.measure(cpus)
    assert [one["cpu"] for one in found] == cpus
    for one in found:
        assert 0 <= one["lost"] < 1.5
        assert (one["gaps"] > 0) == (one["longest_us"] > 1) == (one["lost"] > 0)


def test_a_gap_is_seen() -> None:
    """All readings of the clock lie further apart than 1 ns, none further than 1,000 s."""
    lost, longest, count = noise.gaps(1_000_000, 1)
    assert lost >= 1_000_000
    assert count > 100
    assert 0 < longest <= lost
    assert noise.gaps(1_000_000, 10**12) == (0, 0, 0)


def test_a_warning_where_others_use_a_cpu() -> None:
    quiet = {"cpu": 0, "lost": 0.009, "longest_us": 30.0, "gaps": 9}
    assert noise.warning("before the runs", [quiet]) is None
    said = noise.warning("before the runs", [quiet, quiet | {"cpu": 1, "lost": 0.2, "longest_us": 4100.0}])
    assert said == (
        "before the runs others had CPU 1 for 20 % of the time, up to 4.1 ms at once: "
        "trust small differences less"
    )
