"""Case 14 (iceoryx2#601, #1584, posix_ipc#6, #51): after kill -9 leftovers stop the restart.

Of whole engines: every process of one is killed at once. The next of the same name and port starts, with
`rxring rings gc` and without; gc leaves the living alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from runs import RXRING, Run, Source, check_ledger


def leftovers(name: str) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"rxring-*-{name}-*"))


def kill_all(run: Run) -> None:
    pids = [run.pid, *(worker["pid"] for worker in run.ready["receivers"] + run.ready["consumers"])]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that none sees the other die
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.await_all_gone()
    assert run.wait() == -signal.SIGKILL


@pytest.mark.parametrize("collected", [True, False])
def test_the_next_engine_takes_name_and_port(name: str, collected: bool) -> None:
    flags = ("--consumer", "rate", "--consumer", "gaps", "--sender", f"{name}s")
    with Run(f"{name}a", "--consumer", "rate") as living, Source(f"{name}s") as source:
        assert living.ready
        with Run(f"{name}b", *flags) as run:
            source.connect(run)
            source.send([b"to the dead"] * 10)
            port = run.port
            kill_all(run)
        objects = [f"rxring-{os.getuid()}-{name}b-{part}" for part in ("0", "status")]
        assert leftovers(f"{name}b") == objects
        if collected:
            told = subprocess.run([*RXRING, "rings", "gc", "--json"], stdout=subprocess.PIPE, check=True)
            assert set(objects) <= set(json.loads(told.stdout)["removed"])
            assert leftovers(f"{name}b") == []
            assert len(leftovers(f"{name}a")) == 2
        with Run(f"{name}b", *flags, listen=f"udp://127.0.0.1:{port}") as again:
            source.connect(again)
            source.sent = 0
            source.send([b"to the living"] * 20)
            source.done()
            summary = again.end()
        assert leftovers(f"{name}b") == []
        check_ledger(summary)
        assert [consumer["delivered"] for consumer in summary["consumers"]] == [20, 20]
        assert living.end()["receivers"][0]["restarts"] == 0
