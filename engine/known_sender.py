"""A local sender whose own count of what it sent is known: `rxring run --sender NAME`."""

from __future__ import annotations

from typing import NamedTuple

from engine.status import Status
from rings import locks
from rings.layout import LOCK_OWNER


class Sent(NamedTuple):
    """frames: messages as they were handed to the kernel, each of one packet or (GSO) several."""

    packets: int
    frames: int


class KnownSender:
    """Looks for the sender's status segment until it is there, and keeps it: it outlives its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._status: Status | None = None

    def look(self) -> None:
        """Find the sender, if it has come. To be called often: a sender may be short-lived."""
        if self._status is None:
            try:
                status = Status.open(self.name)
            except FileNotFoundError:
                return
            if status.kind == "sender" and locks.held_by_other(status.segment.fd, LOCK_OWNER):
                self._status = status
            else:
                status.close()

    @property
    def came(self) -> bool:
        return self._status is not None

    @property
    def lives(self) -> bool:
        """Is it there, and not done yet? The kernel frees its lock when it ends, however it ends."""
        status = self._status
        return (
            status is not None
            and locks.held_by_other(status.segment.fd, LOCK_OWNER)
            and status.read(0)[0].get("state") != "done"
        )

    @property
    def sent(self) -> Sent | None:
        """What it sent, once it is done: before, some is on its way and none can say how much."""
        if self._status is None:
            return None
        facts, _ = self._status.read(0)
        return Sent(facts["sent"], facts["frames"]) if facts.get("state") == "done" else None

    def close(self) -> None:
        if self._status is not None:
            self._status.close()
