"""What makes packets late."""

from __future__ import annotations

import re

from engine import figures
from engine.affinity.topology import format_cpu_list, read_text
from engine.doctor.check import Answer, Group, hidden
from engine.doctor.machine import Machine

_DEEP_US = 10  # an idle state that takes longer to leave is worth a note
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")  # read without a call
_FAIR_SERVER = "sys/kernel/debug/sched/fair_server"

GROUP = Group("latency")


@GROUP.check(
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


@GROUP.check(
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


@GROUP.check(
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


@GROUP.check(
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


@GROUP.check(
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


@GROUP.check(
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


@GROUP.check(
    "A receive that waits may ask the device itself instead of awaiting its interrupt; it then takes the "
    "CPU for so many microseconds. Not measured here, and nothing to gain over lo and veth.",
)
def busy_poll(m: Machine) -> Answer:
    us = m.sysctl("net.core.busy_poll")
    if us is None:
        return hidden("net.core.busy_poll")
    finding = f"net.core.busy_poll is {us} µs"
    if us or not m.interrupt_cpus:
        return Answer("ok", finding if us else f"{finding}, and no device here could be polled")
    mend = m.as_root("sysctl -w net.core.busy_poll=50")
    return Answer("note", f"{finding}: --busy-poll works with --rx-wait spin only", mend)


@GROUP.check(
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
