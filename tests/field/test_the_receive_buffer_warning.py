"""Case 4 (ska-sa/spead2#25, aeron#151, #420): the warning of a small buffer names the wrong knob, or is late.

Here the buffer is read back before the first packet can come; if it is short, one line says what was asked,
what was granted, and the very sysctl that would grant it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Run

RMEM_MAX = int(Path("/proc/sys/net/core/rmem_max").read_text())
CAP_NET_ADMIN = 12
_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: two words of effective, permitted, inheritable


@contextlib.contextmanager
def without_net_admin() -> Iterator[None]:
    """Within, this process and those it forks may not force a buffer upon the kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("Ii", _VERSION, 0), 8)
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    words = list(struct.unpack("6I", before.raw))
    words[0] &= ~(1 << CAP_NET_ADMIN)
    assert libc.capset(header, struct.pack("6I", *words)) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.mark.parametrize("asked", [2 * RMEM_MAX + 2, 4 * RMEM_MAX + 1])
def test_a_short_buffer_is_told_at_the_start_with_the_very_sysctl(name: str, asked: int) -> None:
    with without_net_admin(), Run(name, "--rcvbuf", str(asked)) as run:
        ready = run.ready
        (told,) = (line for line in run.stderr.splitlines() if "buffer" in line)  # by now, not later
        granted = 2 * RMEM_MAX
        assert ready["receivers"][0]["rcvbuf"] == {"asked": asked, "granted": granted}
        assert told == (
            f"rx0: the receive buffer is {granted} bytes, not {asked}: "
            f"sysctl -w net.core.rmem_max={asked // 2} (or CAP_NET_ADMIN) grants it"
        )
        summary = run.end()
        assert summary["receivers"][0]["rcvbuf"] == {"asked": asked, "granted": granted}
        assert run.stderr.count("buffer") == 1


@pytest.mark.parametrize("asked", [2 * RMEM_MAX + 1, 2 * RMEM_MAX, 10_000])
def test_what_was_granted_needs_no_warning(name: str, asked: int) -> None:
    """The kernel grants even numbers: one byte less than asked for is no lack."""
    with without_net_admin(), Run(name, "--rcvbuf", str(asked)) as run:
        assert run.ready["receivers"][0]["rcvbuf"] == {"asked": asked, "granted": asked // 2 * 2}
        assert "buffer" not in run.stderr
        run.end()


def test_the_sysctl_it_names_is_what_the_kernel_goes_by(name: str) -> None:
    """One more than it allows is the first that is not granted."""
    granted = []
    for asked in (2 * RMEM_MAX, 2 * RMEM_MAX + 2):
        with without_net_admin(), Run(f"{name}.{len(granted)}", "--rcvbuf", str(asked)) as run:
            granted.append(run.ready["receivers"][0]["rcvbuf"]["granted"])
            run.end()
    assert granted == [2 * RMEM_MAX] * 2
