"""The runner of all experiments: cases in turn, every answer checked, every run kept.

An experiment is a module of this folder. Its docstring is its help. It has

    cases(setting)   the cases, compiled and ready; `seconds` in their parameters: how long a run takes
    CLAIMS           what must hold of them
    PLACES           where it runs, unless somebody chose (bench/place.py); none: nothing crosses a network
    VARIES           what its cases set at those places: mtu, rps, offloads, net.ipv4.ip_early_demux …
    WARM_UP          True: a round before the first, and after a break, is not counted
    tell(result)     sections that it adds to the report, if it does

A round runs every case once, in an order of its own: whatever disturbs the machine for a while disturbs
all, and ratios are taken within a round. A run that says itself why it is doubtful (`flags`), or whose
ledger does not balance, is repeated, at most twice; what came of it stays in the result, with why. One that
failed, or whose answer was wrong, is not repeated: it makes the result invalid, as does one that stays
doubtful.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.place import Place
from bench.progress import Progress
from bench.spread import interval, median, quartiles, ratios
from engine.errors import Failed, Refused

EXPERIMENTS = (
    *("ring", "queues", "waits", "halfring", "statistics", "gro", "peers", "density", "sockbuf", "flows"),
    *("layouts", "lossless", "scale", "batch", "quotes"),
)
REPEATS = 2  # of a doubtful run

# What one run found: `value` in the case's unit (None: it has none), `ok` (was the answer right?),
# `ledger_balanced` where there is a ledger, `flags` (sentences that say what makes it doubtful), and whatever
# else is worth keeping. The runner adds `took_s` and, where the run is doubtful, `why`.
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


@dataclass(slots=True)
class Taken:
    """What a case has so far: a run of each round, and those that were repeated."""

    runs: list[Figures] = field(default_factory=list)
    repeated: list[Figures] = field(default_factory=list)


def measure(
    cases: Sequence[Case],
    rounds: int,
    seed: int,
    taken: dict[str, Taken],
    progress: Progress,
    *,
    warm_up: bool = False,
    save: Callable[[], None] = lambda: None,
    budget_s: float = float("inf"),
) -> int:
    """Add to what is taken, by name of the case, until it has all rounds; how many that are.

    The order depends on seed alone. save: called after every run. budget_s: no further round is begun that
    would not end within it, as long as the last one took.
    """
    able = [case for case in cases if not case.skip]
    begin = time.monotonic()
    order = random.Random(seed)
    if warm_up and any(len(taken[case.name].runs) < rounds for case in able):
        for case in order.sample(able, len(able)):
            _run_once(case)
            progress.say(f"warm-up  {case.name}")
    order = random.Random(seed)
    for number in range(1, rounds + 1):
        round_begin = time.monotonic()
        for case in order.sample(able, len(able)):
            while len(taken[case.name].runs) < number:
                figures = _run_once(case)
                again = _keep(taken[case.name], number, figures)
                progress.ran(case.name, number, figures, case.unit, again=again)
                save()
        now = time.monotonic()
        if now - begin + (now - round_begin) > budget_s:
            return number
    return rounds


def _run_once(case: Case) -> Figures:
    begin = time.monotonic()
    try:
        figures = case.run()
    except (Failed, Refused) as error:
        figures = {"value": None, "ok": False, "error": str(error)}
    why = [*figures.get("flags", ())]
    if figures.get("ledger_balanced") is False:
        why.append("the ledger does not balance")
    return {**figures, "took_s": time.monotonic() - begin, **({"why": why} if why else {})}


def _keep(taken: Taken, number: int, figures: Figures) -> bool:
    """Is the run to be repeated?"""
    tried = sum(run["round"] == number for run in taken.repeated)
    again = bool(figures["ok"] and "why" in figures and tried < REPEATS)
    if again:
        taken.repeated.append({"round": number, **figures})
    else:
        taken.runs.append(figures)
    return again


def summary(case: Case, taken: Taken) -> dict[str, Any]:
    """A case as it stands in result.json."""
    ledgers = [run["ledger_balanced"] for run in taken.runs if run.get("ledger_balanced") is not None]
    counted = _counted(taken.runs)
    return {
        "name": case.name,
        "parameters": case.parameters,
        "unit": case.unit,
        "skip": case.skip,
        "runs": taken.runs,
        "repeated": taken.repeated,
        **_spread([run["value"] for run in counted if run is not None and run["value"] is not None]),
        "ok": all(run["ok"] for run in taken.runs),
        "ledger_balanced": all(ledgers) if ledgers else None,
        "valid": all(map(is_sound, taken.runs)),
    }


def is_sound(run: Figures) -> bool:
    """Is its answer right, and nothing known against it?"""
    return bool(run["ok"]) and not run.get("why")


def _counted(runs: Sequence[Figures]) -> list[Figures | None]:
    """The runs whose figures count, by round: the sound ones; where there is none, all, for a look."""
    none_is_sound = not any(map(is_sound, runs))
    return [run if none_is_sound or is_sound(run) else None for run in runs]


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
    runs = {case["name"]: _counted(case["runs"]) for case in cases}
    judged = []
    for claim in claims:
        found = _figures(runs.get(claim.case, ()), claim.figure)
        if claim.against is None:
            values = [value for value in found if value is not None]
        else:
            values = ratios(found, _figures(runs.get(claim.against, ()), claim.figure))
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


def _figures(runs: Sequence[Figures | None], figure: str) -> list[float | None]:
    return [None if run is None else run.get(figure) for run in runs]
