"""Case 17 (pupnp#498, ponyc#5289, neper): a zero-length datagram ends the receiver.

It is a packet: counted, and delivered to every handler.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from forked import await_
from link import Link
from runs import Run, Source, check_ledger

import rings
from engine.affinity import pinning


@pytest.mark.parametrize("receive", ["recvmmsg", "recvmsg"])
@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_packet_of_length_zero_is_counted_and_delivered(
    name: str, tmp_path: Path, receive: str, policy: str
) -> None:
    payloads = [b"", b"a", b"", b"", b"bc" * 100, b""]
    dump = tmp_path / "dump"
    handlers = ("rate", "gaps", "latency", f"dump={dump}")
    consumers = [flag for handler in handlers for flag in ("--consumer", f"{handler},policy={policy}")]
    with (
        Source(f"{name}.s") as source,
        Run(name, *consumers, "--receive", receive, "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        source.send(payloads)
        source.done()
        summary = run.end()
    check_ledger(summary)
    assert summary["receivers"][0]["packets"] == len(payloads)
    assert [consumer["delivered"] for consumer in summary["consumers"]] == [len(payloads)] * 4
    rate, _, latency, dumped = (consumer["result"] for consumer in summary["consumers"])
    assert rate["sizes"] == {"0": 4, "1": 1, "200": 1}
    assert latency["ring"]["count"] == len(payloads)
    assert dumped["packets"] == len(payloads)
    assert dump.read_bytes() == b"".join(payloads)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_beside_a_packet_that_is_put_together_privately(name: str, one_by_one: bool) -> None:
    """A jumbo is longer than the room of one message in the ring: its whole batch takes the other way."""
    with Link(name, one_by_one=one_by_one) as link:
        for lengths in ([0, 9000, 0], [9000, 0, 0, 1, 0], [0, 0, 9000], [0]):
            link.rx.state[0]["stride"] = 2048
            sent = link.send(lengths)
            link.take()
            assert link.read() == sent
        assert link.ring.counters["overflowed"] == 3
        link.check_balance()


@pytest.mark.parametrize("receive", ["recvmmsg", "recvmsg"])
def test_a_run_takes_a_jumbo_between_packets_of_length_zero(name: str, receive: str) -> None:
    """All are queued while the receiver stands still, so that one call brings them."""
    lengths = [0, 9000, 0, 0, 1, 9000, 0]
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--receive", receive, "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        receiver = run.worker(0)
        os.kill(receiver, signal.SIGSTOP)
        await_(lambda: pinning.is_stopped(receiver))
        source.send([b"x" * length for length in lengths])
        os.kill(receiver, signal.SIGCONT)
        source.done()
        with rings.attach(name) as ring:
            await_(lambda: ring.published()[1] == len(lengths))
            assert int(ring.counters["overflowed"]) >= 1
        summary = run.end()
    check_ledger(summary)
    (rate,) = summary["consumers"]
    assert (rate["delivered"], rate["restarts"]) == (len(lengths), 0)
    assert rate["result"]["sizes"] == {"0": 4, "1": 1, "9000": 2}
    assert summary["receivers"][0]["restarts"] == 0
