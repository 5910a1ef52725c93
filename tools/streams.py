"""Standard streams that may be closed, or whose other end may go away."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def open_missing() -> None:
    """Lead those that are closed to /dev/null: a socket would get the descriptor, and what is printed."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # opens as the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def drop_output(stream: TextIO | None = None) -> None:
    """Lead stdout to /dev/null, what is still buffered, too: Python would try again when it exits."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), (stream or sys.stdout).fileno())


def complain(text: str) -> None:
    """A line on stderr, where it can be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop_output(sys.stderr)
