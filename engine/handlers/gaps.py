"""`gaps`: what is missing, by the sequence numbers of the rxring stamps.

A *run* is what a sender sent under one flow id from its start to its end, numbered from 0. For each run:

    0 ─── before_first ─── lowest ───── received once, or lost ───── highest ─── lost ─── end

    before_first   numbers below the lowest that arrived: what was sent before we listened is not lost
    unique         numbers that arrived, each counted once
    end            the number that a closing stamp gives, or highest + 1 if that is more (or all we know)
    lost           end − lowest − unique: what is missing, the tail included if a closing stamp came
    duplicated     packets whose number had arrived already
    reordered      packets that arrived after one with a higher number, and filled a gap
    too_late       packets more than WINDOW numbers behind the highest: which numbers have arrived is known
                   only within WINDOW, so they may be late or duplicates. They change nothing else; each
                   may be one that `lost` or `before_first` still counts

so that  unique + lost + before_first == end  and none is ever negative.

A number at or below the highest, or any number after a closing stamp, that was scheduled *later* than all
that came before is no late packet: the sender began anew, or there are two senders with one flow id. It
begins another run of the flow. From then on each packet goes to the run whose highest number is nearest
(so a hole that begins just where a killed sender had stopped is hidden: the end of its run is not known).
Packets too short to say when they were scheduled (16–23 bytes) begin another run when they are WINDOW or
more behind.

A run of which only a closing stamp arrived is all before_first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import Refused
from engine.handlers.api import (
    ON_BATCH,
    Handler,
    Options,
    no_clock,
    packet_loop,
    payload_as,
    record_at,
    takes_no_argument,
)
from engine.net.stamp import CLOSING, CLOSING_BYTES, MAGIC, STAMP
from rings.jit import callback, jit

WINDOW = 4096  # sequence numbers behind the highest; a power of two
RUNS = 1024  # that are looked at, of all flows
RUNS_AT_ONCE = 8  # of one flow
_SLOTS = 2 * RUNS  # hash table of flows, open addressing; a power of two
_SLOT_SHIFT = 32 - (_SLOTS.bit_length() - 1)
_GOLDEN = 2654435761  # 2³² / φ: spreads flow ids that follow one another (Knuth's multiplicative hashing)
_MAX_SEQUENCE = 1 << 61  # beyond it no sender has counted: not a stamp
_FLOW = CLOSING - 1
_SCHEDULED_END = STAMP.fields["sent_ns"][1]  # type: ignore[index]
_NO_TIME = -(1 << 63)
_LAST_RESORT = 1 << 62
_NOT_OF_IT = (1 << 63) - 1

RUN = np.dtype(
    [
        ("flow", "i8"),
        ("older", "i8"),  # the next of the flow's runs, + 1; 0: none
        ("lowest", "i8"),
        ("highest", "i8"),
        ("end", "i8"),  # from closing stamps
        ("began_ns", "i8"),  # the first scheduled time
        ("newest_ns", "i8"),  # the latest
        ("unique", "i8"),
        ("duplicated", "i8"),
        ("reordered", "i8"),
        ("too_late", "i8"),
        ("seen", "i8", (WINDOW // 64,)),  # a bit for each number in (highest − WINDOW, highest]
    ],
    align=True,
)
GAPS = np.dtype(
    [
        ("received", "i8"),
        ("closing", "i8"),
        ("unstamped", "i8"),
        ("untracked", "i8"),
        ("flows", "i8"),
        ("begun", "i8"),  # runs, those that have ended included
        ("past", RUN),  # the sums of those: lowest, end and the counts
        ("runs", "i8"),  # of `run` in use
        ("slots", "i4", (_SLOTS,)),  # the first of a flow's runs, + 1; 0: free
        ("run", RUN, (RUNS,)),
    ],
    align=True,
)
_SUMS = ("lowest", "end", "unique", "duplicated", "reordered", "too_late")


@jit
def _slot_of(slots, runs, flow):  # type: ignore[no-untyped-def]
    """The slot of a flow, or the free one where it would stand. Half of the slots are always free."""
    at = (flow * _GOLDEN & 0xFFFF_FFFF) >> _SLOT_SHIFT
    while slots[at] > 0 and runs[slots[at] - 1]["flow"] != flow:
        at = (at + 1) & (_SLOTS - 1)
    return at


@jit
def _most_silent(s, first):  # type: ignore[no-untyped-def]
    """Of a flow's runs: how many there are, and which, + 1, has been silent longest. first: as in _run_of."""
    count = 0
    silent = first
    at = first
    while at > 0:
        if s.run[at - 1].newest_ns < s.run[silent - 1].newest_ns:
            silent = at
        count += 1
        at = s.run[at - 1].older
    return count, silent


@jit
def _end(past, run):  # type: ignore[no-untyped-def]
    """Add the counts of a run to those of all that have ended, and empty it."""
    past.lowest += run.lowest
    past.end += max(run.end, run.highest + 1)
    past.unique += run.unique
    past.duplicated += run.duplicated
    past.reordered += run.reordered
    past.too_late += run.too_late
    run.end = 0
    run.unique = 0
    run.duplicated = 0
    run.reordered = 0
    run.too_late = 0
    run.seen[:] = 0


@jit
def _begin(s, slot, flow, sequence, time_ns):  # type: ignore[no-untyped-def]
    """A new run of a flow, before its packet `sequence`; its index + 1, or 0: no room.

    A flow that has RUNS_AT_ONCE, or finds the table full, gives up the one that has been silent longest.
    """
    first = np.int64(s.slots[slot])
    count, at = _most_silent(s, first)
    if count == RUNS_AT_ONCE or (count > 0 and s.runs == RUNS):
        _end(s.past, s.run[at - 1])
    elif s.runs == RUNS:
        return np.int64(0)
    else:
        s.runs += 1
        at = s.runs
        s.run[at - 1].older = first
        s.slots[slot] = at
    run = s.run[at - 1]
    run.flow = flow
    run.lowest = sequence
    run.highest = sequence - 1
    run.began_ns = time_ns
    run.newest_ns = time_ns
    s.begun += 1
    if count == 0:
        s.flows += 1
    return at


@jit
def _distance(run, sequence, time_ns):  # type: ignore[no-untyped-def]
    """How far a packet is from the highest of a run; _NOT_OF_IT if it can't be of this run.

    Within a run what is numbered higher is never scheduled earlier.
    """
    ahead = sequence - run.highest
    if time_ns == _NO_TIME:
        return abs(ahead) if ahead > -WINDOW else np.int64(_NOT_OF_IT)
    if time_ns <= run.newest_ns:
        # Ahead and yet earlier: that is how the tail looks behind its closing stamp, or a clock set back.
        return abs(ahead) if ahead <= 0 or time_ns == run.newest_ns else ahead + _LAST_RESORT
    return ahead if ahead > 0 and run.end == 0 else np.int64(_NOT_OF_IT)


@jit
def _run_of(s, first, sequence, time_ns):  # type: ignore[no-untyped-def]
    """The run, + 1, that a packet continues best; 0: none. first: the first run of its flow, + 1."""
    best = np.int64(0)
    least = np.int64(_NOT_OF_IT)
    at = first
    while at > 0:
        run = s.run[at - 1]
        distance = _distance(run, sequence, time_ns)
        if distance < least:
            best = at
            least = distance
        at = run.older
    return best


@jit
def _repeats(s, first, sent, at):  # type: ignore[no-untyped-def]
    """The run, + 1, that this closing stamp has closed before; else `at`, the run that it would fit.

    Unless that one began after the other was closed: a sender may send as many packets again.
    """
    began_ns = s.run[at - 1].began_ns if at > 0 else np.int64(_NO_TIME)
    candidate = first
    while candidate > 0:
        run = s.run[candidate - 1]
        if run.end == sent and run.newest_ns >= began_ns:
            return candidate
        candidate = np.int64(run.older)
    return at


@jit
def _word(sequence):  # type: ignore[no-untyped-def]
    """Which word of `seen` a number's bit is in: the bit of `sequence` replaces that of sequence − WINDOW."""
    return (sequence >> 6) & (WINDOW // 64 - 1)


@jit
def _bit(sequence):  # type: ignore[no-untyped-def]
    return np.int64(1) << (sequence & 63)


@jit
def _advance(run, sequence):  # type: ignore[no-untyped-def]
    """Make `sequence` the highest; it and those in between have not been seen."""
    if sequence - run.highest >= WINDOW:
        run.seen[:] = 0
    else:
        for unseen in range(run.highest + 1, sequence + 1):
            run.seen[_word(unseen)] &= ~_bit(unseen)
    run.highest = sequence


@jit
def _take(run, sequence):  # type: ignore[no-untyped-def]
    """Book one packet of a run."""
    if run.unique == 0:  # whatever a closing stamp told before
        run.lowest = sequence
        run.highest = sequence - 1
    behind = run.highest - sequence
    if behind >= WINDOW:
        run.too_late += 1
        return
    if behind < 0:
        _advance(run, sequence)
    elif run.seen[_word(sequence)] & _bit(sequence):
        run.duplicated += 1
        return
    else:
        run.reordered += 1
        run.lowest = min(run.lowest, sequence)
    run.seen[_word(sequence)] |= _bit(sequence)
    run.unique += 1


def _on_packet(s, payload, meta):  # type: ignore[no-untyped-def]
    stamp = payload_as(payload, STAMP)
    sequence = np.int64(-1)
    if payload.size >= CLOSING_BYTES and stamp.magic == MAGIC:
        sequence = np.int64(stamp.sequence)
    if not 0 <= sequence < _MAX_SEQUENCE:
        s.unstamped += 1
        return
    time_ns = stamp.scheduled_ns if payload.size >= _SCHEDULED_END else np.int64(_NO_TIME)
    flow = np.int64(stamp.flow) & _FLOW
    slot = _slot_of(s.slots, s.run, flow)
    first = np.int64(s.slots[slot])
    closes = stamp.flow & CLOSING != 0
    at = _run_of(s, first, sequence, time_ns)
    if closes:
        at = _repeats(s, first, sequence, at)
    if at == 0:
        at = _begin(s, slot, flow, sequence, time_ns)
    if at == 0:
        s.untracked += 1
        return
    run = s.run[at - 1]
    run.newest_ns = max(run.newest_ns, time_ns)
    if closes:
        s.closing += 1
        run.end = max(run.end, sequence)
    else:
        s.received += 1
        _take(run, sequence)


_each_packet = packet_loop(_on_packet, no_clock)


@callback(ON_BATCH)
def _on_batch(state, frames, count, arena):  # type: ignore[no-untyped-def]
    _each_packet(record_at(state, GAPS), frames, count, arena)
    return 0


def _start(state: Any, options: Options) -> None:
    takes_no_argument("gaps", options)
    if options.stamp != "rxring":
        raise Refused(f"gaps needs sequence numbers, and stamp {options.stamp} has none: use stamp rxring")


def _runs_of(state: Any, flow: int) -> list[int]:
    """Indices of a flow's runs, the latest first."""
    at = int(state["slots"][_slot_of.py_func(state["slots"], state["run"], flow)])
    found = []
    while at > 0:
        found.append(at - 1)
        at = int(state["run"][at - 1]["older"])
    return sorted(found, key=lambda i: -int(state["run"][i]["newest_ns"]))


def _merge(into: Any, other: Any) -> None:
    """Exact where no flow is in both.

    Two parts of one flow are taken for parts of the same runs, the latest of both first. What was reordered
    or late from one part to the other is then not known, nor a duplicate more than WINDOW apart.
    """
    for field in ("received", "closing", "unstamped", "untracked"):
        into[field] += other[field]
    for field in _SUMS:
        into["past"][field] += other["past"][field]
    into["begun"] += other["begun"] - other["runs"]
    for flow in dict.fromkeys(other["run"]["flow"][: other["runs"]].tolist()):
        here = _runs_of(into, flow)
        for i, there in enumerate(_runs_of(other, flow)):
            if i < len(here):
                _join(into["run"][here[i]], other["run"][there])
            else:
                _append(into, other["run"][there])


def _append(into: Any, run: Any) -> None:
    """Take over a run whose like is not there."""
    index = int(into["runs"])
    if index == RUNS:
        packets = sum(int(run[field]) for field in ("unique", "duplicated", "too_late"))
        into["received"] -= packets
        into["untracked"] += packets
        return
    slot = _slot_of.py_func(into["slots"], into["run"], int(run["flow"]))
    first = into["slots"][slot]
    into["run"][index] = run
    into["run"][index]["older"] = first
    into["slots"][slot] = into["runs"] = index + 1
    into["begun"] += 1
    into["flows"] += first == 0


def _join(into: Any, other: Any) -> None:
    """Make `into` the run that both are parts of."""
    highest = max(int(into["highest"]), int(other["highest"]))
    window = np.arange(highest - WINDOW + 1, highest + 1)
    mine, others = _seen(into, window), _seen(other, window)
    lowest = min(int(into["lowest"]), int(other["lowest"]))
    packets = int(into["unique"]) + int(other["unique"])
    unique = min(packets - int((mine & others).sum()), highest + 1 - lowest)
    into["duplicated"] += other["duplicated"] + packets - unique
    into["reordered"] += other["reordered"]
    into["too_late"] += other["too_late"]
    into["unique"], into["lowest"], into["highest"] = unique, lowest, highest
    into["began_ns"] = min(into["began_ns"], other["began_ns"])
    for field in ("end", "newest_ns"):
        into[field] = max(into[field], other[field])
    order = np.argsort(window & (WINDOW - 1))  # as the ring of bits has them
    bits = np.packbits((mine | others)[order], bitorder="little")
    into["seen"] = bits.view("<i8")


def _seen(run: Any, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these numbers has the run seen, as far as it knows?"""
    bits = run["seen"][_word.py_func(numbers)] >> (numbers & 63) & 1
    behind = run["highest"] - numbers
    known: NDArray[np.bool_] = (bits == 1) & (behind >= 0) & (behind < WINDOW)
    return known


def _report(state: Any) -> dict[str, Any]:
    """Counts of packets, summed over all runs of all flows.

    received (== those that arrived once, duplicated and too_late ones) + closing + unstamped + untracked
    (for which the table had no room) are all packets there were. restarted: runs after the first of a flow.
    """
    runs = state["run"][: state["runs"]]
    end = int(state["past"]["end"]) + sum(np.maximum(runs["end"], runs["highest"] + 1).tolist())
    total = {
        field: int(state["past"][field]) + sum(runs[field].tolist()) for field in _SUMS if field != "end"
    }
    return {
        "received": int(state["received"]),
        "lost": end - total["lowest"] - total["unique"],
        "duplicated": total["duplicated"],
        "reordered": total["reordered"],
        "too_late": total["too_late"],
        "before_first": total["lowest"],
        "flows": int(state["flows"]),
        "restarted": int(state["begun"] - state["flows"]),
        "closing": int(state["closing"]),
        "unstamped": int(state["unstamped"]),
        "untracked": int(state["untracked"]),
    }


handler = Handler(GAPS, on_batch=_on_batch, merge=_merge, report=_report, start=_start)
