"""`rxring pin`: what it shows on machines of all kinds, what it refuses, that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trees
from forked import Child
from namespace_of_its_own import enter, masks, needs_root

from engine.affinity import journal, layouts, load, steering, topology
from engine.errors import Failed, Refused
from tools import cli, pin

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def the_machine_is_as_before() -> Iterator[None]:
    before = masks()
    yield
    assert masks() == before


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`run(root, *args)`: what the command prints, on that machine."""

    def call(root: Path, *args: str, code: int = 0) -> str:
        assert pin.main(args, root) == code
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return call


def objects(text: str) -> list[Object]:
    return [json.loads(line) for line in text.splitlines()]


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────


def test_show_on_the_vm(tmp_path: Path, run: Callable[..., str]) -> None:
    root = trees.vm(tmp_path).root
    text = run(root, "show")
    assert "CPUs  online 0-1  allowed 0-1  isolated none  offline none" in text
    assert "39         eth0  virtio2-output.0  0-1   1" in text  # wish and fact
    assert "packets since the boot  CPU 1 50.2 %  CPU 0 49.8 %" in text
    assert "irqbalance" not in text
    [view] = objects(run(root, "show", "--json"))
    assert view["cpus"][1]["llc"] == [0, 1]
    assert (view["offline"], view["irqbalance"], view["rfs_entries"]) == ([], None, 0)
    eth0 = next(device for device in view["devices"] if device["name"] == "eth0")
    assert eth0["irqs"][1] == {
        "number": 38,
        "actions": ["virtio2-input.0"],
        "wish": [0, 1],
        "fact": [0],
        "managed": False,
    }
    assert view["load"][1] == {
        "cpu": 1,
        "interrupts": 6,
        "net_rx": 10,
        "net_tx": 2,
        "processed": 101,
        "dropped": 0,
        "time_squeeze": 0,
        "received_rps": 0,
    }


def test_show_on_the_server_is_short(tmp_path: Path, run: Callable[..., str]) -> None:
    root = trees.server(tmp_path).root
    text = run(root, "show")
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 80
    assert "offline 5,40,69" in text
    assert "32-39,96-103" in text  # a row for each cache
    assert "by the kernel" in text  # the managed interrupt
    assert "117 more" in text
    assert "irqbalance runs (process 812)" in text


def test_show_at_256_cpus_with_many_interrupts(tmp_path: Path, run: Callable[..., str]) -> None:
    tree = trees.Tree(tmp_path)
    places = {cpu: trees.Place(cpu // 128, cpu // 8, cpu, cpu // 128) for cpu in range(256)}
    tree.cpus(places, allowed=range(256))
    irqs = {number: f"eth0-rx-{number - 200}" for number in range(200, 264)}
    tree.device("eth0", rx=64, tx=64, at="0000:81:00.0", driver="ice", irqs=irqs)
    for number, action in irqs.items():
        tree.irq(number, action, "0-127", str(number - 200))
    text = run(tree.root, "show")
    assert len(text.splitlines()) < 50
    assert "200-263    eth0  64, each in --json  0-127  0-63" in text


def test_cores_without_a_shared_cache_are_one_row(tmp_path: Path, run: Callable[..., str]) -> None:
    tree = trees.Tree(tmp_path)
    tree.cpus({cpu: trees.Place(0, cpu, cpu, cpu // 64) for cpu in range(128)}, allowed=range(128))
    text = run(tree.root, "show")
    assert "each core its own" in text
    assert text.count("each core") == 2  # nodes


def test_show_on_arm_and_in_the_container(tmp_path: Path, run: Callable[..., str]) -> None:
    assert "21         eth0  eth0       0-3   0" in run(trees.arm(tmp_path / "arm").root, "show")
    assert "allowed 2,4" in run(trees.container(tmp_path / "c").root, "show")


def test_show_here_loads_no_compiler() -> None:
    """As a script from anywhere."""
    command = [sys.executable, "-X", "importtime", f"{ROOT}/tools/pin.py", "show", "--json"]
    done = subprocess.run(command, check=True, cwd="/", capture_output=True, text=True, timeout=60)
    assert "lo" in [device["name"] for device in json.loads(done.stdout)["devices"]]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"numba", "numpy", "rich"}


def test_show_is_quick() -> None:
    """Its CPU time, since others want the CPU, too: 0.24 s here."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert command("show").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1.0


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────


def test_layouts_with_reasons(tmp_path: Path, run: Callable[..., str]) -> None:
    root = trees.vm(tmp_path).root
    text = run(root, "layouts", "--device", "lo")
    assert "split           1        0  1" in text
    assert "layout sibling cannot be had: no core has two threads (SMT)" in text
    assert "lo has no interrupts of its own" in text
    assert "interrupts of its own" not in run(root, "layouts", "--device", "eth0")
    found = objects(run(root, "layouts", "--device", "eth0", "--json"))
    assert [layout["layout"] for layout in found] == list(layouts.NAMES)
    assert found[2] == {
        "possible": True,
        "layout": "split",
        "interrupt": 1,
        "receive": 0,
        "process": [1],
        "interrupt_by": "irq",
        "note": "processing shares the interrupt CPU: no other is left",
    }
    assert found[1]["possible"] is False
    assert found[1]["interrupt"] is None


# ── apply, restore ───────────────────────────────────────────────────────────────────────────────────


def test_apply_and_restore(tmp_path: Path, run: Callable[..., str]) -> None:
    tree = trees.vm(tmp_path)
    text = run(tree.root, "apply", "split", "--device", "eth0")
    assert f"{tmp_path}/proc/irq/38/smp_affinity_list: 0-1 -> 1" in text
    assert "run with --rx-cpu 0 --consumer HANDLER@1" in text
    assert tree.read("proc/irq/38/smp_affinity_list") == "1"
    assert f"{tmp_path}/proc/irq/38/smp_affinity_list: 1 -> 0-1" in run(tree.root, "restore")
    assert tree.read("proc/irq/38/smp_affinity_list") == "0-1"
    assert run(tree.root, "restore") == "nothing to restore\n"


def test_a_governor_on_the_layouts_cpus_alone_and_back(tmp_path: Path, run: Callable[..., str]) -> None:
    tree = trees.server(tmp_path)
    for cpu in topology.online(tree.root):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        tree.write(f"{folder}/scaling_available_governors", "performance powersave")
        tree.write(f"{folder}/scaling_governor", "powersave")
    command = ("apply", "split", "--device", "lo", "--governor")
    with pytest.raises(Refused, match=r"no governor 'fast': choose from performance, powersave$"):
        pin.main([*command, "fast"], tree.root)
    assert not (tmp_path / "run").exists()
    [view] = objects(run(tree.root, *command, "performance", "--json"))
    ours = {view["interrupt"], view["receive"], *view["process"]}
    for cpu in topology.online(tree.root):
        text = tree.read(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor")
        assert text == ("performance" if cpu in ours else "powersave")
    tree.write(f"sys/devices/system/cpu/cpu{view['receive']}/cpufreq/scaling_governor", "powersave")
    with pytest.raises(Failed, match=r"1 thing is not as the layout says: .*scaling_governor: powersave"):
        pin.main(["verify", "--json"], tree.root)
    run(tree.root, "restore")
    assert {path.read_text().strip() for path in tmp_path.rglob("scaling_governor")} == {"powersave"}


def test_a_machine_without_governors_says_so(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    with pytest.raises(Refused, match=r"CPU 0 has no frequency governors here, .*: leave out --governor"):
        pin.main(["apply", "split", "--device", "lo", "--governor", "performance"], tree.root)


def test_apply_as_json(tmp_path: Path, run: Callable[..., str]) -> None:
    tree = trees.vm(tmp_path)
    [view] = objects(run(tree.root, "apply", "same", "--device", "lo", "--json"))
    assert view == {
        "layout": "same",
        "interrupt": 1,
        "receive": 1,
        "process": [0],
        "device": "lo",
        "interrupt_by": "rps",
        "arrived": {},
        "journal": 1,
        "applied": True,
        "writes": [{"path": f"{tmp_path}/sys/class/net/lo/queues/rx-0/rps_cpus", "old": "0", "new": "2"}],
        "refusals": [],
    }
    tree.write("sys/class/net/lo/queues/rx-0/rps_cpus", "1")
    [file] = objects(run(tree.root, "restore", "--json"))
    assert (file["found"], file["value"], file["state"]) == ("1", "0", "drifted")


def test_a_dry_run_writes_nothing_and_foresees_refusals(tmp_path: Path, run: Callable[..., str]) -> None:
    tree = trees.server(tmp_path)
    text = run(tree.root, "apply", "split", "--device", "eth0", "--dry-run", code=2)
    assert text.count("smp_affinity_list: 32-39,41-63 -> 32") == 8
    assert "interrupt 108 (mlx5_comp8) of eth0 is managed" in text
    assert "irqbalance (process 812)" in text
    assert "run with" not in text
    assert tree.read("proc/irq/100/smp_affinity_list") == "32-39,41-63"
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refused, match=r"managed.*irqbalance"):
        pin.main(["apply", "split", "--device", "eth0"], tree.root)
    assert not (tmp_path / "run").exists()
    assert "refused" not in run(tree.root, "apply", "split", "--device", "lo", "--dry-run")


def test_a_layout_from_a_file(tmp_path: Path, run: Callable[..., str]) -> None:
    tree, file = trees.container(tmp_path), tmp_path / "mine.toml"
    file.write_text('device = "eth0"\ninterrupt = 4\nreceive = 2\nprocess = 2\n')
    [view] = objects(run(tree.root, "apply", str(file), "--json"))
    assert (view["layout"], view["device"], view["writes"][0]["new"]) == ("mine", "eth0", "10")
    run(tree.root, "restore")
    [view] = objects(run(tree.root, "apply", str(file), "--device", "lo", "--json"))
    assert view["device"] == "lo"
    file.write_text('device = "eth0"\ninterrupt = 0\nreceive = 2\nprocess = 2\n')
    with pytest.raises(Refused, match=r"CPU 0 is outside the cpuset .*: choose from 2,4$"):
        pin.main(["apply", str(file)], tree.root)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["apply", "split"], "--device is missing: choose from "),
        (["apply", "split", "--device", "eth99"], "no network device 'eth99': choose from "),
        (["apply", "none.toml"], "none.toml: No such file or directory: give one of same, sibling"),
        (["apply"], "LAYOUT|FILE.toml is missing: see `rxring pin apply --help`"),
        (["arrange"], "no such command 'arrange': see `rxring pin --help`"),
        (["show", "--jsn"], "unknown flag --jsn: did you mean --json?"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], args: list[str], what: str) -> None:
    assert cli.main(["pin", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"rxring: {what}")
    assert err.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], []):
        assert cli.main(["pin", *args]) == 0
        assert "restore" in capsys.readouterr().out
    assert cli.main(["pin", "apply", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: rxring pin apply [OPTIONS] LAYOUT|FILE.toml")


def test_an_ordinary_user_may_look_and_is_told_what_needs_root(fork: Callable[..., Child]) -> None:
    def look() -> None:
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for args in (["show"], ["layouts", "--device", "lo"], ["restore"]):
            assert pin.main(args) == 0
        assert pin.main(["apply", "same", "--device", "lo", "--dry-run"]) == 0
        with pytest.raises(Refused, match="needs root"):
            pin.main(["apply", "same", "--device", "lo"])

    assert fork(look).wait() == 0


def through_the_command() -> None:
    enter()
    before = masks()
    assert cli.main(["pin", "apply", "same", "--device", "v0"]) == 0
    assert cli.main(["pin", "apply", "same", "--device", "lo"]) == 0
    assert masks() != before
    assert [found.about["device"] for found in journal.journals()] == ["v0", "lo"]
    pin._AGAIN_S = 0.1
    assert cli.main(["pin", "verify", "--traffic", "--json"]) == 0
    steering.rps_path("lo", 0).write_text("0")
    assert cli.main(["pin", "verify"]) == 1
    assert cli.main(["pin", "restore"]) == 0
    assert masks() == before
    assert cli.main(["pin", "verify"]) == 2


@needs_root
@pytest.mark.root
def test_the_command_on_real_devices(fork: Callable[..., Child], capfd: pytest.CaptureFixture[str]) -> None:
    child = fork(through_the_command)
    code = child.wait()
    out, err = capfd.readouterr()
    assert code == 0, err
    looks = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [look["ok"] for look in looks] == [True, True]  # and again after a while
    whats = [check["what"] for check in looks[0]["checks"]]
    assert whats[0] == "/sys/class/net/lo/queues/rx-0/rps_cpus"
    assert "packets of our own over lo" in whats
    assert "WRONG /sys/class/net/lo/queues/rx-0/rps_cpus: 0, not " in out
    assert "(somebody else had put it back)" in out
    assert "rxring: 1 thing is not as the layout says: /sys/class/net/lo/queues/rx-0/rps_cpus: 0, not " in err
    assert "rxring: no layout is applied" in err


# ── run, watch ───────────────────────────────────────────────────────────────────────────────────────


def command(*args: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "tools/pin.py", *args]
    return subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_run_says_where_it_ran() -> None:
    cpu = topology.allowed()[-1]
    done = command("run", "--cpus", str(cpu), "--", "sh", "-c", "taskset -cp $$; exit 3")
    assert done.returncode == 3
    assert done.stdout.endswith(f": {cpu}\n")
    assert "sh  ended with 3 after 0." in done.stderr
    assert f"pinned to CPU {cpu}" in done.stderr
    assert "migrations" in done.stderr


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--cpus", "4095", "--", "true"], "cannot pin: CPU 4095 does not exist: choose from "),
        (["--cpus", "1-0", "--", "true"], "--cpus: '1-0' is no CPU list"),
        (["--fifo", "100", "--", "true"], "--fifo: '100' is out of range"),
        (["--", "no-such-command"], "cannot run 'no-such-command': No such file or directory"),
        ([], "-- COMMAND… is missing: see `rxring pin run --help`"),
    ],
)
def test_run_refuses(args: list[str], what: str) -> None:
    done = command("run", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rxring: {what}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_prints_until_it_is_told_to_end(number: signal.Signals) -> None:
    watch = [sys.executable, "tools/pin.py", "watch"]
    with subprocess.Popen(watch, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        head, *rows = (process.stdout.readline() for _ in range(1 + len(topology.online())))
        process.send_signal(number)
        assert process.wait(30) == 0
    assert head.split()[:2] == ["CPU", "packets"]
    assert [int(row.split()[0]) for row in rows] == list(topology.online())


@needs_root
@pytest.mark.root
def test_load_counts_packets_on_their_cpu(fork: Callable[..., Child]) -> None:
    def send() -> None:
        enter()  # here nobody steers lo
        cpu = topology.allowed()[-1]
        os.sched_setaffinity(0, {cpu})
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            before = load.read()
            for _ in range(500):
                sock.sendto(b"x", sock.getsockname())
                sock.recv(8)
            risen = load.read()[cpu].since(before[cpu])
        assert risen.processed >= 500

    assert fork(send).wait() == 0


def test_counts_of_32_bits_wrap() -> None:
    before, after = load.Load(1, 2, 3, 0xFFFFFFFE, 0, 0, 0), load.Load(5, 2, 3, 4, 0, 0, 0)
    assert after.since(before) == load.Load(4, 0, 0, 6, 0, 0, 0)
