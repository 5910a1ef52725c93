"""Case 13 (iceoryx#325, #1546, #2193, ramen#221): a peer is killed mid-operation, and the ring hangs.

Of the engine's workers; a receiver killed at every instruction is tests/engine/net/test_receiver_killed.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from forked import await_
from runs import Run, Source, check_ledger

import rings


@pytest.fixture
def frozen(name: str) -> Iterator[tuple[Run, Source]]:
    """A run whose ring is full because of a stopped consumer; its supervisor is stopped, too."""
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--ring", "64KiB", "--batch", "8", "--consumer", "rate", "--sender", f"{name}.s"),
            *("--every", "0.02"),
        ) as run,
    ):
        source.connect(run)
        os.kill(run.worker(1), signal.SIGSTOP)
        source.send([b"x" * 200] * 400)
        run.await_interval(lambda view: view["rings"][0]["full_events"] > 0)
        run.send_signal(signal.SIGSTOP)
        yield run, source


def test_the_receiver_goes_on_without_the_dead(frozen: tuple[Run, Source], name: str) -> None:
    """Not after a restart: at once, while nobody looks after the dead."""
    run, source = frozen
    with rings.attach(name) as ring:
        before = ring.published()[1]
        assert before < 400
        os.kill(run.worker(1), signal.SIGKILL)
        await_(lambda: ring.published()[1] == 400)
    source.done()
    run.send_signal(signal.SIGCONT)
    summary = run.end()
    check_ledger(summary)
    (rate,) = summary["consumers"]
    assert (rate["restarts"], rate["alive"], rate["unread"]) == (1, True, 0)
    assert rate["skipped"] > 0
    assert rate["delivered"] + rate["skipped"] == 400


def test_all_workers_are_killed_at_once(frozen: tuple[Run, Source], name: str) -> None:
    run, source = frozen
    for worker in (0, 1):
        os.kill(run.worker(worker), signal.SIGKILL)
    run.send_signal(signal.SIGCONT)
    with rings.attach(name) as ring:
        await_(lambda: ring.published()[1] == 400)
    source.done()
    summary = run.end()
    check_ledger(summary)
    assert summary["receivers"][0]["restarts"] == summary["consumers"][0]["restarts"] == 1
    assert summary["consumers"][0]["unread"] == 0
