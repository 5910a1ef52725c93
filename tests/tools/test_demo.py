"""`make run`, interrupted: its children end in order, each told once."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("kill", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_a_signal_ends_it_with_the_ledger(kill: Callable[[int, int], None], number: signal.Signals) -> None:
    """A terminal's Ctrl-C goes to the whole process group."""
    command = [sys.executable, "-m", "tools.demo"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        out = b""
        while b" published" not in out:  # a line of its first second
            assert select.select([process.stdout], [], [], 90)[0]
            block = os.read(process.stdout.fileno(), 1 << 16)
            assert block, "it ended"
            out += block
        kill(process.pid, number)
        rest, err = process.communicate(timeout=60)  # until nobody has the pipes open any more
    assert process.returncode == 0
    assert b"Traceback" not in err
    assert b"ledger" in rest
