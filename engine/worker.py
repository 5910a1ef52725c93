"""What a forked worker process is: its own signals, its own locks, its CPU, its record in the status."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.affinity import pinning
from engine.errors import Failed, Refused
from engine.signals import END_SIGNALS
from engine.status import Status
from rings import locks
from rings.layout import LOCK_OWNER
from rings.segment import RingError, Segment, find, remove_if_dead

_PR_SET_NAME = 15


@dataclass(slots=True)
class Worker:
    """A worker's own view, in its process. `index` is its record in the status segment."""

    name: str
    index: int
    status: Status
    cpus: tuple[int, ...] | None
    fifo: int | None
    mlock: bool
    ready_fd: int = -1
    _switches: tuple[int | None, int] = (None, 0)  # what to add to what the kernel counts of this process
    _lock_view: Segment | None = None

    def begin(self) -> None:
        """The first acts after the fork: become a process of its own, on its own CPU."""
        # Ctrl-C in a terminal, its closing, and a service manager's SIGTERM reach the whole group. The
        # supervisor ends the run in order and tells us through the stop word.
        signal.set_wakeup_fd(-1)
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()  # what came from the supervisor is never garbage: its pages stay shared
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rx:{self.name}"[:15].encode())
        self._lock_view = self.status.segment.reopen()
        self.status.disown()
        if self.cpus is not None:
            pinning.pin(os.getpid(), self.cpus)
        if self.fifo is not None:
            pinning.set_fifo(os.getpid(), self.fifo)
        if self.mlock:
            pinning.lock_memory()
        self._count_switches()

    def _count_switches(self) -> None:
        """From now on, and on from where a process died whose work this one takes up."""
        before, (migrations, involuntary) = self.status.read(self.index)[0], pinning.switches(os.getpid())
        self._switches = (
            None if migrations is None else (before.get("migrations") or 0) - migrations,
            before.get("involuntary", 0) - involuntary,
        )

    def ready(self, facts: dict[str, Any], state: bytes | memoryview = b"") -> None:
        self.publish(facts, state)
        os.write(self.ready_fd, b"r")

    def publish(self, facts: dict[str, Any], state: bytes | memoryview = b"") -> None:
        """Tell the outside. Where our threads may run is read back each time, not remembered."""
        threads = pinning.verify(os.getpid())
        migrations, involuntary = pinning.switches(os.getpid())
        offset, more = self._switches
        common = {
            "pid": os.getpid(),
            "cpus": sorted({cpu for thread in threads for cpu in thread.cpus}),
            "last_cpu": threads[0].last_cpu if threads else None,
            "migrations": None if migrations is None or offset is None else migrations + offset,
            "involuntary": involuntary + more,
        }
        self.status.publish(self.index, common | facts, state)

    def say_last(self, error: str) -> None:
        """Why it ends; what it had published before stays."""
        facts, state = self.status.read(self.index)
        self.publish(facts | {"error": error}, state)

    def supervisor_lives(self) -> bool:
        """Its lock on the status segment is freed by the kernel when it ends, however it ends."""
        return self._lock_view is not None and locks.held_by_other(self._lock_view.fd, LOCK_OWNER)

    def leave(self) -> None:
        """The last act: who is left without a supervisor removes what it would have removed."""
        if not self.supervisor_lives():
            for found in find():
                if found.name == self.status.name:
                    remove_if_dead(found.object)

    @property
    def stop_address(self) -> int:
        """Of the stop word, for compiled loops."""
        return int(np.frombuffer(self.status.memory, np.uint8).ctypes.data) + self.status.stop_offset


def fork(worker: Worker, life: Callable[[Worker], None], forget: Callable[[], None]) -> int:
    """Fork a process that lives `life(worker)`; its pid.

    forget: closes what the supervisor holds and the child must not (locks above all). The child exits
    with 0, with 1 (Failed: its one line stands in its facts), or with 2 (Refused).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        worker.begin()
        forget()
        life(worker)
        worker.leave()
        code = 0
    except (Failed, Refused, RingError) as error:
        code = 1 if isinstance(error, Failed) else 2
        worker.say_last(str(error))
    except BaseException as error:
        worker.say_last(f"{type(error).__name__}: {error}")
        if os.environ.get("RXRING_DEBUG"):
            traceback.print_exc()
    finally:
        os._exit(code)
