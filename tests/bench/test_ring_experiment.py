"""The experiment `ring` in small: do its processes do what it says, and do they notice what is wrong?"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bench import native, ring
from bench.pinned import Pinned
from engine.errors import Failed
from rings.layout import DESCRIPTOR

FRAMES, BATCH = ring.SHAPES[""]
CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
compiler = pytest.mark.skipif(native.missing() != "", reason=native.missing())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@two_cpus
def test_descriptors_cross() -> None:
    count, seconds, wrong = ring._stream(FRAMES, BATCH, BATCH * 2000, CPUS[0], CPUS[1])
    assert (count, wrong) == (BATCH * 2000, 0)
    assert seconds > 0


@two_cpus
def test_descriptors_go_round() -> None:
    count, seconds, wrong = ring._trips(2000, CPUS[0], CPUS[1])
    assert (count, wrong) == (2000, 0)
    assert seconds > 0


@pytest.mark.parametrize("field", ["number", "time_ns", "offset", "length", "socket_ns", "segment", "flags"])
def test_a_wrong_descriptor_is_noticed(stack: ExitStack, field: str) -> None:
    writer, reader = ring._ring(stack, 0, FRAMES)
    ring.write_all(writer.record, BATCH, 2 * BATCH)
    at = writer.record[0]["descriptors"] - writer._memory.ctypes.data
    written = writer._memory[at:][: 2 * BATCH * DESCRIPTOR.itemsize].view(DESCRIPTOR)
    written[field][77] ^= np.array(1, written.dtype[field])
    wrong, elapsed_ns = ring.read_all(reader.record, 2 * BATCH)
    # A wrong offset or length can also cut a batch in two, but never hides itself.
    assert wrong == 1
    assert elapsed_ns > 0


@two_cpus
@compiler
def test_the_c_programs_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.program.cache_clear()
    count = BATCH * 2000
    assert native.run("ring", FRAMES, BATCH, count, *CPUS[:2])[::2] == [count, 0]
    for kind in ("raw", "ring"):
        assert native.run("pingpong", kind, 2000, *CPUS[:2])[::2] == [2000, 0]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"ring", "pingpong"}
    with pytest.raises(Failed, match="ring ended with 2"):
        native.run("ring")
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
