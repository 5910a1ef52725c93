"""The compiled code of each protocol step, for aarch64, keeps the order that the step relies on.

A run cannot tell: x86 keeps all orders by itself but that of a store and a later load, and an aarch64 core
reorders only now and then. So the code is read: docs/ring.md's table of orderings, row by row. Where a
sequentially consistent fence is asked for, x86-64 needs one, too.
"""

from __future__ import annotations

import machine_code
import pytest
from machine_code import STEPS, Code

ARM = ["armv8", "neoverse"]
ALL = [*ARM, "x86"]
OWN_MEMORY = {"__errno_location", "NRT_MemInfo_alloc_aligned", "NRT_MemInfo_call_dtor"}


@pytest.mark.parametrize("machine", ALL)
@pytest.mark.parametrize("step", STEPS)
def test_the_word_of_each_access_is_known(machine: str, step: str) -> None:
    """Otherwise what follows might overlook one. All that a step calls is the C library's, or numba's
    for an array of its own."""
    code = machine_code.code(machine, step)
    done = {what for line in code.does for what in line}
    assert not {what for what in done if what.endswith("?")}
    called = {what.removeprefix("call ") for what in done if what.startswith("call ")}
    assert called <= {"memmove", "fcntl", "clock_gettime", "nanosleep", "syscall", *OWN_MEMORY}
    assert code.reaches("entry", "return")


# A store, then a load of another word: every machine needs a full fence ------------------------------------


@pytest.mark.parametrize("machine", ALL)
@pytest.mark.parametrize(
    ("step", "stored", "looked_at"),
    [
        ("writer.publish", "store published", "load waiting"),
        ("writer.append", "store published", "load waiting"),
        ("writer.set_state", "store state", "load waiting"),
        ("writer._wake", "entry", "load waiting"),
        ("wait._sleep", "store waiting", "load published"),
        ("wait._sleep", "store waiting", "load state"),
        ("wait._sleep_any", "store waiting", "load published"),
        ("wait._sleep_any", "store waiting", "load state"),
        ("writer._look", "entry", "load slots"),  # `published` was stored by the last publish
        ("writer.reserve", "entry", "load slots"),
        ("reader.activate", "store word", "load published"),
    ],
)
def test_a_full_fence_between_a_store_and_the_look_for_the_other_side(
    machine: str, step: str, stored: str, looked_at: str
) -> None:
    machine_code.code(machine, step).check(stored, "fence full", looked_at)


# Stores, then the store that publishes them ----------------------------------------------------------------


@pytest.mark.parametrize("machine", ARM)
@pytest.mark.parametrize(
    ("step", "before", "releasing"),
    [
        ("writer.publish", "store descriptors", "store release published"),
        ("writer.publish", "store packets", "store release published"),
        ("writer.append", "store descriptors", "store release published"),
        ("writer.append", "call memmove", "store release published"),
        ("reader._keep_account", "store slot", "store release cursor"),
        ("reader.release", "store slot", "store release cursor"),
        ("reader._poll_copy", "store slot", "store release cursor"),
    ],
)
def test_what_a_release_store_publishes_stands_before_it(
    machine: str, step: str, before: str, releasing: str
) -> None:
    code = machine_code.code(machine, step)
    code.check(before, releasing, "return")
    _always(code, releasing)


@pytest.mark.parametrize("machine", ARM)
@pytest.mark.parametrize(
    ("step", "releasing"),
    [("writer.set_state", "store release state"), ("reader.activate", "store release word")],
)
def test_a_release_store_that_publishes_what_was_done_before_the_step(
    machine: str, step: str, releasing: str
) -> None:
    code = machine_code.code(machine, step)
    code.check("entry", releasing, "fence full")
    _always(code, releasing)


def _always(code: Code, ordered: str) -> None:
    """No access to that word is without its order."""
    kind, _, word = ordered.split()
    assert code.count(ordered) == code.count(f"{kind} {word}") > 0


# The load that takes over what was published, then loads of it ---------------------------------------------


@pytest.mark.parametrize("machine", ARM)
@pytest.mark.parametrize(
    ("step", "acquiring", "then"),
    [
        ("reader.poll", "load acquire published", "return"),
        ("reader._poll_copy", "load acquire published", "call memmove"),
        ("reader._poll_copy", "load acquire published", "load copied_descriptors"),
        ("reader._start_account", "load acquire published", "load descriptors"),
        ("reader.activate", "load acquire published", "load descriptors"),
        ("reader.is_closed", "load acquire state", "return"),
        ("reader._poll_entry", "load acquire state", "load acquire published"),
        ("writer._look", "load acquire slots", "atomic slots"),
        ("wait._sleep", "load acquire wake", "store waiting"),
        ("wait._sleep_any", "load acquire wake", "store waiting"),
    ],
)
def test_an_acquire_load_stands_before_what_it_allows(
    machine: str, step: str, acquiring: str, then: str
) -> None:
    code = machine_code.code(machine, step)
    code.check("entry", acquiring, then)
    _always(code, acquiring)


@pytest.mark.parametrize("machine", ARM)
@pytest.mark.parametrize("step", ["reader.poll", "reader._poll_entry"])
def test_a_descriptor_is_loaded_only_after_its_sequence_was_seen_as_published(
    machine: str, step: str
) -> None:
    """By `published`, or by a floor, which is never beyond it."""
    code = machine_code.code(machine, step)
    code.check("entry", "load acquire published or load acquire floor", "load descriptors")
    assert code.count("load acquire published") == code.count("load published")


# The floor: a seqlock's two sides --------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ARM)
@pytest.mark.parametrize(
    ("step", "then"),
    [("writer.reserve", "return"), ("writer.append", "call memmove"), ("writer.append", "store descriptors")],
)
def test_the_floor_is_stored_then_fenced_then_written_over(machine: str, step: str, then: str) -> None:
    machine_code.code(machine, step).check("store floor", "fence full", then)


@pytest.mark.parametrize("machine", ARM)
@pytest.mark.parametrize(
    ("step", "read"),
    [
        ("reader.number_at", "load descriptors"),
        ("reader.activate", "load descriptors"),
        ("reader._poll_copy", "load descriptors"),
        ("reader._poll_copy", "call memmove"),
    ],
)
def test_what_was_copied_is_fenced_before_the_floor_is_looked_at_again(
    machine: str, step: str, read: str
) -> None:
    code = machine_code.code(machine, step)
    code.check(read, "fence loads", "load floor")
    code.check(read, "load floor", "return")


# The account: the record that was valid is not touched before the other is ---------------------------------


@pytest.mark.parametrize("machine", ARM)
def test_the_idle_record_is_filled_after_the_last_cursor_was_stored(machine: str) -> None:
    for step in ("reader._keep_account", "reader.release"):
        machine_code.code(machine, step).check("entry", "fence full", "store slot")
    for step in ("reader._start_account", "reader._poll_copy"):
        code = machine_code.code(machine, step)
        code.check("store cursor", "fence full", "store slot")


@pytest.mark.parametrize("machine", ALL)
def test_waiting_is_cleared_before_wake_is_raised(machine: str) -> None:
    code = machine_code.code(machine, "writer._wake")
    code.check("load waiting", "store waiting", "atomic wake")
    code.check("store waiting", "atomic wake", "call syscall")
