from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from ring_loops import put

import rings
from rings import RingError
from rings.batch import Batch
from rings.layout import ALIGN, DESCRIPTOR
from rings.reader import Reader
from rings.ring import Ring
from rings.writer import Writer


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=64, arena_bytes=1 << 16) as made:
        yield made


@pytest.fixture
def writer(ring: Ring) -> Writer:
    return ring.writer()


@pytest.fixture(params=["gate", "skip"])
def reader(ring: Ring, request: pytest.FixtureRequest) -> Iterator[Reader]:
    with ring.reader(policy=request.param) as attached:
        yield attached


def _put(writer: Writer, frames: list[bytes], segments: list[int] | None = None) -> None:
    data = np.frombuffer(b"".join(frames) + b"-", np.uint8)
    segments = segments or [0] * len(frames)
    assert put(writer.record, data, np.array([len(f) for f in frames]), np.array(segments))


def _poll(reader: Reader) -> Batch:
    batch = reader.poll()
    assert batch is not None
    return batch


def _address(array: Any) -> int:
    return int(array.ctypes.data)


def test_all_views_are_of_the_ring_itself_and_read_only(ring: Ring, writer: Writer) -> None:
    reader = ring.reader(name="gate")
    _put(writer, [b"a" * 100, b"b" * 100, b"c" * 100])
    batch = _poll(reader)
    memory = reader._memory
    for view in (batch.descriptors, batch.arena, batch.payload(1), batch.matrix):
        assert np.shares_memory(view, memory)
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            view.flags.writeable = True
    assert _address(batch.payload(1)) == _address(memory) + ring.geometry.arena + 112
    assert _address(batch.descriptors) == _address(memory) + ring.geometry.descriptors
    reader.close()


def test_a_skipping_readers_views_are_of_its_copy_and_read_only(ring: Ring, writer: Writer) -> None:
    reader = ring.reader(policy="skip")
    _put(writer, [b"a" * 100] * 3)
    batch = _poll(reader)
    for view in (batch.descriptors, batch.arena, batch.payload(1), batch.matrix):
        assert np.shares_memory(view, reader._copy)
        assert not np.shares_memory(view, reader._memory)
        assert not view.flags.writeable
    reader.close()


def test_descriptors(reader: Reader, writer: Writer) -> None:
    _put(writer, [b"a" * 7, b"", b"c" * 500], [0, 0, 100])
    batch = _poll(reader)
    d = batch.descriptors
    assert d.dtype == DESCRIPTOR
    assert d.shape == (3,)
    assert d["number"].tolist() == [0, 1, 2]
    assert d["length"].tolist() == [7, 0, 500]
    assert d["segment"].tolist() == [0, 0, 100]
    assert (batch.first, batch.frames, len(batch)) == (0, 3, 7)


def test_packets_of_gro_frames(reader: Reader, writer: Writer) -> None:
    _put(writer, [b"abcdefghij", b"", b"0123456", b"z"], [4, 5, 7, 9])
    batch = _poll(reader)
    got = [batch.payload(i).tobytes() for i in range(len(batch))]
    assert got == [b"abcd", b"efgh", b"ij", b"", b"0123456", b"z"]
    assert batch.packets["frame"].tolist() == [0, 0, 0, 1, 2, 3]
    assert batch.packets["length"].tolist() == [4, 4, 2, 0, 7, 1]
    assert batch.matrix is None


def test_a_uniform_batch_is_a_matrix(reader: Reader, writer: Writer) -> None:
    rows = [bytes([i]) * 100 for i in range(5)]
    _put(writer, rows)
    matrix = _poll(reader).matrix
    assert matrix is not None
    assert matrix.shape == (5, 100)
    assert matrix.strides == (112, 1)
    assert [row.tobytes() for row in matrix] == rows


def test_a_gro_frame_is_a_matrix_without_holes(reader: Reader, writer: Writer) -> None:
    _put(writer, [bytes(range(250)) * 2], [50])
    matrix = _poll(reader).matrix
    assert matrix is not None
    assert matrix.shape == (10, 50)
    assert matrix.strides == (50, 1)
    assert matrix.tobytes() == bytes(range(250)) * 2


@pytest.mark.parametrize(
    ("frames", "segments"),
    [
        ([b"a" * 10, b"b" * 11], None),
        ([b"a" * 10, b"b" * 10, b""], None),
        ([b"a" * 250], [100]),  # the last is shorter
        ([b"a" * 200, b"b" * 200], [50, 50]),  # alike, but with a hole between the frames
    ],
)
def test_what_is_not_uniform_is_no_matrix(
    reader: Reader, writer: Writer, frames: list[bytes], segments: list[int] | None
) -> None:
    _put(writer, frames, segments)
    assert _poll(reader).matrix is None


def test_two_gro_frames_that_leave_no_hole_are_one_matrix(reader: Reader, writer: Writer) -> None:
    _put(writer, [b"a" * 160, b"b" * 160], [32, 32])
    matrix = _poll(reader).matrix
    assert matrix is not None
    assert matrix.shape == (10, 32)


@pytest.mark.parametrize("count", [1, 5])
def test_empty_packets_are_packets(reader: Reader, writer: Writer, count: int) -> None:
    _put(writer, [b""] * count)
    batch = _poll(reader)
    assert len(batch) == count
    assert [batch.payload(i).size for i in range(count)] == [0] * count
    matrix = batch.matrix
    assert matrix is not None
    assert matrix.shape == (count, 0)


def test_a_packet_that_is_not_there(reader: Reader, writer: Writer) -> None:
    _put(writer, [b"a"])
    batch = _poll(reader)
    with pytest.raises(IndexError):
        batch.payload(1)


frames = st.lists(st.tuples(st.binary(max_size=200), st.integers(0, 60)), min_size=1, max_size=8)


@pytest.mark.parametrize("policy", ["gate", "skip"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=frames)
def test_any_batch_is_cut_as_the_kernel_glued_it(
    ring: Ring, policy: str, frames: list[tuple[bytes, int]]
) -> None:
    with ring.writer() as writer, ring.reader(name=policy, policy=policy) as reader:
        joined = ring.published()[1]
        _put(writer, [f for f, _ in frames], [s for _, s in frames])
        got: list[bytes] = []
        for batch in iter(reader.poll, None):
            packets = [batch.payload(i).tobytes() for i in range(len(batch))]
            assert batch.packets["offset"][0] == 0
            matrix = batch.matrix
            if matrix is not None:
                assert [row.tobytes() for row in matrix] == packets
            got += packets
            if batch.first + batch.frames == ring.published()[0]:
                break
        wanted = []
        for payload, segment in frames:
            step = segment or max(len(payload), 1)
            wanted += [payload[i : i + step] for i in range(0, max(len(payload), 1), step)]
        assert got == wanted
        assert len(wanted) == ring.published()[1] - joined


# The end of a batch -----------------------------------------------------------------------------------


def test_an_ended_batch_says_so(reader: Reader, writer: Writer) -> None:
    _put(writer, [b"a"])
    batch = _poll(reader)
    assert reader.poll() is None
    for use in (
        lambda: batch.descriptors,
        lambda: batch.packets,
        lambda: batch.arena,
        lambda: batch.matrix,
        lambda: batch.payload(0),
        lambda: len(batch),
        lambda: batch.release(1),
    ):
        with pytest.raises(RingError, match="this batch has ended: copy what you keep"):
            use()


@pytest.mark.parametrize("how", ["poll", "next", "close"])
def test_any_step_of_the_reader_ends_it(reader: Reader, writer: Writer, how: str) -> None:
    _put(writer, [b"a"])
    batch = _poll(reader)
    _put(writer, [b"b"])
    {"poll": reader.poll, "next": lambda: next(reader), "close": reader.close}[how]()
    with pytest.raises(RingError, match="has ended"):
        len(batch)


def test_intact_until_the_writer_comes(ring: Ring, writer: Writer) -> None:
    reader = ring.reader(name="gate")
    _put(writer, [b"first"])
    batch = _poll(reader)
    view = batch.payload(0)
    assert reader.poll() is None
    while batch.intact:
        assert view.tobytes() == b"first"
        _put(writer, [b"x" * 1000])
        reader.poll()
    assert int(ring.counters["floor"]) > batch.first
    reader.close()


def test_not_intact_once_its_first_frames_are_released_and_overwritten(ring: Ring, writer: Writer) -> None:
    reader = ring.reader(name="gate")
    _put(writer, [b"a" * 1000] * 30)
    batch = _poll(reader)
    batch.release(10)
    assert batch.intact
    for _ in range(40):
        _put(writer, [b"b" * 1000])
    assert int(ring.counters["floor"]) > batch.first
    assert not batch.intact
    reader.close()


def test_a_copy_is_intact_until_the_next_step(ring: Ring, writer: Writer) -> None:
    reader = ring.reader(policy="skip")
    _put(writer, [b"first"])
    batch = _poll(reader)
    view = batch.payload(0)
    for _ in range(200):
        _put(writer, [b"x" * 1000])
    assert batch.intact
    assert view.tobytes() == b"first"
    reader.poll()
    assert not batch.intact
    reader.close()


def test_intact_can_be_asked_when_all_is_closed(ring: Ring, writer: Writer) -> None:
    reader = ring.reader(name="gate")
    _put(writer, [b"a"])
    batch = _poll(reader)
    view = batch.payload(0)
    reader.close()
    assert batch.intact
    writer.close()
    ring.close()
    assert batch.intact
    assert view.tobytes() == b"a"


# Release ahead of the end -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[], [0], [1, 2], [3, 3, 1], [5], [99], [2, 99]])
def test_released_in_steps(ring: Ring, reader: Reader, writer: Writer, steps: list[int]) -> None:
    _put(writer, [bytes([i]) * 50 for i in range(5)], [0, 20, 0, 20, 0])
    packets = [1, 3, 1, 3, 1]
    batch = _poll(reader)
    done = 0
    for upto in steps:
        batch.release(upto)
        done = max(done, min(upto, 5))
        (info,) = ring.readers()
        assert info.cursor == done
        assert info.delivered == sum(packets[:done])
        assert batch.payload(len(batch) - 1).tobytes() == bytes([4]) * 50
    reader.poll()
    (info,) = ring.readers()
    assert (info.cursor, info.delivered, info.unread) == (5, 9, 0)


def test_offsets_are_aligned(reader: Reader, writer: Writer) -> None:
    _put(writer, [b"a", b"b" * 17, b"c"])
    batch = _poll(reader)
    assert batch.packets["offset"].tolist() == [0, ALIGN, 3 * ALIGN]


def test_iterating_gives_the_payloads_of_all_packets_while_the_batch_lives(name: str) -> None:
    payloads = [b"", b"a", bytes(range(200)), b"", b"zz"]
    with rings.create(name, frames=16, arena_bytes=4096) as ring, ring.writer() as writer:
        reader = ring.reader()
        for payload in payloads:
            writer.write(payload)
        batch = reader.poll()
        assert batch is not None
        assert [payload.tobytes() for payload in batch] == payloads
        iterator = iter(batch)
        next(iterator)
        reader.poll()
        with pytest.raises(RingError, match="this batch has ended"):
            next(iterator)
        reader.close()
