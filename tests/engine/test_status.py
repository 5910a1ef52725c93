"""The status segment: what one process publishes another reads, whole, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Child, await_
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.status import FACTS_BYTES, STOP, Status, _checksum
from rings.segment import RingError, create_segment, object_name

json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    published=st.lists(
        st.tuples(
            st.integers(0, 2), st.dictionaries(st.text(max_size=8), json, max_size=5), st.binary(max_size=99)
        ),
        max_size=12,
    )
)
def test_what_is_published_is_read(name: str, published: list[tuple[int, dict[str, Any], bytes]]) -> None:
    status = Status.create(name, kind="engine", workers=["a", "b", "c"], state_bytes=[99, 5000, 99])
    try:
        outside = Status.open(name)
        now: dict[int, tuple[dict[str, Any], bytes]] = {}
        for worker, facts, state in published:
            status.publish(worker, facts, state)
            now[worker] = (facts, state)
            for each in range(3):
                assert outside.read(each) == now.get(each, ({}, b""))
        outside.close()
    finally:
        status.close()


def test_it_tells_who_it_is_of(name: str) -> None:
    workers = ["rx0", "ä" * 16, "x" * 32]
    status = Status.create(name, kind="engine", workers=workers)
    outside = Status.open(name)
    assert (outside.kind, outside.pid, outside.workers) == ("engine", os.getpid(), workers)
    assert outside.started_ns == status.started_ns
    outside.close()
    assert Status.open(name)  # who only looked does not remove it
    status.close()
    with pytest.raises(FileNotFoundError):
        Status.open(name)


def test_numbers_of_numpy_are_numbers(name: str) -> None:
    status = Status.create(name, kind="engine", workers=["a"])
    status.publish(0, {"n": np.int64(3), "x": np.float64(0.5), "list": np.arange(3)})
    assert status.read(0)[0] == {"n": 3, "x": 0.5, "list": [0, 1, 2]}
    status.close()


def test_what_does_not_fit_is_not_published(name: str) -> None:
    status = Status.create(name, kind="engine", workers=["a", "b"], state_bytes=[10, 10])
    status.publish(0, {"n": 1}, b"0123456789")
    status.publish(1, {"n": 2}, b"abcdefghij")
    for facts, state in (({"text": "x" * FACTS_BYTES}, b""), ({"n": 3}, bytes(FACTS_BYTES + 8192))):
        with pytest.raises(ValueError, match="do not fit"):
            status.publish(0, facts, state)
    assert status.read(0) == ({"n": 1}, b"0123456789")
    assert status.read(1) == ({"n": 2}, b"abcdefghij")
    status.close()


def test_one_that_is_just_being_made_is_not_there_yet(name: str) -> None:
    segment = create_segment(object_name(name, "status"), 8192)
    with pytest.raises(FileNotFoundError):
        Status.open(name)
    segment.map(writable=True)[0:8] = b"RXSTAT\x00\x07"
    with pytest.raises(RingError, match="of another version"):
        Status.open(name)
    segment.unlink()
    segment.forget()


def test_a_living_one_is_not_replaced_a_dead_one_is(name: str, fork: Callable[..., Child]) -> None:
    child = fork(create_and_sleep, name)
    await_(lambda: exists(name))
    with pytest.raises(RingError, match=f"{name}-status is in use by process {child.pid}"):
        Status.create(name, kind="engine", workers=["a"])
    child.kill()
    assert exists(name)
    status = Status.create(name, kind="sender", workers=["a"])
    assert Status.open(name).kind == "sender"
    status.close()


def exists(name: str) -> bool:
    try:
        Status.open(name).close()
    except FileNotFoundError:
        return False
    return True


def create_and_sleep(name: str) -> None:
    status = Status.create(name, kind="engine", workers=["a"])
    signal.pause()
    status.close()


def test_the_stop_word_is_seen_by_all(name: str, fork: Callable[..., Child]) -> None:
    status = Status.create(name, kind="engine", workers=["a"])
    child = fork(lambda: await_(lambda: status.stop == STOP))
    status.stop = STOP
    assert child.wait() == 0
    assert Status.open(name).stop == STOP
    at = np.frombuffer(status.memory, np.int64, 1, status.stop_offset)[0]
    assert at == STOP
    status.close()


def publish_without_end(status: Status, board: NDArray[Any]) -> None:
    """Facts and state that must belong together, of changing length."""
    while True:
        n = int(board[0]) + 1
        status.publish(0, {"n": n, "fill": "x" * (n * 7 % 3000)}, np.full(n % 500, n).tobytes())
        board[0] = n


def test_no_reading_is_torn_and_none_goes_back(
    name: str, fork: Callable[..., Child], board: NDArray[Any]
) -> None:
    """Also of a publisher that is killed, and whose successor goes on in the same record."""
    status = Status.create(name, kind="engine", workers=["a"], state_bytes=[4000])
    last = 0
    for _ in range(20):
        child = fork(publish_without_end, status, board)
        start = int(board[0])
        while board[0] < start + 200:
            before = int(board[0])
            facts, state = status.read(0)
            n = facts.get("n", 0)
            assert last <= n
            assert before <= n <= board[0] + 1
            assert (np.frombuffer(state, np.int64) == n).all()
            assert len(state) == n % 500 * 8
            assert len(facts.get("fill", "")) == n * 7 % 3000
            last = n
        child.kill()
    status.close()


def test_a_header_of_zeros_is_no_record() -> None:
    """As a reader finds it that was overtaken while the next record is being written."""
    assert _checksum(b"", 0) != 0


def test_nothing_is_left_of_it(name: str) -> None:
    Status.create(name, kind="engine", workers=["a"]).close()
    assert not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))
