"""Forked processes for tests, and waiting for what they do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


class Child:
    """A forked process that runs one function and exits: 0, or 1 with a traceback on stderr."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                function(*arguments)
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def send(self, number: signal.Signals) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, or minus the signal that ended it."""
        if self.status is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ended = readable(pidfd, timeout_s)
            finally:
                os.close(pidfd)
            assert ended, f"process {self.pid} still runs after {timeout_s} s"
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()


def readable(fd: int, timeout_s: float) -> bool:
    """Wait for input, or, of a pidfd, for the end of its process; False after `timeout_s`."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0) * 1000))


def await_(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Until something outside this process has happened."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def descriptors_of(name: str) -> int:
    """How many file descriptors of this process lead to files with `name` in theirs."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += name in os.readlink(f"/proc/self/fd/{descriptor}")
    return found
