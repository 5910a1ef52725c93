"""Case 19 (bifrost#167): a file in /dev/shm that belonged to the first user stopped the second."""

from __future__ import annotations

import os
import pwd
import stat
from typing import Any

import numpy as np
import pytest
from forked import await_

import rings
from rings import RingError
from rings.ring import Ring
from rings.segment import SHM

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="becomes another user: needs root"),
]
NOBODY = pwd.getpwnam("nobody")


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY.pw_gid)
    os.setuid(NOBODY.pw_uid)


def test_two_users_of_one_name(name: str, fork: Any, board: Any) -> None:
    def other() -> None:
        _become_nobody()
        with rings.create(name, frames=16, arena_bytes=4096) as ring:
            board[0] = 1
            await_(lambda: board[1])
            assert [info.name for info in rings.list()] == [name]
            assert rings.collect() == []
            assert ring.segment.is_linked()

    child = fork(other)
    await_(lambda: board[0])
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        assert [info.pid for info in rings.list() if info.name == name] == [os.getpid()]
        assert not [found for found in rings.collect() if name in found]
        theirs = os.stat(SHM / f"rxring-{NOBODY.pw_uid}-{name}-0")
        assert (theirs.st_uid, stat.S_IMODE(theirs.st_mode)) == (NOBODY.pw_uid, 0o600)
        board[1] = 1
        assert child.wait() == 0
        assert ring.segment.is_linked()


def _plant(name: str, uid: int, mode: int) -> None:
    """An object under another user's name, with a ring in it that one may well trust."""
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        content = bytes(ring._memory)
    _become_nobody()
    path = SHM / f"rxring-{uid}-{name}-0"
    path.write_bytes(content)
    path.chmod(mode)


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_foreign_segment_is_refused_and_its_owner_named(name: str, mode: int, fork: Any) -> None:
    assert fork(_plant, name, os.getuid(), mode).wait() == 0
    for use in (rings.attach, lambda of: rings.create(of, frames=16, arena_bytes=4096)):
        with pytest.raises(RingError, match=f"rxring-0-{name}-0 belongs to user nobody: use another name"):
            use(name)
    assert not [info for info in rings.list() if info.name == name]
    assert not [found for found in rings.collect() if name in found]
    with pytest.raises(RingError, match="no ring"):
        rings.remove(name)


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_root_s_segment_under_a_users_name(name: str, mode: int, fork: Any, board: Any) -> None:
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        path = SHM / f"rxring-{NOBODY.pw_uid}-{name}-0"
        path.write_bytes(bytes(ring._memory))
        path.chmod(mode)

    def other() -> None:
        _become_nobody()
        for use in (rings.attach, lambda of: rings.create(of, frames=16, arena_bytes=4096)):
            with pytest.raises(RingError, match="belongs to user root: use another name, or that user"):
                use(name)

    assert fork(other).wait() == 0
    assert path.exists()


def test_nobody_may_open_what_is_ours(name: str, fork: Any) -> None:
    def look(ring: Ring) -> None:
        path = SHM / ring.segment.object[1:]
        _become_nobody()
        for flags in (os.O_RDONLY, os.O_RDWR):
            with pytest.raises(PermissionError):
                os.open(path, flags)

    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        assert int(np.asarray(ring.counters["published"])) == 0
        assert fork(look, ring).wait() == 0
