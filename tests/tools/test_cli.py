"""The command line: every ending is an exit code and, where it is a bad one, a single line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import Child

import rings
from tools import cli, commands

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    """Run; it must end with `code` and one line, which is returned without its beginning."""
    assert cli.main(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rxring: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err[len("rxring: ") : -1]


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["rum"], "no such command 'rum'"),
        (["--quiet"], "unknown flag --quiet: see `rxring --help`"),
        (["run", "--bach", "3"], "unknown flag --bach: did you mean --batch?"),
        (["run", "--metrics", "a:1"], "unknown flag --metrics"),
        (["run", "-x"], "unknown flag -x: see `rxring run --help`"),
        (["run", "--batch"], "--batch has no value: write one after it"),
        (["run", "--json=yes"], "--json takes no value: leave it out"),
        (["run", "a.toml", "b.toml"], "got unexpected extra argument (b.toml): see `rxring run --help`"),
        (["run"], "nothing to listen on: give --listen udp://ADDR:PORT"),
        (["run", "none.toml"], "none.toml: No such file or directory: give a spec file"),
        (["run", "--listen", "udp://1.2.3.4:x"], "--listen: 'udp://1.2.3.4:x': port x: give ADDR:PORT"),
        (["run", "--listen", "udp://a:1", "--listen", "udp://a:1"], "udp://a:1 is listened on twice"),
        (["run", "--name", "a b"], "--name: name 'a b': use 1 to 32 of"),
        (["run", "--rx-cpu", "1-0"], "--rx-cpu: '1-0' is no CPU list: write ids"),
        (["run", "--consumer", "late@0"], "--consumer: 'late@0': no handler 'late': give latency"),
        (["run", "--receive", "read"], "--receive: 'read' is not known: give recvmmsg or recvmsg"),
        (["run", "--batch", "3001"], "--batch: '3001' is out of range: give a whole number from 1 to 3000"),
        (["run", "--listen", "udp://a:1", "--ring", "1MiB", "--batch", "513"], "give --batch 512 or less"),
        (["run", "--ring", "1 MB"], "--ring: '1 MB' is no size: give bytes"),
        (["run", "--rcvbuf", "0"], "--rcvbuf: '0' is no size"),
        (["run", "--timestamps", "yes"], "--timestamps: 'yes' is not known: give on or off"),
        (["run", "--stamp", "mine"], "--stamp: 'mine' is not known: give none or rxring or seed"),
        (["run", "--fifo", "100"], "--fifo: '100' is out of range: give a whole number from 1 to 99"),
        (["run", "--duration", "0"], "--duration: '0' is no time: give seconds"),
        (["run", "--packets", "1e6"], "--packets: '1e6' is out of range: give a whole number"),
        (["run", "--every", "nan"], "--every: 'nan' is no time"),
        (["send"], "--to is missing: see `rxring send --help`"),
        (["send", "--to", "127.0.0.1:9", "--rate", "1e5"], "--rate: '1e5' is no number: give"),
        (["send", "--to", "127.0.0.1:9", "--size", "x"], "--size: 'x' is no size"),
        (
            ["send", "--to", "127.0.0.1:9", "--gso", "no"],
            "--gso: 'no' is no number: give a whole number or off",
        ),
        (["send", "--to", "127.0.0.1:9", "--send", "write"], "--send: 'write' is not known"),
        (["mirror"], "--listen is missing"),
        (["mirror", "--listen", "udp://127.0.0.1"], "--listen: 'udp://127.0.0.1': port missing"),
        (["rings", "list"], "no such command 'list'"),
        (["rings", "show"], "NAME is missing: see `rxring rings show --help`"),
        (["rings", "show", "a/b"], "NAME: name 'a/b': use 1 to 32"),
        (["rings", "rm", "no.such.ring"], "no ring 'no.such.ring': `rxring rings ls`"),
        (["rings", "show", "no.such.ring"], "no ring 'no.such.ring': `rxring rings ls`"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], args: list[str], what: str) -> None:
    assert what in refused(capsys, *args)


@pytest.mark.parametrize("command", [[], ["run"], ["send"], ["mirror"], ["rings"], ["rings", "show"]])
def test_help(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert cli.main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: {' '.join(['rxring', *command])}")
    assert err == ""


def test_alone_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rxring")


def test_every_flag_of_run_is_a_key_of_the_spec() -> None:
    from engine import spec

    flags = {param.name.replace("_", "-") for param in commands.run.params if param.name} - {"spec-file"}
    assert flags == {*spec.RUN, *spec.RECEIVER, "ring", "consumer"}


def test_priority_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The last check of a spec fails: everything before it was understood.
    answer = refused(capsys, "run", "--fifo", "--listen", "udp://a:1", "--json", "--plain")
    assert answer.startswith("--json and --plain exclude each other")


# ── processes of their own ───────────────────────────────────────────────────────────────────────────


def process(*command: str, stdout: Any = subprocess.PIPE, **environment: str) -> Any:
    """A process of its own, ended: returncode, stdout, stderr."""
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


def rxring(*args: str, **more: Any) -> Any:
    return process("-m", "tools.cli", *args, **more)


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["rings", "ls"], ["rings", "gc"]])
def test_looking_needs_no_compiler(args: list[str]) -> None:
    done = process("-X", "importtime", "-m", "tools.cli", *args)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert "numba" not in imported
    assert ("numpy" in imported) == (args[0] == "rings")


def test_numpy_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)  # importing tools.cli here has set it
    done = process(
        "-c",
        "import tools.cli, numpy, os; numpy.ones((300, 300)) @ numpy.ones((300, 300));"
        "print(len(os.listdir('/proc/self/task')))",
    )
    assert done.stdout == "1\n"


def test_an_unexpected_error_is_one_line_and_a_traceback_only_when_asked(tmp_path: Path) -> None:
    # Something that is no module stands in the supervisor's place: an error that nobody foresaw.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['engine.supervisor'] = 3\n")
    run = ["run", "--listen", "udp://127.0.0.1:0"]
    quiet = rxring(*run, PYTHONPATH=str(tmp_path))
    assert (quiet.returncode, quiet.stdout) == (1, "")
    assert quiet.stderr.startswith("rxring: unexpected ")
    assert quiet.stderr.count("\n") == 1
    loud = rxring(*run, PYTHONPATH=str(tmp_path), RXRING_DEBUG="1")
    assert loud.returncode == 1
    assert "Traceback (most recent call last)" in loud.stderr


def test_an_exit_that_nobody_planned_is_an_error(tmp_path: Path) -> None:
    # Stands in the supervisor's place, too: code of the user's that calls sys.exit.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.modules['engine.supervisor'] = types.SimpleNamespace(run=lambda *_: sys.exit(0))\n"
    )
    done = rxring("run", "--listen", "udp://127.0.0.1:0", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "rxring: unexpected SystemExit: 0: RXRING_DEBUG=1 shows where\n"


_INTERRUPTS = """
import signal, sys

class Interrupt:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
"""


@pytest.mark.parametrize(
    ("args", "module"),
    [
        (["rings", "ls"], "click"),
        (["rings", "ls"], "engine.spec"),
        (["rings", "ls"], "rings"),
        (["run", "--listen", "udp://127.0.0.1:0"], "engine.supervisor"),
        (["bench", "ring"], "bench.ring"),  # where click makes something else of it
    ],
)
def test_an_interrupt_is_quiet_whenever_it_comes(args: list[str], module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS.format(module=module))
    done = rxring(*args, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (130, "")
    assert "rxring:" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [["--help"], ["rings", "ls"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_error(args: list[str], unbuffered: str, name: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with rings.create(name, size_bytes=1 << 20), os.fdopen(write_end, "w") as out:
        done = rxring(*args, stdout=out, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_said(unbuffered: str) -> None:
    with open("/dev/full", "w") as out:
        done = rxring("rings", "ls", stdout=out, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "rxring: No space left on device: RXRING_DEBUG=1 shows where\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_message_that_cannot_be_written_changes_no_exit_code(unbuffered: str) -> None:
    command = [sys.executable, "-m", "tools.cli", "rum"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, check=False, cwd=ROOT, stderr=full, timeout=60, env=environment)
    assert done.returncode == 2


# ── rings ────────────────────────────────────────────────────────────────────────────────────────────


def test_rings_are_listed_with_their_state(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def listed() -> dict[str, Any]:
        assert cli.main(["rings", "ls", "--json"]) == 0
        objects = map(json.loads, capsys.readouterr().out.splitlines())
        return next(found for found in objects if found["name"] == name)

    with rings.create(name, size_bytes=1 << 20) as ring:
        assert listed() == {
            "name": name,
            "number": 0,
            "state": "waiting",
            "size_bytes": ring.geometry.total_bytes,
            "pid": os.getpid(),
        }
        writer = ring.writer()
        assert listed()["state"] == "live"
        writer.close()
        assert cli.main(["rings"]) == 0
        assert name in capsys.readouterr().out


def test_show_tells_counters_and_readers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with rings.create(name, size_bytes=1 << 20) as ring:
        writer = ring.writer()
        slow, fast = ring.reader("slow"), ring.reader("fast", policy="skip")
        for _ in range(5):
            writer.write(b"0123456789")
        next(iter(fast))
        assert cli.main(["rings", "show", name, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["name"], found["state"]) == (name, "live")
        assert found["counters"]["published"] == 5
        by_name = {reader["name"]: reader for reader in found["readers"]}
        assert by_name["slow"] | {"policy": "gate", "lag": 5, "unread": 5, "alive": True} == by_name["slow"]
        assert by_name["fast"]["policy"] == "skip"
        assert cli.main(["rings", "show", name]) == 0
        told = capsys.readouterr().out
        for word in (name, "live", "published 5", "slow", "fast", "gate", "skip", "active"):
            assert word in told
        slow.close()
        fast.close()
        writer.close()


def test_a_living_ring_is_not_removed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with rings.create(name, size_bytes=1 << 20):
        assert "is in use" in refused(capsys, "rings", "rm", name)
        assert cli.main(["rings", "gc"]) == 0
        assert name not in capsys.readouterr().out
        assert any(info.name == name for info in rings.list())


def test_what_the_dead_left_is_collected(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def die_while_owning(named: str) -> None:
        rings.create(named, size_bytes=1 << 20)  # never closed

    for args in (["rings", "gc"], ["rings", "rm", name]):
        assert Child(die_while_owning, name).wait() == 0
        assert cli.main(["rings", "ls"]) == 0
        assert f"{name}" in capsys.readouterr().out
        assert cli.main(args) == 0
        assert f"removed rxring-{os.getuid()}-{name}-0\n" in capsys.readouterr().out
        assert not any(info.name == name for info in rings.list())


def test_what_is_no_shared_memory_disables_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory stands where ring 0 would be, a FIFO where ring 2 would be; ring 1 is one."""
    beginning = f"/dev/shm/rxring-{os.getuid()}-{name}-"
    os.mkdir(f"{beginning}0")
    try:
        os.mkfifo(f"{beginning}2")
        with rings.create(name, number=1, size_bytes=1 << 20):
            assert cli.main(["rings", "ls", "--json"]) == 0
            listed = map(json.loads, capsys.readouterr().out.splitlines())
            assert [found["number"] for found in listed if found["name"] == name] == [1]
            assert cli.main(["rings", "show", name, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["number"] == 1
            assert cli.main(["rings", "gc"]) == 0
            assert name not in capsys.readouterr().out
            assert "is in use" in refused(capsys, "rings", "rm", name)
    finally:
        os.rmdir(f"{beginning}0")


def test_a_ring_that_cannot_be_shown_hides_no_other(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with rings.create(name, size_bytes=1 << 20), rings.create(name, number=1, size_bytes=1 << 20):
        with open(f"/dev/shm/rxring-{os.getuid()}-{name}-0", "r+b") as ring:
            ring.write(b"no magic")
        assert cli.main(["rings", "show", name, "--json"]) == 2
        out, err = capsys.readouterr()
        assert json.loads(out)["number"] == 1
        assert err == f"rxring: rxring-{os.getuid()}-{name}-0 is not a ring: remove it, or use another name\n"
