"""Members that share the work: each packet is handled by one of them, and `passed` by the others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forked import await_
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_motion import Stepper

import rings
from rings import RingError
from rings import reader as reader_module
from rings.reader import BLOCK_FRAMES, MAX_SPLIT, Reader
from rings.ring import Ring

FRAMES = 512


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=FRAMES, arena_bytes=1 << 16) as made:
        yield made


def take(reader: Reader) -> list[int]:
    """The packets that are there for it, by their number."""
    numbers: list[int] = []
    while (batch := reader.poll()) is not None:
        for i in range(len(batch)):
            numbers.append(int.from_bytes(batch.payload(i).tobytes(), "little"))
    return numbers


def account(reader: Reader) -> tuple[int, int, int]:
    info = next(info for info in reader._ring.readers() if info.name == reader.name)
    assert info.delivered + info.skipped + info.passed + info.unread == (
        reader._ring.published()[1] - info.joined_packets
    )
    return info.delivered, info.skipped, info.passed


@pytest.mark.parametrize("policy", ["gate", "skip"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=st.integers(1, 5), bursts=st.lists(st.integers(0, 300), max_size=12))
def test_each_packet_is_one_members(ring: Ring, policy: str, split: int, bursts: list[int]) -> None:
    with ring.writer() as writer:
        start = ring.published()[1]
        members = [ring.reader(f"m{k}", policy=policy, split=split, member=k) for k in range(split)]
        got: list[list[int]] = [[] for _ in members]
        sent = 0
        for burst in bursts:
            for _ in range(burst):
                writer.write((start + sent).to_bytes(4, "little"), timeout_s=0)
                sent += 1
            for numbers, member in zip(got, members, strict=True):
                numbers += take(member)
        for numbers in got:
            assert numbers == sorted(numbers)
        assert sorted(n for numbers in got for n in numbers) == list(range(start, start + sent))
        for k, numbers in enumerate(got):
            assert {n // BLOCK_FRAMES % split for n in numbers} <= {k}
            assert account(members[k]) == (len(numbers), 0, sent - len(numbers))
        for member in members:
            member.close()


def test_a_lapped_member_knows_what_it_lost_and_handles_only_its_own(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("m1", policy="skip", split=3, member=1) as reader:
        for n in range(5 * FRAMES + 17):
            writer.write(n.to_bytes(4, "little"))
        numbers = take(reader)
        delivered, skipped, passed = account(reader)
        assert numbers == [n for n in range(skipped, 5 * FRAMES + 17) if n // BLOCK_FRAMES % 3 == 1]
        assert delivered == len(numbers)
        assert skipped >= 4 * FRAMES
        assert passed == 5 * FRAMES + 17 - skipped - delivered


@pytest.fixture
def ring_of_flows(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=FRAMES, arena_bytes=1 << 16, sources=True) as made:
        yield made


@pytest.mark.parametrize("policy", ["gate", "skip"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=st.integers(1, 5), bursts=st.lists(st.lists(st.integers(0, 7), max_size=300), max_size=8))
def test_each_flow_is_one_members(
    ring_of_flows: Ring, policy: str, split: int, bursts: list[list[int]]
) -> None:
    ring = ring_of_flows
    with ring.writer() as writer:
        options = {"policy": policy, "split": split, "by": "flow"}
        members = [ring.reader(f"m{k}", member=k, **options) for k in range(split)]
        got: list[list[int]] = [[] for _ in members]
        flows: list[int] = []
        for burst in bursts:
            for flow in burst:
                assert writer.write(len(flows).to_bytes(4, "little"), flow=flow, timeout_s=0)
                flows.append(flow)
            for numbers, member in zip(got, members, strict=True):
                numbers += take(member)
        for k, numbers in enumerate(got):
            assert numbers == [n for n, flow in enumerate(flows) if flow % split == k]
            assert account(members[k]) == (len(numbers), 0, len(flows) - len(numbers))
        for member in members:
            member.close()


def test_a_lapped_member_knows_its_flows_again(ring_of_flows: Ring) -> None:
    ring = ring_of_flows
    with (
        ring.writer() as writer,
        ring.reader("m1", policy="skip", split=3, member=1, by="flow") as reader,
    ):
        count = 5 * FRAMES + 17
        for n in range(count):
            writer.write(n.to_bytes(4, "little"), flow=n * n)
        numbers = take(reader)
        delivered, skipped, passed = account(reader)
        assert numbers == [n for n in range(skipped, count) if n * n % 3 == 1]
        assert (delivered, delivered + skipped + passed) == (len(numbers), count)
        assert skipped >= 4 * FRAMES


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_poll_of_a_few_frames_looks_at_no_more_flows(
    ring_of_flows: Ring, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who is far behind would look at all of them again for each frame, and stay behind."""
    with (
        ring_of_flows.writer() as writer,
        ring_of_flows.reader("m0", policy=policy, split=2, member=0, by="flow") as reader,
    ):
        for _ in range(200):
            writer.write(b"x", flow=2)
        stepper = Stepper(monkeypatch, reader_module)
        for _ in range(3):
            stepper.arm(-1, lambda: None)
            batch = reader.poll(2)
            assert batch is not None
            assert len(batch) == 2
            assert stepper.count < 100


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_batch_tells_whose_its_frames_are(ring_of_flows: Ring, policy: str) -> None:
    flows = [3, 0, (1 << 63) - 1]
    with ring_of_flows.writer() as writer, ring_of_flows.reader("r", policy=policy) as reader:
        for flow in flows:
            writer.write(b"x", flow=flow)
        batch = reader.poll()
        assert batch is not None
        assert batch.sources is not None
        assert batch.sources["flow"].tolist() == flows
        assert batch.sources["family"].tolist() == [0, 0, 0]
        with pytest.raises(RingError, match=r"flow -1: give 0 to"):
            writer.write(b"x", flow=-1)


def test_a_ring_without_sources_knows_no_flows(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("r") as reader:
        with pytest.raises(RingError, match="create it with sources=True"):
            ring.reader("flows", split=2, by="flow")
        with pytest.raises(RingError, match="to a ring created with sources=True"):
            writer.write(b"x", flow=1)
        writer.write(b"x")
        batch = reader.poll()
        assert batch is not None
        assert batch.sources is None


def test_the_writer_waits_for_a_member_that_gates(ring: Ring) -> None:
    with ring.writer() as writer, ring.reader("m0", split=2, member=0) as reader:
        for n in range(FRAMES - 1):
            assert writer.write(n.to_bytes(4, "little"), timeout_s=0)
        assert not writer.write(b"", timeout_s=0)
        assert take(reader) == [n for n in range(FRAMES - 1) if n // BLOCK_FRAMES % 2 == 0]
        assert writer.write(b"", timeout_s=0)


def test_a_member_that_dies_comes_back_under_its_name(ring: Ring, fork: Any) -> None:
    with ring.writer() as writer, ring.reader("m0", policy="skip", split=2, member=0):
        first = fork(_release_ten, ring)
        await_(lambda: len(ring.readers()) == 2)
        for n in range(200):
            writer.write(n.to_bytes(4, "little"))
        await_(lambda: ring.readers()[1].delivered == 10)
        first.kill()
        with ring.reader("m1", split=2, member=1) as again:
            assert take(again) == [n for n in range(74, 200) if n // BLOCK_FRAMES % 2 == 1]
            assert account(again) == (64 + 8, 0, 128)


def _release_ten(ring: Ring) -> None:
    """Of the first batch, and then sleep for ever."""
    reader = ring.reader("m1", split=2, member=1)
    await_(lambda: ring.published()[0] == 200)
    batch = reader.poll()
    assert batch is not None
    batch.release(10)
    signal.pause()


@pytest.mark.parametrize(("split", "member"), [(0, 0), (2, 2), (2, -1), (MAX_SPLIT + 1, 0)])
def test_an_impossible_member_is_refused(ring: Ring, split: int, member: int) -> None:
    with pytest.raises(RingError, match=f"member {member} of {split}: give a split of 1 to {MAX_SPLIT}"):
        ring.reader(split=split, member=member)
    assert ring.readers() == []
    assert np.all(ring.slots["word"] & 0xFF == 0)
