"""Who takes whose CPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.affinity import interrupts, layouts
from engine.affinity.topology import format_cpu_list
from engine.doctor.check import Answer, Group, count
from engine.doctor.machine import Machine
from engine.errors import Refused

GROUP = Group("placement")


@GROUP.check(
    "The kernel's work for a packet goes before the receiver's on the same CPU: under a flood over veth a "
    "receiver there got 0.10 M packets/s, on another CPU 1.50 M. For a few packets it is the nearest place.",
)
def interrupt_cpu(m: Machine) -> Answer:
    at = m.interrupt_cpus
    if not at:
        return Answer("ok", "no device has interrupts of its own: whoever sends does the kernel's work")
    where = "; ".join(f"{name} on CPU {format_cpu_list(cpus)}" for name, cpus in at.items())
    everywhere = {cpu for cpus in at.values() for cpu in cpus}
    device, *_ = at
    apart = _apart(m)
    mend = m.rxring_as_root(f"pin apply {apart[0]} --device {shlex.quote(device)}") if apart else None
    for name, cpu, _ in m.receivers:
        if cpu in everywhere:
            return Answer("bad", f"{name} receives on CPU {cpu}, where interrupts come: {where}", mend)
    if set(m.cpus.allowed) <= everywhere:
        return Answer("note", f"no CPU is free of interrupts: {where}", mend)
    return Answer("ok", f"{where}: receive elsewhere")


def _apart(m: Machine) -> list[str]:
    """The layouts this machine can do where interrupts come elsewhere than packets are received."""
    names = []
    for name in ("split", "split-package", "sibling", "cross-node"):
        with suppress(Refused):
            layouts.find(name, m.cpus)
            names.append(name)
    return names


@GROUP.check(
    "Two threads of a core share what it computes with: a consumer that spins takes it from the receiver. "
    "Their ring is fast (a round trip of 139 ns, between two cores 552), so share it for latency, not under "
    "a flood.",
)
def siblings(m: Machine) -> Answer:
    cores = {cpu.id: cpu.siblings for cpu in m.cpus.cpus}
    shared = sorted({core for core in cores.values() if len(set(core) & set(m.cpus.allowed)) > 1})
    if not shared:
        return Answer("ok", "no two CPUs share a core, as far as this machine tells")
    apart = [name for name in _apart(m) if name != "sibling"]
    mend = _run_apart(m, apart[0]) if apart else None
    for receiver in m.receivers:
        for other in m.workers:
            if other.cpu != receiver.cpu and other.cpu in cores.get(receiver.cpu, ()):
                both = f"{receiver.name} on CPU {receiver.cpu} and {other.name} on CPU {other.cpu}"
                return Answer("bad", f"{both} share a core", mend)
    shown = ", ".join(format_cpu_list(core) for core in shared[:3])
    more = f" and {count(len(shared) - 3, 'more core')}" if len(shared) > 3 else ""
    return Answer("note", f"these share a core: {shown}{more}", mend)


def _run_apart(m: Machine, name: str) -> str:
    layout = layouts.find(name, m.cpus)
    return f"rxring run --rx-cpu {layout.receive} --consumer HANDLER@{format_cpu_list(layout.process)} …"


@GROUP.check(
    "RPS has another CPU do the kernel's work for a packet, by an interrupt from CPU to CPU: an interrupt "
    "core for lo and veth; for a device that has interrupts it undoes where they were put.",
)
def rps(m: Machine) -> Answer:
    on = {d.name: sorted({cpu for q in d.rx for cpu in q.rps or ()}) for d in m.devices}
    both = [name for name, cpus in on.items() if cpus and name in m.interrupt_cpus]
    shown = "; ".join(f"{name} to CPU {format_cpu_list(cpus)}" for name, cpus in on.items() if cpus)
    if not both:
        return Answer("ok", shown or "off: packets stay on the CPU that took them")
    mend = "; ".join(
        f"for f in /sys/class/net/{shlex.quote(name)}/queues/rx-*/rps_cpus; do echo 0 > $f; done"
        for name in both
    )
    return Answer("note", shown, m.as_root(mend))


@GROUP.check("It puts interrupts elsewhere every ten seconds, whatever layout was applied.")
def irqbalance(m: Machine) -> Answer:
    pid = interrupts.irqbalance(m.root)
    if pid is not None:
        return Answer(
            "bad" if m.interrupt_cpus else "note",
            f"runs (process {pid})",
            m.as_root("systemctl stop irqbalance"),
        )
    if m.container:
        return Answer("unknown", "the host's processes are not seen in a container")
    if not m.asked.is_root and m.text("proc/1/comm") is None:
        again = m.rxring_as_root("doctor")
        return Answer("unknown", "processes of others are hidden: seeing them needs root", again)
    return Answer("ok", "does not run")


@GROUP.check(
    "Receiver, consumers and interrupts take each other's time where CPUs are fewer than they are: each "
    "wants one.",
)
def cpuset(m: Machine) -> Answer:
    allowed, online = m.cpus.allowed, m.cpus.online
    if len(allowed) > 1 and set(online) <= set(allowed):
        return Answer("ok", f"all {len(online)} CPUs")
    finding = f"CPU {format_cpu_list(allowed)} of {format_cpu_list(online)}"
    mend = None if set(online) <= set(allowed) else _widen(m, format_cpu_list(online))
    return Answer("bad" if len(allowed) == 1 else "note", finding, mend)


def _widen(m: Machine, cpus: str) -> str | None:
    if m.container:
        return f"docker update --cpuset-cpus={cpus} {_container_id(m)}"
    limiting = next((path for path in _cgroups(m, "cpuset.cpus") if m.text(path)), None)
    return m.as_root(f"echo {cpus} > {shlex.quote(f'/{limiting}')}") if limiting else None


def _container_id(m: Machine) -> str:
    return shlex.quote(m.text("etc/hostname") or "CONTAINER")


def _cgroups(m: Machine, file: str) -> Iterator[str]:
    """Files of this name of our cgroup and those above, as paths below the root, the nearest first."""
    for line in (m.text("proc/self/cgroup") or "").splitlines():
        _, controllers, folder = line.split(":", 2)
        kind = file.partition(".")[0]
        if controllers and kind not in controllers.split(","):
            continue
        base = Path("sys/fs/cgroup") / (kind if controllers else "")
        inner = Path(folder.lstrip("/"))
        for level in (inner, *inner.parents):
            if m.text(f"{base / level / file}") is not None:
                yield f"{base / level / file}"


@GROUP.check(
    "When a period's quota is used up everything stands still until the next, up to 100 ms, while 8 MiB of "
    "buffer last 10 ms at 1 M packets/s.",
)
def cpu_quota(m: Machine) -> Answer:
    for path in _cgroups(m, "cpu.max"):
        quota, _, period = (m.text(path) or "").partition(" ")
        if quota != "max":
            return _quota(m, path, int(quota), int(period), "max")
    for path in _cgroups(m, "cpu.cfs_quota_us"):
        if (us := int(m.text(path) or -1)) > 0:
            period = m.text(path.replace("quota", "period")) or "100000"
            return _quota(m, path, us, int(period), "-1")
    return Answer("ok", "none")


def _quota(m: Machine, path: str, quota: int, period: int, none: str) -> Answer:
    mend = f"docker update --cpus=0 {_container_id(m)}" if m.container else None
    finding = f"{quota / 1000:g} ms of CPU time in every {period / 1000:g} ms"
    return Answer("bad", finding, mend or m.as_root(f"echo {none} > {shlex.quote(f'/{path}')}"))
