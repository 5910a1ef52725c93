"""The highest rate without loss, and with at most 0.1 % of it: a search with several trials at each rate.

A packet may be lost to a single noise event, and a search that believes every trial finds another rate each
time (RFC 2544 allows no loss in 60 s). So, as in MLRsearch (RFC 9971), a rate is judged by the share of its
trials that exceed the goal: it holds while at most half of them do, of three trials one; it fails once more
do. Both goals are searched for, and every trial serves both. Upwards from the least rate each is twice the
one before, and one trial that loses nothing is enough to go on; then the interval between the highest rate
that holds and the lowest that fails is halved, and what is found in the end has held by all of its trials.

A trial is packets of 100 bytes, in GSO messages of 16, since one by one the sender is the limit, sent at that
rate for a short while to an engine that goes on running, with one consumer that gates and blocks; GRO is off.
Lost is what was sent and the consumer did not have. A trial whose sender was slower or later than asked is
none: it is repeated, and where that happens again the sender is the limit, said as such, and the rate found
is a lower bound.

`value` is the rate without loss, `small_loss` that with at most 0.1 %; `fails_at` is the next rate tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bench import pictures
from bench.flood import Flood, Running
from bench.layouts import Cores, layouts
from bench.place import Place
from bench.report import number, span
from bench.runner import Case, Figures, Setting
from bench.section import Picture, Section, Table
from bench.spread import interval, median, overlap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("lo", "veth")
CLAIMS = ()

SIZE, SEGMENTS = 100, 16
GOALS = {"value": 0.0, "small_loss": 0.001}  # of the packets, that may be lost
TRIALS = 3  # at a rate, at most
LEAST = 100_000  # packets/s, the first rate tried; nothing is looked for below it
HALVINGS = 3
TRIAL_S = 0.4

HELD, FAILED, OPEN, LIMITED = "held", "failed", "open", "limited by the sender"


@dataclass(frozen=True, slots=True)
class Trial:
    """lost: share of the packets. valid: the sender did what it was asked."""

    lost: float
    valid: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """rate: the highest that holds; None: not even the least one. fails_at: the lowest that does not. why:
    FAILED, or LIMITED by the sender."""

    rate: int | None
    fails_at: int
    why: str


@dataclass(slots=True)
class Search:
    """trial: makes one of a rate. tried: all of them, by rate."""

    trial: Callable[[int], Trial]
    trials: int = TRIALS
    halvings: int = HALVINGS
    least: int = LEAST
    tried: dict[int, list[Trial]] = field(default_factory=dict)

    def state(self, rate: int, goal: float) -> str:
        """Does the rate hold with this goal, as far as its trials tell?"""
        trials = self.tried.get(rate, [])
        valid = [trial for trial in trials if trial.valid]
        exceed, allowed = sum(trial.lost > goal for trial in valid), self.trials // 2
        if exceed > allowed:
            return FAILED
        if len(valid) - exceed >= self.trials - allowed:
            return HELD
        return LIMITED if len(trials) - len(valid) > 1 else OPEN

    def judge(self, rate: int, goal: float) -> str:
        """The same, after as many trials as it takes."""
        while (state := self.state(rate, goal)) == OPEN:
            self._try(rate)
        return state

    def promises(self, rate: int, goal: float) -> str:
        """HELD if any trial has held; the rest takes as many trials as it takes."""
        while (state := self.state(rate, goal)) == OPEN:
            if any(trial.valid and trial.lost <= goal for trial in self.tried.get(rate, ())):
                return HELD
            self._try(rate)
        return state

    def _try(self, rate: int) -> None:
        self.tried.setdefault(rate, []).append(self.trial(rate))

    def find(self, goal: float) -> Found:
        low, high = 0, self.least
        while (why := self.promises(high, goal)) == HELD:
            low, high = high, 2 * high
        for _ in range(self.halvings if low else 0):
            middle = (low + high) // 2
            if (state := self.judge(middle, goal)) == HELD:
                low = middle
            else:
                high, why = middle, state
        while low and (state := self.judge(low, goal)) != HELD:  # it had only promised to
            low, high, why = self._below(low, goal), low, state
        return Found(low or None, high, why)

    def _below(self, rate: int, goal: float) -> int:
        """The next lower rate that was tried and may hold; 0: there is none."""
        lower = (one for one in self.tried if one < rate and self.state(one, goal) in (HELD, OPEN))
        return max(lower, default=0)


def cases(setting: Setting) -> Iterator[Case]:
    for place in setting.places:
        for name, found, why_not in layouts(place):
            if found is None:
                yield Case(f"{place.name}, {name}", "M/s", dict, {"place": place.name}, why_not)
            else:
                yield _case(place, found, setting.quick)


def _case(place: Place, found: Cores, quick: bool) -> Case:
    flood = Flood(
        *(SIZE, SEGMENTS, found.receive, found.send, 0.1, TRIAL_S, place), interrupt_cpu=found.interrupt
    )
    trials, halvings, trial_s = (1, 0, 0.2) if quick else (TRIALS, HALVINGS, TRIAL_S)
    parameters = flood.parameters | {"layout": found.layout, "process_cpu": found.process}
    parameters |= {"trials": trials, "halvings": halvings, "trial_s": trial_s, "shared": found.shared}
    parameters["seconds"] = 2 + (6 if quick else 16) * (0.7 + trial_s)  # about so many trials
    run = functools.partial(_run, flood, found, trials, halvings, trial_s)
    return Case(f"{place.name}, {found.layout}", "M/s", run, parameters)


def _run(flood: Flood, found: Cores, trials: int, halvings: int, trial_s: float) -> Figures:
    told: list[Figures] = []
    with flood.place.receive.layout(found.layout), flood.running(found.process, "off") as running:
        search = Search(functools.partial(_trial, running, flood, trial_s, told), trials, halvings)
        rates = {figure: search.find(goal) for figure, goal in GOALS.items()}
    whole = running.figures()
    return {
        **{figure: None if one.rate is None else one.rate / 1e6 for figure, one in rates.items()},
        "fails_at": {figure: one.fails_at / 1e6 for figure, one in rates.items()},
        "limit": {figure: one.why for figure, one in rates.items()},
        **{key: whole[key] for key in ("ok", "ledger_balanced", "ledger")},
        "flags": [flag for flag in whole["flags"] if not _of_sender(flag)],
        "trials": told,
    }


def _trial(running: Running, flood: Flood, seconds: float, told: list[Figures], rate: int) -> Trial:
    found = running.trial(replace(flood, rate=rate), seconds)
    told.append(
        {"rate": rate, "sent_per_second": found["sent_per_second"], "late_ns": found["late_ns"]}
        | {"lost": found["lost"], "flags": found["flags"]}
    )
    return Trial(found["lost"], not any(map(_of_sender, found["flags"])))


def _of_sender(flag: str) -> bool:
    """Such a trial is none; that it was made is nothing against the search."""
    return flag.startswith("the sender")


# ── what the report tells ────────────────────────────────────────────────────────────────────────────

_COLUMNS = ("layout", "0 lost, M/s", "runs", "≤ 0.1 % lost, M/s", "runs", "limit", "trials a run")


def tell(result: dict[str, Any]) -> Iterator[Section]:
    able = [case for case in result["cases"] if not case["skip"] and _runs(case)]
    for place in dict.fromkeys(case["parameters"]["place"] for case in able):
        here = [case for case in able if case["parameters"]["place"] == place]
        picture = Picture(
            f"lossless-{place}",
            f"Rates of each layout on {place} without loss and with 0.1 %",
            functools.partial(_picture, here),
        )
        table = Table(_COLUMNS, tuple(map(_row, here)))
        yield Section(f"{place}: the highest rate", (*choose(here),), table, picture)


def choose(here: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The layout with the highest lossless rate, if it can be told from the others."""
    rates = {_layout(case): _rates(case, "value") for case in here if _rates(case, "value")}
    if not rates:
        yield f"No layout takes {LEAST} packets/s without loss."
        return
    best = max(rates, key=lambda name: median(rates[name]))
    alike = [name for name in rates if overlap(interval(rates[name]), interval(rates[best]))]
    told = "; ".join(f"{name} {_spread(found)}" for name, found in rates.items())
    if len(alike) == 1:
        yield f"Without loss `{best}` takes most: {told}."
    else:
        yield f"Without loss {' and '.join(alike)} cannot be told apart: {told}."
    limited = [_layout(case) for case in here if any(LIMITED in run["limit"].values() for run in _runs(case))]
    if limited:
        yield f"The sender was the limit in runs of {', '.join(limited)}: there the rate is a lower bound."


def _runs(case: dict[str, Any]) -> list[Figures]:
    return [run for run in case["runs"] if "limit" in run]


def _layout(case: dict[str, Any]) -> str:
    return str(case["parameters"]["layout"])


def _rates(case: dict[str, Any], figure: str) -> list[float]:
    return [run[figure] for run in _runs(case) if run[figure] is not None]


def _spread(rates: list[float]) -> str:
    return f"{number(median(rates))} M/s ({span(*interval(rates))})"


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    runs, cells = _runs(case), []
    for figure in GOALS:
        rates = _rates(case, figure)
        none = f"below {LEAST / 1e6:g}"
        cells += [number(median(rates)) if rates else none, span(min(rates), max(rates)) if rates else "–"]
    limits = dict.fromkeys(
        "the sender" if why == LIMITED else "loss" for run in runs for why in run["limit"].values()
    )
    trials = number(median([len(run["trials"]) for run in runs]))
    return (_layout(case), *cells, " or ".join(limits), trials)


def _picture(here: Sequence[dict[str, Any]]) -> Figure:
    names = {"value": "no loss", "small_loss": "at most 0.1 %"}
    rows = {
        f"{_layout(case)}, {names[figure]}": _rates(case, figure)
        for case in here
        for figure in GOALS
        if _rates(case, figure)
    }
    return pictures.dots(rows or {"none": [0.0]}, "10⁶ packets/s")
