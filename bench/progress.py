"""How far an experiment is, on stderr: a line for each run and, on a terminal, a bar with the time left."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from bench.report import outcome


class Progress:
    """As a context, while runs are made.

    to_do: runs that each case still needs. expected_s: how long a run of it takes, where that is known.
    """

    def __init__(self, to_do: Mapping[str, int], rounds: int, expected_s: Mapping[str, float]) -> None:
        self._to_do, self._rounds, self._expected_s = dict(to_do), rounds, dict(expected_s)
        self._took_s: dict[str, list[float]] = {}
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs  {task.description}"))
        # No thread that refreshes: experiments fork, and enter network namespaces.
        self._bar = Bar(
            *columns, console=Console(stderr=True), auto_refresh=False, disable=not _is_terminal()
        )
        self._task = self._bar.add_task("", total=sum(to_do.values()))
        self._round = 0

    def say(self, text: str) -> None:
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)
            self._bar.update(self._task, description=self._left(), refresh=True)

    def ran(self, case: str, number: int, figures: Mapping[str, Any], unit: str, *, again: bool) -> None:
        """A run of this round is made. again: it does not count, and follows once more."""
        self._took_s.setdefault(case, []).append(figures["took_s"])
        if not again:
            self._to_do[case] -= 1
            self._bar.advance(self._task)
        if self._bar.disable and number > max(self._round, 1):
            self.say(f"round {number}/{self._rounds}: {self._left()}")
        self._round = number
        self.say(f"round {number}/{self._rounds}  {case}: {outcome(figures, unit)}{'  (again)' * again}")

    def seconds_left(self) -> float | None:
        """None as long as nothing is known of any case. A case of which nothing is known takes the mean."""
        known = self._expected_s | {case: sum(took) / len(took) for case, took in self._took_s.items()}
        if not known:
            return None
        mean = sum(known.values()) / len(known)
        return sum(count * known.get(case, mean) for case, count in self._to_do.items())

    def _left(self) -> str:
        left = self.seconds_left()
        return "" if left is None else f"about {duration(left)} left"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def duration(seconds: float) -> str:
    """45 s, 12 min, 1 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
