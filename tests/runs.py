"""Whole runs for tests: `rxring run --json` and what sends to it.

A `Run` is a forked process in which everything is compiled already, or, with `command=True`, the command
as a user starts it. Its workers have its stdout open: the end of that pipe is the end of all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from forked import Child, await_, readable

from engine.consumer import Consumer
from engine.handlers.api import load
from engine.receiving import Receiving
from engine.spec import ConsumerSpec
from engine.status import Status
from rings.reader import Reader
from tools import cli

ROOT = Path(__file__).resolve().parent.parent
RXRING = [sys.executable, "-m", "tools.cli"]
Object = dict[str, Any]


@functools.cache
def warm() -> None:
    """Compile what runs need: processes forked from here on have it."""
    Receiving.compile()
    Reader.compile()
    for name in ("latency", "rate", "gaps"):
        Consumer.compile(ConsumerSpec(handler=name), load(name), "rxring")


class Run:
    """A run of name `name`. `flags` are the command's; it listens on a free port of 127.0.0.1.

    folder, cache: of the command: where it is started, and where its compiled code is kept.
    """

    def __init__(
        self,
        name: str,
        *flags: str,
        command: bool = False,
        listen: str = "udp://127.0.0.1:0",
        folder: Path = ROOT,
        cache: Path | None = None,
    ) -> None:
        self.name = name
        self.objects: list[Object] = []
        self._errors = os.memfd_create("stderr")
        self._out, out = os.pipe()
        fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, 1 << 20)  # it may be a while until a test reads
        self._rest = b""
        args = ["run", "--name", name, "--json", "--listen", listen, *flags]
        self.process: Child | subprocess.Popen[bytes]
        if command:
            self.process = subprocess.Popen(
                [*RXRING, *args],
                stdout=out,
                stderr=self._errors,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)}
                | ({"NUMBA_CACHE_DIR": f"{cache}"} if cache else {}),
                start_new_session=True,
            )
        else:
            warm()
            self.process = Child(_main, args, out, self._errors, self._out)
        os.close(out)
        self.pid = self.process.pid

    def next(self, timeout_s: float = 90.0) -> Object | None:
        """The next object of its output; None at its end, when no process of the run is left."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            assert readable(self._out, end - time.monotonic()), f"no output for {timeout_s} s: {self.errors}"
            block = os.read(self._out, 1 << 16)
            if not block:
                assert not self._rest, f"half a line: {self._rest!r}"
                return None
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        self.objects.append(json.loads(line))
        return self.objects[-1]

    @functools.cached_property
    def ready(self) -> Object:
        first = self.next()
        assert first is not None, f"it ended: {self.errors}"
        assert first["type"] == "ready"
        return first

    @property
    def port(self) -> int:
        port: int = self.ready["receivers"][0]["port"]
        return port

    def await_interval(self, condition: Callable[[Object], bool] = lambda view: True) -> Object:
        """The next interval of which that is true; soon."""
        assert self.ready
        end = time.monotonic() + 30
        while True:
            view = self.next()
            assert view is not None, f"it ended: {self.errors}"
            assert view["type"] == "interval"
            if condition(view):
                return view
            assert time.monotonic() < end, f"it does not happen: {view}"

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, number: signal.Signals | None = signal.SIGINT, *, code: int = 0) -> Object:
        """End it by a signal (None: it ends by itself); its summary."""
        assert self.ready
        if number is not None:
            self.send_signal(number)
        deadline = time.monotonic() + 90.0
        while self.next() is not None:
            assert time.monotonic() < deadline, f"it does not end: {self.errors}"
        assert self.wait() == code, self.errors
        assert self.objects[-1]["type"] == "summary"
        return self.objects[-1]

    def wait(self, timeout_s: float = 90.0) -> int:
        """The supervisor's exit code."""
        return self.process.wait(timeout_s)

    def await_all_gone(self, timeout_s: float = 20.0) -> None:
        """Until no process of the run is left, whatever became of the supervisor."""
        while self.next(timeout_s) is not None:
            pass

    @property
    def errors(self) -> str:
        """stderr so far, without the notes that depend on the machine."""
        notes = ("compiling for the first time: ", "rx0: the receive buffer is ")
        return "".join(line for line in self.stderr.splitlines(True) if not line.startswith(notes))

    @property
    def stderr(self) -> str:
        return os.pread(self._errors, 1 << 20, 0).decode()

    def worker(self, index: int) -> int:
        """Pid of a worker as it is now: 0 is the receiver, 1 the first consumer."""
        assert self.ready
        status = Status.open(self.name)
        try:
            return int(status.read(index)[0]["pid"])
        finally:
            status.close()

    def kill_worker(self, index: int) -> None:
        """SIGKILL a worker; returns when another does its work."""
        before = self.worker(index)
        os.kill(before, signal.SIGKILL)
        await_(lambda: self.worker(index) != before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # workers that a test had stopped
            os.killpg(self.pid, signal.SIGCONT)
        self.await_all_gone()
        os.close(self._out)
        os.close(self._errors)


def _main(args: list[str], out: int, errors: int, read_end: int) -> None:
    """The command in a forked process, with a process group of its own."""
    os.setsid()
    os.close(read_end)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.close(out)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os._exit(cli.main(args))


def ended(pid: int, timeout_s: float = 30.0) -> int:
    """Wait for a child of ours: its exit code, or minus the signal that ended it."""
    pidfd = os.pidfd_open(pid)
    try:
        assert readable(pidfd, timeout_s), f"process {pid} still runs after {timeout_s} s"
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Source:
    """Sends to a run and is its known sender: plain socket, our own status segment, exact counts."""

    def __init__(self, name: str) -> None:
        self._status = Status.create(name, kind="sender", workers=["sender"])
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sent = 0

    def connect(self, run: Run) -> None:
        self._socket.connect(("127.0.0.1", run.port))

    def send(self, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            self._socket.send(payload)
            self.sent += 1

    def done(self) -> None:
        """Say how many there were."""
        self._status.publish(0, {"state": "done", "sent": self.sent, "frames": self.sent})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._status.close()


def fits_quickly(attempt: Callable[[], float], limit_s: float) -> None:
    """Something takes less than so long, if not at first, then when the machine has time for us."""
    times = []
    for _ in range(5):
        times.append(attempt())
        if times[-1] < limit_s:
            return
    raise AssertionError(f"each time longer than {limit_s} s: {times}")


def check_ledger(view: Object) -> None:
    """A summary whose counts add up, each line from counts of its own; to the packet where that is known."""
    ledger = view["ledger"]
    receivers = view["receivers"]
    assert ledger["residual"] == 0
    assert ledger["balanced"] is True
    dropped_frames = sum(r["gro"] * (r["socket_dropped_frames"] + r["after_stop_frames"]) for r in receivers)
    assert ledger["exact"] is True or dropped_frames > 0
    assert ledger["received"] == sum(r["packets"] for r in receivers)
    assert ledger["received"] == ledger["refused"] + ledger["published"]
    assert ledger["refused"] == sum(sum(r["refused"].values()) for r in receivers)
    if ledger["exact"]:
        assert ledger["sent"] == (
            ledger["nic_dropped"]
            + ledger["socket_dropped"]
            + ledger["softnet_dropped"]
            + ledger["other_errors"]
            - ledger["of_others"]
            + ledger["lost_in_flight"]
            + ledger["after_stop"]
            + ledger["received"]
        )
    for consumer in view["consumers"]:
        counts = {key: consumer[key] for key in ("delivered", "skipped", "passed", "unread")}
        assert ledger["consumers"][consumer["name"]] == counts
        assert sum(counts.values()) == ledger["published"] - consumer["joined"]
