"""The experiment `ring` in small: do its processes do what it says, and do they notice what is wrong?"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import native, ring
from bench.pinned import Pinned
from engine.errors import Failed
from rings.layout import DESCRIPTOR
from rings.wait import SPIN
from rings.writer import Writer

FRAMES, BATCH = ring.SHAPES[""]
CPUS = sorted(os.sched_getaffinity(0))
FIELDS = ["number", "time_ns", "offset", "length", "socket_ns", "segment", "flags"]
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
compiler = pytest.mark.skipif(native.missing() != "", reason=native.missing())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def described(writer: Writer) -> Any:
    """The descriptors of the ring, to be spoilt."""
    at = writer.record[0]["descriptors"] - writer._memory.ctypes.data
    return writer._memory[at:][: int(writer.record[0]["frames"]) * DESCRIPTOR.itemsize].view(DESCRIPTOR)


@two_cpus
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_descriptors_cross(readers: int) -> None:
    writer_cpu, reader_cpus, shared = ring._places(readers)
    assert len(reader_cpus) == readers
    assert shared == (len({writer_cpu, *reader_cpus}) <= readers)
    count, seconds, wrong = ring._stream(FRAMES, BATCH, BATCH * 2000, writer_cpu, reader_cpus)
    assert (count, wrong) == (BATCH * 2000, 0)
    assert seconds > 0


@two_cpus
@pytest.mark.parametrize("payload", [False, True])
def test_frames_go_round(payload: bool) -> None:
    count, seconds, wrong = ring._trips(2000, payload, CPUS[0], CPUS[1])
    assert (count, wrong) == (2000, 0)
    assert seconds > 0


@two_cpus
@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("size", ring.PAYLOADS)
def test_payloads_cross(size: int, policy: str) -> None:
    count = 20_000
    found = ring._payload_rate(size, *ring._payloads(size, 64, 64 * (count // 64), policy, CPUS[0], CPUS[1]))
    assert found["ok"]
    assert found["wrong"] == 0
    assert found["delivered"] > 0
    assert policy == "skip" or found["skipped"] == 0


def test_publishing_alone() -> None:
    count, seconds, wrong = ring._alone(FRAMES * 3, CPUS[0])
    assert (count, wrong) == (FRAMES * 3, 0)
    assert seconds > 0


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_descriptor_is_noticed(stack: ExitStack, field: str) -> None:
    writer, reader = ring._ring(stack, 0, FRAMES)
    ring.write_all(writer.record, BATCH, 2 * BATCH)
    written = described(writer)
    written[field][77] ^= np.array(1, written.dtype[field])
    assert ring.count_wrong(writer.record[0]) == 1
    wrong, elapsed_ns = ring.read_all(reader.record, 2 * BATCH, SPIN)
    # A wrong offset or length can also cut a batch in two, but never hides itself.
    assert wrong == 1
    assert elapsed_ns > 0


@pytest.mark.parametrize("policy", ["gate", "skip"])
@pytest.mark.parametrize("field", [*FIELDS, "first byte", "last byte", "payload of the last lap"])
def test_a_wrong_payload_is_noticed(stack: ExitStack, field: str, policy: str) -> None:
    size = 100
    source, sums = ring.make_payloads(size)
    writer, reader = ring._ring(stack, 0, FRAMES, ring.ARENA, policy)
    ring.write_payloads(writer.record, BATCH, 2 * BATCH, source, size)
    written = described(writer)
    at = writer.record[0]["arena"] - writer._memory.ctypes.data + int(written["offset"][77]) * 16
    payload = writer._memory[at : at + size]
    if field == "payload of the last lap":
        payload[:] = source[(77 - FRAMES) % ring.KINDS]
    elif field in FIELDS:
        written[field][77] ^= np.array(1, written.dtype[field])
    else:
        payload[0 if field == "first byte" else -1] ^= 1
    wrong, delivered, skipped, elapsed_ns = ring.read_payloads(reader.record, 2 * BATCH, sums, size)
    assert wrong == 1
    assert (delivered, skipped) == (2 * BATCH, 0) or field == "number"
    assert elapsed_ns > 0


@pytest.mark.parametrize(("delivered", "skipped", "wrong"), [(90, 9, 0), (90, 11, 0), (90, 10, 1)])
def test_what_does_not_add_up_is_wrong(delivered: int, skipped: int, wrong: int) -> None:
    assert ring._payload_rate(100, 100, 1.0, 0, 90, 10)["ok"]
    assert not ring._payload_rate(100, 100, 1.0, wrong, delivered, skipped)["ok"]


@two_cpus
@compiler
def test_the_c_programs_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.program.cache_clear()
    count = BATCH * 2000
    for readers in (1, 3):
        writer_cpu, reader_cpus, _ = ring._places(readers)
        assert native.run("ring", FRAMES, BATCH, count, writer_cpu, *reader_cpus)[::2] == [count, 0]
    for kind in ("raw", "ring", "protocol", "payload"):
        assert native.run("pingpong", kind, 2000, *CPUS[:2])[::2] == [2000, 0]
    for size, frames in ring.PAYLOADS.items():
        assert native.run("payload", frames, ring.ARENA, 64, 64 * 500, size, *CPUS[:2])[::2] == [64 * 500, 0]
    assert native.run("publish", FRAMES, ring.ARENA, 3 * FRAMES, 128, CPUS[0])[::2] == [3 * FRAMES, 0]
    programs = {"ring", "pingpong", "payload", "publish"}
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == programs
    for program in programs:
        with pytest.raises(Failed, match=f"{program} ended with 2"):
            native.run(program)
    native.program.cache_clear()


@compiler
def test_a_cpu_that_is_not_there_fails() -> None:
    with pytest.raises(Failed, match="pingpong ended with 2: sched_setaffinity"):
        native.run("pingpong", "raw", 10, CPUS[0], 1023)


def test_a_function_in_a_process_of_its_own() -> None:
    before = os.sched_getaffinity(0)
    pid, cpus = Pinned(CPUS[-1], lambda: (os.getpid(), os.sched_getaffinity(0))).result()
    assert pid != os.getpid()
    assert cpus == {CPUS[-1]}
    assert os.sched_getaffinity(0) == before


def test_what_it_raises_is_told() -> None:
    with pytest.raises(Failed, match="ended with 1: ZeroDivisionError: division by zero"):
        Pinned(CPUS[0], lambda: 1 / 0).result()


BROKEN = [  # program, its arguments, and what to break in which file
    ("ring", (FRAMES, 64, 64_000, *CPUS[:2]), "ring.c", "= describe(n, frames)", "= describe(n ^ 1, frames)"),
    (
        "payload",
        (FRAMES, ring.ARENA, 64, 64_000, 100, *CPUS[:2]),
        "protocol.h",
        "payload, size);",
        "payload, size - 1);",
    ),
    (
        "payload",
        (FRAMES, ring.ARENA, 64, 64_000, 100, *CPUS[:2]),
        "payload.c",
        "(w, i, position, size, payloads[kind])",
        "(w, i, position, size, payloads[0])",
    ),
    ("publish", (FRAMES, ring.ARENA, 64_000, 128, CPUS[0]), "protocol.h", "n & 0xffff};", "n & 0xfff};"),
    (
        "pingpong",
        ("ring", 1000, *CPUS[:2]),
        "pingpong.c",
        "= describe(n, FRAMES)",
        "= describe(n + 1, FRAMES)",
    ),
    ("pingpong", ("payload", 1000, *CPUS[:2]), "protocol.h", "if (payload)", "if (0)"),
]


@two_cpus
@compiler
@pytest.mark.parametrize(("program", "arguments", "file", "right", "broken"), BROKEN)
def test_a_broken_c_program_notices_itself(
    program: str,
    arguments: tuple[str | int, ...],
    file: str,
    right: str,
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(native._HERE, tmp_path / "native")
    source = tmp_path / "native" / file
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, broken))
    monkeypatch.setattr(native, "_HERE", tmp_path / "native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.program.cache_clear()
    assert native.run(program, *arguments)[2] > 0
    native.program.cache_clear()
