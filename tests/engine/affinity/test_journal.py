"""All or nothing, and back again whatever happened: on plain files, and on the kernel's of a namespace."""

import ctypes
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trees
from forked import Child
from namespace_of_its_own import QUEUES, enter, masks, needs_root

from engine.affinity import devices, journal, layouts, steering, topology
from engine.affinity.journal import Journal, Owner, Write
from engine.affinity.layouts import Layout
from engine.affinity.topology import format_hex_mask
from engine.errors import Failed, Refused

_CALLS = ("open", "write", "fsync", "replace", "unlink", "close")  # of os: what changes anything


@pytest.fixture(scope="module", autouse=True)
def the_machine_is_as_before() -> Iterator[None]:
    before = masks()
    yield
    assert masks() == before


def three(root: Path) -> list[Write]:
    """Files of a tree, and what to write."""
    tree = trees.Tree(root)
    tree.write("proc/sys/kernel/random/boot_id", "this boot")
    writes = []
    for i in range(3):
        path = f"sys/class/net/d{i}/queues/rx-0/rps_cpus"
        tree.write(path, f"0000000{i}")
        writes.append(Write(root / path, "f"))
    return writes


def texts(writes: list[Write]) -> list[str]:
    return [write.path.read_text().strip() for write in writes]


def test_there_and_back(tmp_path: Path) -> None:
    writes = three(tmp_path)
    done = journal.apply(writes, {"layout": "x"}, tmp_path)
    assert texts(writes) == ["f"] * 3
    assert journal.journals(tmp_path) == [done]
    assert (done.number, done.complete, done.about) == (1, True, {"layout": "x"})
    assert [(file.path, file.found, file.state) for file in journal.restore(tmp_path)] == [
        (str(write.path), "f", "back") for write in reversed(writes)
    ]
    assert texts(writes) == ["00000000", "00000001", "00000002"]
    assert journal.journals(tmp_path) == journal.restore(tmp_path) == []


def test_newest_first(tmp_path: Path) -> None:
    writes = three(tmp_path)
    journal.apply(writes, {}, tmp_path)
    journal.apply([Write(writes[0].path, "3"), Write(writes[1].path, "5")], {}, tmp_path)
    assert [file.found for file in journal.restore(tmp_path)] == ["5", "3", "f", "f", "f"]
    assert texts(writes) == ["00000000", "00000001", "00000002"]


def test_what_somebody_else_changed_is_said_and_put_back(tmp_path: Path) -> None:
    writes = three(tmp_path)
    journal.apply(writes, {}, tmp_path)
    writes[0].path.write_text("8")
    writes[1].path.write_text("00000001")
    writes[2].path.unlink()
    found = {file.path: (file.found, file.state) for file in journal.restore(tmp_path)}
    assert list(found.values()) == [(None, "gone"), ("00000001", "unchanged"), ("8", "drifted")]
    assert texts(writes[:2]) == ["00000000", "00000001"]


def test_another_boots_journal_is_refused(tmp_path: Path) -> None:
    writes = three(tmp_path)
    journal.apply(writes, {}, tmp_path)
    trees.Tree(tmp_path).write("proc/sys/kernel/random/boot_id", "the next")
    with pytest.raises(Refused, match=r"1\.json is of another boot, .*: remove it: rm "):
        journal.restore(tmp_path)
    with pytest.raises(Refused, match="another boot"):
        journal.apply(writes, {}, tmp_path)
    assert texts(writes) == ["f"] * 3


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    three(tmp_path)
    folder = tmp_path / "run/rxring/pin"
    folder.mkdir(parents=True)
    (folder / "1.json").write_text('{"number": 1')
    with pytest.raises(Refused, match=r"1\.json is no journal of ours"):
        journal.restore(tmp_path)


@pytest.mark.parametrize("foreign", ["foo.json", "3.json"])
def test_a_foreign_file_among_the_journals_is_refused(tmp_path: Path, foreign: str) -> None:
    writes = three(tmp_path)
    journal.apply(writes, {}, tmp_path)
    (tmp_path / "run/rxring/pin" / foreign).mkdir()
    with pytest.raises(Refused, match=rf"{foreign} is no journal of ours.*: remove it: rm -r "):
        journal.restore(tmp_path)
    with pytest.raises(Refused, match=rf"{foreign} is no journal of ours"):
        journal.apply(writes, {}, tmp_path)


def test_what_a_living_engine_applied_stays_and_the_rest_goes_back(tmp_path: Path) -> None:
    first, second, third = three(tmp_path)
    pid = os.getpid()
    trees.Tree(tmp_path).write(f"proc/{pid}/stat", Path(f"/proc/{pid}/stat").read_text())
    journal.apply([first], {"layout": "split", "device": "d0"}, tmp_path, Owner.this("e"))
    journal.apply([second], {}, tmp_path)
    with pytest.raises(Failed, match=r"engine e .* layout split on d0, still runs: end it"):
        journal.restore(tmp_path)
    assert texts([first, second, third]) == ["f", "00000001", "00000002"]
    with pytest.raises(Refused, match=r"engine e .* still runs"):  # nothing else is left
        journal.restore(tmp_path)


def in_a_network_that_sys_does_not_show() -> None:
    before = journal.network()
    assert before == journal.network() != 0
    journal.need_own_sys()
    ctypes.CDLL(None).unshare(0x4000_0000)
    assert journal.network() != before
    with pytest.raises(Refused, match=r"another network namespace .* ip netns exec"):
        journal.need_own_sys()
    with pytest.raises(Refused, match="another network namespace"):
        journal.apply([], {})


@needs_root
def test_a_network_that_sys_does_not_show_is_refused(fork: Callable[..., Child]) -> None:
    """As `nsenter --net` leaves it: the paths would be another network's."""
    assert fork(in_a_network_that_sys_does_not_show).wait() == 0


def test_another_namespaces_journal_is_left_alone(tmp_path: Path) -> None:
    writes = three(tmp_path)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    trees.Tree(tmp_path).write("proc/self/ns/net", "")
    journal.apply(writes, {}, tmp_path)
    (tmp_path / "proc/self/ns/net").rename(tmp_path / "proc/self/ns/other")
    trees.Tree(tmp_path).write("proc/self/ns/net", "")
    assert journal.restore(tmp_path) == []
    assert texts(writes) == ["f"] * 3
    assert journal.apply(writes, {}, tmp_path).number == 2


def test_two_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_PATIENCE_S", 0.0)
    writes = three(tmp_path)
    journal.apply(writes, {}, tmp_path)
    with open(tmp_path / "run/rxring/pin/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for act in (lambda: journal.apply(writes, {}, tmp_path), lambda: journal.restore(tmp_path)):
            with pytest.raises(Refused, match="another `rxring pin`"):
                act()


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    writes = three(tmp_path)
    writes[2].path.unlink()
    with pytest.raises(Refused, match="rps_cpus: No such file"):
        journal.apply(writes, {}, tmp_path)
    assert texts(writes[:2]) == ["00000000", "00000001"]
    assert journal.journals(tmp_path) == []


def test_a_restore_that_is_refused_keeps_the_journal(tmp_path: Path) -> None:
    writes = three(tmp_path)
    journal.apply(writes, {}, tmp_path)
    target = writes[1].path
    target.unlink()
    target.mkdir()
    with pytest.raises(Failed, match="does not take 00000001 back"):
        journal.restore(tmp_path)
    assert texts([writes[0], writes[2]]) == ["00000000", "00000002"]
    target.rmdir()
    target.write_text("f")
    assert [file.state for file in journal.restore(tmp_path)] == ["back", "back", "back"]
    assert texts(writes) == ["00000000", "00000001", "00000002"]


def test_interrupts_of_a_tree(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    device = devices.read("eth0", tmp_path)
    layout = layouts.find("same", topology.read(tmp_path), device)
    journal.apply(layouts.writes(layout, device, tmp_path), {}, tmp_path)
    assert [tree.read(f"proc/irq/{n}/smp_affinity_list") for n in (37, 38, 39)] == ["0-1", "1", "1"]
    journal.restore(tmp_path)
    assert [tree.read(f"proc/irq/{n}/smp_affinity_list") for n in (37, 38, 39)] == ["0-1", "0-1", "0-1"]


@pytest.mark.parametrize(
    ("name", "one", "other", "same"),
    [
        ("rps_cpus", "00000000,0000000f", "f", True),
        ("rps_cpus", "f", "e", False),
        ("smp_affinity_list", "0-3", "0,1,2,3", True),
        ("smp_affinity_list", "0-3", "0-2", False),
        ("rps_flow_cnt", "0\n", "0", True),
    ],
)
def test_the_kernel_writes_values_its_own_way(name: str, one: str, other: str, same: bool) -> None:
    assert journal.equal(name, one, other) is same


def test_an_ordinary_user_is_told_before_anything_is_written(fork: Callable[..., Child]) -> None:
    def try_it() -> None:
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        with pytest.raises(Refused, match=r"^applying a layout needs root: run it with sudo$"):
            journal.apply([Write(steering.rps_path("lo", 0), "0")], {})

    assert fork(try_it).wait() == 0


# ── what engines apply for as long as they run ───────────────────────────────────────────────────────


def an_engine(tmp_path: Path, state: str = "S") -> Owner:
    """Of process 77, as the tree has it."""
    after = " ".join([state, *map(str, range(4, 22)), "500"])
    trees.Tree(tmp_path).write("proc/77/stat", f"77 (rx) ring) {after} 0 0")
    return Owner("quotes", 77, 500)


def test_what_a_living_engine_applied_is_left_alone(tmp_path: Path) -> None:
    writes, owner = three(tmp_path), an_engine(tmp_path)
    about = {"layout": "split", "device": "d0"}
    journal.apply(writes[:1], about, tmp_path, owner)
    for act in (lambda: journal.apply(writes, about, tmp_path), lambda: journal.restore(tmp_path)):
        with pytest.raises(
            Refused,
            match=r"^engine quotes \(process 77\), which applied layout split on d0, still runs: end it",
        ):
            act()
    journal.apply(writes[1:], about, tmp_path)  # other files
    assert [file.path for file in journal.restore(tmp_path, owner)] == [str(writes[0].path)]
    assert texts(writes) == ["00000000", "f", "f"]


@pytest.mark.parametrize(("state", "started"), [("Z", 500), ("S", 501)])
def test_what_a_dead_engine_applied_is_to_be_restored(tmp_path: Path, state: str, started: int) -> None:
    """A zombie is dead; so is who had the number before another process got it."""
    writes, owner = three(tmp_path), an_engine(tmp_path, state)
    owner = Owner(owner.engine, owner.pid, started)
    journal.apply(writes[:1], {}, tmp_path, owner)
    with pytest.raises(Refused, match=r"is dead: bring back what was there: rxring pin restore$"):
        journal.apply(writes[1:], {}, tmp_path)
    assert len(journal.restore(tmp_path)) == 1
    assert texts(writes) == ["00000000", "00000001", "00000002"]


# ── files of the kernel, in a namespace of their own ─────────────────────────────────────────────────


def v0(interrupt: int, send: tuple[int, ...] = ()) -> list[Write]:
    return layouts.writes(Layout("x", interrupt, 0, (0,), send), devices.read("v0"))


def a_refused_write_undoes_the_others() -> None:
    enter()
    before = masks()
    writes = v0(0, send=(0,))
    assert len(writes) == 2 * QUEUES
    writes.insert(QUEUES + 1, Write(steering.rps_path("v1", 3), format_hex_mask([topology.MAX_CPU])))
    with pytest.raises(
        Refused, match=r"rx-3/rps_cpus does not take .*, nothing is changed: the mask names a CPU"
    ):
        journal.apply(writes, {})
    assert masks() == before
    assert journal.journals() == []
    journal.apply(v0(0, send=(0,)), {})
    assert masks() != before
    journal.restore()
    assert masks() == before


@needs_root
@pytest.mark.root
def test_a_write_that_the_kernel_refuses_undoes_the_others(fork: Callable[..., Child]) -> None:
    assert fork(a_refused_write_undoes_the_others).wait() == 0


def die_at(step: int, act: Callable[[], object]) -> int:
    """Run it in a fork that kills itself with SIGKILL before its `step`-th call that changes anything;
    whether it came so far."""
    pid = os.fork()
    if pid == 0:
        counted = 0

        def counting(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted_call(*args: Any, **more: Any) -> Any:
                nonlocal counted
                counted += 1
                if counted == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **more)

            return counted_call

        for name in _CALLS:
            setattr(os, name, counting(getattr(os, name)))
        act()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0
    return False


def killed_at_every_step() -> None:
    enter()
    before, steps, touched = masks(), 0, 0
    while die_at(steps + 1, lambda: journal.apply(v0(0, send=(0,)), {})):
        steps += 1
        touched += masks() != before
        journal.restore()
        assert masks() == before, f"killed before call {steps}"
        assert journal.restore() == []
    assert steps >= 50
    assert touched >= 2 * QUEUES - 1
    # The last one came through; now restoring is killed.
    steps = 0
    while die_at(steps + 1, journal.restore):
        steps += 1
        journal.restore()
        assert masks() == before, f"killed before call {steps} of the restore"
        journal.apply(v0(0, send=(0,)), {})
    assert steps >= 50
    assert masks() == before


@needs_root
@pytest.mark.root
def test_killed_at_every_step_everything_comes_back(fork: Callable[..., Child]) -> None:
    assert fork(killed_at_every_step).wait(120) == 0


def test_a_journal_is_whole(tmp_path: Path) -> None:
    """What its writer has not finished is none."""
    three(tmp_path)
    folder = tmp_path / "run/rxring/pin"
    folder.mkdir(parents=True)
    (folder / "1.new").write_text('{"number": 1')
    assert journal.restore(tmp_path) == []
    assert not list(folder.glob("*.new"))
    assert isinstance(journal.apply([], {}, tmp_path), Journal)
