"""The runner of all experiments: cases in turn, every answer checked, what came of it written down.

An experiment is a module of this folder. Its docstring is its help. It has

    cases(setting)   the cases, to be compiled and ready: the first run counts
    CLAIMS           what must hold of them
    PLACES           where it runs, unless somebody chose (bench/place.py); none: nothing crosses a network
    tell(result)     sections that it adds to the report, if it does

A round runs every case once, in an order of its own: whatever disturbs the machine for a while disturbs
all, and ratios are taken within a round. No run is left out: one that failed, or whose answer was wrong,
stands in the result and makes it invalid.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bench import machine, report
from bench.place import Place, open_place
from bench.spread import CI, interval, median, quartiles, ratios
from engine.errors import Failed, Refused

EXPERIMENTS = ("ring", "queues", "waits", "halfring", "statistics", "gro", "peers", "density")
RUNS, QUICK_RUNS = 5, 3
_QUIET = 0.5  # runnable tasks, over the last minute

# What one run found: `value` in the case's unit, `ok` (was the answer right?), `ledger_balanced` where
# there is a ledger, and whatever else is worth keeping.
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure. `run` does one run. `skip`: why this machine cannot do it."""

    name: str
    unit: str
    run: Callable[[], Figures]
    parameters: dict[str, Any] = field(default_factory=dict)
    skip: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the cases are made for."""

    quick: bool
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """What must hold: the median of a case, or of its ratio to the case `against`, lies within bounds.

    figure: which of the figures of a run is meant.
    """

    case: str
    against: str | None = None
    figure: str = "value"
    at_least: float | None = None
    at_most: float | None = None


def measure(cases: Sequence[Case], runs: int, seed: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Run `runs` rounds; {"cases": […], "notes": […]} of result.json."""
    notes = [f"{case.name} was not run: {case.skip}" for case in cases if case.skip]
    able = [case for case in cases if not case.skip]
    found: dict[str, list[Figures]] = {case.name: [] for case in cases}
    order = random.Random(seed)
    for number in range(1, runs + 1):
        for case in order.sample(able, len(able)):
            figures = _run_once(case)
            found[case.name].append(figures)
            note(f"round {number}/{runs}  {case.name}: {report.outcome(figures, case.unit)}")
    return {"cases": [_summary(case, found[case.name]) for case in cases], "notes": notes}


def _run_once(case: Case) -> Figures:
    try:
        return case.run()
    except (Failed, Refused) as error:
        return {"value": None, "ok": False, "error": str(error)}


def _summary(case: Case, runs: list[Figures]) -> dict[str, Any]:
    values = [run["value"] for run in runs if run["value"] is not None]
    ledgers = [run["ledger_balanced"] for run in runs if run.get("ledger_balanced") is not None]
    return {
        "name": case.name,
        "parameters": case.parameters,
        "unit": case.unit,
        "runs": runs,
        **_spread(values),
        "ok": all(run["ok"] for run in runs),
        "ledger_balanced": all(ledgers) if ledgers else None,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return dict.fromkeys(("median", "ci", "min", "max", "quartiles"))
    return {
        "median": median(values),
        "ci": interval(values),
        "min": min(values),
        "max": max(values),
        "quartiles": quartiles(values),
    }


def judge(claims: Iterable[Claim], cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims with what was found. `holds` is None where a case was not run."""
    runs = {case["name"]: case["runs"] for case in cases}
    judged = []
    for claim in claims:
        found = [run.get(claim.figure) for run in runs[claim.case]]
        if claim.against is None:
            values = [value for value in found if value is not None]
        else:
            values = ratios(found, [run.get(claim.figure) for run in runs[claim.against]])
        low = claim.at_least if claim.at_least is not None else float("-inf")
        high = claim.at_most if claim.at_most is not None else float("inf")
        judged.append(
            {
                "case": claim.case,
                "against": claim.against,
                "figure": claim.figure,
                "at_least": claim.at_least,
                "at_most": claim.at_most,
                "values": values,
                **_spread(values),
                "holds": low <= median(values) <= high if values else None,
            }
        )
    return judged


def is_valid(result: dict[str, Any]) -> bool:
    """Was every answer right, and every ledger balanced?"""
    return all(case["ok"] and case["ledger_balanced"] is not False for case in result["cases"])


def run(
    name: str,
    *,
    quick: bool,
    runs: int | None,
    out: Path | None,
    json: bool,
    seed: int,
    device: str | None = None,
) -> int:
    """Do an experiment; 0, or 1 where a run failed or its answer was wrong. A missed claim is a result."""
    if name not in EXPERIMENTS:
        raise Refused(f"no experiment {name!r}: `rxring bench list` names them")
    experiment: Any = importlib.import_module(f"bench.{name}")
    runs = runs or (QUICK_RUNS if quick else RUNS)
    folder = out or Path("results") / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}"
    _note(f"{name}: {runs} rounds, seed {seed}")
    command = f"rxring bench {name}{' --quick' if quick else ''} --runs {runs} --seed {seed}"
    config = {"seed": seed, "runs": runs, "quick": quick, "ci": CI, **machine.config()}
    with ExitStack() as stack:
        names = (device,) if device else getattr(experiment, "PLACES", ())
        places = tuple(stack.enter_context(open_place(place)) for place in names)
        cases = list(experiment.cases(Setting(quick, places)))
        found = measure(cases, runs, seed, _note)
    result = {
        "name": name,
        "command": command,
        "git": machine.git(),
        "config": config,
        **found,
    }
    if config["load"] > _QUIET:
        result["notes"].append(
            f"the machine was not quiet: its load was {config['load']:.1f} before the runs"
        )
    result["claims"] = judge(experiment.CLAIMS, result["cases"])
    result["valid"] = is_valid(result)
    told = list(experiment.tell(result)) if hasattr(experiment, "tell") else []
    report.save(folder, result)
    for line in report.write(folder, result, told, experiment.__doc__ or ""):
        _note(line)
    if json:
        report.print_json(result)
    else:
        report.print_result(result, told)
    _note(f"written to {folder}")
    return 0 if result["valid"] else 1


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@click.command()
@click.argument("name", metavar="[list | NAME]", default="list")
@click.option("--quick", is_flag=True, help="Shorter runs, and fewer.")
@click.option("--runs", type=click.IntRange(1), metavar="N", help=f"Rounds ({RUNS}).")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Of the order within the rounds (random).")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="(results/NAME-TIME)")
@click.option("--device", metavar="lo|veth", help="Where packets go (what the experiment says).")
@click.option("--json", is_flag=True, help="result.json on stdout, too, as one line.")
def bench(
    name: str,
    quick: bool,
    runs: int | None,
    seed: int | None,
    out: Path | None,
    device: str | None,
    json: bool,
) -> int:
    """An experiment: its cases in turn, their medians and spread, and whether what is claimed holds."""
    if name == "list":
        report.print_list({name: report.purpose(name) for name in EXPERIMENTS}, json=json)
        return 0
    seed = random.randrange(1 << 31) if seed is None else seed
    return run(name, quick=quick, runs=runs, out=out, json=json, seed=seed, device=device)


def main(argv: Sequence[str]) -> int:
    """`rxring bench …`; its exit code. Bad arguments raise click.ClickException or Refused."""
    try:
        return bench.main(list(argv), "rxring bench", standalone_mode=False) or 0
    except click.Abort:  # click's word for Ctrl-C
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
