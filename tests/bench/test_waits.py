"""The experiment `waits` in small: latencies are those of the frames, and a wrong frame is noticed."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from bench import native, ring, waits
from rings.layout import DESCRIPTOR
from rings.libc import monotonic_ns
from rings.reader import Reader
from rings.wait import SPIN, STRATEGIES
from rings.writer import Writer

CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
COUNT, PERIOD_NS = 200, 100_000


@pytest.fixture
def ends() -> Iterator[tuple[Writer, Reader]]:
    with ExitStack() as stack:
        yield ring._ring(stack, 0, waits.FRAMES)


def described(writer: Writer, count: int) -> Any:
    at = writer.record[0]["descriptors"] - writer._memory.ctypes.data
    return writer._memory[at:][: count * DESCRIPTOR.itemsize].view(DESCRIPTOR)


def check(figures: waits.Figures) -> None:
    assert figures["ok"]
    assert 0 < figures["value"] <= figures["p99_us"] <= figures["max_us"]
    assert figures["writer_cpu_ns"] > 0
    assert figures["reader_cpu_ns"] > 0


@two_cpus
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_hands_over(strategy: str) -> None:
    check(waits._figures(PERIOD_NS, *waits._hand_over(strategy, COUNT, PERIOD_NS, *CPUS[:2])))


@two_cpus
@pytest.mark.skipif(native.missing() != "", reason=native.missing())
@pytest.mark.parametrize("kind", ["word", "futex"])
def test_c_hands_over(kind: str) -> None:
    check(waits._figures(PERIOD_NS, *native.run("handover", kind, COUNT, PERIOD_NS, *CPUS[:2])))


@two_cpus
def test_a_sleeper_takes_less_cpu_time_than_a_spinner() -> None:
    """The CPU time is that of the thread, not the time that passed."""
    period_ns = 5_000_000
    found = {way: waits._hand_over(way, 20, period_ns, *CPUS[:2]) for way in ("block", "spin")}
    block, spin = (waits._figures(period_ns, *found[way])["reader_cpu_ns"] for way in ("block", "spin"))
    assert block < spin / 2


def test_a_latency_is_from_the_write_to_the_reader(ends: tuple[Writer, Reader]) -> None:
    writer, reader = ends
    waits.publish_paced(writer.record, 3, 1_000_000)
    written_ns = described(writer, 3)["time_ns"]
    latencies_ns = np.zeros(3, np.int64)
    before_ns = monotonic_ns()
    wrong, _ = waits.take_paced(reader.record, SPIN, latencies_ns)
    taken_ns = written_ns + latencies_ns
    assert wrong == 0
    assert len(set(written_ns.tolist())) == 3
    assert np.all((before_ns <= taken_ns) & (taken_ns <= monotonic_ns()))


@pytest.mark.parametrize("field", ["number", "time_ns", "offset", "length", "socket_ns", "segment", "flags"])
def test_a_wrong_frame_is_noticed(ends: tuple[Writer, Reader], field: str) -> None:
    writer, reader = ends
    waits.publish_paced(writer.record, 10, 1000)
    frames = described(writer, 10)
    if field == "time_ns":
        frames[field][5] = monotonic_ns() + 10**12  # it comes before it was written
    else:
        frames[field][5] ^= np.array(1, frames.dtype[field])
    wrong, _ = waits.take_paced(reader.record, SPIN, np.zeros(10, np.int64))
    assert wrong == 1
    assert not waits._figures(1000, 10, 1, 1, 1, wrong, 1, 1)["ok"]
