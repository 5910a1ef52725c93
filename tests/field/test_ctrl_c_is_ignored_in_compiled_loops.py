"""Case 32 (numba#5551, #6011): Ctrl-C is ignored in compiled loops.

Every process of a run ends in order within a second of SIGINT or SIGTERM, whether the supervisor alone
gets it (a service manager) or the whole group does (a terminal), in any wait and under load.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Child, await_
from numpy.typing import NDArray
from runs import Run, fits_quickly

SENT, ENOUGH = range(2)


def flood(port: int, board: NDArray[Any]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        while board[ENOUGH] == 0:
            try:
                sock.send(b"x" * 100)
            except ConnectionRefusedError:
                return
            board[SENT] += 1


@pytest.mark.parametrize("wait", ["block", "yield", "spin"])
@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ends_within_a_second(
    name: str,
    fork: Callable[..., Child],
    board: NDArray[Any],
    number: signal.Signals,
    whole_group: bool,
    wait: str,
) -> None:
    numbers = itertools.count()

    def attempt() -> float:
        board[:] = 0
        name_now = f"{name}.{next(numbers)}"
        with Run(name_now, *("--consumer", f"rate,wait={wait}", "--consumer", f"gaps,wait={wait}")) as run:
            sender = fork(flood, run.port, board)
            await_(lambda: board[SENT] > 1000)
            began = time.monotonic()
            (os.killpg if whole_group else os.kill)(run.pid, number)
            summary = run.end(None)
            took = time.monotonic() - began
            board[ENOUGH] = 1
            assert sender.wait() == 0
            assert run.errors == ""
        assert summary["receivers"][0]["packets"] > 0
        for consumer in summary["consumers"]:
            assert consumer["delivered"] == summary["ledger"]["published"]
            assert consumer["alive"] is True
        return took

    fits_quickly(attempt, 1.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_compiles_ends_it(name: str, tmp_path: Path, number: signal.Signals) -> None:
    """The first start compiles for a minute: nobody waits for that."""

    def attempt() -> float:
        cache = tmp_path / f"{time.monotonic_ns()}"
        with Run(name, "--consumer", "latency", command=True, cache=cache) as run:
            await_(lambda: run.stderr)
            assert run.stderr.startswith("compiling for the first time")
            began = time.monotonic()
            run.send_signal(number)
            assert run.next() is None
            assert run.wait() == 0
            took = time.monotonic() - began
            assert run.errors == ""
        return took

    fits_quickly(attempt, 1.0)


def test_a_second_signal_ends_it_at_once(name: str) -> None:
    """Also where a worker would be waited for."""
    with Run(name, "--consumer", "rate", "--every", "0.02") as run:
        receiver = run.worker(0)
        run.await_interval()
        os.kill(receiver, signal.SIGSTOP)
        os.kill(run.pid, signal.SIGSTOP)
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGTERM)
        os.kill(run.pid, signal.SIGCONT)
        summary = run.end(None, code=1)  # its workers had to be killed
        assert "rx0 did not end: killed\n" in run.errors
    assert summary["receivers"][0]["restarts"] == 0
