"""What all tests share: names of their own, forked children, and the proof that nothing is left behind."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: tests fork, and threads do not

import numpy as np
import pytest
from forked import Child
from numpy.typing import NDArray

from rings import locks
from rings.layout import LOCK_OWNER, LOCK_WRITER

# Jobs that a shell starts in the background ignore it, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHM = Path("/dev/shm")
_MARK = "RXRING_TEST_SESSION"
_numbers = itertools.count()


def _in_use(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return True
    try:
        return any(locks.held_by_other(fd, byte) for byte in (LOCK_OWNER, LOCK_WRITER))
    finally:
        os.close(fd)


def _left_objects(before: set[Path]) -> list[str]:
    """Objects that are new, and ours or nobody's: other runs on this machine may have some of theirs."""
    ours = f"-t{os.getpid()}."
    new = set(SHM.glob("rxring-*")) - before
    theirs = {path for path in new if re.search(r"-t\d+\.", path.name) and ours not in path.name}
    return sorted(path.name for path in new - theirs if ours in path.name or not _in_use(path))


def _left_processes() -> list[str]:
    """Children of this process, and processes that were started within this session."""
    left = []
    mark = f"{_MARK}={os.getpid()}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ours = int(fields[1]) == os.getpid() or mark in (process / "environ").read_bytes().split(b"\0")
            if ours and int(process.name) != os.getpid():
                left.append(f"{process.name} {(process / 'comm').read_text().strip()} {fields[0]}")
        except OSError:
            continue  # it ended, or is another user's
    return left


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Shared memory and processes are, after all tests, as they were before."""
    before = set(SHM.glob("rxring-*"))
    os.environ[_MARK] = str(os.getpid())
    yield
    deadline = time.monotonic() + 3.0  # for what is just ending
    while (left := _left_objects(before) + _left_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a ring or an engine that nobody else uses; what is left of it is removed."""
    unique = f"t{os.getpid()}.{next(_numbers)}"
    yield unique
    for path in SHM.glob(f"rxring-*-{unique}-*"):
        path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def runs_where_it_ran() -> Iterator[None]:
    """A test that pins this very process puts it back."""
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before, "this test has left the process pinned"


@pytest.fixture
def fork() -> Iterator[Callable[..., Child]]:
    """`fork(function, *arguments)` starts a Child; those that still run at the end are killed."""
    children: list[Child] = []

    def start(function: Callable[..., object], *arguments: object) -> Child:
        children.append(Child(function, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.send(signal.SIGCONT)
        child.kill()


@pytest.fixture
def board() -> NDArray[Any]:
    """Zeros, shape (64,), int64, shared with forked children: what they have to tell, SIGKILL or not."""
    return np.frombuffer(mmap.mmap(-1, 64 * 8), np.int64)


@pytest.fixture(scope="session")
def loops() -> Any:
    """The module ring_loops, compiled: children that are forked from now on need not."""
    import ring_loops

    ring_loops.compile_all()
    return ring_loops
