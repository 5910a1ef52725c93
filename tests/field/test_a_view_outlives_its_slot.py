"""Case 16 (iceoryx2#1548): a numpy view outlived its slot and quietly showed other data.

A view cannot be revoked. So a batch's own attributes end with it, loudly, and `intact` tells of a view that
was kept whether it still shows what was polled. Never is it memory that is no longer mapped.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

import rings
from rings import RingError


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_the_batch_is_loud_and_the_view_can_be_asked_about(name: str, policy: str) -> None:
    with rings.create(name, frames=8, arena_bytes=1024) as ring, ring.writer() as writer:
        reader = ring.reader(policy=policy)
        writer.write(b"first")
        batch = reader.poll()
        assert batch is not None
        view = batch.payload(0)
        lied = 0
        for i in range(40):
            writer.write(bytes([i]) * 5)
            reader.poll()
            if view.tobytes() != b"first":
                lied += batch.intact
        assert lied == 0
        assert not batch.intact
        with pytest.raises(RingError, match="copy what you keep before the next step"):
            batch.payload(0)
        reader.close()


@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_collecting_batches_instead_of_copies_fails_at_once(name: str, policy: str) -> None:
    """The mistake people make: list(reader)."""
    with rings.create(name, frames=8, arena_bytes=1024) as ring:
        reader = ring.reader(policy=policy)
        with ring.writer() as writer:
            for i in range(5):
                writer.write(bytes([i]))
        batches = list(reader)
        for batch in batches:
            with pytest.raises(RingError, match="has ended"):
                batch.payload(0)
        reader.close()


@pytest.mark.parametrize("what", ["descriptors", "arena", "matrix", "payload"])
@pytest.mark.parametrize("policy", ["gate", "skip"])
def test_a_view_kept_over_the_end_of_everything_is_still_memory(
    name: str, policy: str, what: str, fork: Any
) -> None:
    def keep() -> None:
        ring = rings.create(name, frames=8, arena_bytes=1024)
        writer, reader = ring.writer(), ring.reader(policy=policy)
        writer.write(b"first")
        batch = reader.poll()
        assert batch is not None
        view = batch.payload(0) if what == "payload" else getattr(batch, what)
        before = view.tobytes()
        reader.close()
        writer.close()
        ring.close()
        del reader, writer, ring, batch
        gc.collect()
        assert view.tobytes() == before

    assert fork(keep).wait() == 0
