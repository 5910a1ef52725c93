"""Topology, devices, interrupts and steering, read on machines of all kinds."""

import os
import random
from pathlib import Path

import pytest
import trees
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.affinity import devices, interrupts, steering, topology
from engine.affinity.topology import format_cpu_list, format_hex_mask, parse_hex_mask, parse_kernel_list
from engine.errors import Refused

cpu_sets = st.sets(st.integers(0, topology.MAX_CPU))


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.sampled_from((2, 64, 256, 4096)))
def test_lists_and_masks_are_read_back_exactly(seed: int, most: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        cpus = {cpu for _ in range(draw.randrange(5)) for cpu in _run(draw, most)}
        assert parse_hex_mask(format_hex_mask(cpus)) == tuple(sorted(cpus))
        assert parse_kernel_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


def _run(draw: random.Random, most: int) -> range:
    """CPUs that follow each other, or one."""
    first = draw.randrange(most)
    return range(first, min(first + draw.choice((1, 2, 32, 200)), most))


@given(cpu_sets, st.integers(1, 4096))
def test_a_mask_as_the_kernel_prints_it(cpus: set[int], width: int) -> None:
    """%*pb: all of its bits, the first group only as many digits as it needs."""
    cpus = {cpu for cpu in cpus if cpu < width}
    bits = sum(1 << cpu for cpu in cpus)
    groups = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(0, width, 32)][::-1]
    digits = -(-(width % 32 or 32) // 4)
    printed = ",".join([groups[0][-digits:], *groups[1:]]) + "\n"
    assert parse_hex_mask(printed) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    "text", ["", ",", "1,", ",1", "0x2", "0-1", "g", "123456789", "1,,2", "1 2", "-1", "+1", "1_0", "٣"]
)
def test_a_broken_mask_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mask"):
        parse_hex_mask(text)


@given(st.text("0123456789abcdefxg,- ", max_size=20))
@example("ffffffff,ffffffff")
def test_a_mask_is_read_as_int_reads_it_or_refused(text: str) -> None:
    try:
        cpus = parse_hex_mask(text)
    except ValueError:
        return
    groups = [int(group, 16) for group in text.strip().split(",")]
    value = 0
    for group in groups:
        assert group < 1 << 32
        value = value << 32 | group
    assert sum(1 << cpu for cpu in cpus) == value


def test_this_machine() -> None:
    found = topology.read()
    assert [cpu.id for cpu in found.cpus] == list(found.online)
    assert set(found.allowed) <= set(found.online)
    for cpu in found.cpus:
        assert cpu.id in cpu.siblings
        assert set(cpu.siblings) <= set(cpu.llc) <= set(found.online)
    lo = devices.read("lo")
    assert (lo.irqs, lo.driver, lo.node, lo.coalescing) == ((), None, None, None)
    assert [queue.number for queue in lo.rx] == [0]
    softirqs = interrupts.parse_softirqs(Path("/proc/softirqs").read_text())
    assert set(found.online) <= set(softirqs["NET_RX"])
    rows = interrupts.parse_interrupts(Path("/proc/interrupts").read_text())
    assert all(set(row.counts) in ({*found.online}, set()) for row in rows.values())
    for device in devices.read_all():
        for irq in device.irqs:
            assert all(action in rows[str(irq.number)].what for action in irq.actions)


def test_the_vm(tmp_path: Path) -> None:
    root = trees.vm(tmp_path).root
    assert topology.read(root).cpus[1] == topology.Cpu(1, 0, (0, 1), 1, (1,), 0)
    eth0 = devices.read("eth0", root)
    assert (eth0.driver, eth0.node) == ("virtio_net", None)
    assert [irq.number for irq in eth0.irqs] == [37, 38, 39]  # of the PCI device, not of the bridge above it
    assert [irq.number for irq in eth0.packet_irqs] == [38, 39]
    assert eth0.irqs[1] == interrupts.Irq(38, ("virtio2-input.0",), (0, 1), (0,), False)
    assert interrupts.irqbalance(root) is None
    blk = interrupts.read_irq(36, root)
    assert blk is not None
    assert blk.managed
    assert interrupts.read_irq(99, root) is None


def test_a_pci_device_without_its_own_does_not_get_the_bridges(tmp_path: Path) -> None:
    tree = trees.Tree(tmp_path)
    tree.device("eth1", at="0000:02:00.0", driver="e1000")
    tree.irq(9, "PCIe bwctrl", "0-3", "0")
    assert devices.read("eth1", tmp_path).irqs == ()
    tree.write("sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0/irq", 19)
    tree.irq(19, "eth1", "0-3", "2")
    assert [irq.number for irq in devices.read("eth1", tmp_path).irqs] == [19]


def test_the_server(tmp_path: Path) -> None:
    root = trees.server(tmp_path).root
    found = topology.read(root)
    assert found.offline == (5, 40, 69)
    assert len(found.cpus) == 125
    assert found.isolated == tuple(range(24, 32))
    assert found.by_id[33] == topology.Cpu(33, 1, (*range(32, 40), *range(96, 104)), 1, (33, 97), 1)
    assert found.by_id[104].siblings == (104,)  # the other thread is offline
    eth0 = devices.read("eth0", root)
    assert (eth0.driver, eth0.node, len(eth0.rx), len(eth0.tx)) == ("mlx5_core", 1, 8, 8)
    assert [irq.managed for irq in eth0.irqs] == [False] * 8 + [True]
    assert eth0.tx[0].xps == eth0.rx[0].rps == ()
    assert steering.rfs_entries(root) == 32768
    assert interrupts.irqbalance(root) == 812


def test_arm_without_caches_and_package(tmp_path: Path) -> None:
    root = trees.arm(tmp_path).root
    assert topology.read(root).cpus[2] == topology.Cpu(2, 0, (0, 1, 2, 3), 2, (2,), 0)
    # There is no bus to ask: by their names; eth01 is another device's.
    assert [irq.number for irq in devices.read("eth0", root).irqs] == [21, 22]


def test_the_container(tmp_path: Path) -> None:
    root = trees.container(tmp_path).root
    found = topology.read(root)
    assert found.allowed == (2, 4)
    assert found.online == tuple(range(8))
    assert devices.read("eth0", root).irqs == ()
    with pytest.raises(Refused, match=r"^no network device 'eth9': choose from eth0, lo$"):
        devices.read("eth9", root)


def test_threads_that_poll_a_device(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    tree.write("sys/class/net/eth0/threaded", 1)
    tree.process(71, "napi/eth0-8193", "0-1")
    tree.process(72, "napi/eth01-8194", "0-1")
    threads = devices.read("eth0", tmp_path).napi
    assert threads == (devices.NapiThread(71, "napi/eth0-8193", (0, 1)),)
    assert devices.read("lo", tmp_path).napi is None


def test_interrupts_of_a_machine_with_holes() -> None:
    text = (
        "            CPU0       CPU2       CPU7       \n"
        "  38:          1          2          3  PCI-MSIX-0000:00:03.0   1-edge      eth0-rx-0, x y\n"
        "  40:          0          0          0\n"
        " NMI:          5          6          7   Non-maskable interrupts\n"
        " ERR:          9\n"
    )
    rows = interrupts.parse_interrupts(text)
    assert rows["38"].counts == {0: 1, 2: 2, 7: 3}
    assert "eth0-rx-0, x y" in rows["38"].what
    assert rows["40"] == interrupts.Row({0: 0, 2: 0, 7: 0}, "")
    assert rows["NMI"].what == "Non-maskable interrupts"
    assert rows["ERR"].counts == {}
    assert interrupts.parse_interrupts("") == {}


def test_softirqs_are_by_cpu() -> None:
    text = "                    CPU0       CPU3       \n      NET_RX:         10         20\n"
    assert interrupts.parse_softirqs(text) == {"NET_RX": {0: 10, 3: 20}}


def test_reading_needs_no_rights(fork, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def look() -> None:
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        topology.read()
        assert "lo" in [device.name for device in devices.read_all()]

    assert fork(look).wait() == 0
