"""Local senders whose own count of what they sent is known: `rxring run --sender NAME`.

Several may come under the name, one after the other; what they sent adds up.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from engine.status import Status
from rings import locks
from rings.layout import LOCK_OWNER
from rings.segment import RingError


class Sent(NamedTuple):
    """frames: messages as they were handed to the kernel, each of one packet or (GSO) several."""

    packets: int
    frames: int


class KnownSender:
    """Looks for the senders' status segments, and keeps each: it outlives its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem = ""  # why an object of this name is none of a sender's
        self._statuses: list[Status] = []

    def look(self) -> None:
        """Find a sender that has come. To be called often: a sender may be short-lived."""
        try:
            status = Status.open(self.name)
        except FileNotFoundError:
            return
        except (RingError, OSError, ValueError, struct.error) as error:
            self.problem = str(error)  # somebody else's: no reason to end a run
            return
        known = any((s.pid, s.started_ns) == (status.pid, status.started_ns) for s in self._statuses)
        if known or status.kind != "sender" or not _lives(status):
            status.close()
        else:
            self._statuses.append(status)

    @property
    def came(self) -> bool:
        return bool(self._statuses)

    @property
    def lives(self) -> bool:
        """Is one there, and not done yet? The kernel frees its lock when it ends, however it ends."""
        return any(_lives(status) and not _is_done(status) for status in self._statuses)

    @property
    def state(self) -> str:
        """absent · sends · died · done"""
        if not self.came:
            return "absent"
        return "sends" if self.lives else "died" if self.sent is None else "done"

    @property
    def sent(self) -> Sent | None:
        """What they sent, once they are done: before, some is on its way and none can say how much."""
        if not self.came or not all(map(_is_done, self._statuses)):
            return None
        facts = [status.read(0)[0] for status in self._statuses]
        return Sent(sum(f["sent"] for f in facts), sum(f["frames"] for f in facts))

    def close(self) -> None:
        for status in self._statuses:
            status.close()


def _lives(status: Status) -> bool:
    return locks.held_by_other(status.segment.fd, LOCK_OWNER)


def _is_done(status: Status) -> bool:
    return bool(status.read(0)[0].get("state") == "done")
