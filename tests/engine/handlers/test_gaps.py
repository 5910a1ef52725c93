from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import Refused
from engine.handlers.gaps import RUNS, WINDOW, handler
from engine.net.stamp import CLOSING
from tests.engine.handlers.batches import NOW_NS, closing, feed, fresh, gro, one, report, rxring

SIZE = 32
UNTIMED = 16  # bytes: the scheduled time does not fit


def packet(sequence: int, *, flow: int = 1, start_ns: int = NOW_NS, size: int = SIZE) -> bytes:
    """Number `sequence` of a run that began at `start_ns`, a microsecond apart."""
    return rxring(sequence, flow=flow, scheduled_ns=start_ns + sequence * 1000, size=size)


def end(sent: int, *, flow: int = 1, start_ns: int = NOW_NS, size: int = SIZE) -> bytes:
    return closing(sent, flow=flow, scheduled_ns=start_ns + sent * 1000 + 500, size=size)


def gaps(*packets: bytes) -> dict[str, Any]:
    return report(handler, *map(one, packets))


def numbers(*sequences: int, **facts: int) -> list[bytes]:
    return [packet(sequence, **facts) for sequence in sequences]


def told(found: dict[str, Any], **expected: int) -> bool:
    """Are these the counts, and all others of what went wrong 0?"""
    usual = dict.fromkeys(found, 0) | {"flows": 1, "received": found["received"]}
    return found == usual | expected


def test_everything_arrived() -> None:
    assert told(gaps(*numbers(*range(1000)), end(1000)), received=1000, closing=1)


def test_a_hole_is_lost() -> None:
    assert told(gaps(*numbers(0, 1, 4, 5)), received=4, lost=2)


def test_the_lost_tail_is_known_from_a_closing_stamp() -> None:
    packets = numbers(0, 1, 2)
    assert told(gaps(*packets), received=3)
    assert told(gaps(*packets, end(10)), received=3, lost=7, closing=1)


def test_closing_stamps_are_repeated_and_counted_apart() -> None:
    assert told(gaps(*numbers(0, 1), end(3), end(3), packet(2), end(3)), received=3, closing=3)


def test_late_packets_are_reordered_and_not_lost() -> None:
    assert told(gaps(*numbers(0, 3, 1, 2, 4)), received=5, reordered=2)


def test_duplicates_are_received_but_found_once() -> None:
    assert told(gaps(*numbers(0, 1, 1, 0, 3, 3)), received=6, duplicated=3, lost=1)


def test_what_came_before_the_first_packet() -> None:
    assert told(gaps(*numbers(500, 501, 503)), received=3, before_first=500, lost=1)


def test_a_late_first_packet_moves_the_beginning() -> None:
    assert told(gaps(*numbers(5, 3, 6)), received=3, reordered=1, before_first=3, lost=1)


def test_flows_are_apart() -> None:
    packets = [packet(i, flow=flow) for i in range(20) for flow in range(100) if (i, flow) != (7, 42)]
    assert told(gaps(*packets), received=1999, lost=1, flows=100)


def test_only_a_closing_stamp_arrived() -> None:
    assert told(gaps(end(10)), received=0, before_first=10, closing=1)


def test_packets_behind_a_closing_stamp_that_came_first() -> None:
    assert told(gaps(end(10), *numbers(7, 9)), received=2, before_first=7, lost=1, closing=1)


def test_a_packet_older_than_the_window_changes_nothing_but_its_own_count() -> None:
    found = gaps(*numbers(0, 2, WINDOW + 2, 2, 1))
    assert told(found, received=5, lost=WINDOW, too_late=2)


def test_the_window_is_exact() -> None:
    """The oldest number in it is still told apart, also where the ring of bits wraps."""
    for top in range(WINDOW, WINDOW + 130, 13):
        oldest = top - WINDOW + 1
        start = numbers(*range(oldest - 1), top)
        assert gaps(*start, packet(oldest))["reordered"] == 1
        assert gaps(*start, packet(oldest), packet(oldest))["duplicated"] == 1
        assert gaps(*start, packet(oldest - 1))["too_late"] == 1


@pytest.mark.parametrize("jump", [1, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 10 * WINDOW])
def test_what_a_jump_passes_over_has_not_been_seen(jump: int) -> None:
    seen = range(2 * WINDOW)
    top = seen[-1] + jump
    missing = top - 1
    found = gaps(*numbers(*seen, top))
    assert (found["lost"], found["duplicated"]) == (jump - 1, 0)
    if jump > 1:
        found = gaps(*numbers(*seen, top, missing, missing))
        assert (found["lost"], found["reordered"], found["duplicated"]) == (jump - 2, 1, 1)


def test_a_restarted_sender_begins_another_run() -> None:
    first = numbers(*range(10_000))
    second = numbers(*range(5_000), start_ns=NOW_NS + 10**10)
    assert told(gaps(*first, *second), received=15_000, restarted=1)


def test_a_sender_that_restarts_within_the_window_sends_no_duplicates() -> None:
    second = numbers(0, 1, 3, start_ns=NOW_NS + 10**10)
    assert told(gaps(*numbers(0, 1, 2), end(4), *second), received=6, restarted=1, lost=2, closing=1)


def test_a_sender_that_sends_as_many_again_and_loses_the_tail() -> None:
    """Its closing stamp looks like a repetition of the first run's."""
    later_ns = NOW_NS + 10**6
    second = [*numbers(0, 1, start_ns=later_ns), *[end(5, start_ns=later_ns)] * 3]
    assert told(gaps(*numbers(*range(5)), *[end(5)] * 3, *second), received=7, restarted=1, lost=3, closing=6)


def test_closing_stamps_repeated_while_another_sender_goes_on() -> None:
    other_ns = NOW_NS + 999_400
    packets = [*numbers(*range(1000)), *numbers(0, 1, start_ns=other_ns)]
    packets += [end(1000), packet(2, start_ns=NOW_NS + 10**6), end(1000, start_ns=NOW_NS + 10**6)]
    assert told(gaps(*packets), received=1003, restarted=1, closing=2)


def test_late_packets_of_the_run_before_a_restart() -> None:
    second = numbers(0, 1, start_ns=NOW_NS + 10**10)
    assert told(gaps(*numbers(0, 1, 3), *second, packet(2)), received=6, restarted=1, reordered=1)


def test_a_short_stamp_restarts_only_beyond_the_window() -> None:
    facts = {"size": UNTIMED}
    assert told(gaps(*numbers(0, 5, 2, 2, **facts)), received=4, lost=3, reordered=1, duplicated=1)
    found = gaps(*numbers(*range(WINDOW + 10), 0, 1, 2, **facts))
    assert told(found, received=WINDOW + 13, restarted=1)


def test_two_senders_with_one_flow_id_at_once() -> None:
    """A second process that sends flow 0 as well must not look like a storm of losses."""
    other_ns = NOW_NS + 300_400
    both = sorted(
        [(NOW_NS + i * 1000, packet(i)) for i in range(20_000)]
        + [(other_ns + i * 1000, packet(i, start_ns=other_ns)) for i in range(20_000)]
    )
    assert told(gaps(*[stamped for _, stamped in both]), received=40_000, restarted=1)


def test_a_sender_that_is_started_again_and_again() -> None:
    """The table holds the latest runs of a flow; those before have gone into the sums."""
    times = 3 * RUNS
    packets = []
    for i in range(times):
        start_ns = NOW_NS + i * 10**9
        packets += [*numbers(4, 2, 6, 6, 3, start_ns=start_ns), end(8, start_ns=start_ns)]
    assert told(
        gaps(*packets),
        received=5 * times,
        lost=2 * times,
        duplicated=times,
        reordered=2 * times,
        before_first=2 * times,
        restarted=times - 1,
        closing=times,
    )


def test_the_run_that_goes_on_is_kept_while_others_come_and_go() -> None:
    packets = []
    for i in range(30):
        now_ns = NOW_NS + i * 10**9
        packets += numbers(10**6 + i, start_ns=now_ns - 10**9)
        packets += numbers(0, 1, start_ns=now_ns + 10**8)
    assert told(gaps(*packets), received=90, before_first=10**6, restarted=30)


def test_flows_that_restart_when_the_table_is_full() -> None:
    first = [packet(0, flow=flow) for flow in range(RUNS)]
    second = [packet(i, flow=7, start_ns=NOW_NS + 10**9) for i in (0, 1, 3)]
    found = gaps(*first, *second)
    assert told(found, received=RUNS + 3, lost=1, flows=RUNS, restarted=1)


def test_segments_of_a_frame_are_packets() -> None:
    frames = [gro(*numbers(*range(64))), gro(*numbers(*range(65, 90)))]
    assert told(report(handler, *frames), received=89, lost=1)


def test_a_last_segment_cut_within_its_stamp() -> None:
    frames = [gro(*numbers(0, 1), packet(2, size=15))]
    assert told(report(handler, *frames), received=2, unstamped=1)


@pytest.mark.parametrize("payload", [b"", b"RXR1", b"RXR1" + bytes(11), b"G" * 1316, bytes(32)])
def test_packets_without_a_stamp(payload: bytes) -> None:
    assert told(gaps(payload), flows=0, unstamped=1)


@pytest.mark.parametrize("sequence", [1 << 61, 1 << 63, (1 << 64) - 1])
def test_a_sequence_that_nobody_can_have_reached_is_no_stamp(sequence: int) -> None:
    assert told(gaps(rxring(sequence), *numbers(0, 1)), received=2, unstamped=1)


def test_a_full_table_says_what_it_did_not_look_at() -> None:
    packets = [packet(0, flow=flow) for flow in range(RUNS + 5)]
    found = gaps(*packets, packet(1, flow=0), packet(1, flow=RUNS + 2), end(2, flow=RUNS + 3))
    assert told(found, received=RUNS + 1, flows=RUNS, untracked=7)


def test_flow_ids_of_any_value() -> None:
    flows = [0, 1, CLOSING - 1, *(random.Random(5).sample(range(CLOSING), 500))]
    found = gaps(*[packet(i, flow=flow) for i in range(3) for flow in flows])
    assert told(found, received=3 * len(flows), flows=len(flows))


@dataclass
class Model:
    """One run, by brute force: every number that arrived is remembered."""

    arrived: set[int] = field(default_factory=set)
    lowest: int = 0
    highest: int = -1
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("received", "duplicated", "reordered", "too_late"), 0)
    )

    def take(self, sequence: int) -> None:
        self.counts["received"] += 1
        if not self.arrived:
            self.lowest, self.highest = sequence, sequence - 1
        if sequence <= self.highest - WINDOW:
            self.counts["too_late"] += 1
        elif sequence in self.arrived:
            self.counts["duplicated"] += 1
        else:
            self.counts["reordered"] += sequence < self.highest
            self.lowest = min(self.lowest, sequence)
            self.highest = max(self.highest, sequence)
            self.arrived.add(sequence)

    def lost(self) -> int:
        return len(set(range(self.lowest, self.highest + 1)) - self.arrived)


steps = st.one_of(
    st.integers(1, 3),  # forward, also over holes
    st.just(1),
    st.integers(-5, 0),  # duplicates and late ones nearby
    st.integers(-WINDOW - 2, -WINDOW + 2),
    st.sampled_from([WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 65, 3 * WINDOW]),
)


def walk(first: int, moves: Sequence[int]) -> list[int]:
    """Sequence numbers, each `move` from the highest before it."""
    path, highest = [first], first
    for move in moves:
        path.append(max(highest + move, 0))
        highest = max(highest, path[-1])
    return path


@given(st.integers(0, 2 * WINDOW), st.lists(steps, max_size=60), st.booleans())
def test_one_run_against_brute_force(first: int, moves: list[int], timed: bool) -> None:
    model = Model()
    path = walk(first, moves)
    if not timed:  # there, what is beyond the window would begin another run
        path = [s for i, s in enumerate(path) if s > max(path[:i], default=0) - WINDOW]
    for sequence in path:
        model.take(sequence)
    found = gaps(*numbers(*path, size=SIZE if timed else UNTIMED))
    assert told(found, lost=model.lost(), before_first=model.lowest, **model.counts)
    unique = found["received"] - found["duplicated"] - found["too_late"]
    assert unique + found["lost"] + found["before_first"] == model.highest + 1


anything = st.builds(
    lambda make, sequence, flow, time_ns, size: make(
        sequence, flow=flow, scheduled_ns=NOW_NS + time_ns, size=size
    ),
    st.sampled_from([rxring, rxring, rxring, closing]),
    st.integers(0, 20) | st.integers(0, 3 * WINDOW) | st.integers(0, 1 << 61) | st.integers(0, (1 << 64) - 1),
    st.integers(0, 3),
    st.integers(-5, 5) | st.integers(-NOW_NS, NOW_NS),
    st.sampled_from([SIZE, 24, UNTIMED, 15, 0]),
)


@given(st.lists(anything, max_size=80))
def test_whatever_comes_nothing_is_negative_and_every_packet_is_counted(packets: list[bytes]) -> None:
    state = fresh(handler)
    feed(handler, state, *map(one, packets))
    found = handler.report(state[0])
    assert min(found.values()) >= 0
    assert found["received"] + found["closing"] + found["unstamped"] + found["untracked"] == len(packets)
    unique = int(state[0]["past"]["unique"]) + sum(state[0]["run"]["unique"].tolist())
    assert unique == found["received"] - found["duplicated"] - found["too_late"]


def states(*parts: Sequence[bytes]) -> list[NDArray[Any]]:
    made = [fresh(handler) for _ in parts]
    for state, part in zip(made, parts, strict=True):
        feed(handler, state, *map(one, part))
    return made


@given(st.lists(anything, max_size=40), st.lists(anything, max_size=40))
def test_merging_is_the_same_as_all_packets_in_one_where_flows_are_apart(
    a: list[bytes], b: list[bytes]
) -> None:
    apart = [
        payload[:4] + bytes([payload[4] + 4]) + payload[5:] if len(payload) > 4 else payload for payload in b
    ]
    first, second, both = states(a, apart, a + apart)
    handler.merge(first[0], second[0])
    assert handler.report(first[0]) == handler.report(both[0])
    more = states([*a, *apart, packet(3)])[0]
    feed(handler, first, one(packet(3)))
    assert handler.report(first[0]) == handler.report(more[0])  # and goes on as if it were


@given(
    st.lists(st.integers(0, 3 * WINDOW), min_size=1, max_size=60, unique=True),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_merging_parts_of_one_run(sequences: list[int], share: list[bool]) -> None:
    a = [s for s, mine in zip(sequences, share, strict=False) if mine]
    b = [s for s, mine in zip(sequences, share, strict=False) if not mine]
    first, second, both = states(numbers(*sorted(a)), numbers(*sorted(b)), numbers(*sorted(sequences)))
    handler.merge(first[0], second[0])
    assert handler.report(first[0]) == handler.report(both[0])


def test_merging_finds_a_duplicate_that_went_to_the_other_consumer() -> None:
    first, second = states(numbers(0, 1, 2, 3), numbers(2, 3, 4, 6))
    handler.merge(first[0], second[0])
    assert told(handler.report(first[0]), received=8, duplicated=2, lost=1)


def test_merging_never_makes_the_loss_negative() -> None:
    """Duplicates further apart than the windows reach can't be told; they must not become packets."""
    far = numbers(*range(2 * WINDOW))
    first, second = states(far, far)
    handler.merge(first[0], second[0])
    assert told(handler.report(first[0]), received=4 * WINDOW, duplicated=2 * WINDOW)


def test_merging_into_a_full_table_says_so() -> None:
    first, second = states(
        [packet(0, flow=flow) for flow in range(RUNS - 1)], [packet(0, flow=RUNS + flow) for flow in range(3)]
    )
    handler.merge(first[0], second[0])
    assert told(handler.report(first[0]), received=RUNS, flows=RUNS, untracked=2)


@pytest.mark.parametrize("stamp", ["none", "seed"])
def test_a_stamp_without_sequence_is_refused(stamp: str) -> None:
    with pytest.raises(Refused, match=f"stamp {stamp} has none: use stamp rxring"):
        fresh(handler, stamp=stamp)


def test_an_argument_is_refused() -> None:
    with pytest.raises(Refused, match="gaps takes no argument"):
        fresh(handler, argument="x")


def test_the_report_reads_a_copy_that_can_not_be_written() -> None:
    state = states(numbers(0, 2))[0]
    copy = np.frombuffer(state.tobytes(), handler.dtype)
    assert told(handler.report(copy[0]), received=2, lost=1)
