"""The experiment `halfring` in small: who reads how much at once, what is noticed, what is told."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from bench import halfring, ring
from rings.layout import DESCRIPTOR
from rings.reader import Reader
from rings.writer import Writer

CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="two CPUs are needed, this process may use only one")
FRAMES = 1024
ALL = FRAMES - halfring.BATCH  # what the writer can have there at once
Ends = tuple[Writer, Reader]


@pytest.fixture(params=["gate", "skip"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield ring._ring(stack, 0, FRAMES, policy=request.param)


@two_cpus
@pytest.mark.parametrize("way", halfring.WAYS)
@pytest.mark.parametrize(("most", "capped"), [(256, True), (ALL, True), (ALL, False)])
def test_each_way_reads_all(way: str, most: int, capped: bool) -> None:
    count = 64 * 1000
    found = halfring._figures(count, *halfring._read(FRAMES, way, most, capped, count, *CPUS[:2]))
    assert found["ok"]
    assert found["delivered"] > 0
    assert way == "skip" or found["skipped"] == 0
    assert found["frames_per_read"] <= most
    if capped:
        assert found["above_half"] == 0
    elif way == "whole":
        assert found["above_half"] > 0.9


def test_a_whole_ring_is_read_at_once_without_the_cap(ends: Ends) -> None:
    writer, reader = ends
    way = "skip" if reader.record[0]["protected"] else "whole"
    ring.write_all(writer.record, 64, ALL)
    wrong, delivered, skipped, reads, above, _ = halfring._run(reader, way, ALL, False, ALL)
    assert (wrong, delivered, skipped, reads, above) == (0, ALL, 0, 1, 1)


def test_half_of_it_with_the_cap(ends: Ends) -> None:
    writer, reader = ends
    way = "skip" if reader.record[0]["protected"] else "whole"
    ring.write_all(writer.record, 64, ALL)
    wrong, delivered, _, reads, above, _ = halfring._run(reader, way, ALL, True, ALL)
    assert (wrong, delivered, reads, above) == (0, ALL, 2, 0)


def test_batches_go_on_across_the_end_of_the_ring(ends: Ends) -> None:
    writer, reader = ends
    way = "skip" if reader.record[0]["protected"] else "spin"
    ring.write_all(writer.record, 64, 512)
    assert halfring._run(reader, way, 512, False, 512)[:2] == (0, 512)
    # Frames 512 … 1471, described as a stream that goes on.
    write_on(writer, ALL)
    wrong, delivered, _, _, _, _ = halfring._run(reader, way, ALL, False, 512 + ALL)
    assert (wrong, delivered) == (0, 512 + ALL)


def write_on(writer: Writer, count: int) -> None:
    """As ring.write_all, whose frames begin at 0: with the values of the frames at the head."""
    w = writer.record[0]
    head, frames, arena_bytes = int(w["head"]), int(w["frames"]), int(w["arena_bytes"])
    ring.write_all(writer.record, 64, count)
    at = w["descriptors"] - writer._memory.ctypes.data
    table = writer._memory[at:][: frames * DESCRIPTOR.itemsize].view(np.int64).reshape(frames, 4)
    n = np.arange(head, head + count)
    place = ((n * ring.LENGTH) & (arena_bytes - 1)) >> 4 | (ring.LENGTH << 32)
    table[n & (frames - 1)] = np.stack((n, n ^ 0x5555, place, n & 0xFFFF), axis=1)


@pytest.mark.parametrize("field", ["number", "time_ns", "offset", "length", "socket_ns", "segment", "flags"])
def test_a_wrong_descriptor_is_noticed(ends: Ends, field: str) -> None:
    writer, reader = ends
    way = "skip" if reader.record[0]["protected"] else "whole"
    ring.write_all(writer.record, 64, ALL)
    at = writer.record[0]["descriptors"] - writer._memory.ctypes.data
    frames = writer._memory[at:][: ALL * DESCRIPTOR.itemsize].view(DESCRIPTOR)
    frames[field][700] ^= np.array(1, frames.dtype[field])
    wrong, *rest = halfring._run(reader, way, ALL, False, ALL)
    assert wrong == 1
    assert not halfring._figures(ALL, wrong, *rest)["ok"]


@pytest.mark.parametrize(("delivered", "skipped"), [(90, 9), (90, 11)])
def test_what_does_not_add_up_is_wrong(delivered: int, skipped: int) -> None:
    assert halfring._figures(100, 0, 90, 10, 1, 0, 1)["ok"]
    assert not halfring._figures(100, 0, delivered, skipped, 1, 0, 1)["ok"]


# What the report tells ---------------------------------------------------------------------------------


def case(way: str, fraction: float, capped: bool, rates: list[float], above_half: float) -> dict[str, Any]:
    runs = [{"value": rate, "above_half": above_half, "frames_per_read": 512} for rate in rates]
    parameters = {"frames": FRAMES, "way": way, "fraction": fraction, "capped": capped}
    middle = sorted(rates)[len(rates) // 2]
    spread = {"median": middle, "min": min(rates), "max": max(rates)}
    return {"parameters": parameters, "runs": runs, **spread}


@pytest.mark.parametrize(
    ("way", "rates", "above_half", "said"),
    [
        ("whole", [60.0, 6.0, 55.0], 1.0, "the drop shows: without the cap 0.6 of"),
        ("whole", [95.0, 10.0, 90.0], 1.0, "the drop does not show: without the cap 0.95 of"),
        ("whole", [95.0, 10.0, 90.0], 1.0, "though 100 % of the reads"),
        ("spin", [95.0, 10.0, 90.0], 0.01, "it needs long reads, and only 1 % of the reads"),
        ("spin", [60.0, 6.0, 55.0], 0.0001, "lockstep needs long reads, and only 0.01 % of the reads"),
        ("skip", [60.0, 6.0, 55.0], 1.0, "lockstep is not possible"),
    ],
)
def test_verdicts(way: str, rates: list[float], above_half: float, said: str) -> None:
    """Round by round: in the second everything took ten times as long."""
    cases = [case(way, 1, True, [100.0, 10.0, 100.0], 0.0), case(way, 1, False, rates, above_half)]
    (verdict,) = halfring.verdicts(cases)
    assert verdict.startswith(f"{FRAMES} frames, {way}: ")
    assert said in verdict


def test_what_the_report_tells() -> None:
    cases = [case("whole", 0.5, True, [100.0, 90.0], 0.0), case("whole", 1, True, [100.0, 90.0], 0.0)]
    cases += [case("whole", 1, False, [50.0, 45.0], 1.0)]
    not_run = case("spin", 1, False, [1.0], 0.0) | {"median": None, "runs": []}
    drop, reads, beside = halfring.tell({"cases": [*cases, not_run]})
    assert drop.text[0].startswith(f"{FRAMES} frames, whole: the drop shows: without the cap 0.5 of")
    assert reads.table
    assert reads.table.rows[2] == ("1024", "whole", "1", "none", "50", "45 – 50", "512", "1")
    assert beside.table
    assert beside.table.rows == (
        ("1024", "half", "3.18", "1.00", "95", "1.00"),
        ("1024", "all, no cap", "1.49", "0.47", "47.5", "0.50"),
        ("1024", "all asked for, half got", "–", "–", "95", "1.00"),
    )
    pytest.importorskip("matplotlib")
    for section in (drop, reads):
        assert section.picture
        assert len(section.picture.draw().axes) == 1
    assert list(halfring.tell({"cases": [not_run]})) == []
