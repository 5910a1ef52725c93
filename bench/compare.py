"""Two results of one experiment beside each other: is it the same machine, and are they the same figures?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench.machine import changes
from bench.report import number, shown, span
from bench.section import Alarm, Section, Table
from bench.spread import overlap
from engine.errors import Refused

MOST = 0.9  # of the cases, that are to agree
_OF_THE_RUNS = ("seed", "ci", "noise")  # of the configuration: not the machine's
_COLUMNS = ("case", "A", "interval", "B", "interval", "B / A", "is")


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """{config: differences, cases, alike, would_hold, missing}. Refused where it is not one experiment.

    alike: share of the cases whose medians lie within each other's intervals. would_hold: the least share of
    a median that, put on both sides of it, would hold the other's median in nine cases of ten.
    """
    if a["name"] != b["name"]:
        raise Refused(f"{a['name']} and {b['name']} are two experiments: give two results of one")
    others = {case["name"]: case for case in b["cases"] if case["median"] is not None}
    pairs = [
        (case, others[case["name"]])
        for case in a["cases"]
        if case["median"] is not None and case["name"] in others
    ]
    cases = [_pair(one, other) for one, other in pairs]
    both = {case["name"] for case in cases}
    everything = {case["name"]: None for case in (*a["cases"], *b["cases"])}
    apart = sorted(case["apart"] for case in cases)
    return {
        "config": list(changes(_config(a), _config(b))),
        "cases": cases,
        "alike": sum(case["within"] for case in cases) / len(cases) if cases else None,
        "would_hold": apart[math.ceil(MOST * len(apart)) - 1] if apart else None,
        "missing": [name for name in everything if name not in both],
    }


def _config(result: dict[str, Any]) -> dict[str, Any]:
    return {"git": result["git"]} | {
        key: value for key, value in result["config"].items() if key not in _OF_THE_RUNS
    }


def _pair(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    one, other = a["median"], b["median"]
    least = min(abs(one), abs(other))
    return {
        "name": a["name"],
        "unit": a["unit"],
        "a": {"median": one, "ci": a["ci"]},
        "b": {"median": other, "ci": b["ci"]},
        "ratio": other / one if one else None,
        "distinguishable": not overlap(a["ci"], b["ci"]),
        "within": _holds(a["ci"], other) and _holds(b["ci"], one),
        "apart": abs(one - other) / least if least else (0.0 if one == other else math.inf),
    }


def _holds(interval: Sequence[float], value: float) -> bool:
    return interval[0] <= value <= interval[1]


def sections(found: dict[str, Any], a: str, b: str) -> Iterator[Section]:
    """For people. a, b: where the results came from."""
    differences = tuple((one["key"], shown(one["before"]), shown(one["after"])) for one in found["config"])
    table = Table(("configuration", "A", "B"), differences) if differences else None
    same = () if differences else ("The configurations are the same.",)
    missing = (f"Not in both: {', '.join(found['missing'])}.",) if found["missing"] else ()
    yield Section("What differed", (f"A: {a}", f"B: {b}", *same, *missing), table)
    for unit in dict.fromkeys(case["unit"] for case in found["cases"]):
        rows = tuple(_row(case) for case in found["cases"] if case["unit"] == unit)
        yield Section(f"Cases, {unit}", table=Table(_COLUMNS, rows))
    if found["cases"]:
        within, would_hold = sum(case["within"] for case in found["cases"]), number(100 * found["would_hold"])
        yield Section(
            "Do they agree?",
            (
                "Same: each median lies within the other's interval. Near: the intervals overlap.",
                f"{within} of {len(found['cases'])} cases are the same: {100 * found['alike']:.0f} %.",
                f"± {would_hold} % around a median would hold the other in {100 * MOST:.0f} % of all.",
            ),
        )


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    apart = Alarm("apart") if case["distinguishable"] else "near"
    return (
        case["name"],
        number(case["a"]["median"]),
        span(*case["a"]["ci"]),
        number(case["b"]["median"]),
        span(*case["b"]["ci"]),
        number(case["ratio"]),
        "same" if case["within"] else apart,
    )
