"""What on this machine costs packets or microseconds, and the command that mends it. Changes nothing.

A check is a function of a Machine: files below a root (/ or a captured tree), and what the kernel answered
when it was asked. Its name is the id of its finding, underscores read as hyphens.

ok       as it should be                    bad      packets are lost, or a layout is undone
note     better otherwise, for some uses    unknown  not told to this user, or not here
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import resource
import shlex
import socket
import struct
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine import figures
from engine.affinity import devices, interrupts, layouts, topology
from engine.affinity.devices import Device
from engine.affinity.topology import ROOT, Topology, format_cpu_list, parse_mask, read_text
from engine.errors import Refused
from engine.net.counters import parse_softnet
from engine.spec import UDP_BUFFER_BYTES, RingSpec

if TYPE_CHECKING:
    from rich.text import Text

State = Literal["bad", "note", "unknown", "ok"]
STATES: tuple[State, ...] = ("bad", "note", "unknown", "ok")
GROUPS = ("packets", "latency", "placement", "memory")

_RING_BYTES = RingSpec().size
_BACKLOG = 16384  # packets: 16 ms at 1 M/s
_FILES = 4096  # connections, rings, sockets of one process
_DEEP_US = 10  # an idle state that takes longer to leave is worth a note
_SO_RCVBUFFORCE, _SOL_UDP, _UDP_GRO = 33, 17, 104
_FUTEX_WAITV = 449  # its number on every architecture of ours
_SIOCETHTOOL, _GGRO = 0x8946, 0x2B
_CAPABILITIES = {"NET_ADMIN": 12, "NET_RAW": 13, "IPC_LOCK": 14, "SYS_NICE": 23}
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")  # read without a call
_FAIR_SERVER = "sys/kernel/debug/sched/fair_server"


@dataclass(frozen=True, slots=True)
class Finding:
    """finding: what is so, in one line. why: what it costs. mend: a command for a shell (of what is
    unknown: that makes it known), None: there is none.
    """

    id: str
    group: str
    state: State
    finding: str
    why: str
    mend: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What no file tells, in bytes. rcvbuf: granted of UDP_BUFFER_BYTES to anybody; forced: with
    CAP_NET_ADMIN, None without. no_gro: devices that have it off.
    """

    rcvbuf: int
    forced: int | None
    udp_gro: bool
    no_gro: tuple[str, ...]
    futex_waitv: bool
    shm_size: int
    shm_free: int
    is_root: bool


class Worker(NamedTuple):
    name: str
    cpu: int
    receives: bool


@dataclass(frozen=True)
class Machine:
    root: Path
    asked: Asked

    @cached_property
    def cpus(self) -> Topology:
        return topology.read(self.root)

    @cached_property
    def devices(self) -> list[Device]:
        return list(_devices(self.root))

    @cached_property
    def workers(self) -> list[Worker]:
        """Of the engines that run, those pinned to one CPU."""
        found = []
        for pid, name in interrupts.processes(self.root):
            if name.startswith("rx:"):
                with suppress(OSError):
                    cpus = parse_mask((self.root / f"proc/{pid}/status").read_text())
                    who = f"{name.removeprefix('rx:')} (process {pid})"
                    if len(cpus) == 1:
                        found.append(Worker(who, cpus[0], bool(re.fullmatch(r"rx:rx\d+", name))))
        return found

    @property
    def receivers(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.receives]

    @property
    def interrupt_cpus(self) -> dict[str, tuple[int, ...]]:
        """Where the packets' interrupts come, by device that has any."""
        found = {}
        for device in self.devices:
            cpus = {cpu for irq in device.packet_irqs for cpu in (irq.wish if irq.fact is None else irq.fact)}
            if cpus:
                found[device.name] = tuple(sorted(cpus))
        return found

    @property
    def container(self) -> bool:
        return any((self.root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))

    @property
    def kernel(self) -> tuple[int, int]:
        match = re.match(r"(\d+)\.(\d+)", read_text(self.root / "proc/sys/kernel/osrelease") or "")
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def text(self, path: str) -> str | None:
        return read_text(self.root / path)

    def sysctl(self, name: str) -> int | None:
        """None where this kernel, or this network namespace, has none."""
        text = self.text(f"proc/sys/{name.replace('.', '/')}")
        return int(text) if text else None

    def glob(self, pattern: str) -> dict[Path, str]:
        """The texts of all files that can be read."""
        found = {path: read_text(path) for path in sorted(self.root.glob(pattern))}
        return {path: text for path, text in found.items() if text is not None}

    def limit(self, name: str) -> tuple[float, float]:
        """Soft and hard, of a row of /proc/self/limits; infinite where there is none."""
        match = re.search(rf"^{name} +(\S+) +(\S+)", self.text("proc/self/limits") or "", re.MULTILINE)
        soft, hard = match.groups() if match else ("unlimited", "unlimited")
        return _limit(soft), _limit(hard)

    def has(self, capability: str) -> bool:
        match = re.search(r"^CapEff:\s*([0-9a-f]+)", self.text("proc/self/status") or "", re.MULTILINE)
        return bool(match and int(match[1], 16) >> _CAPABILITIES[capability] & 1)

    def rxring_as_root(self, arguments: str) -> str:
        """sudo has a path of its own, on which a virtual environment is not."""
        return f"{'rxring' if self.asked.is_root else 'sudo $(command -v rxring)'} {arguments}"

    def as_root(self, command: str) -> str:
        """Needs root: by sudo, where we are not."""
        if self.asked.is_root:
            return command
        needs_shell = re.search(r"[|&;<>$*]", command)
        return f"sudo sh -c {shlex.quote(command)}" if needs_shell else f"sudo {command}"


class Answer(NamedTuple):
    state: State
    finding: str
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    id: str
    group: str
    why: str
    look: Callable[[Machine], Answer]

    def examine(self, machine: Machine) -> Finding:
        """What cannot be read, or understood, is unknown: one odd file must not hide the other findings."""
        try:
            answer = self.look(machine)
        except (OSError, ValueError, Refused) as error:
            answer = Answer("unknown", f"cannot be told here: {' '.join(str(error).split())}")
        return Finding(self.id, self.group, answer.state, answer.finding, self.why, answer.mend)


CHECKS: list[Check] = []


def _check(group: str, why: str) -> Callable[[Callable[[Machine], Answer]], Callable[[Machine], Answer]]:
    def register(look: Callable[[Machine], Answer]) -> Callable[[Machine], Answer]:
        CHECKS.append(Check(look.__name__.replace("_", "-"), group, why, look))
        return look

    return register


def examine(machine: Machine | None = None) -> list[Finding]:
    """All findings: groups with something bad first, in a group the bad first."""
    machine = machine or Machine(ROOT, ask())
    found = [check.examine(machine) for check in CHECKS]
    rank = {group: min(STATES.index(f.state) for f in found if f.group == group) for group in GROUPS}
    return sorted(found, key=lambda f: (rank[f.group], GROUPS.index(f.group), STATES.index(f.state)))


def ask() -> Asked:
    """Put the questions to this kernel, by sockets that are closed again."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UDP_BUFFER_BYTES // 2)  # the kernel doubles it
        granted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        return Asked(
            rcvbuf=granted,
            forced=_forced(sock),
            udp_gro=_takes_gro(sock),
            no_gro=tuple(name for name in devices.names() if not _gro_on(sock, name)),
            futex_waitv=_has_futex_waitv(),
            **_shm(),
            is_root=os.geteuid() == 0,
        )


def _forced(sock: socket.socket) -> int | None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, UDP_BUFFER_BYTES // 2)
    except PermissionError:
        return None
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def _takes_gro(sock: socket.socket) -> bool:
    with suppress(OSError):
        sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        return True
    return False


def _gro_on(sock: socket.socket, device: str) -> bool:
    """Also where the device does not say."""
    value = (ctypes.c_uint32 * 2)(_GGRO, 1)  # struct ethtool_value
    with suppress(OSError):
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))
    return bool(value[1])


def _has_futex_waitv() -> bool:
    """On no futex at all it answers EINVAL; ENOSYS or EPERM where it cannot be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_FUTEX_WAITV, None, 0, 0, None, 0)
    return ctypes.get_errno() == errno.EINVAL


def _shm() -> dict[str, int]:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return {"shm_size": 0, "shm_free": 0}
    return {"shm_size": shm.f_blocks * shm.f_frsize, "shm_free": shm.f_bavail * shm.f_frsize}


def _devices(root: Path) -> Iterator[Device]:
    for name in devices.names(root):
        with suppress(Refused):  # it has gone meanwhile
            yield devices.read(name, root)


def _hidden(name: str) -> Answer:
    return Answer("unknown", f"{name} is not shown in this network namespace: ask in the host's")


def _limit(word: str) -> float:
    return float("inf") if word == "unlimited" else int(word)


def _bytes(size: float) -> str:
    """Exact where that is short: 8MiB, 416KiB; else a magnitude."""
    if size == float("inf"):
        return "unlimited"
    exact = figures.format_size(int(size))
    return exact if len(exact) <= 7 else figures.magnitude(size, "B")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


# ── packets ──────────────────────────────────────────────────────────────────────────────────────────


@_check(
    "packets",
    "While the receiver does something else packets wait in the socket's buffer; what finds it full is "
    "dropped. 8 MiB last 10 ms at 1 M packets/s of 100 bytes, the usual 208 KiB 0.25 ms.",
)
def receive_buffer(m: Machine) -> Answer:
    granted = f"{_bytes(UDP_BUFFER_BYTES)} asked, {_bytes(m.asked.rcvbuf)} granted"
    rmem_max = m.sysctl("net.core.rmem_max")
    limit = "" if rmem_max is None else f" (net.core.rmem_max {_bytes(rmem_max)}, doubled)"
    if m.asked.rcvbuf >= UDP_BUFFER_BYTES:
        return Answer("ok", granted + limit)
    mend = m.as_root(f"sysctl -w net.core.rmem_max={UDP_BUFFER_BYTES // 2}")
    if (m.asked.forced or 0) >= UDP_BUFFER_BYTES:
        return Answer("note", f"all of it for you by CAP_NET_ADMIN; for others {granted}{limit}", mend)
    return Answer("bad", granted + limit, mend)


@_check(
    "packets",
    "All UDP sockets together may hold so much; beyond it packets are dropped though each socket's own "
    "buffer has room, and counted as MemErrors.",
)
def udp_memory(m: Machine) -> Answer:
    text = m.text("proc/sys/net/ipv4/udp_mem")
    if text is None:
        return _hidden("net.ipv4.udp_mem")
    low, pressure, most = map(int, text.split())
    match = re.search(r"^UDP: .*\bmem (\d+)", m.text("proc/net/sockstat") or "", re.MULTILINE)
    page = resource.getpagesize()
    used = int(match[1]) * page if match else 0
    finding = f"{_bytes(most * page)} for all UDP sockets (net.ipv4.udp_mem), {_bytes(used)} in use"
    if most * page - used >= UDP_BUFFER_BYTES:
        return Answer("ok", finding)
    enough = (used + 8 * UDP_BUFFER_BYTES) // page
    return Answer("bad", finding, m.as_root(f"sysctl -w net.ipv4.udp_mem='{low} {pressure} {enough}'"))


@_check(
    "packets",
    "What comes over lo and veth, or is moved by RPS, waits for its CPU in a queue of this length: 1,000 "
    "are 1 ms at 1 M packets/s. With the packets of lo steered to a slow CPU, 1,079 of 3,000 messages were "
    "dropped there.",
)
def backlog(m: Machine) -> Answer:
    limit = m.sysctl("net.core.netdev_max_backlog")
    if limit is None:
        return _hidden("net.core.netdev_max_backlog")
    rows = parse_softnet(m.text("proc/net/softnet_stat") or "", m.cpus.online)
    dropped = sum(row.dropped for row in rows.values())
    finding = (
        f"net.core.netdev_max_backlog is {_count(limit, 'packet')}, {_count(dropped, 'drop')} since the boot"
    )
    if limit >= _BACKLOG:
        return Answer("ok", finding)
    mend = m.as_root(f"sysctl -w net.core.netdev_max_backlog={_BACKLOG}")
    return Answer("bad" if dropped else "note", finding, mend)


@_check(
    "packets",
    "One receive brings up to 64 packets of a flow instead of one: 14.3 M packets/s of 100 bytes instead of "
    "1.27 M on loopback.",
)
def gro(m: Machine) -> Answer:
    if not m.asked.udp_gro:
        return Answer("bad", "this kernel has no UDP GRO: it needs Linux 5.0")
    if off := [name for name in m.interrupt_cpus if name in m.asked.no_gro]:
        mend = "; ".join(f"ethtool -K {shlex.quote(name)} gro on" for name in off)
        return Answer("bad", f"turned off for {', '.join(off)}", m.as_root(mend))
    return Answer("ok", "the kernel has UDP GRO, and no device with interrupts has it turned off")


@_check(
    "packets",
    "A buffer that was filled on another CPU goes back to that one, in lots and by an interrupt: with the "
    "receiver on another CPU than the sender these were 15 to 25 % of the receiver's time. What turning it "
    "off brings was not measured.",
)
def deferred_freeing(m: Machine) -> Answer:
    most = m.sysctl("net.core.skb_defer_max")
    if most is None:
        if m.kernel < (5, 19):
            return Answer("ok", "this kernel frees buffers at once")
        return _hidden("net.core.skb_defer_max")
    if most == 0:
        return Answer("ok", "turned off (net.core.skb_defer_max 0)")
    mend = m.as_root("sysctl -w net.core.skb_defer_max=0")
    return Answer("note", f"up to {_count(most, 'buffer')} wait (net.core.skb_defer_max)", mend)


@_check(
    "packets",
    "A connected socket (--connect) is found before the packet is routed. Others gain nothing by it; what "
    "it costs them was not measured.",
)
def early_demux(m: Machine) -> Answer:
    names = ("net.ipv4.ip_early_demux", "net.ipv4.udp_early_demux")
    values = {name: m.sysctl(name) for name in names}
    if values[names[0]] is None:
        return _hidden(names[0])
    off = [name for name, value in values.items() if value == 0]
    if not off:
        return Answer("ok", "on for UDP")
    mend = m.as_root(f"sysctl -w {' '.join(f'{name}=1' for name in off)}")
    return Answer("note", f"off ({', '.join(off)} 0)", mend)


@_check(
    "packets",
    "Each receiver, ring and TCP connection takes one; a connection that finds none is not accepted.",
)
def open_files(m: Machine) -> Answer:
    soft, hard = m.limit("Max open files")
    finding = f"{_number(soft)} for a process"
    if soft >= _FILES:
        return Answer("ok", finding)
    if hard >= _FILES:
        return Answer("note", finding, f"ulimit -n {_FILES}")
    raised = m.as_root(f"prlimit --nofile={_FILES}:{_FILES} --pid") + " $$"
    return Answer("note", f"{finding}, and it may not have more", raised)


def _number(limit: float) -> str:
    return "unlimited" if limit == float("inf") else f"{int(limit):,}"


@_check(
    "packets",
    "NET_ADMIN grants a receive buffer beyond rmem_max and --busy-poll, NET_RAW lets `pin verify --traffic` "
    "tap a device, SYS_NICE is for --fifo, IPC_LOCK for --mlock. All else works without.",
)
def capabilities(m: Machine) -> Answer:
    missing = [name for name in _CAPABILITIES if not m.has(name)]
    if not missing:
        return Answer("ok", f"has {', '.join(_CAPABILITIES)}")
    if m.asked.is_root:  # what root lacks, whoever started it has taken away
        option = " ".join(f"--cap-add={name}" for name in missing)
        return Answer(
            "note", f"root has no {', '.join(missing)}", f"docker run {option} …" if m.container else None
        )
    caps = ",".join(f"+{name.lower()}" for name in missing)
    options = f"--reuid=$(id -u) --regid=$(id -g) --init-groups --inh-caps={caps} --ambient-caps={caps}"
    mend = f'sudo setpriv {options} "$SHELL"'
    return Answer("note", f"has no {', '.join(missing)}; mended for a shell, and what runs in it", mend)


@_check(
    "packets",
    "The network's settings are those of the host, and often its limits on CPUs and memory, too: what is to "
    "be mended there is not seen, or not written, in here.",
)
def container(m: Machine) -> Answer:
    if m.container:
        return Answer("note", "this is one: what cannot be written in here is mended on the host")
    return Answer("ok", "this is no container")


# ── latency ──────────────────────────────────────────────────────────────────────────────────────────


@_check(
    "latency",
    "A CPU that has clocked down receives slower until the governor notices. Not measured here.",
)
def governor(m: Machine) -> Answer:
    found = m.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    if not found:
        return Answer("unknown", "no cpufreq here: the host, or the firmware, decides how fast CPUs run")
    slow = {int(path.parts[-3][3:]): name for path, name in found.items() if name != "performance"}
    if not slow:
        return Answer("ok", "performance on every CPU")
    mend = "echo performance | tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    names = ", ".join(sorted(set(slow.values())))
    return Answer("note", f"{names} on CPU {format_cpu_list(slow)}", m.as_root(mend))


@_check(
    "latency",
    "Whoever waits asleep is woken later by what the idle state takes to leave. Two CPUs that spin answer "
    "each other within 0.14 to 0.55 µs.",
)
def idle_states(m: Machine) -> Answer:
    states = "sys/devices/system/cpu/cpu[0-9]*/cpuidle/state*"
    enabled = {
        path.parent: int(us)
        for path, us in m.glob(f"{states}/latency").items()
        if read_text(path.with_name("disable")) != "1"
    }
    if not enabled:
        return Answer("unknown", "no cpuidle here: the host, or the firmware, decides how deep CPUs sleep")
    deepest, us = max(enabled.items(), key=lambda state: state[1])
    finding = f"CPUs sleep as deep as {read_text(deepest / 'name')}, {us} µs to leave"
    if us <= _DEEP_US:
        return Answer("ok", finding)
    each = "/sys/devices/system/cpu/cpu*/cpuidle/state*"
    mend = f'for s in {each}; do [ "$(cat $s/latency)" -gt {_DEEP_US} ] && echo 1 > $s/disable; done; true'
    return Answer("note", finding, m.as_root(mend))


@_check(
    "latency",
    "Every system call and interrupt pays for them, and without GRO 97 % of the receiver's time is the "
    "kernel's. How much it is was not measured. Turn them off only where no foreign code runs, and reboot.",
)
def mitigations(m: Machine) -> Answer:
    found = m.glob("sys/devices/system/cpu/vulnerabilities/*")
    if not found:
        return Answer("unknown", "this kernel does not tell of any")
    active = [path.name for path, text in found.items() if "Mitigation:" in text]
    if not active:
        return Answer("ok", "none is active")
    return Answer("note", f"active: {', '.join(active)}", _boot_option(m, "mitigations=off"))


def _boot_option(m: Machine, option: str) -> str | None:
    """None where no boot loader is seen that we know."""
    if any((m.root / path).exists() for path in ("sbin/grubby", "usr/sbin/grubby", "usr/bin/grubby")):
        return m.as_root(f"grubby --update-kernel=ALL --args={option}")
    if (m.root / "etc/default/grub").exists() and (m.root / "usr/sbin/update-grub").exists():
        line = f's/^GRUB_CMDLINE_LINUX="/&{option} /'
        return m.as_root(f"sed -i '{line}' /etc/default/grub && update-grub")
    return None


@_check(
    "latency",
    "A receiver that spins with --fifo stands still for so long, where another task waits for its CPU: 5 % "
    "are 50 ms in every second, and 8 MiB of buffer last 10 ms at 1 M packets/s. Without it, what else "
    "belongs on that CPU never runs.",
)
def rt_throttling(m: Machine) -> Answer:
    if m.kernel >= (6, 12):  # from then on others are served, not real time throttled
        return _fair_server(m)
    runtime, period = m.sysctl("kernel.sched_rt_runtime_us"), m.sysctl("kernel.sched_rt_period_us")
    if runtime is None or not period:
        return Answer("unknown", "kernel.sched_rt_runtime_us is not shown here")
    if not 0 <= runtime < period:
        return Answer("ok", "real-time tasks are not throttled")
    mend = m.as_root("sysctl -w kernel.sched_rt_runtime_us=-1")
    return Answer("note", f"{figures.percent(1 - runtime / period)} are kept from real-time tasks", mend)


def _fair_server(m: Machine) -> Answer:
    runtimes = m.glob(f"{_FAIR_SERVER}/cpu*/runtime")
    if not runtimes:
        default = "5 % are for others by default; what it is here"
        if m.asked.is_root:
            mount = "mount -t debugfs debugfs /sys/kernel/debug"
            return Answer("unknown", f"{default} debugfs tells, which is not mounted", mount)
        return Answer("unknown", f"{default} only root can read", m.rxring_as_root("doctor"))
    shares = [
        int(ns) / int(read_text(path.with_name("period")) or 1_000_000_000) for path, ns in runtimes.items()
    ]
    if not max(shares):
        return Answer("ok", "no time is kept from real-time tasks")
    mend = f"for f in /{_FAIR_SERVER}/cpu*/runtime; do echo 0 > $f; done"
    finding = f"{figures.percent(max(shares))} are for others, if they wait (fair server)"
    return Answer("note", finding, m.as_root(mend))


@_check(
    "latency",
    "Read without a system call, the clock costs 16 to 22 ns, and `latency` asks it for every 16 packets or "
    "every frame; so does the kernel, once for each packet. Other sources are read over a bus, by a system "
    "call.",
)
def clock_source(m: Machine) -> Answer:
    folder = "sys/devices/system/clocksource/clocksource0"
    now = m.text(f"{folder}/current_clocksource")
    if now is None:
        return Answer("unknown", "the kernel does not tell")
    if now in _FAST_CLOCKS:
        return Answer("ok", now)
    others = (m.text(f"{folder}/available_clocksource") or "").split()
    better = next((name for name in _FAST_CLOCKS if name in others), None)
    mend = m.as_root(f"echo {better} > /{folder}/current_clocksource") if better else None
    return Answer("bad", f"{now}{'' if better else ', and the kernel trusts no faster one'}", mend)


@_check(
    "latency",
    "The host gives and takes CPUs as it likes: a round trip between two of them changes by a factor of "
    "five from one second to the next, and waking a sleeper, there and back, took 70 µs, whatever the idle "
    "states promise.",
)
def virtual_machine(m: Machine) -> Answer:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", m.text("proc/cpuinfo") or "", re.MULTILINE)
    vendor = m.text("sys/class/dmi/id/sys_vendor") or m.text("sys/hypervisor/type") or ""
    virtual = re.search("QEMU|KVM|VMware|Xen|xen|innotek|Amazon EC2|Google|Parallels|Virtual", vendor)
    if not virtual and not (flags and "hypervisor" in flags[1].split()):
        return Answer("ok", "no hypervisor is seen")
    return Answer("note", f"this is one; its host took {_stolen(m)} of the CPUs' time since the boot (steal)")


def _stolen(m: Machine) -> str:
    match = re.search(r"^cpu +(.*)$", m.text("proc/stat") or "", re.MULTILINE)
    ticks = [int(count) for count in match[1].split()[:8]] if match else []  # guests' are in these already
    return figures.percent(ticks[7] / sum(ticks)) if len(ticks) == 8 and any(ticks) else "an unknown part"


@_check(
    "latency",
    "A receive that waits may ask the device itself instead of awaiting its interrupt; it then takes the "
    "CPU for so many microseconds. Not measured here, and nothing to gain over lo and veth.",
)
def busy_poll(m: Machine) -> Answer:
    us = m.sysctl("net.core.busy_poll")
    if us is None:
        return _hidden("net.core.busy_poll")
    finding = f"net.core.busy_poll is {us} µs"
    if us or not m.interrupt_cpus:
        return Answer("ok", finding if us else f"{finding}, and no device here could be polled")
    mend = m.as_root("sysctl -w net.core.busy_poll=50")
    return Answer("note", f"{finding}: --busy-poll works with --rx-wait spin only", mend)


@_check(
    "latency",
    "A consumer of several rings sleeps on all of them at once; without it, it looks every millisecond.",
)
def futex_waitv(m: Machine) -> Answer:
    if m.asked.futex_waitv:
        return Answer("ok", "the kernel has it")
    if m.kernel >= (5, 16):
        return Answer(
            "note",
            "forbidden here, by a container's seccomp profile",
            "docker run --security-opt seccomp=unconfined …",
        )
    return Answer("note", "this kernel has none: it needs Linux 5.16")


# ── placement ────────────────────────────────────────────────────────────────────────────────────────


@_check(
    "placement",
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


@_check(
    "placement",
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
    more = f" and {_count(len(shared) - 3, 'more core')}" if len(shared) > 3 else ""
    return Answer("note", f"these share a core: {shown}{more}", mend)


def _run_apart(m: Machine, name: str) -> str:
    layout = layouts.find(name, m.cpus)
    return f"rxring run --rx-cpu {layout.receive} --consumer HANDLER@{format_cpu_list(layout.process)} …"


@_check(
    "placement",
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


@_check("placement", "It puts interrupts elsewhere every ten seconds, whatever layout was applied.")
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


@_check(
    "placement",
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


@_check(
    "placement",
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


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


@_check(
    "memory",
    "Rings lie in /dev/shm, all of each taken at the start: what does not fit is refused. A ring has 40MiB "
    "unless told otherwise, one for each receiver; Docker gives 64 MB.",
)
def shm(m: Machine) -> Answer:
    size, free = m.asked.shm_size, m.asked.shm_free
    if not size:
        return Answer("bad", "there is no /dev/shm", m.as_root("mount -t tmpfs tmpfs /dev/shm"))
    finding = (
        f"/dev/shm has {_bytes(size)}, {_bytes(free)} free: room for {_count(free // _RING_BYTES, 'ring')}"
    )
    if free >= 2 * _RING_BYTES:
        return Answer("ok", finding)
    mend = "docker run --shm-size=1g …" if m.container else m.as_root("mount -o remount,size=1g /dev/shm")
    return Answer("bad" if free < _RING_BYTES else "note", finding, mend)


@_check(
    "memory",
    "--mlock keeps the workers in RAM, so that none waits for the disk; it needs a limit above all that "
    "they map, rings included, or CAP_IPC_LOCK.",
)
def memlock(m: Machine) -> Answer:
    soft, hard = m.limit("Max locked memory")
    finding = f"{_bytes(soft)} may be locked"
    if m.has("IPC_LOCK"):
        return Answer("ok", f"all of it, by CAP_IPC_LOCK (without: {_bytes(soft)})")
    if soft == float("inf"):
        return Answer("ok", finding)
    if hard == float("inf"):
        return Answer("note", finding, "ulimit -l unlimited")
    return Answer("note", finding, m.as_root("prlimit --memlock=unlimited:unlimited --pid") + " $$")


@_check(
    "memory",
    "With `always` the kernel may stop a process to put small pages together. Rings are in /dev/shm, which "
    "has huge pages only if it was mounted so; what they bring was not measured.",
)
def huge_pages(m: Machine) -> Answer:
    text = m.text("sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Answer("ok", "this kernel makes none of itself")
    chosen = (re.search(r"\[(\w+)\]", text) or ["", text])[1]
    mount = re.search(r"^\S+ /dev/shm \S+ (\S+)", m.text("proc/mounts") or "", re.MULTILINE)
    huge = re.search(r"\bhuge=(\w+)", mount[1] if mount else "")
    finding = f"transparent huge pages: {chosen}; of /dev/shm: {huge[1] if huge else 'never'}"
    if chosen != "always":
        return Answer("ok", finding)
    return Answer("note", finding, m.as_root("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"))


# ── for people ───────────────────────────────────────────────────────────────────────────────────────

_STYLES = {"bad": "bold red", "note": "yellow", "unknown": "cyan", "ok": "green"}
_WIDEST = 100
_INDENT = "          "


def show(found: Sequence[Finding]) -> None:
    """What matters first; the why of bad and note only. Commands have lines of their own, unbroken."""
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    width = min(out.width, _WIDEST)
    counts = Counter(finding.state for finding in found)
    plural = {state: f"{state}s" if state == "note" and counts[state] > 1 else state for state in STATES}
    pieces = [Text(f"{counts[state]} {plural[state]}", _STYLES[state]) for state in STATES if counts[state]]
    out.print(Text(", ").join(pieces))
    for group in dict.fromkeys(finding.group for finding in found):
        out.print(Text(f"\n{group}", "bold"))
        for finding in (f for f in found if f.group == group):
            for line in _lines(finding, width):
                out.print(line, soft_wrap=True)


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    from rich.text import Text

    from engine.screen import printable

    def wrapped(text: str) -> list[str]:
        """A number and its unit stay together."""
        joined = re.sub(r"(?<=\d) (?=([kM]|[KM]iB|[kMG]B|[nµm]s|%)( |$|[.,;:)]))", "\N{NO-BREAK SPACE}", text)
        lines = textwrap.wrap(joined, max(width - len(_INDENT), 40), break_on_hyphens=False)
        return [printable(line.replace("\N{NO-BREAK SPACE}", " ")) for line in lines]

    matters = finding.state in ("bad", "note")
    state = (f"  {finding.state:<{len(_INDENT) - 2}}", _STYLES[finding.state])
    head, *more = wrapped(f"{finding.id}: {finding.finding}")
    name, colon, rest = head.partition(":")
    yield Text.assemble(state, (name, "bold" if matters else ""), colon, rest)
    for line in more:
        yield Text(f"{_INDENT}{line}")
    for line in wrapped(finding.why) if matters else []:
        yield Text(f"{_INDENT}{line}", "dim")
    if finding.mend:
        yield Text(f"{_INDENT}{printable(finding.mend)}", "cyan")
