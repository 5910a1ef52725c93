"""`rxring doctor`: each check finds what it is for and only that, its command mends it, nothing changes."""

from __future__ import annotations

import itertools
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import trees
from forked import Child
from namespace_of_its_own import needs_root
from rich.cells import cell_len
from trees import Tree

from engine import doctor
from engine.doctor import screen
from engine.doctor.check import STATES, Finding
from engine.doctor.machine import Asked, Machine
from engine.errors import Refused
from tools import cli, commands

CHECKS = [check for group in doctor.GROUPS for check in group.checks]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
ASKED = Asked(
    rcvbuf=8 * MIB,
    forced=8 * MIB,
    udp_gro=True,
    no_gro=(),
    futex_waitv=True,
    shm_size=1 << 30,
    shm_free=1 << 30,
    is_root=True,
)
Setup = Callable[[Tree], None]
_LIMITS = (
    "Max open files            20000    20000    files\nMax locked memory         unlimited unlimited bytes"
)


def look(tree: Tree, check: str, **asked: Any) -> Finding:
    """What this check finds there."""
    machine = Machine(tree.root, replace(ASKED, **asked))
    found = {finding.id: finding for finding in doctor.examine(machine)}
    return found[check]


def good(root: Path) -> Tree:
    """A machine on which everything is as it should be: four cores, interrupts on the first."""
    tree = Tree(root)
    tree.cpus({cpu: trees.Place(0, 0, cpu, 0) for cpu in range(4)}, allowed=range(4))
    tree.device("lo")
    tree.device("eth0", rx=2, tx=2, at="0000:81:00.0", driver="mlx5_core", irqs={100: "", 101: ""}, index=2)
    tree.irq(100, "mlx5_comp0", "0", "0")
    tree.irq(101, "mlx5_comp1", "0", "0")
    status = tree.read("proc/self/status")
    tree.write("proc/self/status", f"{status}\nCapEff:\t000001ffffffffff")
    tree.write("proc/self/limits", _LIMITS)
    tree.write("proc/self/cgroup", "0::/user.slice/me")
    tree.write("proc/1/comm", "systemd")
    tree.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme tsc")
    tree.write("proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,size=1g 0 0")
    tree.write("proc/net/sockstat", "sockets: used 9\nUDP: inuse 1 mem 256\nUDPLITE: inuse 0")
    for name, value in {
        "kernel/osrelease": "6.18.1",
        "kernel/sched_rt_runtime_us": -1,
        "kernel/sched_rt_period_us": 1000000,
        "net/core/busy_poll": 50,
        "net/core/netdev_max_backlog": 16384,
        "net/core/rmem_max": 4 * MIB,
        "net/core/skb_defer_max": 0,
        "net/ipv4/ip_early_demux": 1,
        "net/ipv4/udp_early_demux": 1,
        "net/ipv4/udp_mem": "100000\t200000\t300000",
    }.items():
        tree.write(f"proc/sys/{name}", value)
    system = trees.SYSTEM
    for cpu in range(4):
        tree.write(f"{system}/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance")
        for state, (name, us, disable) in enumerate((("POLL", 0, 0), ("C1", 2, 0), ("C6", 133, 1))):
            for file, value in (("name", name), ("latency", us), ("disable", disable)):
                tree.write(f"{system}/cpu/cpu{cpu}/cpuidle/state{state}/{file}", value)
        tree.write(f"sys/kernel/debug/sched/fair_server/cpu{cpu}/runtime", 0)
        tree.write(f"sys/kernel/debug/sched/fair_server/cpu{cpu}/period", 1000000000)
    tree.write(f"{system}/cpu/vulnerabilities/meltdown", "Not affected")
    tree.write(f"{system}/cpu/vulnerabilities/spectre_v2", "Vulnerable")
    tree.write(f"{system}/clocksource/clocksource0/current_clocksource", "tsc")
    tree.write(f"{system}/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm")
    tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    tree.write("sys/fs/cgroup/user.slice/me/cpu.max", "max 100000")
    tree.write("sys/fs/cgroup/user.slice/cpu.max", "max 100000")
    tree.write("sys/class/dmi/id/sys_vendor", "Dell Inc.")
    return tree


def test_a_good_machine_has_no_findings(tmp_path: Path) -> None:
    found = doctor.examine(Machine(good(tmp_path).root, ASKED))
    assert [f for f in found if f.state != "ok" or f.mend] == []


@pytest.mark.parametrize("machine", [trees.vm, trees.server, trees.arm, trees.container])
def test_whatever_is_missing_is_no_error(machine: Callable[[Path], Tree], tmp_path: Path) -> None:
    found = doctor.examine(Machine(machine(tmp_path).root, ASKED))
    assert len(found) == len(CHECKS)
    assert not [f for f in found if "cannot be told" in f.finding]


# ── each check ───────────────────────────────────────────────────────────────────────────────────────


def write(path: str, value: object) -> Setup:
    return lambda tree: tree.write(path, value)


def every_cpu(path: str, value: object) -> Setup:
    def change(tree: Tree) -> None:
        for cpu in range(4):
            tree.write(path.format(cpu), value)

    return change


def both(*setups: Setup) -> Setup:
    def change(tree: Tree) -> None:
        for setup in setups:
            setup(tree)

    return change


def gone(pattern: str) -> Setup:
    def change(tree: Tree) -> None:
        for path in tree.root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def threads(tree: Tree) -> None:
    for cpu in range(4):
        tree.write(f"{trees.SYSTEM}/cpu/cpu{cpu}/topology/core_cpus_list", ("0,2", "1,3")[cpu % 2])


def worker(pid: int, name: str, cpu: int) -> Setup:
    return lambda tree: tree.process(pid, f"rx:{name}", str(cpu))


def allowed(cpus: str) -> Setup:
    def change(tree: Tree) -> None:
        status = tree.read("proc/self/status")
        tree.write("proc/self/status", re.sub("(Cpus_allowed_list:\t).*", rf"\g<1>{cpus}", status))

    return change


def capabilities(bits: int) -> Setup:
    def change(tree: Tree) -> None:
        status = tree.read("proc/self/status")
        tree.write("proc/self/status", re.sub("(CapEff:\t).*", rf"\g<1>{bits:016x}", status))

    return change


def nothing(tree: Tree) -> None:
    pass


_SYSCTL = "proc/sys"
_CPU = f"{trees.SYSTEM}/cpu/cpu{{}}"
_CLOCK = f"{trees.SYSTEM}/clocksource/clocksource0"
_FAIR = "sys/kernel/debug/sched/fair_server/cpu{}/runtime"
_OLD = write(f"{_SYSCTL}/kernel/osrelease", "6.8.0-31-generic")
DOCKER = write(".dockerenv", "")

# Check, what makes it so, what the kernel answers, the state, words of the finding.
MENDED = [
    ("udp-memory", write(f"{_SYSCTL}/net/ipv4/udp_mem", "100 200 1000"), "bad", "for all UDP sockets"),
    ("backlog", write(f"{_SYSCTL}/net/core/netdev_max_backlog", 1000), "note", "1,000 packets, 0 drops"),
    (
        "backlog",
        both(
            write(f"{_SYSCTL}/net/core/netdev_max_backlog", 1000),
            write("proc/net/softnet_stat", "\n".join("000000ff 00000010 00000000" for _ in range(4))),
        ),
        "bad",
        "64 drops since the boot",
    ),
    ("deferred-freeing", write(f"{_SYSCTL}/net/core/skb_defer_max", 64), "note", "up to 64 buffers"),
    ("early-demux", write(f"{_SYSCTL}/net/ipv4/udp_early_demux", 0), "note", "udp_early_demux 0"),
    ("busy-poll", write(f"{_SYSCTL}/net/core/busy_poll", 0), "note", "is 0 µs"),
    (
        "governor",
        write(f"{_CPU}/cpufreq/scaling_governor".format(2), "powersave"),
        "note",
        "powersave on CPU 2",
    ),
    ("idle-states", every_cpu(f"{_CPU}/cpuidle/state2/disable", 0), "note", "as deep as C6, 133 µs"),
    ("rt-throttling", every_cpu(_FAIR, 50_000_000), "note", "5.00 % are for others"),
    (
        "rt-throttling",
        both(_OLD, write(f"{_SYSCTL}/kernel/sched_rt_runtime_us", 950000)),
        "note",
        "5.00 % are kept from",
    ),
    ("clock-source", write(f"{_CLOCK}/current_clocksource", "hpet"), "bad", "hpet"),
    (
        "rps",
        write("sys/class/net/eth0/queues/rx-1/rps_cpus", "c"),
        "note",
        "eth0 to CPU 2-3",
    ),
    (
        "cpu-quota",
        write("sys/fs/cgroup/user.slice/cpu.max", "200000 100000"),
        "bad",
        "200 ms of CPU time in every 100 ms",
    ),
    (
        "cpu-quota",
        both(
            write("proc/self/cgroup", "4:cpu,cpuacct:/job"),
            write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", 50000),
            write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", 100000),
        ),
        "bad",
        "50 ms of CPU time in every 100 ms",
    ),
    (
        "huge-pages",
        write("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never"),
        "note",
        "always; of /dev/shm: never",
    ),
]

_LOW = "Max open files            256      {}    files\nMax locked memory         65536    {} bytes"
SHOWN: list[tuple[str, Setup, dict[str, Any], str, str, str | None]] = [
    (
        "receive-buffer",
        nothing,
        {"rcvbuf": 425984, "forced": None},
        "bad",
        "8MiB asked, 416KiB granted",
        "sysctl -w net.core.rmem_max=4194304",
    ),
    (
        "receive-buffer",
        nothing,
        {"rcvbuf": 425984},
        "note",
        "by CAP_NET_ADMIN; for others",
        "sysctl -w net.core.rmem_max=4194304",
    ),
    (
        "udp-memory",
        gone(f"{_SYSCTL}/net/ipv4/udp_mem"),
        {},
        "unknown",
        "not shown in this network namespace",
        None,
    ),
    ("backlog", gone(f"{_SYSCTL}/net/core/netdev_max_backlog"), {}, "unknown", "not shown", None),
    ("gro", nothing, {"udp_gro": False}, "bad", "Linux 5.0", None),
    ("gro", nothing, {"no_gro": ("eth0",)}, "bad", "turned off for eth0", "ethtool -K eth0 gro on"),
    ("gro", nothing, {"no_gro": ("veth7",)}, "ok", "no device with interrupts", None),
    (
        "deferred-freeing",
        both(_OLD, gone(f"{_SYSCTL}/net/core/skb_defer_max")),
        {},
        "unknown",
        "not shown",
        None,
    ),
    (
        "deferred-freeing",
        both(write(f"{_SYSCTL}/kernel/osrelease", "5.15.0"), gone(f"{_SYSCTL}/net/core/skb_defer_max")),
        {},
        "ok",
        "at once",
        None,
    ),
    (
        "open-files",
        write("proc/self/limits", _LOW.format("unlimited", 65536)),
        {},
        "note",
        "256 for a process",
        "ulimit -n 4096",
    ),
    (
        "open-files",
        write("proc/self/limits", _LOW.format(512, 65536)),
        {},
        "note",
        "may not have more",
        "prlimit --nofile=4096:4096 --pid $$",
    ),
    (
        "capabilities",
        capabilities(0),
        {"is_root": False},
        "note",
        "has no NET_ADMIN, NET_RAW, IPC_LOCK, SYS_NICE",
        None,
    ),
    (
        "capabilities",
        both(DOCKER, capabilities(1 << 13)),
        {},
        "note",
        "root has no NET_ADMIN, IPC_LOCK",
        "docker run --cap-add=NET_ADMIN --cap-add=IPC_LOCK --cap-add=SYS_NICE …",
    ),
    ("container", DOCKER, {}, "note", "this is one", None),
    (
        "governor",
        gone(f"{_CPU}/cpufreq".format("*")),
        {},
        "unknown",
        "no cpufreq",
        None,
    ),
    (
        "mitigations",
        write(f"{trees.SYSTEM}/cpu/vulnerabilities/meltdown", "Mitigation: PTI"),
        {},
        "note",
        "active: meltdown",
        None,
    ),
    (
        "rt-throttling",
        gone("sys/kernel/debug"),
        {"is_root": False},
        "unknown",
        "only root can read",
        "sudo $(command -v rxring) doctor",
    ),
    (
        "clock-source",
        both(
            write(f"{_CLOCK}/current_clocksource", "hpet"),
            write(f"{_CLOCK}/available_clocksource", "hpet acpi_pm"),
        ),
        {},
        "bad",
        "trusts no faster",
        None,
    ),
    (
        "virtual-machine",
        both(
            write("proc/cpuinfo", "flags\t: fpu hypervisor"),
            write("proc/stat", "cpu  10 0 10 70 0 0 0 10 5 0\ncpu0 1"),
        ),
        {},
        "note",
        "took 10.0 % of",
        None,
    ),
    ("virtual-machine", write("sys/class/dmi/id/sys_vendor", "QEMU"), {}, "note", "an unknown part", None),
    (
        "busy-poll",
        both(write(f"{_SYSCTL}/net/core/busy_poll", 0), gone("proc/irq")),
        {},
        "ok",
        "no device here",
        None,
    ),
    (
        "futex-waitv",
        write(f"{_SYSCTL}/kernel/osrelease", "5.10.0"),
        {"futex_waitv": False},
        "note",
        "Linux 5.16",
        None,
    ),
    (
        "futex-waitv",
        nothing,
        {"futex_waitv": False},
        "note",
        "seccomp",
        "docker run --security-opt seccomp=unconfined …",
    ),
    (
        "interrupt-cpu",
        write("proc/irq/101/effective_affinity_list", "1-3"),
        {},
        "note",
        "eth0 on CPU 0-3",
        "rxring pin apply split --device eth0",
    ),
    (
        "interrupt-cpu",
        worker(700, "rx0", 0),
        {},
        "bad",
        "rx0 (process 700) receives on CPU 0",
        "rxring pin apply split --device eth0",
    ),
    ("interrupt-cpu", worker(700, "latency", 0), {}, "ok", "eth0 on CPU 0: receive elsewhere", None),
    ("siblings", threads, {}, "note", "0,2, 1,3", None),
    (
        "siblings",
        both(threads, worker(700, "rx0", 1), worker(701, "gaps", 3)),
        {},
        "bad",
        "rx0 (process 700) on CPU 1 and gaps (process 701) on CPU 3",
        None,
    ),
    ("siblings", both(threads, worker(700, "rx0", 1), worker(701, "gaps", 2)), {}, "note", "0,2, 1,3", None),
    ("rps", write("sys/class/net/lo/queues/rx-0/rps_cpus", "2"), {}, "ok", "lo to CPU 1", None),
    (
        "irqbalance",
        lambda t: t.process(812, "irqbalance"),
        {},
        "bad",
        "process 812",
        "systemctl stop irqbalance",
    ),
    (
        "irqbalance",
        gone("proc/1"),
        {"is_root": False},
        "unknown",
        "needs root",
        "sudo $(command -v rxring) doctor",
    ),
    ("irqbalance", DOCKER, {}, "unknown", "container", None),
    ("cpuset", allowed("2"), {}, "bad", "CPU 2 of 0-3", None),
    (
        "cpuset",
        both(allowed("1-2"), write("sys/fs/cgroup/user.slice/cpuset.cpus", "1-2")),
        {},
        "note",
        "CPU 1-2 of 0-3",
        "echo 0-3 > /sys/fs/cgroup/user.slice/cpuset.cpus",
    ),
    (
        "cpuset",
        both(allowed("1-2"), DOCKER, write("etc/hostname", "3f2a")),
        {},
        "note",
        "CPU 1-2 of 0-3",
        "docker update --cpuset-cpus=0-3 3f2a",
    ),
    (
        "shm",
        nothing,
        {"shm_free": 64 * 10**6},
        "note",
        "room for 1 ring",
        "mount -o remount,size=1g /dev/shm",
    ),
    (
        "shm",
        DOCKER,
        {"shm_size": 64 * MIB, "shm_free": 30 * MIB},
        "bad",
        "30MiB free: room for 0 rings",
        "docker run --shm-size=1g …",
    ),
    ("shm", nothing, {"shm_size": 0, "shm_free": 0}, "bad", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm"),
    (
        "memlock",
        both(capabilities(0), write("proc/self/limits", _LOW.format(256, 65536))),
        {"is_root": False},
        "note",
        "64KiB may be locked",
        "sudo prlimit --memlock=unlimited:unlimited --pid $$",
    ),
    (
        "memlock",
        both(capabilities(0), write("proc/self/limits", _LOW.format(256, "unlimited"))),
        {},
        "note",
        "64KiB may be locked",
        "ulimit -l unlimited",
    ),
    (
        "backlog",
        write(f"{_SYSCTL}/net/core/netdev_max_backlog", "many"),
        {},
        "unknown",
        "cannot be told here",
        None,
    ),
]


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and " " not in value else ""


@pytest.mark.parametrize(("check", "setup", "asked", "state", "words", "mend"), SHOWN, ids=_name)
def test_what_is_found(
    check: str, setup: Setup, asked: dict[str, Any], state: str, words: str, mend: str | None, tmp_path: Path
) -> None:
    tree = good(tmp_path)
    setup(tree)
    found = look(tree, check, **asked)
    assert (found.state, words in found.finding) == (state, True), found
    if mend is not None:
        assert found.mend == mend
    elif state in ("ok", "unknown"):
        assert found.mend is None


@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize(("check", "setup", "state", "words"), MENDED, ids=_name)
def test_the_command_mends_it(
    check: str, setup: Setup, state: str, words: str, is_root: bool, tmp_path: Path
) -> None:
    """Run by a shell on the captured machine, with a sysctl and a sudo of its own."""
    tree = good(tmp_path)
    setup(tree)
    found = look(tree, check, is_root=is_root)
    assert (found.state, words in found.finding) == (state, True), found
    assert found.mend is not None
    assert found.mend.startswith("sudo ") != is_root
    _run_there(tree, found.mend)
    assert look(tree, check, is_root=is_root).state == "ok"


def _run_there(tree: Tree, command: str) -> None:
    tools = tree.root / "tools"
    tools.mkdir()
    sysctl = f"""test "$1" = -w; shift
        for set; do echo "${{set#*=}}" > {tree.root}/proc/sys/$(echo "${{set%%=*}}" | tr . /); done"""
    for name, script in (("sysctl", sysctl), ("sudo", 'exec "$@"')):
        (tools / name).write_text(f"#!/bin/sh\nset -eu\n{script}\n")
        (tools / name).chmod(0o755)
    there = re.sub(r"(?<![\w/])/(?=(sys|proc|etc)/)", f"{tree.root}/", command)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-euc", there], check=True, env=environment, capture_output=True, timeout=20)


def test_every_check_was_seen_to_find_something() -> None:
    seen = {case[0] for case in MENDED} | {case[0] for case in SHOWN if case[3] in ("bad", "note")}
    assert seen == {check.id for check in CHECKS}


def test_the_boot_option_goes_to_the_boot_loader_there_is(tmp_path: Path) -> None:
    tree = good(tmp_path)
    tree.write(f"{trees.SYSTEM}/cpu/vulnerabilities/meltdown", "Mitigation: PTI")
    tree.write("etc/default/grub", 'GRUB_CMDLINE_LINUX="quiet"')
    tree.write("usr/sbin/update-grub", "")
    found = look(tree, "mitigations", is_root=False)
    assert found.mend is not None
    _run_there(tree, found.mend.replace("update-grub", "true"))
    assert tree.read("etc/default/grub") == 'GRUB_CMDLINE_LINUX="mitigations=off quiet"'
    tree.write("usr/sbin/grubby", "")
    assert look(tree, "mitigations").mend == "grubby --update-kernel=ALL --args=mitigations=off"


def test_names_from_outside_are_quoted(tmp_path: Path) -> None:
    """A device may be called almost anything."""
    tree = good(tmp_path)
    tree.link("sys/class/net/a;b/device", "sys/devices/pci0000:00/0000:00:01.0/0000:81:00.0")
    tree.write("sys/class/net/a;b/queues/rx-0/rps_cpus", "1")
    assert "'a;b'/queues" in (look(tree, "rps").mend or "")
    assert look(tree, "gro", no_gro=("a;b",)).mend == "ethtool -K 'a;b' gro on"


def test_what_is_bad_comes_first(tmp_path: Path) -> None:
    tree = good(tmp_path)
    tree.write("proc/sys/net/core/skb_defer_max", 64)
    found = doctor.examine(Machine(tree.root, replace(ASKED, shm_free=0, udp_gro=False)))
    first = [(f.group, f.state, f.id) for f in found[:3]]
    assert first == [
        ("packets", "bad", "gro"),
        ("packets", "note", "deferred-freeing"),
        ("packets", "ok", "receive-buffer"),
    ]
    groups = [group for group, _ in itertools.groupby(found, lambda f: f.group)]
    assert groups == ["packets", "memory", "latency", "placement"]


# ── the page, and what is printed ────────────────────────────────────────────────────────────────────


def test_the_page_names_the_same_checks() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    named = re.findall(r"^\| `([a-z-]+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert named == [(check.id, check.group) for check in CHECKS]


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_and_commands_are_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    tree = good(tmp_path)
    tree.process(812, "irqbalance")
    every_cpu(f"{_CPU}/cpuidle/state2/disable", 0)(tree)
    gone(f"{_CPU}/cpufreq".format("*"))(tree)
    found = doctor.examine(Machine(tree.root, replace(ASKED, is_root=False, rcvbuf=425984, forced=None)))
    screen.show(found)
    lines = capsys.readouterr().out.splitlines()
    commands = [f.mend for f in found if f.mend]
    assert len(commands) >= 3
    assert [line.strip() for line in lines if line.strip() in commands] == commands
    assert max(cell_len(line) for line in lines if line.strip() not in commands) <= width
    text = " ".join(" ".join(lines).split())
    assert all(f.finding in text for f in found)
    assert all((f.why in text) == (f.state in ("bad", "note")) for f in found)


def test_an_escape_sequence_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show([Finding("rps", "placement", "bad", "\x1b[2J", "because", "echo \x1b[2J")])
    assert "\x1b[2J" not in capsys.readouterr().out


# ── this machine ─────────────────────────────────────────────────────────────────────────────────────


def test_bad_arguments() -> None:
    with pytest.raises(Refused, match="unknown flag --fix"):
        commands.invoke(["doctor", "--fix"])


def _python(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_json_on_this_machine_without_numba() -> None:
    """One object; looking must not wait for the compiler to be imported."""
    code = (
        "import sys; from tools import cli; code = cli.main(['doctor', '--json']);"
        "sys.exit(code or any(name in sys.modules for name in ('numba', 'numpy')))"
    )
    done = _python(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    found = [Finding(**finding) for finding in json.loads(line)["findings"]]
    assert sorted(f.id for f in found) == sorted(check.id for check in CHECKS)
    assert {f.state for f in found} <= set(STATES)
    assert not [f for f in found if "cannot be told" in f.finding]


@pytest.mark.root
@needs_root
def test_an_ordinary_user_is_told_as_much(tmp_path: Path) -> None:
    """Whatever root's command would mend is asked of sudo."""
    out = tmp_path / "found"
    out.touch()
    out.chmod(0o666)
    stream = out.open("w")

    def as_user() -> None:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(*[nobody.pw_gid] * 3)
        os.setresuid(*[nobody.pw_uid] * 3)
        json.dump([asdict(finding) for finding in doctor.examine()], stream)
        stream.close()

    assert Child(as_user).wait() == 0
    stream.close()
    found = {f["id"]: f for f in json.loads(out.read_text())}
    assert found.keys() == {check.id for check in CHECKS}
    assert found["capabilities"]["state"] == "note"
    assert not [f for f in found.values() if "cannot be told" in f["finding"]]
    for finding in found.values():
        if finding["mend"]:
            assert re.match("sudo |ulimit |docker |rxring run ", finding["mend"]), finding


@pytest.mark.skipif(shutil.which("strace") is None, reason="traces its system calls: needs strace")
def test_nothing_is_written(tmp_path: Path) -> None:
    """No file is opened for writing, made, renamed or removed; no mask but its own thread's is touched."""
    trace = tmp_path / "trace"
    calls = "open,openat,creat,rename,renameat2,unlink,unlinkat,mkdir,mkdirat,mount,sched_setaffinity,kill"
    command = [
        *("strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={calls},setsockopt,sendto,bind,connect"),
        *(sys.executable, "-B", "-m", "tools.cli", "doctor"),
    ]
    done = _python(*command)
    if "ptrace" in done.stderr:
        pytest.skip(f"strace is not allowed here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    seen = trace.read_text().splitlines()
    assert any("/sys/devices/system/cpu/online" in line for line in seen)
    harmless = re.compile(r"O_RDONLY|setsockopt|sched_setaffinity\(0, |\+\+\+|---|ENOENT")
    assert [line for line in seen if not harmless.search(line)] == []
    options = {re.search(r"setsockopt\(\d+, (\S+)", line)[1] for line in seen if "setsockopt" in line}  # type: ignore[index]
    assert options <= {"SOL_SOCKET,", "SOL_UDP,"}


def test_it_ends_with_0_and_prints_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(f"{check.id}: " in out for check in CHECKS)
