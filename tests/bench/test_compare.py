"""Two results beside each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import main
from bench.compare import compare
from bench.runner import Case, Taken, summary
from engine.errors import Refused


def result(name: str = "tiny", rmem: str = "1", **values: list[float]) -> dict[str, Any]:
    cases = [
        summary(Case(case, "M/s", dict), Taken([{"value": value, "ok": True} for value in found]))
        for case, found in values.items()
    ]
    config = {"seed": rmem, "load": rmem, "noise": {}, "kernel": "6", "sysctl": {"net.core.rmem_max": rmem}}
    return {"name": name, "git": None, "config": config, "cases": cases}


def test_medians_within_each_others_intervals() -> None:
    a = result(
        same=[1.0, 2.0, 3.0],
        near=[1.0, 2.0, 9.0],
        far=[4.0, 6.0, 7.0],
        apart=[1.0, 2.0, 3.0],
        gone=[1.0],
        none=[],
    )
    b = result(
        same=[2.0, 2.5, 4.0],
        near=[4.0, 6.0, 7.0],
        far=[1.0, 2.0, 9.0],
        apart=[4.0, 5.0, 6.0],
        fresh=[1.0],
        none=[],
    )
    found = compare(a, b)
    cases = {case["name"]: case for case in found["cases"]}
    assert {name: case["within"] for name, case in cases.items()} == {
        "same": True,
        "near": False,
        "far": False,
        "apart": False,
    }
    assert {name: case["distinguishable"] for name, case in cases.items()} == {
        "same": False,
        "near": False,
        "far": False,
        "apart": True,
    }
    assert cases["apart"]["ratio"] == 2.5
    assert found["alike"] == 0.25
    assert found["missing"] == ["gone", "none", "fresh"]


def test_the_interval_that_would_hold() -> None:
    """Nine of ten: the widest is left out."""
    a = result(**{f"c{i}": [100.0] for i in range(10)})
    b = result(**{f"c{i}": [100.0 + i * i] for i in range(10)})
    assert compare(a, b)["would_hold"] == pytest.approx(0.64)


def test_what_differed_in_the_configuration_but_not_what_always_does() -> None:
    assert compare(result(), result())["config"] == []
    difference = {"key": "sysctl.net.core.rmem_max", "before": "1", "after": "2"}
    assert compare(result(), result(rmem="2"))["config"] == [difference]


def test_two_experiments_cannot_be_compared() -> None:
    with pytest.raises(Refused, match="ring and waits are two experiments"):
        compare(result("ring"), result("waits"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b.json"
    a.mkdir()
    (a / "result.json").write_text(json.dumps(result(one=[1.0, 2.0], two=[1.0])))
    b.write_text(json.dumps(result(rmem="7", one=[1.5, 1.6], two=[3.0])))
    assert main.main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    for part in ("sysctl.net.core.rmem_max", "1 of 2 cases are the same: 50 %", "± 200 %", "apart"):
        assert part in out
    assert main.main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alike"] == 0.5


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"name": "tiny"}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(Refused, match=r"no result in .*: give a folder of `rxring bench`"):
            main.main(["compare", str(tmp_path), str(tmp_path)])
