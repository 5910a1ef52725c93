"""`rxring bench` from its first word to its report, with experiments that take no time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from bench import machine, main, runner
from bench.runner import Case, Claim, Figures, Setting
from bench.section import Section, Table
from engine.errors import Refused

Run = Callable[..., int]


def constant(name: str, value: float, **more: Any) -> Case:
    return Case(name, "M/s", lambda: {"value": value, "ok": True, **more}, {"n": 1})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An experiment of two cases; no noise is measured, which takes 0.4 s."""
    module = ModuleType("bench.tiny", "Two and one.\n\nWhat `it` is.")

    def cases(setting: Setting) -> Iterator[Case]:
        yield constant("two", 2.0, ledger_balanced=True)
        yield Case("one", "M/s", lambda: {"value": 1.0, "ok": True}, {"quick": setting.quick})

    def tell(result: dict[str, Any]) -> Iterator[Section]:
        yield Section("What it means", (f"{len(result['cases'])} cases",), Table(("a", "b"), (("x", "1"),)))

    vars(module).update(cases=cases, tell=tell, CLAIMS=(Claim("two", against="one", at_least=1.5),))
    monkeypatch.setitem(sys.modules, "bench.tiny", module)
    monkeypatch.setattr(main, "EXPERIMENTS", ("tiny",))
    quiet = [{"cpu": 0, "lost": 0.001, "longest_us": 3.0, "gaps": 4}]
    monkeypatch.setattr("bench.noise.measure", lambda cpus: quiet)
    return module


@pytest.fixture
def bench(tiny: ModuleType, tmp_path: Path) -> Run:
    return lambda *words: main.main(["tiny", *words, "--out", str(tmp_path / "out")])


def stored(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out/result.json").read_text())
    return found


def test_what_is_written(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--quick", "--runs", "4", "--seed", "3", "--json") == 0
    result = stored(tmp_path)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == result
    assert "2 cases, 4 rounds, seed 3" in captured.err
    assert {"name", "command", "git", "config", "cases", "notes", "claims", "valid"} <= result.keys()
    assert result["command"] == "rxring bench tiny --quick --runs 4 --seed 3"
    assert (result["complete"], result["valid"], result["changes"]) == (True, True, [])
    config = result["config"]
    for key in ("kernel", "cpu", "governor", "mitigations", "idle_states", "smt", "cmdline", "seed", "ci"):
        assert key in config
    assert config["versions"]["numba"]
    assert config["sysctl"]["net.core.rmem_max"].isdigit()
    assert config["noise"].keys() == {"before the runs", "after the runs"}
    for case in result["cases"]:
        assert {"name", "parameters", "runs", "median", "ci", "unit", "ledger_balanced"} <= case.keys()
        assert len(case["runs"]) == 4
    assert result["cases"][0]["ledger_balanced"] is True
    assert result["cases"][1]["ledger_balanced"] is None
    assert result["claims"][0]["values"] == [2.0] * 4
    report = (tmp_path / "out/report.md").read_text()
    assert "Two and one." in report
    assert "| two / one | 2 | 2 – 2 | ≥ 1.5 | yes |" in report
    assert "## What it means\n\n2 cases" in report
    assert "What it means" in (tmp_path / "out/report.html").read_text()


def test_a_table_for_people(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    out = capsys.readouterr().out
    assert "two / one" in out
    assert "What it means" in out
    assert "Valid: 10 runs" in out
    assert len(stored(tmp_path)["cases"][0]["runs"]) == main.RUNS


def test_an_invalid_result_is_a_failure(tiny: ModuleType, bench: Run, tmp_path: Path) -> None:
    tiny.cases = lambda setting: iter(
        [constant("two", 2.0, flags=["the sender was late"]), constant("one", 1.0)]
    )
    assert bench() == 1
    result = stored(tmp_path)
    assert (result["valid"], result["complete"]) == (False, True)
    report = (tmp_path / "out/report.md").read_text()
    assert "**Invalid" in report
    assert "**two, round 1…5: the sender was late.**" in report
    assert "10 runs; see below" in report


def test_what_changed_during_the_runs_makes_it_invalid(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupt that was moved: the second look shows it."""
    before = machine.config() | {"interrupts": {"38 eth0": "0 (asked: 0-1)"}}
    looks = iter([before, before | {"interrupts": {"38 eth0": "1 (asked: 1)"}, "load": 99.0}])
    monkeypatch.setattr(machine, "config", lambda places: next(looks))
    assert bench() == 1
    assert "`interrupts.38 eth0` changed during the runs: 0 (asked: 0-1) → 1 (asked: 1)" in (
        (tmp_path / "out/report.md").read_text()
    )
    assert [change["key"] for change in stored(tmp_path)["changes"]] == ["interrupts.38 eth0"]
    assert "changed during the runs" in capsys.readouterr().out


def test_what_the_cases_themselves_set_at_their_places_is_no_change(
    tiny: ModuleType, bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.VARIES = ("rps", "net.ipv4.ip_early_demux")  # type: ignore[attr-defined]
    side = {"rps": {"rx-0": ""}, "mtu": "1500", "sysctl": {"net.ipv4.ip_early_demux": "1"}}
    other = {"rps": {"rx-0": "1"}, "mtu": "9000", "sysctl": {"net.ipv4.ip_early_demux": "0"}}
    looks = iter([machine.config() | {"sides": {"veth": one}} for one in (side, other)])
    monkeypatch.setattr(machine, "config", lambda places: next(looks))
    assert bench() == 1
    assert [change["key"] for change in stored(tmp_path)["changes"]] == ["sides.veth.mtu"]


def stopping(after: int) -> Callable[[Setting], Iterator[Case]]:
    """Cases that are stopped by Ctrl-C instead of their N-th run."""
    made = []

    def run() -> Figures:
        made.append(1)
        if len(made) == after:
            signal.raise_signal(signal.SIGINT)
        return {"value": float(len(made)), "ok": True}

    return lambda setting: iter([Case(name, "M/s", run, {"cpus": (0, 1)}) for name in ("one", "two")])


def test_a_stopped_one_is_reported_and_goes_on(
    tiny: ModuleType, bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.cases = stopping(4)
    assert bench("--runs", "3", "--seed", "5") == 130
    part = stored(tmp_path)
    assert not part["complete"]
    assert sum(len(case["runs"]) for case in part["cases"]) == 3
    assert "Stopped after 3 of 6 runs" in capsys.readouterr().out
    assert f"`rxring bench tiny --runs 3 --seed 5 --out {tmp_path}/out` goes on" in (
        (tmp_path / "out/report.md").read_text()
    )
    assert bench("--runs", "3") == 0
    whole = stored(tmp_path)
    assert whole["complete"]
    assert whole["config"]["seed"] == 5
    for before, after in zip(part["cases"], whole["cases"], strict=True):
        assert after["runs"][: len(before["runs"])] == before["runs"]
        assert len(after["runs"]) == 3


def test_what_changed_before_it_went_on_is_said(
    tiny: ModuleType, bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.cases = stopping(4)
    assert bench("--runs", "3") == 130
    other = machine.config() | {"governor": "powersave"}
    monkeypatch.setattr(machine, "config", lambda places: other)
    assert bench("--runs", "3") == 1
    result = stored(tmp_path)
    assert [(one["key"], one["when"]) for one in result["changes"]] == [("governor", "before going on")]
    assert "it was stopped after 3 runs, and gone on with" in " ".join(result["notes"])


def test_what_is_complete_or_another_is_not_gone_on_with(
    tiny: ModuleType, bench: Run, tmp_path: Path
) -> None:
    tiny.cases = stopping(4)
    bench("--runs", "3", "--seed", "5")
    with pytest.raises(
        Refused, match="holds a part of `rxring bench tiny --runs 3 --seed 5`: go on with that"
    ):
        bench("--runs", "4")
    with pytest.raises(Refused, match="holds a part of"):
        bench("--runs", "3", "--seed", "6")
    tiny.cases = lambda setting: iter([constant("one", 1.0), constant("two", 2.0)])
    with pytest.raises(Refused, match=r"the cases are no longer those of .*, see 'one'"):
        bench("--runs", "3")
    tiny.cases = stopping(99)
    assert bench("--runs", "3") == 0
    with pytest.raises(Refused, match="holds a complete result of tiny: give another --out"):
        bench("--runs", "3")


def test_a_report_can_be_written_anew(bench: Run, tmp_path: Path) -> None:
    bench()
    written = (tmp_path / "out/report.md").read_text()
    (tmp_path / "out/report.md").unlink()
    assert main.main(["report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/report.md").read_text() == written
    with pytest.raises(Refused, match="no result in"):
        main.main(["report", str(tmp_path)])


_SLEEPER = """
import sys
from types import ModuleType
from bench import main
from bench.pinned import Pinned
from bench.runner import Case
from rings.libc import monotonic_ns
from rings.jit import compile_for, jit

@jit
def spin(until_ns):
    while monotonic_ns() < until_ns:
        pass

def run():
    process = Pinned(0, spin, monotonic_ns() + 100_000_000_000)
    print(process._pid, flush=True)
    return {"value": 1.0, "ok": process.result() is None}

def cases(setting):
    compile_for(spin, 0)
    yield Case("A", "ns", run)

module = ModuleType("bench.sleeper")
module.cases, module.CLAIMS = cases, ()
sys.modules["bench.sleeper"], main.EXPERIMENTS = module, ("sleeper",)
sys.exit(main.main(["sleeper", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_children_of_a_run(number: int, tmp_path: Path) -> None:
    """The child spins in compiled code, and does not hear of the signal by itself."""
    (tmp_path / "sleeper.py").write_text(_SLEEPER)
    command = [sys.executable, str(tmp_path / "sleeper.py"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Stopped after 0 of 5 runs" in out
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert stored(tmp_path)["complete"] is False


def test_list_names_every_experiment_and_what_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(runner.EXPERIMENTS)
    assert all(len(line.split()) > 5 for line in lines)
    assert main.main(["list", "--json"]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == list(
        runner.EXPERIMENTS
    )
    assert main.main([]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="no experiment 'rung': `rxring bench list` names them"):
        main.main(["rung"])
    with pytest.raises(click.UsageError):
        main.main(["ring", "--rums", "3"])
    with pytest.raises(click.UsageError):
        main.main(["ring", "--runs", "0"])
    with pytest.raises(click.UsageError):
        main.main(["compare", "one"])
