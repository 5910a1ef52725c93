"""A function in a process of its own, on a CPU of its own."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import Any

from engine.errors import Failed

_LONGEST_S = 120  # then it is killed: a partner that died is waited for by nobody
_NAP_S = 0.2


class Pinned:
    """A forked process that runs `function(*arguments)` on `cpu`, from its first instruction.

    It shares what is in shared mappings, and has copies of everything else. Call `result` once.
    """

    def __init__(self, cpu: int, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, write_end = os.pipe()
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
        self._pid = os.fork()
        if self._pid == 0:
            _live(write_end, function, arguments)
        os.sched_setaffinity(0, ours)
        os.close(write_end)

    def result(self) -> Any:
        """What it returned. Failed where it did not get so far."""
        while not select.select([self._pipe], [], [], _NAP_S)[0]:
            pass  # a signal that came between Python's last look and the sleep is heard of now
        with os.fdopen(self._pipe, "rb") as pipe:
            answer = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if code != 0:
            raise Failed(f"a measuring process ended with {code}: {answer.decode(errors='replace')}")
        return pickle.loads(answer)


def _live(write_end: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):  # compiled code would not hear of them
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(_LONGEST_S)
    code = 1
    try:
        os.write(write_end, pickle.dumps(function(*arguments)))
        code = 0
    except BaseException as error:
        os.write(write_end, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)
