"""`make run`: the main job for ten seconds, on traffic of our own sender.

Starts `rxring run` (a pinned receiver, two consumers on another core where there is one), and once it
is ready `rxring send` beside it. When the sender is done, or at a signal, the run is ended and shows its
ledger; a second signal ends it at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from engine.signals import END_SIGNALS
from engine.status import Status

SECONDS = 10
RATE = 200_000
START_S = 120  # the first start compiles


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _is_ready(name: str) -> bool:
    try:
        status = Status.open(name)
    except FileNotFoundError:
        return False
    ready = status.read(len(status.workers) - 1)[0].get("state") == "ready"
    status.close()
    return ready


class _Children:
    """Our commands, each in a process group of its own: signals reach them through us, each once."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.asked = False
        for number in END_SIGNALS:
            signal.signal(number, self._pass_on)

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tools.cli", *arguments]
        process = subprocess.Popen(command, process_group=0, **more)
        self.processes.append(process)
        if self.asked:
            process.send_signal(signal.SIGINT)
        return process

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGHUP:  # of a terminal that closes, shell and kernel both tell
            signal.signal(number, signal.SIG_IGN)
        for process in self.processes:
            process.send_signal(signal.SIGINT)


def _becomes_ready(run: subprocess.Popen[bytes], name: str) -> bool:
    deadline = time.monotonic() + START_S
    while not _is_ready(name):
        if run.poll() is not None:
            return False
        if time.monotonic() > deadline:
            print(f"rxring: the run was not ready within {START_S} s: see above", file=sys.stderr)
            return False
        time.sleep(0.05)
    return True


def main() -> int:
    cpus = sorted(os.sched_getaffinity(0))
    receive, process = cpus[0], cpus[-1]
    port, name = _free_port(), f"demo{os.getpid()}"
    children, sent = _Children(), 1
    run = children.start(
        *("run", "--name", name, "--listen", f"udp://127.0.0.1:{port}", "--sender", f"{name}s"),
        *("--rx-cpu", f"{receive}", "--consumer", f"latency@{process}", "--consumer", f"gaps@{process}"),
    )
    if _becomes_ready(run, name):
        send = children.start(
            *("send", "--to", f"127.0.0.1:{port}", "--name", f"{name}s", "--cpu", f"{process}"),
            *("--size", "100", "--rate", f"{RATE}", "--duration", f"{SECONDS}", "--json"),
            stdout=subprocess.DEVNULL,
        )
        while send.poll() is None and run.poll() is None:
            time.sleep(0.05)
        if not children.asked:
            send.send_signal(signal.SIGINT)  # where the run has ended by itself
        sent = send.wait()
    if not children.asked:
        run.send_signal(signal.SIGINT)
    return run.wait() or (0 if children.asked else sent)


if __name__ == "__main__":
    sys.exit(main())
