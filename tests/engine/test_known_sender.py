"""A sender that is known by name: seen when it comes, counted when it is done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Child, await_

from engine.known_sender import KnownSender
from engine.status import Status


@pytest.fixture
def known(name: str) -> Iterator[KnownSender]:
    known = KnownSender(name)
    known.look()
    assert (known.came, known.lives, known.sent) == (False, False, None)
    yield known
    known.close()


def test_how_much_it_sent_is_known_when_it_is_done_and_outlives_it(known: KnownSender, name: str) -> None:
    status = Status.create(name, kind="sender", workers=["sender"])
    known.look()
    assert (known.came, known.lives, known.sent) == (True, True, None)
    status.publish(0, {"state": "sending", "sent": 5, "frames": 5})
    assert (known.lives, known.sent) == (True, None)
    status.publish(0, {"state": "done", "sent": 7, "frames": 2})
    assert (known.lives, known.sent) == (False, (7, 2))
    status.close()
    known.look()
    assert (known.came, known.lives, known.sent) == (True, False, (7, 2))


def test_the_next_of_the_name_is_added_to_it(known: KnownSender, name: str) -> None:
    for sent in (7, 5):
        status = Status.create(name, kind="sender", workers=["sender"])
        known.look()
        known.look()
        assert known.lives
        assert known.sent is None
        status.publish(0, {"state": "done", "sent": sent, "frames": sent})
        status.close()
    assert (known.state, known.sent) == ("done", (12, 12))


@pytest.mark.parametrize("content", [b"x" * 9000, b"RXSTAT\0\1" + b"\xff" * 9000, b"RXSTAT\0\1", b""])
def test_what_is_no_status_is_no_sender(known: KnownSender, name: str, content: bytes) -> None:
    path = Path(f"/dev/shm/rxring-{os.getuid()}-{name}-status")
    path.write_bytes(content)
    known.look()
    path.unlink()
    assert (known.came, known.state, known.sent) == (False, "absent", None)
    assert known.problem or len(content) < 4096


def test_a_folder_in_its_place_is_none(known: KnownSender, name: str) -> None:
    path = Path(f"/dev/shm/rxring-{os.getuid()}-{name}-status")
    path.mkdir()
    known.look()
    path.rmdir()
    assert (known.came, known.problem) == (
        False,
        f"{path} is no shared memory: remove it, or use another name",
    )


def test_an_engine_of_that_name_is_no_sender(known: KnownSender, name: str) -> None:
    status = Status.create(name, kind="engine", workers=["rx0"])
    known.look()
    assert not known.came
    status.close()


def send_and_sleep(name: str) -> None:
    status = Status.create(name, kind="sender", workers=["sender"])
    status.publish(0, {"state": "sending", "sent": 5, "frames": 5})
    signal.pause()


def test_one_that_was_killed_lives_no_more_and_what_it_sent_is_not_known(
    known: KnownSender, name: str, fork: Callable[..., Child]
) -> None:
    child = fork(send_and_sleep, name)
    await_(lambda: (known.look(), known.came)[1])
    assert known.lives
    child.kill()
    assert (known.came, known.lives, known.sent) == (True, False, None)


def test_what_a_dead_one_left_is_not_taken_for_the_next(name: str, fork: Callable[..., Child]) -> None:
    child = fork(send_and_sleep, name)
    watched = KnownSender(name)
    await_(lambda: (watched.look(), watched.came)[1])
    watched.close()
    child.kill()
    known = KnownSender(name)
    known.look()
    assert not known.came
    status = Status.create(name, kind="sender", workers=["sender"])
    known.look()
    assert known.lives
    known.close()
    status.close()
