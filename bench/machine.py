"""What a result depends on besides the code: recorded with it, so that two results can be compared."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.errors import Refused

_ROOT = Path(__file__).resolve().parent.parent
_SYSCTLS = Path("/proc/sys/net")


def config() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in ("rxring", "numpy", "numba")},
        "sysctl": _sysctls("core/*") | _sysctls("ipv4/udp_*") | _sysctls("ipv4/ip_early_demux"),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def two_cpus() -> tuple[int, int]:
    """The first two CPUs that we may use. Refused where there is only one."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise Refused(f"this needs two CPUs, this process may use only {cpus[0]}: run it where it has two")
    return cpus[0], cpus[1]


def git() -> dict[str, Any] | None:
    """The commit this runs from, and whether files differ from it; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": _git("status", "--porcelain") != ""}
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sysctls(pattern: str) -> dict[str, str]:
    """{"net.core.rmem_max": "4194304", …} of those that can be read."""
    found = {}
    for path in sorted(_SYSCTLS.glob(pattern)):
        value = _read(path)
        if value is not None:
            found[f"net.{path.relative_to(_SYSCTLS)}".replace("/", ".")] = value
    return found


def _read(path: Path) -> str | None:
    try:
        return " ".join(path.read_text().split())
    except (OSError, UnicodeDecodeError):
        return None
