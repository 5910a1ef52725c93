"""Case 3 (ska-sa/spead2#40): stop() hangs while the ring is full and nobody reads.

Here a stopped reader holds a full ring, more is queued in the socket, and the sender goes on: the end
comes within a second, and says of every packet where it is.
"""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest
from runs import Run, Source, check_ledger, fits_quickly


@pytest.mark.parametrize("size", [100, 5000])  # beyond the first stride: put together privately
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_within_a_second_with_a_full_ring_and_a_stopped_reader(
    name: str, size: int, number: signal.Signals
) -> None:
    attempts = itertools.count()
    fits_quickly(lambda: stop_with_a_full_ring(f"{name}.{next(attempts)}", size, number), 1.0)


def stop_with_a_full_ring(name: str, size: int, number: signal.Signals) -> float:
    """How long it takes, in seconds."""
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--ring", "64KiB", "--batch", "8", "--rcvbuf", "64KiB", "--every", "0.02"),
            *("--consumer", "rate,name=stopped", "--consumer", "gaps", "--sender", f"{name}.s"),
        ) as run,
    ):
        source.connect(run)
        os.kill(run.worker(1), signal.SIGSTOP)
        full = False
        while not full:
            source.send([b"x" * size] * 50)
            view = run.await_interval()
            full = view["rings"][0]["full_events"] > 0 and view["receivers"][0]["socket_dropped"] > 0
        source.done()
        began = time.monotonic()
        summary = run.end(number)
        took = time.monotonic() - began
        assert run.errors == "stopped did not end: killed\n"
    check_ledger(summary)
    stopped, gaps = summary["consumers"]
    assert summary["receivers"][0]["refused"]["ring_full"] > 0
    assert (stopped["alive"], gaps["alive"]) == (False, True)
    assert stopped["unread"] > 0
    assert gaps["delivered"] == summary["ledger"]["published"]
    return took
