"""Case 7 (pdns#17102, #2939): MSG_TRUNC as an input flag makes the length exceed the buffer.

A datagram that is longer than its room is refused and counted `truncated`: not one byte of it lies beyond
its buffer, and its neighbours are whole.
"""

from __future__ import annotations

import pytest
from link import Link

ROOM = 4096


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("stride", [64, 2048, ROOM])
def test_what_is_longer_than_its_room_is_refused_and_touches_nothing_else(
    name: str, one_by_one: bool, stride: int
) -> None:
    with Link(name, batch=4, room=ROOM, one_by_one=one_by_one) as link:
        lengths = [10, ROOM, ROOM + 1, 20, 65507, 30, 65507, ROOM - 1]
        for _ in range(5):
            link.rx.state[0]["stride"] = stride
            sent = link.send(lengths)
            link.take()
            assert link.read() == [packet for packet in sent if len(packet) <= ROOM]
        assert link.refused == {"truncated": 3 * 5}
        link.check_balance()
        assert not link.rx.overflow[:, ROOM:].any()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_largest_datagram_there_is_has_room(name: str, one_by_one: bool) -> None:
    with Link(name, size_bytes=4 << 20, one_by_one=one_by_one) as link:
        sent = link.send([65507, 1, 65507])
        link.take()
        assert link.read() == sent
        assert link.refused == {}
