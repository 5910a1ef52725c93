"""The ring's own code with one fault in it: what shows that a check would notice.

A function is taken in the words it stands in, a few of them are replaced, and the result takes its place for
the length of a test. Nothing of the protocol is written down twice; words that stand there no more are an
error, so a control never outlives what it breaks.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from types import ModuleType
from typing import Any

import numba
import pytest
import ring_loops
from slow_motion import Stepper, _copy, as_record

from rings import writer as writer_module

Changes = tuple[tuple[str, str], ...]


def break_(
    monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, function: str, changes: Changes
) -> None:
    """Replace words of `owner.function`; () puts the same function there once more.

    Of a compiled function the broken one is for slow motion: a Stepper that begins after this takes it up.
    """
    was = getattr(owner, function)
    source = textwrap.dedent(inspect.getsource(getattr(was, "py_func", was)))
    for old, new in changes:
        assert source.count(old) == 1, f"{function} has {source.count(old)} of {old!r}"
        source = source.replace(old, new)
    module = owner if isinstance(owner, ModuleType) else sys.modules[owner.__module__]
    made: dict[str, Any] = {}
    exec(compile(source.removeprefix("@jit\n"), f"<broken {function}>", "exec"), vars(module), made)
    broken = numba.njit(made[function]) if hasattr(was, "py_func") else made[function]
    monkeypatch.setattr(owner, function, broken)


def slow_writer(monkeypatch: pytest.MonkeyPatch, user: ModuleType) -> None:
    """The writer in slow motion also where module `user` writes with the compiled loops of ring_loops."""
    Stepper(monkeypatch, writer_module)
    steps = {name: getattr(writer_module, name) for name in ("reserve", "describe", "publish")}
    for name in ("put", "reserve_only"):
        code = getattr(ring_loops, name).py_func.__code__
        slow = types.FunctionType(code, {**vars(ring_loops), **steps, "memmove": _copy})
        monkeypatch.setattr(user, name, _on_a_record(slow))


def _on_a_record(function: Any) -> Any:
    return lambda state, *arguments: function([as_record(state)], *arguments)
