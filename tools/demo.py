"""`make run`: the main job for ten seconds, on traffic of our own sender.

Starts `rxring run` (a pinned receiver, two consumers on another core where there is one), and once it
is ready `rxring send` beside it. When the sender is done the run is ended, and shows its ledger.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

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


def main() -> int:
    cpus = sorted(os.sched_getaffinity(0))
    receive, process = cpus[0], cpus[-1]
    port, name = _free_port(), f"demo{os.getpid()}"
    rxring = [sys.executable, "-m", "tools.cli"]
    run = subprocess.Popen(
        [
            *(*rxring, "run", "--name", name, "--listen", f"udp://127.0.0.1:{port}", "--sender", f"{name}s"),
            *("--rx-cpu", f"{receive}", "--consumer", f"latency@{process}", "--consumer", f"gaps@{process}"),
        ]
    )
    send = None
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(name):
            if run.poll() is not None:
                return run.returncode
            if time.monotonic() > deadline:
                print(f"rxring: the run was not ready within {START_S} s: see above", file=sys.stderr)
                return 1
            time.sleep(0.05)
        send = subprocess.Popen(
            [
                *(*rxring, "send", "--to", f"127.0.0.1:{port}", "--name", f"{name}s", "--cpu", f"{process}"),
                *("--size", "100", "--rate", f"{RATE}", "--duration", f"{SECONDS}", "--json"),
            ],
            stdout=subprocess.DEVNULL,
        )
        while send.poll() is None and run.poll() is None:
            time.sleep(0.05)
        return send.returncode or 0
    except KeyboardInterrupt:
        return 0
    finally:
        if send is not None and send.poll() is None:
            send.send_signal(signal.SIGINT)
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
        code = run.wait()
        if send is not None:
            send.wait()
        if code:
            sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
