"""Case 12 (iceoryx "nexus#503"): the fences of a seqlock stood the wrong way round, and x86 hid it.

Here `floor` is the seqlock: the writer stores it, fences and only then overwrites; a reader copies, fences
and only then looks at it again. An x86 core keeps both orders without any fence. So what is checked is the
code for aarch64. All other steps of the protocol: tests/rings/test_barriers.py.
"""

from __future__ import annotations

import machine_code
import pytest

MACHINES = ["armv8", "neoverse"]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_writer_fences_between_the_floor_and_the_first_byte(machine: str) -> None:
    reserving = machine_code.code(machine, "writer.reserve")
    reserving.check("store floor", "fence full", "return")
    appending = machine_code.code(machine, "writer.append")
    for overwriting in ("call memmove", "store descriptors", "store release published"):
        appending.check("store floor", "fence full", overwriting)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_reader_fences_between_its_copy_and_the_second_look(machine: str) -> None:
    """Of descriptors and source records, then of the payload; and no copy is handed out without that look."""
    polling = machine_code.code(machine, "reader._poll_copy")
    assert polling.count("call memmove") == 3
    polling.check("call memmove", "fence loads", "load floor")
    polling.check("call memmove", "load floor", "return")
    numbering = machine_code.code(machine, "reader.number_at")
    numbering.check("load descriptors", "fence loads", "load floor")
    numbering.check("load descriptors", "load floor", "return")


def test_the_same_check_fails_where_fence_and_access_are_swapped() -> None:
    """On this code itself: each of its fences is needed."""
    code = machine_code.code("armv8", "reader.number_at")
    (fence,) = code.having("fence loads")
    without = machine_code.Code(
        code.step, "\n".join([*code.lines[1:fence], *code.lines[fence + 1 :]]), code.state, code.decode
    )
    with pytest.raises(AssertionError, match="from 'load descriptors' to 'load floor' without 'fence loads'"):
        without.check("load descriptors", "fence loads", "load floor")
