"""Compiled loops that write and read a ring at full speed, every payload made and checked from its sequence.

Frame s has a length, a segment and bytes that follow from s alone, and carries s as its time. So a reader
knows of each byte what it must be, whoever wrote it, and after any restart.
"""

from __future__ import annotations

import os

import numpy as np
from numba import carray

import rings
from rings.atomics import pointer
from rings.jit import jit
from rings.layout import DESCRIPTOR
from rings.libc import memmove, monotonic_ns, sleep_ns
from rings.reader import NEVER, is_closed, poll, release
from rings.wait import _sleep as sleep
from rings.wait import wait
from rings.writer import append, describe, describe_source, publish, reserve

SLEEP = 9  # a strategy of `ping`: what `block` does without its naps
_FRAME_BYTES = DESCRIPTOR.itemsize
FRAMES, PACKETS, TORN, BATCHES, GAPS = range(5)  # what `read` writes on its board, from `at`
DEADLINE, CLOSED, ENOUGH = range(3)  # why `read` came back


@jit
def _hash(sequence):  # type: ignore[no-untyped-def]
    return ((sequence * -7046029254386353131) >> 33) & 0x7FFFFFFF


@jit
def length_of(sequence, most):  # type: ignore[no-untyped-def]
    """0 … most, both ends often."""
    h = _hash(sequence)
    if h % 16 == 0:
        return 0
    if h % 16 == 1:
        return most
    return (h >> 4) % (most + 1)


@jit
def segment_of(sequence, most):  # type: ignore[no-untyped-def]
    """0 for two frames of three; the third is of several packets, as GRO brings them."""
    length = length_of(sequence, most)
    if sequence % 3 != 0 or length == 0:
        return 0
    return max((length + 3) // 4, 1)


@jit
def packets_of(sequence, most):  # type: ignore[no-untyped-def]
    segment = segment_of(sequence, most)
    return 1 if segment == 0 else (length_of(sequence, most) + segment - 1) // segment


@jit
def flow_of(sequence, flows):  # type: ignore[no-untyped-def]
    """0 … flows − 1: the same for a while, then another with each frame."""
    return _hash(sequence // 37 if sequence & 64 else sequence) % flows


@jit
def fill(address, sequence, length):  # type: ignore[no-untyped-def]
    words = length // 8
    if words > 0:
        block = carray(pointer(address), words, np.int64)
        for k in range(words):
            block[k] = sequence * 1000003 + k
    for k in range(words * 8, length):
        carray(pointer(address + k), 1, np.uint8)[0] = (sequence + k) & 0xFF


@jit
def is_whole(address, sequence, length):  # type: ignore[no-untyped-def]
    words = length // 8
    if words > 0:
        block = carray(pointer(address), words, np.int64)
        for k in range(words):
            if block[k] != sequence * 1000003 + k:
                return False
    for k in range(words * 8, length):
        if carray(pointer(address + k), 1, np.uint8)[0] != (sequence + k) & 0xFF:
            return False
    return True


@jit
def write(state, last, most, batch, deadline_ns, flows=1):  # type: ignore[no-untyped-def]
    """Write frames until the head is at `last` (or the deadline); the head. Batches of 1 … `batch` frames.

    flows: how many, where the ring says whose its frames are.
    """
    w = state[0]
    while w.head < last:
        count = min(1 + _hash(w.head) % batch, last - w.head)
        size = 0
        for i in range(count):
            size += (length_of(w.head + i, most) + 15) & -16
        while not reserve(w, count, size):
            if monotonic_ns() >= deadline_ns:
                return w.head
            sleep_ns(20_000)
        number, position, size = w.number, w.position, 0
        for i in range(count):
            sequence = w.head + i
            length = length_of(sequence, most)
            fill(w.arena + (position & (w.arena_bytes - 1)), sequence, length)
            if w.sources != 0:
                describe_source(w, i, (0, 0), 0, flow_of(sequence, flows))
            number, position = describe(
                w, i, number, sequence, position, length, 7, segment_of(sequence, most), 0
            )
            size += length
        publish(w, count, number, position, size)
        if monotonic_ns() >= deadline_ns:
            break
    return w.head


@jit
def read(state, strategy, most, share, board, at, enough, deadline_ns):  # type: ignore[no-untyped-def]
    """Read and check until closed, `enough` frames or the deadline. `most` as the writer has it.

    share: a batch is released in so many steps. The board gets, from `at` on, FRAMES, PACKETS, TORN …
    """
    r = state[0]
    while True:
        closed = is_closed(r)
        before = r.cursor
        count = poll(r, NEVER)
        if count == 0:
            if closed:
                return CLOSED
            now_ns = monotonic_ns()
            if now_ns >= deadline_ns:
                return DEADLINE
            wait(r, strategy, min(now_ns + 50_000_000, deadline_ns))
            continue
        torn, packets = 0, 0
        for i in range(count):
            sequence = r.cursor + i
            words = carray(pointer(r.batch_descriptors + i * _FRAME_BYTES), 4, np.int64)
            length = words[2] >> 32
            address = r.batch_arena + (words[2] & 0xFFFFFFFF) * 16
            right = words[1] == sequence and length == length_of(sequence, most)
            right = right and (words[3] >> 32) & 0xFFFF == segment_of(sequence, most)
            right = right and words[0] == r.packets + packets
            if not right or not is_whole(address, sequence, length):
                torn += 1
            packets += packets_of(sequence, most)
        board[at + FRAMES] += count
        board[at + PACKETS] += packets
        board[at + TORN] += torn
        board[at + BATCHES] += 1
        board[at + GAPS] += 1 if r.cursor != before else 0
        step = (count + share - 1) // share
        while r.batch_frames > 0:
            release(r, min(step, r.batch_frames))
        if board[at + FRAMES] >= enough:
            return ENOUGH
        if monotonic_ns() >= deadline_ns:
            return DEADLINE


@jit
def put(state, data, lengths, segments):  # type: ignore[no-untyped-def]
    """Publish one batch: frame i is the next `lengths[i]` bytes of `data`. False if there is no room."""
    w = state[0]
    size = 0
    for length in lengths:
        size += (length + 15) & -16
    if not reserve(w, lengths.size, size):
        return False
    source = data.ctypes.data
    number, position = w.number, w.position
    for i in range(lengths.size):
        memmove(w.arena + (position & (w.arena_bytes - 1)), source, lengths[i])
        number, position = describe(w, i, number, w.head + i, position, lengths[i], 0, segments[i], 0)
        source += lengths[i]
    publish(w, lengths.size, number, position, lengths.sum())
    return True


@jit
def reserve_only(state, frames, size):  # type: ignore[no-untyped-def]
    """What a receive does that brings nothing."""
    return reserve(state[0], frames, size)


@jit
def ping(reader_state, writer_state, strategy, rounds, board, at, first):  # type: ignore[no-untyped-def]
    """Answer every packet with one, `rounds` times; who is `first` begins. board[at]: how many were got,
    board[at + 1]: waits of more than 90 ms."""
    r, w = reader_state[0], writer_state[0]
    if first:
        append(w, r.descriptors, 8, 1)
    while board[at] < rounds:
        began_ns = monotonic_ns()
        while poll(r, 1) == 0:
            if strategy == SLEEP:
                sleep(r, began_ns + 60_000_000_000)
            else:
                wait(r, strategy, began_ns + 60_000_000_000)
            if monotonic_ns() - began_ns > 60_000_000_000:
                return
        if monotonic_ns() - began_ns > 90_000_000:
            board[at + 1] += 1
        release(r, 1)
        board[at] += 1
        if not first or board[at] < rounds:
            append(w, r.descriptors, 8, 1)


@jit
def most_at_every_offset(writer_state, reader_state, most, board):  # type: ignore[no-untyped-def]
    """Write and read each length 0 … `most` where it just fits before the end, or just not; how many were
    not as written. board: lengths, how many went round, how many fitted, the longest fill before one."""
    w, r = writer_state[0], reader_state[0]
    wrong, mask = 0, w.arena_bytes - 1
    for length in range(most + 1):
        rounded = (length + 15) & -16
        # One of: it ends at the end, 16 bytes before, 16 bytes behind; or somewhere.
        wanted = (w.arena_bytes - rounded + (length % 4 - 1) * 16) & mask
        while (w.position & mask) != wanted:
            fill_bytes = min((wanted - w.position) & mask, 65536, w.arena_bytes - (w.position & mask))
            if not reserve(w, 1, fill_bytes):
                return -1
            number, position = describe(w, 0, w.number, 0, w.position, fill_bytes, 0, 0, 0)
            publish(w, 1, number, position, fill_bytes)
            release(r, poll(r, 1))
        if not reserve(w, 1, length):
            return -1
        board[1] += 1 if (w.position & mask) != wanted else 0
        board[2] += 1 if (w.position & mask) == wanted else 0
        fill(w.arena + (w.position & mask), w.head, length)
        number, position = describe(w, 0, w.number, w.head, w.position, length, 0, 0, 0)
        publish(w, 1, number, position, length)
        if poll(r, NEVER) != 1:
            return -2
        words = carray(pointer(r.batch_descriptors), 4, np.int64)
        address = r.batch_arena + (words[2] & 0xFFFFFFFF) * 16
        whole = is_whole(address, r.cursor, length) and words[1] == r.cursor
        wrong += 0 if whole and words[2] >> 32 == length else 1
        release(r, 1)
        board[0] += 1
    return wrong


def compile_all() -> None:
    """Run each once, on a small ring."""
    board = np.zeros(8, np.int64)
    with rings.create(f"t{os.getpid()}.loops", frames=16, arena_bytes=4096) as ring:
        writer = ring.writer()
        end_ns = monotonic_ns() + 10_000_000_000
        for policy in ("gate", "skip"):
            with ring.reader(name=policy, policy=policy) as reader:
                write(writer.record, writer.record[0]["head"] + 8, 100, 4, end_ns)
                read(reader.record, 0, 100, 2, board, 0, 8, end_ns)
        put(writer.record, np.zeros(1, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64))
        reserve_only(writer.record, 1, 1)
        with ring.reader(name="ping") as reader:
            ping(reader.record, writer.record, 0, 1, board, 4, True)
            writer.write(b"")
            assert reader.wait(0)
            assert reader.poll() is not None
        writer.close()
