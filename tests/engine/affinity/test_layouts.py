"""Which CPUs a layout takes on machines of all kinds, what realises it, and what stands against it."""

import os
from pathlib import Path

import pytest
import trees
from trees import Tree

from engine.affinity import devices, layouts, topology
from engine.affinity.layouts import Layout
from engine.errors import Refused


def found(tree: Tree, device: str | None = None) -> dict[str, Layout | str]:
    machine = topology.read(tree.root)
    near = devices.read(device, tree.root) if device else None
    all_of_them: dict[str, Layout | str] = {}
    for name in layouts.NAMES:
        try:
            all_of_them[name] = layouts.find(name, machine, near)
        except Refused as refused:
            all_of_them[name] = str(refused)
    return all_of_them


def roles(layout: Layout | str) -> tuple[int, int, tuple[int, ...]]:
    assert isinstance(layout, Layout), layout
    return layout.interrupt, layout.receive, layout.process


def test_the_vm(tmp_path: Path) -> None:
    possible = found(trees.vm(tmp_path))
    assert roles(possible["same"]) == (1, 1, (0,))
    assert roles(possible["split"]) == (1, 0, (1,))
    assert possible["split"].note == "processing shares the interrupt CPU: no other is left"  # type: ignore[union-attr]
    assert possible["sibling"] == "layout sibling cannot be had: no core has two threads (SMT)"
    assert possible["split-package"] == (
        "layout split-package cannot be had: no package has two last-level caches"
    )
    assert possible["cross-node"] == "layout cross-node cannot be had: there is one memory node (NUMA)"


def test_the_server_near_its_nic(tmp_path: Path) -> None:
    tree = trees.server(tmp_path)
    possible = found(tree, "eth0")  # at node 1
    assert roles(possible["same"]) == (32, 32, tuple(range(33, 40)))
    assert roles(possible["sibling"]) == (32, 96, tuple(range(33, 40)))
    assert roles(possible["split"]) == (32, 33, tuple(range(34, 40)))
    assert roles(possible["split-package"]) == (32, 41, (*range(42, 48), 104))  # 40 is offline, 104 is not
    assert roles(possible["cross-node"]) == (32, 24, tuple(range(25, 32)))  # isolated ones receive


def test_the_server_without_a_device(tmp_path: Path) -> None:
    possible = found(trees.server(tmp_path))
    assert roles(possible["split"]) == (1, 2, (0, 3, 4, 6, 7))  # not on CPU 0; 5 is offline
    assert roles(possible["cross-node"]) == (1, 32, tuple(range(33, 40)))


@pytest.mark.parametrize("name", layouts.NAMES)
def test_each_layout_is_what_it_says(tmp_path: Path, name: str) -> None:
    tree = trees.server(tmp_path)
    by_id = topology.read(tree.root).by_id
    for device in ("lo", "eth0"):
        interrupt, receive, process = roles(found(tree, device)[name])
        i, r = by_id[interrupt], by_id[receive]
        assert (i.id == r.id) == (name == "same")
        assert (i.core == r.core and i.package == r.package) == (name in ("same", "sibling"))
        assert (i.llc == r.llc) == (name in ("same", "sibling", "split"))
        assert (i.package == r.package) == (name != "cross-node")
        assert not {*i.siblings, *r.siblings} & set(process)
        assert all(by_id[cpu].llc == r.llc for cpu in process)
        assert interrupt not in range(24, 32)  # isolated


def test_arm(tmp_path: Path) -> None:
    possible = found(trees.arm(tmp_path), "eth0")
    assert roles(possible["split"]) == (1, 2, (0, 3))
    assert "no core has two threads" in str(possible["sibling"])


def test_a_container_uses_what_it_is_allowed(tmp_path: Path) -> None:
    possible = found(trees.container(tmp_path), "eth0")
    assert roles(possible["same"]) == (2, 2, (4,))
    assert possible["split"] == (
        "layout split cannot be had: not among CPU 2,4, which this process is allowed"
    )
    assert roles(possible["split-package"]) == (2, 4, (2,))


def test_isolated_cpus_receive_and_take_no_interrupts(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.cpus({cpu: trees.Place(0, 0, cpu, 0) for cpu in range(8)}, allowed=range(8), isolated=range(1, 4))
    possible = found(tree)
    assert roles(possible["split"]) == (4, 1, (0, 2, 3, 5, 6, 7))
    assert roles(possible["same"])[:2] == (4, 4)
    everything = Tree(tmp_path / "all")
    everything.cpus({0: trees.Place(0, 0, 0, 0)}, allowed=[0], isolated=[0])
    assert found(everything)["same"] == "layout same cannot be had: every CPU is isolated"


def test_one_cpu_does_everything(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.cpus({0: trees.Place(0, 0, 0, 0)}, allowed=[0])
    same = found(tree)["same"]
    assert roles(same) == (0, 0, (0,))
    assert same.note == "everything shares one CPU: no other is left"  # type: ignore[union-attr]


def writes(tree: Tree, layout: Layout, device: str) -> dict[str, str]:
    listed = layouts.writes(layout, devices.read(device, tree.root), tree.root)
    return {str(write.path.relative_to(tree.root)): write.value for write in listed}


def test_what_realises_a_layout(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    layout = Layout("split", 1, 0, (1,))
    assert writes(tree, layout, "eth0") == {
        "proc/irq/38/smp_affinity_list": "1",
        "proc/irq/39/smp_affinity_list": "1",
        "sys/class/net/eth0/queues/rx-0/rps_cpus": "0",
    }
    assert writes(tree, layout, "lo") == {"sys/class/net/lo/queues/rx-0/rps_cpus": "2"}
    tree.write("sys/class/net/lo/queues/rx-0/rps_flow_cnt", 4096)  # it would move packets on
    assert writes(tree, layout, "lo")["sys/class/net/lo/queues/rx-0/rps_flow_cnt"] == "0"


def test_transmit_queues_are_given_to_who_sends(tmp_path: Path) -> None:
    tree = trees.server(tmp_path)
    listed = writes(tree, Layout("mine", 33, 34, (35,), send=(36, 100, 37)), "eth0")
    xps = [listed[f"sys/class/net/eth0/queues/tx-{queue}/xps_cpus"] for queue in range(8)]
    assert xps == ["10,00000000", "10,00000000,00000000,00000000", "20,00000000"] * 2 + [
        "10,00000000",
        "10,00000000,00000000,00000000",
    ]


def against(tree: Tree, layout: Layout, device: str) -> list[str]:
    near = devices.read(device, tree.root)
    return layouts.obstacles(layout, near, topology.read(tree.root), tree.root)


def test_nothing_stands_against_a_plain_machine(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    for device in ("lo", "eth0"):
        assert against(tree, Layout("split", 1, 0, (1,)), device) == []


def test_a_managed_interrupt_and_irqbalance_are_foreseen(tmp_path: Path) -> None:
    tree = trees.server(tmp_path)
    managed, balance = against(tree, Layout("split", 33, 34, (35,)), "eth0")
    assert managed.startswith("interrupt 108 (mlx5_comp8) of eth0 is managed, the kernel keeps it on CPU 36:")
    assert balance.startswith("irqbalance (process 812) undoes it")
    # Where it is anyway, it does not matter.
    assert against(tree, Layout("split", 36, 34, (35,)), "eth0") == [balance]
    listed = writes(tree, Layout("split", 36, 34, (35,)), "eth0")
    assert [path for path in listed if "irq" in path] == [
        f"proc/irq/{number}/smp_affinity_list" for number in range(100, 108)
    ]
    assert against(tree, Layout("split", 33, 34, (35,)), "lo") == []


def test_cpus_that_cannot_be_had_are_foreseen(tmp_path: Path) -> None:
    tree = trees.container(tmp_path)
    assert against(tree, Layout("x", 0, 2, (99,)), "eth0") == [
        "cannot pin: CPU 99 does not exist, CPU 0 is outside the cpuset of this process: choose from 2,4"
    ]
    isolated = against(trees.server(tmp_path / "server"), Layout("x", 25, 26, (27,)), "lo")
    assert isolated == ["CPU 25 is isolated and RPS takes none of those: choose another for interrupts"]


def test_devices_that_cannot_do_it(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    (tmp_path / "sys/class/net/lo/queues/rx-0/rps_cpus").unlink()
    (tmp_path / "proc/irq/38/virtio2-input.0").rmdir()
    (tmp_path / "proc/irq/39/virtio2-output.0").rmdir()
    layout = Layout("x", 1, 0, (1,), send=(1,))
    assert against(tree, layout, "lo") == [
        "lo has neither interrupts nor RPS here: choose another device",
        "lo has no transmit queues to choose from: leave out send",
    ]
    assert "eth0 has no interrupt in use: bring it up" in against(tree, layout, "eth0")[0]


def test_threads_that_poll_are_foreseen(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    tree.write("sys/class/net/eth0/threaded", 1)
    [reason] = against(tree, Layout("split", 1, 0, (1,)), "eth0")
    assert reason.startswith("eth0 is polled by threads, ")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('device = "eth1"\ninterrupt = 2\nreceive = "3"\nprocess = "4-6,8"\nsend = 7\n')
    assert layouts.read_file(path) == (Layout("mine", 2, 3, (4, 5, 6, 8), (7,)), "eth1")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "No such file or directory: give one of same, sibling"),
        ("interrupt = 1\nreceive = 2\n", "missing required field `process`"),
        ("interrupt = 1\nreceive = 2\nprocess = 3\nother = 4\n", "unknown field `other`"),
        ("interrupt = '1,2'\nreceive = 2\nprocess = 3\n", "interrupt and receive are one CPU each"),
        ("interrupt = 1\nreceive = -2\nprocess = 3\n", "'-2' is no CPU list"),
        ("interrupt = 1\nreceive = 2\nprocess = 1.5\n", "Expected `int | str`"),
        ("interrupt =", "mine.toml: "),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str | None, what: str) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Refused) as refused:
        layouts.read_file(path)
    assert what in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_pipe_is_no_layout_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.toml")
    with pytest.raises(Refused, match=r"f\.toml is no file"):
        layouts.read_file(tmp_path / "f.toml")


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("interrupt = " + "[" * 100_000)
    with pytest.raises(Refused, match=r"deep\.toml: "):
        layouts.read_file(path)
