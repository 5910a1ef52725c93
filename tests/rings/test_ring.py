from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import await_, descriptors_of

import rings
from rings import RingError, ring
from rings.layout import ABI_VERSION, HEADER, LAYOUT_HASH, MAGIC, PAGE, Geometry
from rings.ring import Ring, boot_id, clock_offset_ns
from rings.segment import SHM, object_name


@pytest.fixture
def made(name: str) -> Iterator[Ring]:
    with rings.create(name, frames=16, arena_bytes=4096, readers=3) as created:
        yield created


def _header(of: Ring, **changes: object) -> None:
    """Change the header behind everyone's back."""
    header = np.frombuffer(os.pread(of.segment.fd, HEADER.itemsize, 0), HEADER).copy()
    for field, value in changes.items():
        header[field] = value
    os.pwrite(of.segment.fd, header.tobytes(), 0)


def test_the_header_says_what_it_is(made: Ring) -> None:
    header = made.header
    assert int(header["magic"]) == MAGIC
    assert int(header["abi_version"]) == ABI_VERSION
    assert int(header["layout_hash"]) == LAYOUT_HASH
    assert bytes(header["boot_id"]) == boot_id()
    assert bytes(header["uuid"]) != bytes(16)
    assert int(header["owner_pid"]) == os.getpid()
    assert abs(int(header["clock_offset_ns"]) - clock_offset_ns()) < 1_000_000_000
    assert abs(int(header["created_ns"]) - time.time_ns()) < 10_000_000_000
    assert made.geometry == Geometry(16, 4096, 3)


def test_two_rings_of_one_name_differ_by_their_uuid(made: Ring, name: str) -> None:
    with rings.create(name, number=1, frames=16, arena_bytes=4096) as other:
        assert bytes(other.header["uuid"]) != bytes(made.header["uuid"])
        assert rings.attach(name, 1).geometry.readers == 16


def test_who_attaches_sees_the_same(made: Ring, name: str) -> None:
    with rings.attach(name) as attached:
        assert attached.geometry == made.geometry
        assert bytes(attached.header["uuid"]) == bytes(made.header["uuid"])
    assert (SHM / made.segment.object[1:]).exists()  # who only attached never removes


def test_the_owner_removes_it_and_mappings_stay(name: str) -> None:
    made = rings.create(name, frames=16, arena_bytes=4096)
    made.writer().write(b"x")
    attached = rings.attach(name)
    made.close()
    made.close()
    assert not (SHM / object_name(name, 0)[1:]).exists()
    assert attached.published() == (1, 1)
    with pytest.raises(RingError, match="no ring"):
        rings.attach(name)
    attached.close()


def test_closing_unmaps(name: str) -> None:
    made = rings.create(name, frames=16, arena_bytes=4096)
    reader = made.reader()
    writer = made.writer()
    writer.write(b"x")
    for _ in range(2):
        reader.poll()
    maps = Path("/proc/self/maps")
    assert name in maps.read_text()
    reader.close()
    writer.close()
    made.close()
    assert name not in maps.read_text()
    assert descriptors_of(name) == 0


def test_a_sized_ring_takes_that_size(name: str) -> None:
    with rings.create(name, size_bytes=1 << 20) as made:
        assert made.geometry == Geometry.fitting(1 << 20)
        assert os.stat(SHM / made.segment.object[1:]).st_size == made.geometry.total_bytes


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"frames": 3, "arena_bytes": 4096}, "frames is 3: give a power of two"),
        ({"frames": 4}, "arena_bytes is 0: give a power of two"),
        ({"arena_bytes": 4096}, "frames is 0: give a power of two"),
        ({"size_bytes": 1000}, "a ring does not fit into 1000 bytes: give at least"),
        ({"frames": 4, "arena_bytes": 4096, "readers": 65}, "readers is 65: give 1 to 64"),
    ],
)
def test_an_impossible_ring_leaves_nothing(name: str, options: dict[str, int], what: str) -> None:
    with pytest.raises(RingError, match=what):
        rings.create(name, **options)
    assert not [*SHM.glob(f"*-{name}-*")]


def test_a_living_ring_is_not_replaced(made: Ring, name: str) -> None:
    with pytest.raises(RingError, match="is in use: end it first, or use another name"):
        rings.create(name, frames=16, arena_bytes=4096)


# What cannot be attached to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"magic": 12345}, "is not a ring: remove it, or use another name"),
        ({"abi_version": ABI_VERSION + 1}, "of another version of rxring: use the one that made it"),
        ({"layout_hash": 1}, "of another version of rxring: use the one that made it"),
        ({"boot_id": np.void(bytes(16))}, "of another boot: `rxring rings gc` removes it"),
        ({"frames": 3}, "impossible geometry .*frames is 3.*: remove it"),
        ({"frames": -1}, "impossible geometry .*: remove it"),
        ({"arena_bytes": 1 << 60}, "impossible geometry .*: remove it"),
        ({"readers": 0}, "impossible geometry .*: remove it"),
        ({"frames": 1024}, "bytes, its geometry says .*: remove it"),
        ({"sources": 1}, "bytes, its geometry says .*: remove it"),
    ],
)
def test_a_strange_ring_is_refused_in_one_line(
    made: Ring, name: str, changes: dict[str, object], what: str
) -> None:
    before = descriptors_of(name)
    _header(made, **changes)
    with pytest.raises(RingError, match=what) as refusal:
        rings.attach(name)
    assert "\n" not in str(refusal.value)
    del refusal
    assert descriptors_of(name) == before


def test_what_has_no_magic_yet_is_waited_for(made: Ring, name: str, fork: Any) -> None:
    _header(made, magic=0)
    with pytest.raises(RingError, match="was never finished: `rxring rings gc` removes it"):
        rings.attach(name, timeout_s=0.05)
    child = fork(lambda: rings.attach(name).close())
    _header(made, magic=MAGIC)
    assert child.wait() == 0


def test_what_is_empty_is_waited_for(name: str, fork: Any) -> None:
    path = SHM / object_name(name, 0)[1:]
    path.touch(0o600)
    with pytest.raises(RingError, match="was never finished"):
        rings.attach(name, timeout_s=0.05)
    child = fork(lambda: rings.attach(name).close())
    with rings.create(name, frames=16, arena_bytes=4096):
        assert child.wait() == 0


def test_a_short_stranger_is_never_finished(name: str) -> None:
    (SHM / object_name(name, 0)[1:]).write_bytes(b"something else")
    with pytest.raises(RingError, match="was never finished"):
        rings.attach(name, timeout_s=0)


def test_attach_while_it_is_created_again_and_again(name: str, fork: Any) -> None:
    """Never half of a ring, whatever the moment."""

    def look() -> None:
        seen = 0
        while seen < 30:
            try:
                with rings.attach(name) as attached:
                    assert attached.geometry.frames == 16
                    seen += 1
            except RingError as error:
                assert "no ring" in str(error), error  # noqa: PT017

    child = fork(look)
    while child.status is None:
        rings.create(name, frames=16, arena_bytes=4096).close()
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            assert child.wait() == 0


# Looking ----------------------------------------------------------------------------------------------


def test_state(made: Ring) -> None:
    assert made.state == "orphaned"
    writer = made.writer()
    assert made.state == "live"
    writer.abandon()
    assert made.state == "orphaned"
    made.writer().close()
    assert made.state == "closed"
    writer = made.writer()
    assert made.state == "live"
    writer.close()


def test_list_tells_the_living_from_the_dead(made: Ring, name: str) -> None:
    def mine() -> list[rings.ring.RingInfo]:
        return [info for info in rings.list() if info.name == name]

    writer = made.writer()
    (info,) = mine()
    assert (info.number, info.owned, info.written, info.readable) == (0, True, True, True)
    assert (info.size_bytes, info.pid) == (made.geometry.total_bytes, os.getpid())
    writer.close()
    _header(made, layout_hash=1)
    made.forget()
    (info,) = mine()
    assert (info.owned, info.written, info.readable) == (False, False, False)
    assert rings.remove(name) == [object_name(name, 0)[1:]]
    assert mine() == []


def test_list_takes_anything_that_has_the_name_of_a_ring(name: str) -> None:
    for number, content in enumerate((b"", b"x", bytes(PAGE), os.urandom(3 * PAGE))):
        (SHM / object_name(name, number)[1:]).write_bytes(content)
    infos = [info for info in rings.list() if info.name == name]
    assert [(info.number, info.readable) for info in infos] == [(n, False) for n in range(4)]
    assert len(rings.remove(name)) == 4


def test_remove_refuses_the_living_and_the_missing(made: Ring, name: str) -> None:
    with pytest.raises(RingError, match="is in use: end its engine first"):
        rings.remove(name)
    writer = made.writer()
    made.forget()
    with pytest.raises(RingError, match="is in use"):
        rings.remove(name)
    writer.close()
    rings.remove(name)
    with pytest.raises(RingError, match=f"no ring '{name}': `rxring rings ls` lists them"):
        rings.remove(name)
    with pytest.raises(RingError, match="use 1 to 32"):
        rings.remove("../etc")


def test_collect_removes_the_dead_and_ours_only(made: Ring, name: str) -> None:
    dead = rings.create(name, number=1, frames=16, arena_bytes=4096)
    dead.forget()
    written = rings.create(name, number=2, frames=16, arena_bytes=4096)
    writer = written.writer()
    written.forget()
    (SHM / object_name(name, 3)[1:]).touch(0o600)  # someone creates it just now
    stranger = SHM / f"rxring-{os.getuid() + 1}-{name}-0"
    stranger.touch()
    collected = rings.collect()
    assert object_name(name, 1)[1:] in collected
    left = {path.name for path in SHM.glob(f"*-{name}-*")}
    assert left == {object_name(name, n)[1:] for n in (0, 2, 3)} | {stranger.name}
    writer.close()


def test_readers_of_an_unused_ring(made: Ring) -> None:
    assert made.readers() == []
    assert made.published() == (0, 0)


def test_readers_while_one_reads_is_of_one_moment(made: Ring, name: str, fork: Any, loops: Any) -> None:
    from rings.libc import monotonic_ns

    def churn() -> None:
        attached = rings.attach(name)
        writer = attached.writer()
        board = np.zeros(8, np.int64)
        readers = [attached.reader(name=policy, policy=policy) for policy in ("gate", "skip")]
        while True:
            loops.write(writer.record, writer.record[0]["head"] + 5, 100, 3, monotonic_ns() + 100_000)
            for reader in readers:
                loops.read(reader.record, 0, 100, 2, board, 0, 1 << 60, 0)

    child = fork(churn)
    await_(lambda: len(made.readers()) == 2)
    for _ in range(1000):
        for info in made.readers():
            if info.pid:
                assert 0 <= info.unread <= made.published()[1]
        frames, packets = made.published()
        assert frames <= packets
    before = made.published()
    await_(lambda: made.published() > before)
    child.kill()
    for info in made.readers():
        total = info.delivered + info.skipped + info.passed + info.unread + info.joined_packets
        assert total == made.published()[1]


def test_a_killed_owner_and_writer_leave_a_dead_ring(name: str, fork: Any, board: Any) -> None:
    def live() -> None:
        made = rings.create(name, frames=16, arena_bytes=4096)
        writer = made.writer()
        writer.write(b"last words")
        board[0] = 1
        signal.pause()

    child = fork(live)
    await_(lambda: board[0])
    reader = rings.attach(name).reader()
    assert reader.state == "live"
    assert name not in {r.split("-")[2] for r in rings.collect()}
    child.kill()
    assert reader.state == "orphaned"
    assert object_name(name, 0)[1:] in rings.collect()
    reader.close()


def test_attach_s_is_bounded() -> None:
    assert ring.ATTACH_S <= 5
