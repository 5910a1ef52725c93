"""Case 14 (iceoryx2#601, #1584, posix_ipc#6, #51): after kill -9 leftovers stop the restart.

Of whole engines: every process of one is killed at once, or all but a consumer. The next of the same name and
port starts, with `rxring rings gc` and without; gc leaves the living alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from forked import await_, readable
from runs import RXRING, Run, Source, check_ledger

import rings
from engine.affinity import pinning


def leftovers(name: str) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"rxring-*-{name}-*"))


def kill_all(run: Run, *, but: int = 0) -> None:
    """Also the last consumers, unless `but` of them are to be left: those stand still. When it returns, the
    dead hold nothing any more: they need a while to give back a port."""
    pids = [run.pid, *(worker["pid"] for worker in run.ready["receivers"] + run.ready["consumers"])]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that none sees the other die
    with contextlib.ExitStack() as stack:
        pidfds = [os.pidfd_open(pid) for pid in pids[: len(pids) - but]]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in pidfds:
            assert readable(pidfd, 30)
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
            run.await_all_gone()
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


def test_a_consumer_that_outlives_its_engine_is_in_nobodys_way(name: str) -> None:
    """It holds neither port nor name while it still has to drain; then it does, and leaves the next alone."""
    flags = ("--consumer", "rate", "--consumer", "gaps", "--sender", f"{name}.s")
    with Source(f"{name}.s") as source, Run(name, *flags) as run:
        source.connect(run)
        port, survivor = run.port, run.ready["consumers"][1]["pid"]
        os.kill(survivor, signal.SIGSTOP)
        await_(lambda: pinning.is_stopped(survivor))
        source.send([b"to the dead"] * 10)
        with rings.attach(name) as old:
            await_(lambda: old.published()[1] == 10)
            kill_all(run, but=1)
            with Run(name, *flags, listen=f"udp://127.0.0.1:{port}") as again:
                source.connect(again)
                source.sent = 0
                source.send([b"to the living"] * 20)
                source.done()
                objects = leftovers(name)
                assert [info.unread for info in old.readers() if info.name == "gaps"] == [10]
                os.kill(survivor, signal.SIGCONT)
                run.await_all_gone()
                assert leftovers(name) == objects
                summary = again.end()
            gaps = next(info for info in old.readers() if info.name == "gaps")
            assert (gaps.state, gaps.delivered, gaps.unread) == ("left", 10, 0)
    check_ledger(summary)
    assert summary["receivers"][0]["restarts"] == 0
    assert [consumer["delivered"] for consumer in summary["consumers"]] == [20, 20]
    assert leftovers(name) == []
