"""A check: a function of a Machine. Its name is the id of its finding, underscores read as hyphens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine import figures
from engine.doctor.machine import Machine
from engine.errors import Refused

State = Literal["bad", "note", "unknown", "ok"]
STATES: tuple[State, ...] = ("bad", "note", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """finding: what is so, in one line. why: what it costs. mend: a command for a shell (of what is
    unknown: that makes it known), None: there is none.
    """

    id: str
    group: str
    state: State
    finding: str
    why: str
    mend: str | None


class Answer(NamedTuple):
    state: State
    finding: str
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    id: str
    group: str
    why: str
    look: Callable[[Machine], Answer]

    def examine(self, machine: Machine) -> Finding:
        """What cannot be read, or understood, is unknown: one odd file must not hide the other findings."""
        try:
            answer = self.look(machine)
        except (OSError, ValueError, Refused) as error:
            answer = Answer("unknown", f"cannot be told here: {' '.join(str(error).split())}")
        return Finding(self.id, self.group, answer.state, answer.finding, self.why, answer.mend)


class Group:
    """Checks of one kind, in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checks: list[Check] = []

    def check(self, why: str) -> Callable[[Callable[[Machine], Answer]], Callable[[Machine], Answer]]:
        def add(look: Callable[[Machine], Answer]) -> Callable[[Machine], Answer]:
            self.checks.append(Check(look.__name__.replace("_", "-"), self.name, why, look))
            return look

        return add


def hidden(name: str) -> Answer:
    return Answer("unknown", f"{name} is not shown in this network namespace: ask in the host's")


def in_bytes(size: float) -> str:
    """Exact where that is short: 8MiB, 416KiB; else a magnitude."""
    if size == float("inf"):
        return "unlimited"
    exact = figures.format_size(int(size))
    return exact if len(exact) <= 7 else figures.magnitude(size, "B")


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def in_figures(limit: float) -> str:
    return "unlimited" if limit == float("inf") else f"{int(limit):,}"
