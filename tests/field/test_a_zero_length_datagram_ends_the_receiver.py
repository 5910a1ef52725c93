"""Case 17 (pupnp#498, ponyc#5289, neper): a zero-length datagram ends the receiver.

It is a packet: counted, and delivered to every handler.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Run, Source, check_ledger


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
