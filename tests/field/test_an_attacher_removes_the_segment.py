"""Case 15 (cpython#82300): multiprocessing's resource tracker removed a live segment when one who had only
attached to it exited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

import rings
from rings.segment import SHM

ENDS = {
    "returns": "",
    "exits": "import sys; sys.exit(3)",
    "fails": "raise SystemExit('no')",
    "aborts": "import os; os._exit(1)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "closes": "reader.close(); ring.close()",
}


@pytest.mark.parametrize("end", ENDS)
def test_who_attached_may_end_in_any_way(name: str, end: str) -> None:
    with rings.create(name, frames=16, arena_bytes=4096) as ring, ring.writer() as writer:
        code = f"import rings; ring = rings.attach({name!r}); memory = ring.counters; reader = None\n"
        if end == "closes":
            code += "reader = ring.reader()\n"
        subprocess.run([sys.executable, "-c", code + ENDS[end]], stderr=subprocess.DEVNULL, check=False)
        assert (SHM / ring.segment.object[1:]).exists()
        with rings.attach(name) as attached:
            writer.write(b"x")
            assert attached.published() == (1, 1)


def test_a_forked_child_of_the_owner_may_end_in_any_way(name: str, fork: Any) -> None:
    """What it inherited it lets go of, and removes nothing."""
    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        for end in (lambda: None, lambda: os.kill(os.getpid(), signal.SIGKILL), ring.forget):
            fork(end).wait()
            assert (SHM / ring.segment.object[1:]).exists()
            assert ring.published() == (0, 0)
