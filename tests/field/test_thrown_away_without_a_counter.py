"""Case 1 (ska-sa/spead2#122): packets were thrown away, and no counter said so.

Here every packet that left the socket is published, or refused by a reason that has a name and a count.
"""

from __future__ import annotations

import os
import signal

from hypothesis import given, settings
from hypothesis import strategies as st
from link import Link
from runs import Run, Source, check_ledger

from engine import screen
from engine.ledger import REFUSED
from engine.net.receiver import FINISHED, SLICE, give_up

ROOM = 32 << 10  # bytes: more than half of the arena of a small ring, so that all reasons can occur


def test_each_reason_has_its_name_and_its_count(name: str) -> None:
    found: dict[str, int] = {}
    with Link(f"{name}.long", size_bytes=64 << 10, batch=4, room=ROOM) as link:
        half = link.ring.geometry.arena_bytes // 2
        whole = link.send([0, 1, 100])
        link.send([ROOM + 1, 65507])
        link.send([ROOM, ROOM, half + 1])
        assert link.take_all() == whole
        assert link.refused == {"truncated": 2, "too_large": 3}
        link.check_balance()
        found |= link.refused
    with Link(f"{name}.full", size_bytes=64 << 10, batch=4) as link:
        link.send([2000] * (half // 2048))  # and nobody reads
        assert link.take() == FINISHED
        link.send([14_000] * 3)  # there is room for one of them
        assert link.take(0.02, drain=False) == SLICE
        give_up(link.rx.state, link.writer.record)
        assert link.refused == {"ring_full": link.received - link.published}
        link.discard()
        link.check_balance()
        found |= link.refused
    assert tuple(found) == REFUSED  # there is no other reason
    told = [piece.plain for piece in screen.troubles({"refused": found})]
    assert told == ["truncated 2", "too large 3", f"ring full {found['ring_full']}"]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 65507) | st.integers(0, 200), max_size=40),
    batch=st.sampled_from([1, 4, 8]),
    readers=st.booleans(),
)
def test_whatever_comes_is_published_or_refused(lengths: list[int], batch: int, readers: bool) -> None:
    """readers: somebody makes room."""
    with Link(f"t{os.getpid()}.refused", size_bytes=64 << 10, batch=batch, room=ROOM) as link:
        half = link.ring.geometry.arena_bytes // 2
        link.send(lengths)
        if readers:
            link.take_all()
        else:
            link.take(0.02)
            give_up(link.rx.state, link.writer.record)
            link.discard()
        link.check_balance()
        if readers:
            expected = {
                "truncated": sum(length > ROOM for length in lengths),
                "too_large": sum(half < length <= ROOM for length in lengths),
            }
            assert link.refused == {reason: count for reason, count in expected.items() if count}
            assert link.published == sum(length <= half for length in lengths)


def test_a_run_names_what_it_refused(name: str) -> None:
    """To the packet, in the JSON, with a ledger that balances."""
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--ring", "64KiB", "--batch", "8", "--gro", "off", "--every", "0.02"),
            *("--consumer", "rate,name=stopped", "--sender", f"{name}.s"),
        ) as run,
    ):
        source.connect(run)
        source.send([b"x" * 100, b"x" * 60_000, b"x" * 50_000, b"x" * 100])
        view = run.await_interval(lambda view: view["consumers"][0]["delivered"] == 2)
        assert view["receivers"][0]["refused"] == {"too_large": 2}
        os.kill(run.worker(1), signal.SIGSTOP)
        full = False
        while not full:
            source.send([b"x" * 5000] * 20)
            full = run.await_interval()["rings"][0]["full_events"] > 0
        source.done()
        summary = run.end(code=1)  # the consumer had to be killed
    check_ledger(summary)
    refused = summary["receivers"][0]["refused"]
    assert set(refused) == {"too_large", "ring_full"}
    assert refused["too_large"] == 2
    assert refused["ring_full"] == summary["ledger"]["received"] - summary["ledger"]["published"] - 2 > 0
