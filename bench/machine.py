"""What a result depends on besides the code: recorded with it, so that two results can be compared.

`python -m bench.machine DEVICE` prints, as JSON, what concerns a device and the network namespace it runs in.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import offloads
from bench.place import Place, Side
from engine.affinity import devices
from engine.affinity.interrupts import Irq, read_irq
from engine.affinity.topology import format_cpu_list
from engine.errors import Failed, Refused

_ROOT = Path(__file__).resolve().parent.parent
_NET = Path("/proc/sys/net")
_CPU = Path("/sys/devices/system/cpu")
# Of packets and of streams: memory, buffers, steering, and whether sockets are looked up early.
_SYSCTLS = ("core/*", "ipv4/udp_*", "ipv4/tcp_*mem", "ipv4/*early_demux", "ipv4/tcp_congestion_control")
_OTHERS = ("bpf_", "xfrm_", "netdev_rss_key", "warnings")  # of net.core: of no matter here
_PACKAGES = ("rxring", "numpy", "numba", "llvmlite")


def config(places: Sequence[Place] = ()) -> dict[str, Any]:
    """All of it; of the network, what concerns the sides of these places."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "kernel": platform.release(),
        "cmdline": _read(Path("/proc/cmdline")),
        "cpu": cpu_model(),
        "virtual": _is_virtual(),
        "cpus": cpus,
        "smt": {"0": "off", "1": "on"}.get(_read(_CPU / "smt/active") or ""),
        "governor": _each(cpus, "cpufreq/scaling_governor"),
        "turbo": _turbo(),
        "idle_states": _idle_states(cpus[0]),
        "clocksource": _read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        "mitigations": {path.name: _read(path) for path in sorted((_CPU / "vulnerabilities").glob("*"))},
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in _PACKAGES},
        "sysctl": _sysctls(),
        "interrupts": dict(_interrupts()),
        "sides": dict(_sides(places)),
    }


def changes(before: Any, after: Any, key: str = "") -> Iterator[dict[str, Any]]:
    """What differs between two configurations: {key: "sysctl.net.core.rmem_max", before, after}.

    None where one has no such key. Of two lists of names, those that the other has not. `load` is left out:
    it changes always.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            if name != "load":
                yield from changes(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        if _are_names(before) and _are_names(after):
            before, after = _without(before, after), _without(after, before)
        yield {"key": key, "before": before, "after": after}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _without(names: list[str], others: list[str]) -> list[str]:
    return [name for name in names if name not in others]


def network(device: str) -> dict[str, Any]:
    """Of a device in the network namespace of this process. Refused if there is no such device."""
    found = devices.read(device)
    coalescing = found.coalescing
    return {
        "device": device,
        "driver": found.driver,
        "mtu": _read(Path("/sys/class/net") / device / "mtu"),
        "rps": {f"rx-{queue.number}": _list(queue.rps) for queue in found.rx},
        "rfs": {f"rx-{queue.number}": queue.rfs for queue in found.rx},
        "xps": {f"tx-{queue.number}": _list(queue.xps) for queue in found.tx},
        "interrupts": {_name(irq): _place(irq) for irq in found.irqs},
        "napi_threads": None if found.napi is None else {one.name: _list(one.cpus) for one in found.napi},
        "coalescing": None if coalescing is None else str(coalescing),
        "offloads": offloads.active(device),
    }


def _sides(places: Sequence[Place]) -> Iterator[tuple[str, dict[str, Any]]]:
    for place in places:
        if place.receive is place.send:
            yield place.name, _side(place.receive)
        else:
            yield f"{place.name}, receiver", _side(place.receive)
            if not place.send.remote:
                yield f"{place.name}, sender", _side(place.send)


def _side(side: Side) -> dict[str, Any]:
    """Asked within its namespace: /sys shows the devices of the one it was mounted in."""
    if side.namespace is None:
        return network(side.device)
    command = side.command(sys.executable, "-m", "bench.machine", side.device)
    done = subprocess.run(command, cwd=_ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _interrupts() -> Iterator[tuple[str, str]]:
    """Every one that somebody handles: one that moves disturbs whoever works on its new CPU."""
    numbers = sorted(int(entry.name) for entry in Path("/proc/irq").glob("[0-9]*"))
    for irq in filter(None, map(read_irq, numbers)):
        if irq.actions:
            yield _name(irq), _place(irq)


def _name(irq: Irq) -> str:
    return f"{irq.number} {' '.join(irq.actions)}".strip()


def _place(irq: Irq) -> str:
    fact = "not told" if irq.fact is None else format_cpu_list(irq.fact)
    return f"{fact} (asked: {format_cpu_list(irq.wish)})"


def _list(cpus: tuple[int, ...] | None) -> str | None:
    return None if cpus is None else format_cpu_list(cpus)


def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _is_virtual() -> bool:
    return "hypervisor" in (_cpuinfo("flags") or "").split()


def _cpuinfo(key: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return None


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


def _each(cpus: Sequence[int], file: str) -> str | None:
    """What a file of every CPU says; once, where all say the same."""
    said = {text for cpu in cpus if (text := _read(_CPU / f"cpu{cpu}" / file))}
    return ", ".join(sorted(said)) or None


def _turbo() -> str | None:
    """on, off, or None: the kernel has no say, as in a virtual machine."""
    boost, no_turbo = _read(_CPU / "cpufreq/boost"), _read(_CPU / "intel_pstate/no_turbo")
    if boost is None and no_turbo is None:
        return None
    return "on" if boost == "1" or no_turbo == "0" else "off"


def _idle_states(cpu: int) -> dict[str, str] | None:
    """{"C6": "133 µs"}: how long it takes to wake up; `off` where it is not used; None: not the kernel's."""
    states = {}
    for folder in sorted((_CPU / f"cpu{cpu}/cpuidle").glob("state*")):
        off = _read(folder / "disable") != "0"
        states[_read(folder / "name") or folder.name] = "off" if off else f"{_read(folder / 'latency')} µs"
    return states or None


def _sysctls() -> dict[str, str]:
    """{"net.core.rmem_max": "4194304", …} of those that can be read."""
    found = {}
    for path in sorted({path for pattern in _SYSCTLS for path in _NET.glob(pattern)}):
        value = None if path.name.startswith(_OTHERS) else _read(path)
        if value is not None:
            found[f"net.{path.relative_to(_NET)}".replace("/", ".")] = value
    return found


def _read(path: Path) -> str | None:
    try:
        return " ".join(path.read_text().split())
    except (OSError, UnicodeDecodeError):
        return None


if __name__ == "__main__":
    print(json.dumps({**network(sys.argv[1]), "sysctl": _sysctls()}))
