"""The checks of the protocol, each run against a ring that is broken on purpose: it must fail.

A check that cannot fail proves nothing. So every fault that the protocol was built against is put into the
real code (tests/broken.py), and the test that guards against it, the very function of the suite, has to
notice. Of the orders that only another machine would show, every fence and every ordered load and store in
the code for aarch64 is taken away in turn.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import machine_code
import pytest
import test_barriers as barriers
import test_explorer
import test_interleavings as interleavings
import test_wait
from broken import Changes, break_, slow_writer
from machine_code import STEPS, Code
from slow_motion import Stepper
from test_explorer import Explorer
from test_interleavings import N, World

import rings
from rings import reader as reader_module
from rings import wait as wait_module
from rings import writer as writer_module
from rings.reader import Reader

Patch = pytest.MonkeyPatch


# The checks: functions of the suite, called as it calls them ----------------------------------------------


def _in_a_world(
    check: Callable[[World, Patch], None], *, sources: bool = False
) -> Callable[[str, Patch], None]:
    def run(name: str, monkeypatch: Patch) -> None:
        world = World(name, sources=sources)
        try:
            check(world, monkeypatch)
        finally:
            world.close()

    run.__name__ = check.__name__
    return run


_in_a_world_of_flows = functools.partial(_in_a_world, sources=True)


@_in_a_world
def a_skipper_polls(world: World, monkeypatch: Patch) -> None:
    interleavings.test_what_a_writer_does_during_a_skippers_poll_is_never_torn(world, N - 1, monkeypatch)


@_in_a_world
def a_skipper_is_lapped(world: World, monkeypatch: Patch) -> None:
    interleavings.test_what_a_writer_does_during_a_skippers_poll_is_never_torn(world, 3 * N, monkeypatch)


@_in_a_world_of_flows
def a_member_by_flow_polls(world: World, monkeypatch: Patch) -> None:
    interleavings.test_what_a_writer_does_while_a_member_looks_whose_frames_are(world, N - 1, monkeypatch)


@_in_a_world_of_flows
def a_member_by_flow_waits(world: World, monkeypatch: Patch) -> None:
    interleavings.test_what_a_writer_does_while_a_member_looks_whose_frames_are(world, 1, monkeypatch)


def a_sleep_on_two_rings_is_published_into(name: str, monkeypatch: Patch) -> None:
    worlds = [World(name, number=number) for number in range(2)]
    try:
        interleavings.test_a_publish_at_any_place_of_falling_asleep_on_two_rings(worlds, 1, monkeypatch)
    finally:
        for world in worlds:
            world.close()


@_in_a_world
def a_gate_joins(world: World, monkeypatch: Patch) -> None:
    interleavings.test_a_writer_while_somebody_joins(world, "gate", 30, monkeypatch)


@_in_a_world
def a_skipper_joins(world: World, monkeypatch: Patch) -> None:
    interleavings.test_a_writer_while_somebody_joins(world, "skip", 30, monkeypatch)


@_in_a_world
def a_dead_gate_comes_back(world: World, monkeypatch: Patch) -> None:
    interleavings.test_what_a_writer_does_while_a_dead_gate_comes_back(world, False, monkeypatch)


@_in_a_world
def a_gate_holds(world: World, monkeypatch: Patch) -> None:
    interleavings.test_a_gate_that_joins_or_releases_while_the_writer_writes(world, N - 1, monkeypatch)


@_in_a_world
def the_dead_are_evicted(world: World, monkeypatch: Patch) -> None:
    interleavings.test_a_join_in_the_middle_of_an_eviction(world, monkeypatch)


@_in_a_world
def a_publish_is_slept_into(world: World, monkeypatch: Patch) -> None:
    interleavings.test_falling_asleep_at_any_place_of_a_publish(world, monkeypatch)


@_in_a_world
def a_sleep_is_published_into(world: World, monkeypatch: Patch) -> None:
    interleavings.test_a_publish_at_any_place_of_falling_asleep(world, monkeypatch)


def a_skipper_polls_slowly_written(name: str, monkeypatch: Patch) -> None:
    slow_writer(monkeypatch, interleavings)
    a_skipper_polls(name, monkeypatch)


def a_gate_joins_slowly_written(name: str, monkeypatch: Patch) -> None:
    slow_writer(monkeypatch, interleavings)
    a_gate_joins(name, monkeypatch)


def _explored(scenario: Callable[[Explorer], None], frames: int) -> Callable[[str, Patch], None]:
    def run(name: str, monkeypatch: Patch) -> None:
        explorer = Explorer(name, monkeypatch, frames)
        try:
            scenario(explorer)
        finally:
            explorer.close()

    return run


@functools.partial(_explored, frames=2)
def a_member_passes(explorer: Explorer) -> None:
    test_explorer.test_a_member_passes_the_frames_of_another_while_they_come(explorer, "gate", 1, 1144)


def nobody_waits(name: str, monkeypatch: Patch) -> None:
    Stepper(monkeypatch, writer_module)
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        test_wait.test_nobody_waiting_costs_no_wake(ring)


def a_copy_is_passed(name: str, monkeypatch: Patch) -> None:
    field = importlib.import_module("field.test_torn_within_one_claim_of_a_lap")
    for passed in (1, 2, 3, 4):
        field.test_a_writer_passes_a_part_of_what_is_being_copied(f"{name}.{passed}", passed, monkeypatch)


# The faults -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    what: str
    owner: ModuleType | type
    function: str
    changes: Changes
    caught_by: Callable[[str, Patch], None]


LOOK = "overtaken = load_relaxed(r.writer + _FLOOR) - r.cursor"
SCANNED = "        if load_relaxed(r.writer + _FLOOR) > r.cursor:\n"
SCAN = "        ours = r.cursor\n"
PUBLISHED = "    store_release(w.writer + _PUBLISHED, head)  # pairs with the acquire in reader.poll\n"
CLEARED = "        store_relaxed_u32(w.waiting, 0)\n"
RAISED = "        fetch_add_u32(w.writer + _WAKE, 1)\n"
SAID = "    store_relaxed_u32(r.waiting, 1)\n    fence_seq_cst()  # pairs with the fence in writer._wake\n"
SAID_ALL = "        store_relaxed_u32(r.waiting, 1)\n"
LOOKED_AT_ALL = "        now_ns = monotonic_ns()\n"
EVICT = "evicted |= compare_and_swap(slot, word, word - _ACTIVE + _FREE)"

FAULTS = [
    Fault(
        "no look at the floor after the copy of the payload",
        *(reader_module, "_poll_copy", ((LOOK, "overtaken = 0"),), a_skipper_polls),
    ),
    Fault(
        "no look at the floor after the copy of the descriptors",
        *(reader_module, "_poll_copy", (("if load_relaxed(r.writer + _FLOOR) > r.cursor:", "if False:"),)),
        a_copy_is_passed,
    ),
    Fault(
        "after the copy a look at published, not at the floor",
        reader_module,
        "_poll_copy",
        ((LOOK, "overtaken = max(load_relaxed(r.writer + _PUBLISHED) + 1 - r.frames - r.cursor, 0)"),),
        a_skipper_polls,
    ),
    Fault(
        "wakes, then publishes, in every interleaving",
        *(writer_module, "publish", ((PUBLISHED + "    _wake(w)\n", "    _wake(w)\n" + PUBLISHED),)),
        _explored(test_explorer.test_two_fall_asleep_while_one_packet_is_published, 4),
    ),
    Fault(
        "a gap billed at each look",
        *(reader_module, "_skip_to_floor", (("            r.packets = number\n", ""),), a_skipper_is_lapped),
    ),
    Fault(
        "a gap within a copy billed as skipped, then as delivered",
        *(reader_module, "_poll_copy", (("            r.packets = number\n", ""),), a_skipper_polls),
    ),
    Fault(
        "no look at the floor after the number that is found there",
        *(reader_module, "number_at", ((" if load_relaxed(r.writer + _FLOOR) <= sequence else -1", ""),)),
        _explored(test_explorer.test_a_skipper_that_was_lapped_is_lapped_once_more, 2),
    ),
    Fault(
        "no look at the floor after the number that one joins with",
        *(reader_module, "number_at", ((" if load_relaxed(r.writer + _FLOOR) <= sequence else -1", ""),)),
        a_skipper_joins,
    ),
    Fault(
        "a member takes what comes when it has passed all there was",
        reader_module,
        "_pass_blocks",
        (("            return 0\n", "            return ((block + 1) << _BLOCK_SHIFT) - r.cursor\n"),),
        a_member_passes,
    ),
    Fault(
        "no look at the floor after the scan of the flows",
        *(reader_module, "_pass_flows", ((SCANNED, "        if False:\n"),), a_member_by_flow_polls),
    ),
    Fault(
        "a look at the floor before the scan of the flows",
        reader_module,
        "_pass_flows",
        (
            (SCAN, SCAN + "        overtaken = load_relaxed(r.writer + _FLOOR) > r.cursor\n"),
            (SCANNED, "        if overtaken:\n"),
        ),
        a_member_by_flow_polls,
    ),
    Fault(
        "a member by flow takes what is published after its scan",
        reader_module,
        "_pass_flows",
        (("return end - ours\n", "return load_acquire(r.writer + _PUBLISHED) - ours\n"),),
        a_member_by_flow_waits,
    ),
    Fault(
        "a member by flow takes what comes when it has passed all there was",
        reader_module,
        "_pass_flows",
        (("return end - ours\n", "return end - ours if end > ours else r.frames\n"),),
        a_member_by_flow_waits,
    ),
    Fault(
        "what a member by flow passes is counted as delivered",
        *(reader_module, "_pass_flows", (("r.passed +=", "r.delivered +="),), a_member_by_flow_polls),
    ),
    Fault(
        "one who came back works in place",
        reader_module,
        "activate",
        (("            r.protected = published\n", "            r.protected = 0\n"),),
        a_dead_gate_comes_back,
    ),
    Fault(
        "joins without loading published again",
        reader_module,
        "activate",
        (
            ("published = load_acquire(r.writer + _PUBLISHED)", "published = r.cursor"),
            ("number_at(r, published)", "load_relaxed(_descriptor(r, published))"),
        ),
        a_gate_joins,
    ),
    Fault(
        "joins by CAS, then locks",
        Reader,
        "_join",
        (
            (
                "            if locks.acquire(fd, LOCK_READER + index):\n                self._take(index)\n",
                "            self._take(index)\n            if locks.acquire(fd, LOCK_READER + index):\n",
            ),
        ),
        a_gate_joins,
    ),
    Fault(
        "evicts by a plain store",
        writer_module,
        "_evict_dead",
        ((EVICT, "store_relaxed(slot, word - _ACTIVE + _FREE)"),),
        the_dead_are_evicted,
    ),
    Fault(
        "evicts without asking for the lock",
        writer_module,
        "_evict_dead",
        ((" and not _is_locked(w.lock_fd, _LOCK_READER + i)", ""),),
        a_gate_holds,
    ),
    Fault(
        "infinity where nobody gates",
        writer_module,
        "_lowest_cursor",
        (("lowest = w.head", "lowest = 1 << 62"),),
        a_gate_joins_slowly_written,
    ),
    Fault(
        "the floor one frame too low",
        writer_module,
        "reserve",
        (("w.head + frames + 1 - w.frames", "w.head + frames - w.frames"),),
        a_skipper_polls_slowly_written,
    ),
    Fault(
        "wakes, then publishes",
        writer_module,
        "publish",
        ((PUBLISHED + "    _wake(w)\n", "    _wake(w)\n" + PUBLISHED),),
        a_publish_is_slept_into,
    ),
    Fault("waiting is not cleared", writer_module, "_wake", ((CLEARED, ""),), nobody_waits),
    Fault(
        "waiting is cleared after wake was raised",
        *(writer_module, "_wake", ((CLEARED + RAISED, RAISED + CLEARED),), a_publish_is_slept_into),
    ),
    Fault("wake is not raised", writer_module, "_wake", ((RAISED, ""),), a_publish_is_slept_into),
    Fault(
        "looks, then says that it sleeps",
        wait_module,
        "_sleep",
        (
            (SAID, ""),
            ("if timeout_ns > 0:\n", "if timeout_ns > 0:\n            store_relaxed_u32(r.waiting, 1)\n"),
        ),
        a_sleep_is_published_into,
    ),
    Fault(
        "looks at all rings, then says that it sleeps on them",
        wait_module,
        "_sleep_any",
        (
            (SAID_ALL, ""),
            (LOOKED_AT_ALL, "        for r in readers:\n    " + SAID_ALL + LOOKED_AT_ALL),
        ),
        a_sleep_on_two_rings_is_published_into,
    ),
    Fault(
        "says to the first ring alone that it sleeps",
        wait_module,
        "_sleep_any",
        ((SAID_ALL, SAID_ALL.replace("r.waiting", "readers[0].waiting")),),
        a_sleep_on_two_rings_is_published_into,
    ),
    Fault(
        "expects what a ring's word is after the look",
        wait_module,
        "_sleep_any",
        (
            (
                LOOKED_AT_ALL,
                "        for i in range(len(readers)):\n"
                "            waiters[i, 0] = load_acquire_u32(readers[i].writer + _WAKE)\n" + LOOKED_AT_ALL,
            ),
        ),
        a_sleep_on_two_rings_is_published_into,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_caught(fault: Fault, name: str, monkeypatch: Patch) -> None:
    break_(monkeypatch, fault.owner, fault.function, fault.changes)
    with pytest.raises(AssertionError):
        fault.caught_by(name, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"without {fault.what}")
def test_the_same_without_the_fault_passes(fault: Fault, name: str, monkeypatch: Patch) -> None:
    """So what was caught is the fault, not how it came in."""
    break_(monkeypatch, fault.owner, fault.function, ())
    fault.caught_by(name, monkeypatch)


# The orders -----------------------------------------------------------------------------------------------


def _rows(function: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a parametrised test, one after the other."""
    columns = []
    for mark in function.pytestmark:
        names, values = mark.args
        names = names.split(",") if isinstance(names, str) else names
        columns.append([dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in values])
    for row in itertools.product(*columns):
        yield {key: value for part in row for key, value in part.items()}


def _checks(machine: str, step: str) -> list[Callable[[], None]]:
    """All that test_barriers.py says of a step."""
    checks: list[Callable[[], None]] = []
    for name, function in vars(barriers).items():
        if name.startswith("test_") and function is not barriers.test_the_word_of_each_access_is_known:
            for row in _rows(function):
                if row["machine"] == machine and row.get("step", step) == step:
                    checks.append(lambda function=function, row=row: function(**row))
    return checks


def _instructions(text: str) -> list[int]:
    """The lines of an assembly text that `Code` takes for instructions."""
    lines = [" ".join(line.partition(" # ")[0].split()) for line in text.splitlines()]
    return [i for i, line in enumerate(lines) if line and line[0] not in ".#" and line[-1] != ":"]


WEAKER = {"ldar": "ldr", "ldapr": "ldr", "ldapur": "ldur", "stlr": "str", "stlur": "stur"}


def _text(machine: str, step: str) -> tuple[Code, list[str], list[int]]:
    """The code of a step, the lines of its text, and which of them are `code.lines[1:]`."""
    code, text = machine_code.code(machine, step), machine_code._all_assembly()[machine][step]
    lines, instructions = text.splitlines(), _instructions(text)
    assert [" ".join(lines[i].partition(" # ")[0].split()) for i in instructions] == code.lines[1:]
    return code, lines, instructions


def _orders(machine: str, step: str) -> dict[str, Code]:
    """The code of a step without one kind of order: a fence is gone, or an access made plain."""
    code, lines, instructions = _text(machine, step)
    without: dict[str, list[str]] = {}
    for place, line, does in zip(instructions, code.lines[1:], code.does[1:], strict=True):
        op, _, operands = line.partition(" ")
        if op == "dmb" or op in WEAKER:
            kind = next(w for w in sorted(does) if op == "dmb" or " acquire " in w or " release " in w)
            plain = "" if op == "dmb" else f"{WEAKER[op]} {operands}"
            without.setdefault(kind, list(lines))[place] = plain
    return {kind: Code(step, "\n".join(text), code.state, code.decode) for kind, text in without.items()}


def _catches(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


# A step holds copies of the steps it calls, whose orders are asked for where they are on their own.
CALLS = {
    "writer.reserve": ["writer._look"],
    "writer.append": ["writer.reserve", "writer._look", "writer.publish"],
    "reader.poll": ["reader._poll_copy", "reader.number_at", "reader._keep_account"],
    "reader._poll_copy": ["reader.poll", "reader.number_at", "reader._keep_account"],
    "reader._poll_entry": ["reader.poll", "reader._poll_copy", "reader.number_at", "reader._keep_account"],
    "reader.activate": ["reader.number_at", "reader._keep_account"],
    "reader._start_account": ["reader.number_at", "reader._keep_account"],
}
# What a wait saw is only a reason to poll, which loads it again, acquiring; and numba's array is its own.
NOT_NEEDED = {
    *itertools.product(("wait._sleep", "wait._sleep_any"), ("load acquire published", "load acquire state")),
    ("wait._sleep_any", "fence loads"),
}


def _missed(machine: str, step: str, monkeypatch: Patch) -> set[str]:
    """The kinds of orders of a step without which one of its checks fails."""
    missed, whole = set(), machine_code.code
    for kind, weaker in _orders(machine, step).items():
        with monkeypatch.context() as patch:
            patch.setattr(machine_code, "code", lambda m, s, it=weaker: it if s == step else whole(m, s))
            if any(_catches(check) for check in _checks(machine, step)):
                missed.add(kind)
    return missed


@pytest.mark.parametrize("machine", ["armv8", "neoverse"])
@pytest.mark.parametrize("step", STEPS)
def test_every_order_in_the_code_is_asked_for(machine: str, step: str, monkeypatch: Patch) -> None:
    """Whichever fence, acquire or release the code lacks, a row of test_barriers.py fails."""
    assert not any(_catches(check) for check in _checks(machine, step))
    kinds = set(_orders(machine, step))
    missed = _missed(machine, step, monkeypatch)
    for called in CALLS.get(step, []):
        missed |= _missed(machine, called, monkeypatch)
    assert kinds
    assert {kind for kind in kinds - missed if (step, kind) not in NOT_NEEDED} == set()


@pytest.mark.parametrize("machine", ["armv8", "neoverse"])
@pytest.mark.parametrize(
    ("step", "access"),
    [
        ("writer.reserve", "store floor"),
        ("writer.publish", "store published"),
        ("writer.set_state", "store state"),
        ("reader.number_at", "load descriptors"),
        ("reader._poll_copy", "call memmove"),
        ("reader.activate", "store word"),
        ("wait._sleep", "store waiting"),
        ("wait._sleep_any", "store waiting"),
    ],
)
def test_a_fence_before_what_it_should_follow_is_caught(
    machine: str, step: str, access: str, monkeypatch: Patch
) -> None:
    code, lines, instructions = _text(machine, step)
    at = code.having(access)[-1]
    fence = next(i for i in range(at, len(code.lines)) if code.lines[i].startswith("dmb"))
    lines.insert(instructions[at - 1], lines.pop(instructions[fence - 1]))
    moved = Code(step, "\n".join(lines), code.state, code.decode)
    monkeypatch.setattr(machine_code, "code", lambda *_: moved)
    assert any(_catches(check) for check in _checks(machine, step))
