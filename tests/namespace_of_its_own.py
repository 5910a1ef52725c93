"""A forked child's own network namespace, /sys and /run, with a veth of many queues: nothing of the machine
is touched, and all of it goes with the child.
"""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
from collections.abc import Mapping

import pytest

_NEWNS, _NEWNET = 0x0002_0000, 0x4000_0000
_REC_PRIVATE = 0x4000 | 1 << 18
QUEUES = 8
_libc = ctypes.CDLL(None, use_errno=True)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces")


def enter() -> None:
    """This process goes into namespaces of its own: lo, and v0 joined with v1, of QUEUES queues each."""
    _check(_libc.unshare(_NEWNET))
    own_files()
    queues = ["numrxqueues", str(QUEUES), "numtxqueues", str(QUEUES)]
    ip("link", "add", "v0", *queues, "type", "veth", "peer", "name", "v1", *queues)
    ip("link", "set", "lo", "up")
    for device in ("v0", "v1"):
        ip("link", "set", device, "addrgenmode", "none", "up")  # without IPv6 nobody speaks of himself


def own_files() -> None:
    """From now on /sys shows the devices of this process's network namespace, and /run is empty."""
    _check(_libc.unshare(_NEWNS))
    _check(_libc.mount(b"none", b"/", None, _REC_PRIVATE, None))
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    _check(_libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None))


def _check(answer: int) -> None:
    assert answer == 0, os.strerror(ctypes.get_errno())


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def masks() -> Mapping[str, str]:
    """Every file of this process's /sys and /proc that `rxring pin` may write."""
    found = {}
    patterns = ("/sys/class/net/*/queues/*/*ps_*", "/proc/irq/*/smp_affinity_list")
    for path in (path for pattern in patterns for path in glob.glob(pattern)):
        try:
            with open(path) as file:
                found[path] = file.read()
        except OSError:  # XPS of a single queue
            continue
    return found
