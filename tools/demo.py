"""`make run`: the main job for ten seconds, on traffic of our own sender.

Starts `rxring run` (a pinned receiver, two consumers on another core where there is one), and once it
is ready `rxring send` beside it. When the sender is done, or at a signal, the run is ended and shows its
ledger; a second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
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


def _start(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """A command in a process group of its own: Ctrl-C reaches it through us, and only once."""
    return subprocess.Popen([sys.executable, "-m", "tools.cli", *arguments], process_group=0, **more)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End it in order, at once if we are interrupted again; its exit code."""
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
            process.wait()
    return process.returncode


def _send(run: subprocess.Popen[bytes], name: str, port: int, cpu: int) -> int:
    """Feed the run once it is ready, while it lives; an exit code."""
    deadline = time.monotonic() + START_S
    while not _is_ready(name):
        if run.poll() is not None:
            return run.returncode
        if time.monotonic() > deadline:
            print(f"rxring: the run was not ready within {START_S} s: see above", file=sys.stderr)
            return 1
        time.sleep(0.05)
    send = _start(
        *("send", "--to", f"127.0.0.1:{port}", "--name", f"{name}s", "--cpu", f"{cpu}"),
        *("--size", "100", "--rate", f"{RATE}", "--duration", f"{SECONDS}", "--json"),
        stdout=subprocess.DEVNULL,
    )
    try:
        while send.poll() is None and run.poll() is None:
            time.sleep(0.05)
    finally:
        code = _end(send)
    return code


def main() -> int:
    for number in END_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    cpus = sorted(os.sched_getaffinity(0))
    receive, process = cpus[0], cpus[-1]
    port, name = _free_port(), f"demo{os.getpid()}"
    run = _start(
        *("run", "--name", name, "--listen", f"udp://127.0.0.1:{port}", "--sender", f"{name}s"),
        *("--rx-cpu", f"{receive}", "--consumer", f"latency@{process}", "--consumer", f"gaps@{process}"),
    )
    code = 0
    try:
        with contextlib.suppress(KeyboardInterrupt):
            code = _send(run, name, port, process)
    finally:
        code = _end(run) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
