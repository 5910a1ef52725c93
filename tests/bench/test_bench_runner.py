import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from bench import runner
from bench.runner import Case, Claim, Figures, Setting, judge, main, measure
from engine.errors import Failed, Refused


def quiet(text: str) -> None:
    pass


def constant(name: str, value: float, **more: Any) -> Case:
    return Case(name, "M/s", lambda: {"value": value, "ok": True, **more})


def recording(names: str, order: list[str]) -> list[Case]:
    def run(name: str) -> Callable[[], Figures]:
        def once() -> Figures:
            order.append(name)
            return {"value": 1.0, "ok": True}

        return once

    return [Case(name, "M/s", run(name)) for name in names]


def test_each_round_runs_each_case_once() -> None:
    order: list[str] = []
    measure(recording("ABCD", order), 25, 7, quiet)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 100, 4)]
    assert all(sorted(once) == list("ABCD") for once in rounds)
    assert len(set(rounds)) > 10  # in no fixed order


def test_a_seed_gives_the_same_order() -> None:
    orders: list[list[str]] = [[], [], []]
    for order, seed in zip(orders, (7, 7, 8), strict=True):
        measure(recording("ABCD", order), 10, seed, quiet)
    assert orders[0] == orders[1] != orders[2]


def test_statistics_of_a_case() -> None:
    values = iter([3.0, 1.0, 2.0, 5.0, 4.0])
    case = Case("A", "ns", lambda: {"value": next(values), "ok": True, "ledger_balanced": True}, {"n": 1})
    (found,) = measure([case], 5, 0, quiet)["cases"]
    assert [run["value"] for run in found["runs"]] == [3.0, 1.0, 2.0, 5.0, 4.0]
    assert (found["median"], found["min"], found["max"]) == (3.0, 1.0, 5.0)
    assert found["ci"] == (1.0, 5.0)
    assert found["quartiles"] == (2.0, 4.0)
    assert found["unit"] == "ns"
    assert found["parameters"] == {"n": 1}
    assert found["ledger_balanced"] is True


def test_no_run_is_dropped() -> None:
    calls = iter([True, False, True])

    def run() -> Figures:
        if next(calls):
            return {"value": 1.0, "ok": True}
        raise Failed("it fell over")

    result = measure([Case("A", "M/s", run)], 3, 0, quiet)
    (case,) = result["cases"]
    assert [run["value"] for run in case["runs"]] == [1.0, None, 1.0]
    assert case["runs"][1]["error"] == "it fell over"
    assert not runner.is_valid(result)


@pytest.mark.parametrize("fault", [{"ok": False}, {"ledger_balanced": False}])
def test_a_wrong_answer_makes_it_invalid(fault: Figures) -> None:
    assert runner.is_valid(measure([constant("A", 1.0, ledger_balanced=True)], 1, 0, quiet))
    assert not runner.is_valid(measure([constant("A", 1.0, **fault)], 1, 0, quiet))


def test_what_cannot_be_run_is_said() -> None:
    cases = [constant("A", 1.0), Case("B", "M/s", lambda: pytest.fail("it ran"), skip="no compiler")]
    result = measure(cases, 2, 0, quiet)
    assert result["notes"] == ["B was not run: no compiler"]
    assert result["cases"][1]["runs"] == []
    assert result["cases"][1]["median"] is None
    (claim,) = judge([Claim("A", against="B", at_least=1)], result["cases"])
    assert claim["holds"] is None


def test_ratios_are_taken_within_a_round() -> None:
    """The machine's speed changes by a factor of a thousand between rounds; the ratio does not."""
    a, b = iter([1.0, 1000.0, 10.0]), iter([2.0, 2000.0, 20.0])
    cases = [
        Case("A", "M/s", lambda: {"value": next(a), "ok": True}),
        Case("B", "M/s", lambda: {"value": next(b), "ok": True}),
    ]
    (claim,) = judge([Claim("A", against="B", at_least=0.5)], measure(cases, 3, 0, quiet)["cases"])
    assert claim["values"] == [0.5, 0.5, 0.5]
    assert claim["holds"]


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Claim("A", at_least=10), True),
        (Claim("A", at_least=10.1), False),
        (Claim("A", at_most=9.9), False),
        (Claim("A", figure="share", at_least=0.6), True),
        (Claim("A", figure="share", at_most=0.6), False),
    ],
)
def test_claims(claim: Claim, holds: bool) -> None:
    result = measure([constant("A", 10.0, share=0.7)], 3, 0, quiet)
    assert judge([claim], result["cases"])[0]["holds"] is holds


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An experiment of two cases."""
    module = ModuleType("bench.tiny", "Two and one.")

    def cases(setting: Setting) -> Iterator[Case]:
        yield constant("two", 2.0, ledger_balanced=True)
        yield Case("one", "M/s", lambda: {"value": 1.0, "ok": True}, {"quick": setting.quick})

    module.cases = cases  # type: ignore[attr-defined]
    module.CLAIMS = (Claim("two", against="one", at_least=1.5),)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.tiny", module)
    monkeypatch.setattr(runner, "EXPERIMENTS", ("tiny",))
    return module


@pytest.mark.usefixtures("tiny")
def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["tiny", "--quick", "--runs", "4", "--seed", "3", "--out", str(out), "--json"]) == 0
    result = json.loads((out / "result.json").read_text())
    captured = capsys.readouterr()
    assert json.loads(captured.out) == result
    assert "seed 3" in captured.err
    assert {"name", "command", "git", "config", "cases", "notes", "claims", "valid"} <= result.keys()
    assert result["command"] == "rxring bench tiny --quick --runs 4 --seed 3"
    for key in ("kernel", "cpu", "governor", "versions", "sysctl", "seed", "ci"):
        assert key in result["config"]
    assert result["config"]["versions"]["numba"]
    assert result["config"]["sysctl"]["net.core.rmem_max"].isdigit()
    for case in result["cases"]:
        assert {"name", "parameters", "runs", "median", "ci", "unit", "ledger_balanced"} <= case.keys()
        assert len(case["runs"]) == 4
    assert result["cases"][0]["ledger_balanced"] is True
    assert result["cases"][1]["ledger_balanced"] is None
    assert result["claims"][0]["values"] == [2.0] * 4
    report = (out / "report.md").read_text()
    assert "Two and one." in report
    assert "| two / one | 2 | 2 – 2 | ≥ 1.5 | yes |" in report


@pytest.mark.usefixtures("tiny")
def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "two / one" in out
    assert "yes" in out
    assert len(json.loads((tmp_path / "result.json").read_text())["cases"][0]["runs"]) == runner.RUNS


def test_an_invalid_result_is_a_failure(
    tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.cases = lambda quick: iter([constant("two", 2.0, ok=False), constant("one", 1.0)])
    assert main(["tiny", "--out", str(tmp_path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert "**Invalid" in (tmp_path / "report.md").read_text()


def test_list_names_every_experiment_and_what_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(runner.EXPERIMENTS)
    assert all(len(line.split()) > 5 for line in lines)
    assert main(["list", "--json"]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == list(
        runner.EXPERIMENTS
    )


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="no experiment 'rung': `rxring bench list` names them"):
        main(["rung"])
    with pytest.raises(click.UsageError):
        main(["ring", "--rums", "3"])
    with pytest.raises(click.UsageError):
        main(["ring", "--runs", "0"])
