"""Runs with a layout: applied, seen to hold, taken back whatever becomes of the run. All in namespaces of
their own: the machine's lo is not touched."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Child, await_
from namespace_of_its_own import enter, masks, needs_root, own_files
from namespaces import Pair, make_pair
from runs import ROOT, Run, warm

from engine import placement
from engine.affinity import devices, journal, steering, topology
from engine.affinity.layouts import Layout
from engine.net.counters import Softnet
from engine.placement import Placement
from tools import cli

__all__ = ["make_pair"]

Object = dict[str, Any]
PACKETS = 500  # fewer than wait for another CPU at most (net.core.netdev_max_backlog, 1000)
LISTEN = ("--listen", "udp://127.0.0.1:0")
split_on_lo = ("--layout", "split", "--device", "lo", "--consumer", "rate")


def two_cpus() -> tuple[int, int]:
    """The interrupt and the receive CPU of `split`, as `rxring pin layouts` has it."""
    layout = placement.layouts.find("split", topology.read())
    return layout.interrupt, layout.receive


def has_two_cores() -> bool:
    try:
        return bool(two_cpus())
    except placement.Refused:
        return False


needs_two_cores = pytest.mark.skipif(not has_two_cores(), reason="needs two cores behind one cache")
in_a_namespace = [needs_root, pytest.mark.root, needs_two_cores]


@pytest.fixture(scope="module", autouse=True)
def the_machine_is_as_before() -> Iterator[None]:
    before = masks()
    yield
    assert masks() == before


def send(port: int, cpu: int, host: str = "127.0.0.1", sock: socket.socket | None = None) -> None:
    """From this CPU. So few that nothing is dropped, however slow the others are."""
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    with sock or socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for _ in range(PACKETS):
            out.sendto(b"x" * 100, (host, port))
    os.sched_setaffinity(0, mask)


def rps(device: str = "lo") -> str:
    return steering.rps_path(device, 0).read_text().strip()


def whole(view: Object) -> bool:
    return bool(view["consumers"][0]["delivered"] >= PACKETS)


def packets_on(view: Object, cpu: int) -> int:
    return next(int(row["packets"]) for row in view["placement"]["cpus"] if row["cpu"] == cpu)


# ── applied, and taken back ──────────────────────────────────────────────────────────────────────────


def over_lo(name: str) -> None:
    enter()
    before, (interrupt, receive) = masks(), two_cpus()
    for layout, ending in (("split", signal.SIGINT), ("same", signal.SIGTERM)):
        with Run(name, "--layout", layout, "--device", "lo", "--consumer", "rate", "--every", "0.1") as run:
            assert run.ready["receivers"][0]["cpus"] == [receive if layout == "split" else interrupt]
            [made] = journal.journals()
            assert made.owner is not None
            assert (made.owner.engine, made.owner.pid, made.complete) == (name, run.pid, True)
            assert rps() == f"{1 << interrupt:x}"
            send(run.port, cpu=receive)
            run.await_interval(whole)
            summary = run.end(ending)
            assert run.errors == ""
        assert masks() == before
        assert journal.journals() == []
        found = summary["placement"]
        assert (found["layout"], found["device"], found["interrupt_by"]) == (layout, "lo", "rps")
        assert (found["interrupt"], found["deviations"]) == (interrupt, [])
        assert packets_on(summary, interrupt) >= 0.99 * PACKETS
        assert found["on_interrupt_cpu"] > 0
        for worker, role in ((summary["receivers"][0], "receive"), (summary["consumers"][0], "process")):
            asked = found[role] if role == "process" else [found[role]]
            assert worker["cpus"] == worker["cpus_asked"] == asked
            assert worker["migrations"] == 0
            assert worker["involuntary"] >= 0


def over_a_cable(name: str, pair: Pair) -> None:
    interrupt, receive = two_cpus()
    with pair.left:
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with pair.right:
        own_files()
        before, device = masks(), pair.right.device
        flags = ("--layout", "split", "--device", device, "--consumer", "rate", "--every", "0.1")
        with Run(name, *flags, listen=f"udp://{pair.right.ipv4}:0") as run:
            assert run.ready
            assert rps(device) == f"{1 << interrupt:x}"
            send(run.port, cpu=receive, host=pair.right.ipv4, sock=out)
            run.await_interval(whole)
            summary = run.end()
            assert run.errors == ""
        assert packets_on(summary, interrupt) >= 0.99 * PACKETS
        assert summary["placement"]["deviations"] == []
        assert masks() == before


def files_of_ones_own(name: str) -> None:
    """A layout file names the device; the CPUs that a consumer names are meant."""
    enter()
    interrupt, receive = two_cpus()
    file = Path("/run/mine.toml")
    file.write_text(f'device = "v0"\ninterrupt = {interrupt}\nreceive = {receive}\nprocess = {receive}\n')
    flags = ("--layout", str(file), "--consumer", "rate", "--consumer", f"gaps@{interrupt}")
    with Run(name, *flags) as run:
        assert run.ready
        assert rps("v0") == f"{1 << interrupt:x}"
        assert [worker["cpus"] for worker in run.ready["consumers"]] == [[receive], [interrupt]]
        assert run.end()["placement"]["layout"] == "mine"


def killed(name: str) -> None:
    enter()
    before = masks()
    with Run(name, *split_on_lo) as run:
        assert run.ready
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.await_all_gone()  # the workers see it, and leave
    assert masks() != before
    for again in (["run", *LISTEN, *split_on_lo], ["pin", "apply", "same", "--device", "v0"]):
        assert cli.main(again) == 2
    assert len(journal.journals()) == 1
    assert cli.main(["pin", "restore"]) == 0
    assert masks() == before
    with Run(name, *split_on_lo) as run:
        run.end()
    assert masks() == before


def two_engines(name: str) -> None:
    enter()
    before = masks()
    with Run(name, *split_on_lo) as run:
        assert run.ready
        for refused in (
            ["run", *LISTEN, *split_on_lo],
            ["pin", "apply", "same", "--device", "lo"],
            ["pin", "restore"],
        ):
            assert cli.main(refused) == 2
        assert cli.main(["pin", "apply", "same", "--device", "lo", "--dry-run"]) == 2
        elsewhere = ("--layout", "same", "--device", "v1")
        with Run(f"{name}.2", *elsewhere) as other:
            assert other.ready
            assert rps("v1") != "00"
            run.end()
            assert rps("v1") != "00"
            other.end()
    assert masks() == before


def what_was_applied_before_stands_again(name: str) -> None:
    enter()
    assert cli.main(["pin", "apply", "same", "--device", "lo"]) == 0
    before = masks()
    steering.rps_path("lo", 0).write_text("0")
    with Run(name, *split_on_lo) as run:
        run.end()
    assert rps() == "0"
    assert masks() != before
    assert cli.main(["pin", "restore"]) == 0


def a_start_that_fails(name: str) -> None:
    enter()
    before = masks()
    with Run(name, *split_on_lo, "--consumer", "dump=/nowhere/file") as run:
        assert run.next() is None
        assert run.wait() in (1, 2)
        assert "/nowhere/file" in run.errors
    assert masks() == before
    assert journal.journals() == []


def a_worker_that_is_given_up(name: str) -> None:
    enter()
    before = masks()
    with Run(name, *split_on_lo) as run:
        for _ in range(4):
            run.kill_worker(1)
        os.kill(run.worker(1), signal.SIGKILL)
        summary = run.end(None, code=1)
    assert summary["consumers"][0]["restarts"] == 4
    assert masks() == before


WHOLE_RUNS = [
    over_lo,
    files_of_ones_own,
    killed,
    two_engines,
    what_was_applied_before_stands_again,
    a_start_that_fails,
    a_worker_that_is_given_up,
]


@pytest.mark.parametrize("act", [pytest.param(act, marks=in_a_namespace) for act in WHOLE_RUNS])
def test_whole_runs(
    act: Callable[[str], None], name: str, fork: Callable[..., Child], capfd: pytest.CaptureFixture[str]
) -> None:
    warm()
    code = fork(act, name).wait(120)
    err = capfd.readouterr().err
    assert code == 0, err
    for sentence in SAID.get(act, ()):
        assert re.search(sentence, err), err


WHO = r"rxring: (--layout split: )?engine \S+ \(process \d+\), which applied layout split on lo,"
SAID: dict[Callable[[str], None], tuple[str, ...]] = {
    killed: (rf"{WHO} is dead: bring back what was there: rxring pin restore\n{WHO} is dead",),
    two_engines: (
        rf"{WHO} still runs: end it first, .*\n{WHO} still runs: end it first.*\n{WHO} still runs",
    ),
}


@pytest.mark.parametrize("whole_run", [pytest.param(True, marks=in_a_namespace)])
def test_over_a_cable(whole_run: bool, pair: Pair, name: str, fork: Callable[..., Child]) -> None:
    warm()
    assert fork(over_a_cable, name, pair).wait(120) == 0


# ── watched ──────────────────────────────────────────────────────────────────────────────────────────


def a_mask_that_somebody_changes(name: str) -> None:
    enter()
    path = steering.rps_path("lo", 0)
    with Run(name, *split_on_lo) as run:
        assert run.ready
        path.write_text("0")
        await_(lambda: f"{path}: 0, not " in run.errors)
        path.write_text("3")  # said once
        summary = run.end()
        [words] = summary["placement"]["deviations"]
        first, second = run.errors.splitlines()
        assert first == words
        assert words.startswith(f"{path}: 0, not {1 << two_cpus()[0]:x} as layout split has it: ")
        assert second == f"{path}: somebody else had set 3 meanwhile, 0 is back"
    assert rps() == "0"


@pytest.mark.parametrize("whole_run", [pytest.param(True, marks=in_a_namespace)])
def test_a_mask_that_somebody_changes_is_told(whole_run: bool, name: str, fork: Callable[..., Child]) -> None:
    warm()
    assert fork(a_mask_that_somebody_changes, name).wait(120) == 0


def test_a_consumer_that_is_moved_away_is_told(name: str) -> None:
    """Without a layout, too."""
    first, *_, last = cpus = topology.allowed()
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    with Run(name, "--consumer", f"rate@{first}") as run:
        assert run.ready
        os.sched_setaffinity(run.worker(1), {last})
        await_(lambda: "rate was pinned" in run.errors)
        summary = run.end()
        [words] = summary["placement"]["deviations"]
        assert run.errors == f"{words}\n"
    assert words.startswith(f"rate was pinned to CPU {first} and may now run on {last}: ")
    [rate] = summary["consumers"]
    assert (rate["cpus_asked"], rate["cpus"]) == ([first], [last])
    assert rate["migrations"] in (None, 1)
    [rx0] = summary["receivers"]
    assert (rx0["cpus_asked"], summary["placement"]["layout"]) == (None, None)


def softnet(*packets: int) -> dict[int, Softnet]:
    return {cpu: Softnet(processed=count) for cpu, count in enumerate(packets)}


@pytest.mark.parametrize(
    ("frames", "packets", "told"),
    [
        (1000, (0, 1000), False),
        (1000, (10, 990), False),
        (1000, (900, 100), True),
        (1000, (5000, 1000), False),  # others' packets
        (1000, (10, 10), False),  # of which each was cut into many behind softnet
        (0, (0, 0), False),
    ],
)
def test_packets_that_were_handled_elsewhere_are_told(
    frames: int, packets: tuple[int, ...], told: bool
) -> None:
    found = Placement(Layout("split", 1, 0, (1,)), devices.read("lo"))
    found.weigh(frames, softnet(*packets))
    assert bool(found.deviations) is told
    if told:
        assert found.deviations == [
            "of 1000 frames received, at most 100 were handled on CPU 1: do they come over lo?"
        ]


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--device", "lo"], "--device lo is whose packets a layout is for: give --layout NAME, too"),
        (["--layout", "same"], "--layout same is for the packets of a device: give --device DEV, too"),
        (["--layout", "same", "--device", "eth99"], "no network device 'eth99': choose from "),
        (
            ["--layout", "diagonal", "--device", "lo"],
            "diagonal: No such file or directory: give one of same, ",
        ),
    ],
)
def test_what_makes_no_layout(flags: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *LISTEN, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"rxring: {what}")
    assert err.count("\n") == 1


@needs_root
@pytest.mark.root
def test_a_receive_cpu_that_contradicts_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    interrupt, receive = two_cpus()
    assert cli.main(["run", *LISTEN, *split_on_lo, "--rx-cpu", str(interrupt)]) == 2
    assert capsys.readouterr().err == (
        f"rxring: --rx-cpu {interrupt}: layout split receives on CPU {receive}: leave out one of them\n"
    )


def test_a_spec_file_may_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('layout = "same"\n[[receiver]]\nlisten = "udp://127.0.0.1:0"\n')
    assert cli.main(["run", str(file)]) == 2
    assert "give --device DEV" in capsys.readouterr().err
    assert cli.main(["run", str(file), "--device", "eth99"]) == 2
    assert "no network device 'eth99'" in capsys.readouterr().err


def test_an_ordinary_user_is_told_before_anything_is_written(
    fork: Callable[..., Child], capfd: pytest.CaptureFixture[str]
) -> None:
    def try_it() -> None:
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        assert cli.main(["run", *LISTEN, "--layout", "same", "--device", "lo"]) == 2

    assert fork(try_it).wait() == 0
    assert capfd.readouterr().err == "rxring: --layout needs root: run it with sudo\n"


@needs_two_cores
def test_a_process_started_on_one_cpu_stays_there() -> None:
    """taskset is meant: what needs other CPUs is refused, and says why."""
    cpu, other = two_cpus()

    def rxring(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["taskset", "-c", str(cpu), sys.executable, "-m", "tools.cli", *words]
        return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)

    why = f"layout split cannot be had: not among CPU {cpu}, which this process is allowed"
    assert why in " ".join(rxring("pin", "layouts", "--device", "lo").stdout.split())
    for refused in (["pin", "apply", "split", "--device", "lo"], ["run", *LISTEN, *split_on_lo]):
        done = rxring(*refused)
        assert (done.returncode, done.stderr) == (2, f"rxring: {why}\n")
    done = rxring("run", *LISTEN, "--rx-cpu", str(other))
    what = f"cannot pin: CPU {other} is none that this process was started on (taskset): choose from {cpu}"
    assert (done.returncode, done.stderr) == (2, f"rxring: --rx-cpu: {what}\n")
