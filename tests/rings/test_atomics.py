from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import carray

from rings import atomics
from rings.jit import jit

BIG = -(1 << 63) + 12345


@jit
def _words(address, value):  # type: ignore[no-untyped-def]
    """Store and load in every way; what came back."""
    out = np.zeros(8, np.int64)
    atomics.store_release(address, value)
    out[0] = atomics.load_acquire(address)
    atomics.store_relaxed(address, value + 1)
    out[1] = atomics.load_relaxed(address)
    out[2] = atomics.fetch_add(address, 10)
    out[3] = atomics.load_relaxed(address)
    out[4] = atomics.compare_and_swap(address, value, 5)
    out[5] = atomics.load_relaxed(address)
    out[6] = atomics.compare_and_swap(address, value + 11, 5)
    out[7] = atomics.load_relaxed(address)
    atomics.fence_acquire()
    atomics.fence_release()
    atomics.fence_seq_cst()
    atomics.pause()
    return out


@jit
def _half_words(address, value):  # type: ignore[no-untyped-def]
    out = np.zeros(4, np.int64)
    atomics.store_relaxed_u32(address, value)
    out[0] = atomics.load_relaxed_u32(address)
    out[1] = atomics.load_acquire_u32(address)
    out[2] = atomics.fetch_add_u32(address, 1)
    out[3] = atomics.load_relaxed_u32(address)
    return out


@jit
def _scratches():  # type: ignore[no-untyped-def]
    return atomics.scratch(), atomics.scratch()


@jit
def _view(address, count):  # type: ignore[no-untyped-def]
    return carray(atomics.pointer(address), count, np.int64).sum()


@jit
def _record(address, value):  # type: ignore[no-untyped-def]
    atomics.store_record(address, (value, value + 1, -value, 3))


@jit
def _add_many(address, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        atomics.fetch_add(address, 1)
        atomics.fetch_add_u32(address + 8, 1)
        while True:
            before = atomics.load_relaxed(address + 16)
            if atomics.compare_and_swap(address + 16, before, before + 1):
                break
            atomics.pause()


@pytest.mark.parametrize("value", [0, 7, -1, BIG])
def test_a_word_is_an_int64(value: int) -> None:
    word = np.full(3, -9, np.int64)
    got = _words(word[1:].ctypes.data, value).tolist()
    assert got == [value, value + 1, value + 1, value + 11, 0, value + 11, 1, 5]
    assert word.tolist() == [-9, 5, -9]


def test_a_half_word_is_unsigned_and_leaves_its_neighbours_alone() -> None:
    words = np.full(3, 0xAAAAAAAA, np.uint32)
    got = _half_words(words[1:].ctypes.data, (1 << 40) | 0xFFFFFFFF).tolist()
    assert got == [0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0]
    assert words.tolist() == [0xAAAAAAAA, 0, 0xAAAAAAAA]


def test_scratch_blocks_are_each_callers_own() -> None:
    one, other = _scratches()
    assert abs(one - other) >= atomics.SCRATCH_BYTES
    assert one % 8 == other % 8 == 0


def test_pointer_sees_memory() -> None:
    words = np.arange(10)
    assert _view(words.ctypes.data, 10) == 45


def test_a_record_is_four_words_and_leaves_its_neighbours_alone() -> None:
    memory = np.full(16, -9, np.int64)
    words = memory[-memory.ctypes.data // 8 % 4 :]  # begins on 32 bytes
    _record(words[4:].ctypes.data, BIG)
    assert words[:4].tolist() == words[8:12].tolist() == [-9] * 4
    assert words[4:8].tolist() == [BIG, BIG + 1, -BIG, 3]


def test_nothing_is_lost_between_two_processes(fork: Any, board: Any) -> None:
    address = board.ctypes.data
    _add_many(address, 0)
    children = [fork(_add_many, address, 200_000) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert board[:3].tolist() == [400_000, 400_000, 400_000]
