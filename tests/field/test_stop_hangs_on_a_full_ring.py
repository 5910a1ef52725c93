"""Case 3 (ska-sa/spead2#40): stop() hangs while the ring is full and nobody reads.

Here a stopped reader holds a full ring, more is queued in the socket, and the sender is done or goes on: the
end comes within a second, and says of every packet where it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from runs import Object, Run, Source, check_ledger, fits_quickly


@pytest.mark.parametrize("sends_on", [False, True])
@pytest.mark.parametrize("size", [100, 5000])  # beyond the first stride: put together privately
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_within_a_second_with_a_full_ring_and_a_stopped_reader(
    name: str, size: int, number: signal.Signals, sends_on: bool
) -> None:
    attempts = itertools.count()
    fits_quickly(
        lambda: stop_with_a_full_ring(f"{name}.{next(attempts)}", size, number, sends_on=sends_on), 1.0
    )


def stop_with_a_full_ring(name: str, size: int, number: signal.Signals, *, sends_on: bool) -> float:
    """How long it takes, in seconds. sends_on: the sender does not end, nor say how much it sent."""
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
        if not sends_on:
            source.done()
        with sending(source, size) if sends_on else contextlib.nullcontext():
            began = time.monotonic()
            summary = run.end(number, code=1)  # a consumer had to be killed
            took = time.monotonic() - began
        told = run.errors.splitlines()
    assert "rxring: stopped did not end: killed" in told
    if sends_on:
        assert f"sender {name}.s still sends: how much it sent is not known" in told
        check_without_a_total(summary, source.sent)
    else:
        check_ledger(summary)
    stopped, gaps = summary["consumers"]
    assert summary["receivers"][0]["refused"]["ring_full"] > 0
    assert (stopped["alive"], gaps["alive"]) == (False, True)
    assert stopped["unread"] > 0
    assert gaps["delivered"] == summary["ledger"]["published"]
    return took


def check_without_a_total(summary: Object, sent: int) -> None:
    """All lines but the first add up, and no more is accounted for than was sent."""
    ledger = summary["ledger"]
    assert (ledger["sent"], ledger["residual"], ledger["balanced"]) == (None, None, None)
    assert ledger["adds_up"] is True
    assert ledger["received"] == ledger["refused"] + ledger["published"]
    assert ledger["after_stop"] > 0
    assert ledger["received"] + ledger["socket_dropped"] + ledger["after_stop"] <= sent


@contextlib.contextmanager
def sending(source: Source, size: int) -> Iterator[None]:
    """Within: a thread sends on and on; at its end, also to a port that nobody has any more."""
    end = threading.Event()

    def send() -> None:
        while not end.is_set():
            with contextlib.suppress(ConnectionRefusedError):
                source.send([b"x" * size])

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
