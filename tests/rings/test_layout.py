from __future__ import annotations

import itertools
from enum import IntEnum

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rings import layout
from rings.layout import (
    ACCOUNT,
    ALIGN,
    DESCRIPTOR,
    HEADER,
    LINE,
    LOCK_READER,
    MAX_ARENA_BYTES,
    MAX_FRAMES,
    MAX_READERS,
    PAGE,
    READER,
    SOURCE,
    WRITER,
    Geometry,
    Policy,
    SlotState,
    round_up,
    slot_word,
)

powers = st.integers(1, 32).map(lambda k: 1 << k)
geometries = st.builds(
    Geometry,
    frames=powers,
    arena_bytes=st.integers(5, 36).map(lambda k: 1 << k),
    readers=st.integers(1, MAX_READERS),
    sources=st.booleans(),
)


@given(geometries)
def test_sections_follow_each_other_and_begin_on_pages(geometry: Geometry) -> None:
    sections = [
        (0, HEADER.itemsize),
        (geometry.writer, WRITER.itemsize),
        (geometry.waiting, LINE),
        (geometry.slots, geometry.readers * READER.itemsize),
        (geometry.descriptors, geometry.frames * DESCRIPTOR.itemsize),
        (geometry.source_records, geometry.frames * SOURCE.itemsize if geometry.sources else 0),
        (geometry.arena, geometry.arena_bytes),
        (geometry.total_bytes, 0),
    ]
    for (begin, size), (next_, _) in itertools.pairwise(sections):
        assert begin + size <= next_
    # What readers may write is mapped apart, and descriptors never straddle two rights.
    for begin in (
        geometry.writer,
        geometry.waiting,
        geometry.descriptors,
        geometry.source_records,
        geometry.arena,
    ):
        assert begin % PAGE == 0
    assert geometry.total_bytes % PAGE == 0


def test_words_of_different_processes_stand_two_cache_lines_apart() -> None:
    published, floor, wake, epoch, packets = layout.offsets(
        WRITER, "published", "floor", "wake", "epoch", "packets"
    )
    for one, other in itertools.combinations((published, floor, wake, epoch, packets), 2):
        assert abs(one - other) >= LINE
    word, cursor, accounts = layout.offsets(READER, "word", "cursor", "accounts")
    assert min(cursor - word, accounts - cursor, READER.itemsize - accounts) >= LINE
    assert READER.itemsize % LINE == 0
    assert Geometry(2, 32).slots % LINE == 0


@pytest.mark.parametrize("dtype", [HEADER, WRITER, READER, ACCOUNT, DESCRIPTOR, SOURCE])
def test_fields_do_not_overlap_and_words_are_aligned(dtype: np.dtype[np.void]) -> None:
    assert dtype.fields is not None
    places = sorted((at, at + kind.itemsize) for kind, at in dtype.fields.values())
    for (_, end), (begin, _) in itertools.pairwise(places):
        assert end <= begin
    assert places[-1][1] <= dtype.itemsize
    for kind, at in dtype.fields.values():
        if kind.base.kind in "iu":
            assert at % kind.base.itemsize == 0


def test_a_descriptor_is_32_bytes_and_two_share_a_cache_line() -> None:
    assert DESCRIPTOR.itemsize == SOURCE.itemsize == 32


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((0, 4096), "frames"),
        ((1, 4096), "frames"),
        ((3, 4096), "frames"),
        ((-4, 4096), "frames"),
        ((MAX_FRAMES * 2, 4096), "frames"),
        ((4, 16), "arena_bytes"),
        ((4, 4095), "arena_bytes"),
        ((4, MAX_ARENA_BYTES * 2), "arena_bytes"),
        ((4, 4096, 0), "readers"),
        ((4, 4096, MAX_READERS + 1), "readers"),
    ],
)
def test_impossible_geometries_are_refused_and_named(arguments: tuple[int, ...], what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what} is .*: give "):
        Geometry(*arguments)


def test_the_largest_offset_fits_its_field() -> None:
    largest = np.iinfo(np.uint32).max
    assert largest >= (MAX_ARENA_BYTES - ALIGN) // ALIGN
    assert largest >= layout.MAX_FRAME_BYTES


@given(st.integers(40 * 1024, 1 << 38), st.booleans())
def test_fitting_gives_the_largest_ring(size: int, sources: bool) -> None:
    try:
        ring = Geometry.fitting(size, sources=sources)
    except ValueError:
        assert size < 64 * 1024
        return
    each = 64 if sources else 32
    assert ring.arena_bytes + ring.frames * each <= size
    assert ring.frames * 128 >= ring.arena_bytes
    if ring.arena_bytes < MAX_ARENA_BYTES:
        assert 2 * ring.arena_bytes + 2 * ring.arena_bytes // 128 * each > size
    if ring.frames * 64 < ring.arena_bytes:
        assert ring.arena_bytes + 2 * ring.frames * each > size
    assert ring.total_bytes <= size + 5 * PAGE + round_up(16 * READER.itemsize, PAGE)


@given(st.integers(-10, 40 * 1024 - 1))
def test_fitting_refuses_what_is_too_small(size: int) -> None:
    with pytest.raises(ValueError, match="give at least 64KiB"):
        Geometry.fitting(size)


def test_the_default_holds_100_ms_and_fits_a_container() -> None:
    from rings.ring import DEFAULT_BYTES

    ring = Geometry.fitting(DEFAULT_BYTES)
    assert ring.frames > 100_000
    assert ring.arena_bytes >= 100_000 * round_up(100, ALIGN)
    assert ring.total_bytes < 64_000_000


@given(st.sampled_from(SlotState), st.sampled_from(Policy), st.integers(0, (1 << 46) - 1))
def test_a_slot_word_holds_its_three_parts(state: SlotState, policy: Policy, generation: int) -> None:
    word = slot_word(state, policy, generation)
    assert word & 0xFF == state
    assert word >> layout.POLICY_SHIFT & 0xFF == policy
    assert word >> layout.GENERATION_SHIFT == generation
    assert word < 1 << 63


def test_lock_bytes_differ() -> None:
    readers = range(LOCK_READER, LOCK_READER + MAX_READERS)
    fixed = {layout.LOCK_OWNER, layout.LOCK_WRITER, layout.LOCK_JOIN}
    assert len(fixed) == 3
    assert not fixed & set(readers)


# The hash ---------------------------------------------------------------------------------------------


def _moved(dtype: np.dtype[np.void], name: str) -> np.dtype[np.void]:
    assert dtype.fields is not None
    names = list(dtype.fields)
    return np.dtype(
        {
            "names": names,
            "formats": [dtype.fields[n][0] for n in names],
            "offsets": [dtype.fields[n][1] + 8 * (n == name) for n in names],
            "itemsize": dtype.itemsize + 8,
        }
    )


@pytest.mark.parametrize("index", range(6))
def test_the_hash_sees_every_moved_field(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = list(layout._SHARED)
    dtype = shared[index]
    seen = {layout.LAYOUT_HASH}
    for name in [*(dtype.fields or {}), ""]:  # "": only the record grows
        shared[index] = _moved(dtype, name)
        monkeypatch.setattr(layout, "_SHARED", tuple(shared))
        seen.add(layout._layout_hash())
    assert len(seen) == len(dtype.fields or {}) + 2


@pytest.mark.parametrize(
    "constant",
    [
        *("ABI_VERSION", "PAGE", "LINE", "ALIGN", "MAX_FRAME_BYTES", "POLICY_SHIFT", "GENERATION_SHIFT"),
        *("LOCK_OWNER", "LOCK_WRITER", "LOCK_JOIN", "LOCK_READER"),
    ],
)
def test_the_hash_sees_every_constant(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, constant, getattr(layout, constant) * 2 + 8)
    assert layout._layout_hash() != layout.LAYOUT_HASH


def test_the_hash_sees_what_words_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = IntEnum("SlotState", {"FREE": 0, "JOINING": 2, "ACTIVE": 1})
    words = tuple(swapped if kind is SlotState else kind for kind in layout._WORDS)
    monkeypatch.setattr(layout, "_WORDS", words)
    assert layout._layout_hash() != layout.LAYOUT_HASH


def test_the_hash_is_the_same_in_every_process() -> None:
    assert layout._layout_hash() == layout.LAYOUT_HASH
    from rings.writer import compiled_layout_hash

    assert int(compiled_layout_hash()) == layout.LAYOUT_HASH
