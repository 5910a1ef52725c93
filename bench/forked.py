"""Commands of ours in processes forked from this one, for experiments of many short runs.

`rxring` started anew takes longer to import itself and to read compiled code than such a run lasts. These
do the same as `rxring run|mirror|send --json`, say the same objects, and are there at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self, TextIO

import msgspec
import numpy as np

from bench.place import Side
from engine import spec, supervisor
from engine.consumer import Consumer
from engine.errors import Failed, Refused
from engine.handlers.api import load
from engine.net import mirror, sender
from engine.net.mirror import MirrorPlan
from engine.net.sender import SendPlan
from engine.receiving import Receiving
from engine.report import JsonReport
from engine.signals import END_SIGNALS
from engine.spec import RunSpec
from rings.reader import Reader

_PR_SET_PDEATHSIG = 1
_END_S = 30


class Forked:
    """A process at `side` that lives `life(stdout)`. Leaving the context ends it, whatever state it is in."""

    def __init__(self, name: str, side: Side, life: Callable[[TextIO], object]) -> None:
        self._name = name
        read_end, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read_end)
            _live(name, side, life, write_end)
        os.close(write_end)
        self._pidfd = os.pidfd_open(self._pid)
        self._lines = os.fdopen(read_end)

    @property
    def pid(self) -> int:
        return self._pid

    def next(self, kind: str) -> dict[str, Any]:
        """The next object of this type. Failed where it ends before."""
        for line in self._lines:
            found: dict[str, Any] = json.loads(line)
            if found["type"] == kind:
                return found
        raise Failed(f"{self._name} ended with {self._wait()} before its {kind}")

    def end(self) -> dict[str, Any]:
        """Ask it to end in order; its summary."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        summary = self.next("summary")
        code = self._wait()
        if code != 0:
            raise Failed(f"{self._name} ended with {code}")
        return summary

    def _wait(self) -> int:
        """Its exit code. One that does not end is killed."""
        if not select.select([self._pidfd], [], [], _END_S)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            self._wait()
        os.close(self._pidfd)
        self._lines.close()


def _live(name: str, side: Side, life: Callable[[TextIO], object], write_end: int) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        with side, os.fdopen(write_end, "w") as out:
            life(out)
        code = 0
    except BaseException as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        code = 2 if isinstance(error, Refused) else 1
    finally:
        os._exit(code)


def compile_for(wanted: RunSpec) -> None:
    """Compile what the processes will need, once, for all to inherit."""
    sender.warm()
    mirror.warm()
    Receiving.compile()
    Reader.compile()
    for consumer in wanted.consumers:
        Consumer.compile(consumer, load(consumer.handler), wanted.stamp)


def wanted_run(listen: list[str], consumers: list[str], flags: Mapping[str, str]) -> RunSpec:
    """What `rxring run` with these flags (without their dashes) does."""
    parsers = spec.RUN | spec.RECEIVER | {"ring": spec.RING["size"]}
    given: dict[str, Any] = {name: parsers[name](value) for name, value in flags.items()}
    given["listen"] = [spec.listen(url) for url in listen]
    given["consumer"] = [spec.consumer(text) for text in consumers]
    return spec.read(None, given)


def run(side: Side, wanted: RunSpec) -> Forked:
    """`rxring run`, there. Without a name it is called by the process."""

    def life(out: TextIO) -> None:
        if supervisor.run(wanted, JsonReport(out, sys.stderr)) != 0:
            raise Failed("something failed while running")

    return Forked("run", side, life)


def bounce(side: Side, plan: MirrorPlan) -> Forked:
    """`rxring mirror`, there."""
    return Forked("mirror", side, lambda out: mirror.run(plan, _speaker(out)))


def send(side: Side, plan: SendPlan) -> Forked:
    """`rxring send`, there."""
    return Forked("send", side, lambda out: sender.run(plan, _speaker(out)))


def _speaker(out: TextIO) -> Callable[[dict[str, Any]], None]:
    def say(view: dict[str, Any]) -> None:
        out.write(msgspec.json.encode(view, enc_hook=_plain).decode() + "\n")
        out.flush()

    return say


def _plain(value: Any) -> Any:
    """numpy's numbers as JSON's."""
    return np.asarray(value).tolist()
