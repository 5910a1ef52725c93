"""Verifying a layout on real devices, in a namespace of their own, and that what is wrong is seen."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trees
from forked import Child
from namespace_of_its_own import enter, masks, needs_root
from runs import Run, warm

from engine.affinity import checks, devices, journal, layouts, steering, topology
from engine.affinity.checks import Check
from engine.affinity.layouts import Layout
from engine.errors import Refused

needs_two_cpus = pytest.mark.skipif(len(topology.allowed()) < 2, reason="needs two CPUs")
in_a_namespace = [needs_root, pytest.mark.root, needs_two_cpus]


@pytest.fixture(scope="module", autouse=True)
def the_machine_is_as_before() -> Iterator[None]:
    before = masks()
    yield
    assert masks() == before


def apply(layout: Layout, name: str, root: Path = topology.ROOT) -> None:
    device = devices.read(name, root)
    journal.apply(layouts.writes(layout, device, root), layouts.about(layout, device, root), root)


def two_cpus() -> tuple[int, int]:
    first, *_, last = topology.allowed()
    return first, last


def wrong(found: list[Check]) -> list[str]:
    return [check.what for check in found if not check.ok]


# ── read back ────────────────────────────────────────────────────────────────────────────────────────


def test_wish_and_fact_are_both_looked_at(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    apply(Layout("split", 1, 0, (1,)), "eth0", tmp_path)
    layout, made = checks.applied(tmp_path)
    assert layout == Layout("split", 1, 0, (1,))
    # In a tree nothing follows the wish: interrupt 38 is on 0 yet, 39 on 1. It is right as long as it rests.
    found = list(checks.read_back(layout, made, tmp_path))
    assert wrong(found) == []
    assert Check(f"{tmp_path}/proc/irq/38: in effect", "1", "0, until it comes", True) in found
    tree.irq_comes(38)
    assert wrong(list(checks.read_back(layout, made, tmp_path))) == []
    tree.irq_comes(38)
    assert wrong(list(checks.read_back(layout, made, tmp_path))) == [f"{tmp_path}/proc/irq/38: in effect"]
    tree.irq_moves(38, "1")
    assert wrong(list(checks.read_back(layout, made, tmp_path))) == []
    tree.write("proc/irq/39/smp_affinity_list", "0")
    tree.process(77, "irqbalance")
    assert wrong(list(checks.read_back(layout, made, tmp_path))) == [
        f"{tmp_path}/proc/irq/39/smp_affinity_list",
        "irqbalance",
    ]


def test_without_a_layout_there_is_nothing_to_verify(tmp_path: Path) -> None:
    trees.vm(tmp_path)
    with pytest.raises(Refused, match=r"^no layout is applied: "):
        checks.applied(tmp_path)


def test_an_apply_that_was_killed_is_none(tmp_path: Path) -> None:
    trees.vm(tmp_path)
    apply(Layout("split", 1, 0, (1,)), "lo", tmp_path)
    path = tmp_path / "run/rxring/pin/1.json"
    path.write_text(path.read_text().replace('"complete":true', '"complete":false'))
    with pytest.raises(Refused, match=r"did not come to its end: run `rxring pin restore`"):
        checks.applied(tmp_path)


def test_of_an_engine_that_is_dead_only_restore_can_say_more(tmp_path: Path) -> None:
    trees.vm(tmp_path)
    apply(Layout("split", 1, 0, (1,)), "lo", tmp_path)
    path = tmp_path / "run/rxring/pin/1.json"
    owner = '"owner":{"engine":"e","pid":4000000,"started":1}'
    path.write_text(path.read_text().replace('"owner":null', owner))
    with pytest.raises(Refused, match=r"engine e .* is dead: bring back what was there: rxring pin restore"):
        checks.applied(tmp_path)


# ── traffic ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ran", "share", "ok"),
    [
        ({1: 1000}, 1.0, True),
        ({0: 1, 1: 999}, 1.0, False),
        ({0: 1, 1: 108_523}, checks.THERE, True),
        ({0: 20, 1: 980}, checks.THERE, False),
        ({0: 1000}, checks.THERE, False),
        ({}, checks.THERE, False),
    ],
)
def test_how_many_must_be_where_the_layout_says(ran: dict[int, int], share: float, ok: bool) -> None:
    assert checks.handled(ran, 1, share) is ok


def over_lo() -> None:
    enter()
    for interrupt, other in (two_cpus(), two_cpus()[::-1]):
        layout = Layout("x", interrupt, other, (other,))
        apply(layout, "lo")
        mask = os.sched_getaffinity(0)
        ours, softnet = checks.traffic(layout, "lo")
        assert ours == Check(
            "packets of our own over lo", f"all on {interrupt}", f"1000 on {interrupt}", True
        )
        assert softnet.ok
        assert os.sched_getaffinity(0) == mask
        steering.rps_path("lo", 0).write_text("0")  # somebody else was here: they stay where they are sent
        ours, _ = checks.traffic(layout, "lo")
        assert not ours.ok
        assert ours.found.startswith("1000 on ")
        journal.restore()


def frame() -> bytes:
    """A UDP packet that only the flow's hash looks into."""
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 28, 0, 0, 64, 17, 0, bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
    )
    return b"\xff" * 6 + b"\x02" * 6 + b"\x08\x00" + ip + struct.pack("!HHHH", 1, 2, 8, 0) + bytes(18)


def over_veth() -> None:
    enter()
    for interrupt, other in (two_cpus(), two_cpus()[::-1]):
        over_veth_to(interrupt, other)
        journal.restore()


def over_veth_to(interrupt: int, other: int) -> None:
    layout = Layout("x", interrupt, other, (other,))
    apply(layout, "v0")
    checks._WATCH_S = 0.3
    [nothing] = checks.traffic(layout, "v0")
    assert (nothing.found, nothing.ok) == ("none came in 0.3 s, have somebody send", False)
    stop = threading.Event()
    thread = threading.Thread(target=flood, args=(stop, other))
    thread.start()
    try:
        exact, softnet = checks.traffic(layout, "v0")
        stop.set()
        thread.join()
        for queue in devices.read("v0").rx:
            steering.rps_path("v0", queue.number).write_text("0")
        stop.clear()
        thread = threading.Thread(target=flood, args=(stop, other))
        thread.start()
        wrong, _ = checks.traffic(layout, "v0")
    finally:
        stop.set()
        thread.join()
    assert (exact.ok, softnet.ok) == (True, True), (exact, softnet)
    assert re.fullmatch(rf"(\d on {other}, )?\d+ on {interrupt}(, \d on {other})?", exact.found)
    assert not wrong.ok
    assert re.fullmatch(rf"\d+ on {other}", wrong.found)


def flood(stop: threading.Event, cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("v1", 0))
        while not stop.is_set():
            sock.send(frame())


def over_veth_by_an_ordinary_user() -> None:
    enter()
    interrupt, other = two_cpus()
    os.setuid(65534)
    with pytest.raises(Refused, match=r"^the packets of v0 cannot be seen \(.*\): run it with sudo$"):
        list(checks.traffic(Layout("x", interrupt, other, (other,)), "v0"))


def over_a_device_that_is_down() -> None:
    enter()
    ctypes.CDLL(None).unshare(0x4000_0000)  # one more network, whose lo nobody has brought up
    with pytest.raises(Refused, match=r"nothing can be sent over lo .*: ip link set lo up|do not come back"):
        list(checks.traffic(Layout("x", 0, 0, (0,)), "lo"))


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(act, marks=in_a_namespace)
        for act in (over_lo, over_veth, over_veth_by_an_ordinary_user, over_a_device_that_is_down)
    ],
)
def test_traffic(act: Callable[[], None], fork: Callable[..., Child]) -> None:
    assert fork(act).wait() == 0


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────


def a_running_engine(name: str) -> None:
    enter()
    cpu, other = two_cpus()
    flags = ("--rx-cpu", str(cpu), "--consumer", f"rate@{other}")
    with Run(name, *flags) as run:
        ready = run.ready
        good = list(checks.engine_threads(Layout("x", other, cpu, (other,))))
        turned = list(checks.engine_threads(Layout("x", cpu, other, (cpu,))))
        pid = ready["receivers"][0]["pid"]
        for tid in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(tid), {cpu, other})
        floats = list(checks.engine_threads(Layout("x", other, cpu, (other,))))
        run.end()
    assert len(good) == 2
    assert wrong(good) == []
    assert len(wrong(turned)) == 2
    assert [what.split()[0] for what in wrong(floats)] == ["rx0"]


@pytest.mark.parametrize("whole_run", [pytest.param(True, marks=in_a_namespace)])
def test_every_thread_of_a_running_engine(whole_run: bool, name: str, fork: Callable[..., Child]) -> None:
    warm()
    assert fork(a_running_engine, name).wait(120) == 0
