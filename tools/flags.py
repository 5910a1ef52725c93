"""How a flag is declared: its value is read by a parser of `engine.spec`, and refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from engine import spec


def reading(parse: spec.Parser) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A value, or each value of a repeatable flag, read by one of the parsers of `engine.spec`."""

    def read(context: click.Context, param: click.Parameter, given: Any) -> Any:
        try:
            if isinstance(given, tuple):
                return [parse(text) for text in given] or None
            return None if given is None else parse(given)
        except ValueError as error:
            raise click.BadParameter(str(error), context, param) from None

    return read


def flag(name: str, metavar: str, parse: spec.Parser, text: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(name, metavar=metavar, callback=reading(parse), help=text, **more)


def mark(name: str, text: str) -> Callable[[Any], Any]:
    """A flag without a value; None where it is not given, so that a spec file decides."""
    return click.option(name, is_flag=True, default=None, help=text)


def fifo() -> Callable[[Any], Any]:
    text = f"Real-time priority: SCHED_FIFO at PRIO, 1 to 99 ({spec.FIFO_PRIORITY} where PRIO is left out)."
    value = str(spec.FIFO_PRIORITY)
    return flag("--fifo", "[PRIO]", spec.RUN["fifo"], text, is_flag=False, flag_value=value)
