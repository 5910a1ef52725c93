"""The processes that this one has started and that are still there, ended: nothing outlives a stopped run."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_GRACE_S = 3


def end_children() -> None:
    """SIGTERM to all; SIGKILL to those that are still there after three seconds."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + patience_s
        while time.monotonic() < end and _reap():
            time.sleep(0.01)


def _children() -> list[int]:
    """By their parent, the fourth field of stat; the name before it may hold anything."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (entry / "stat").read_text(errors="replace")
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def _reap() -> bool:
    """Collect those that have ended; are there any left?"""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        return True
    return False
