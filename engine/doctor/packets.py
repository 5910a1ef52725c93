"""What loses packets, or has them cost more."""

from __future__ import annotations

import re
import resource
import shlex

from engine.doctor.check import Answer, Group, count, hidden, in_bytes, in_figures
from engine.doctor.machine import CAPABILITIES, Machine
from engine.net.counters import parse_softnet
from engine.spec import UDP_BUFFER_BYTES

_BACKLOG = 16384  # packets: 16 ms at 1 M/s
_FILES = 4096  # connections, rings, sockets of one process

GROUP = Group("packets")


@GROUP.check(
    "While the receiver does something else packets wait in the socket's buffer; what finds it full is "
    "dropped. 8 MiB last 10 ms at 1 M packets/s of 100 bytes, the usual 208 KiB 0.25 ms.",
)
def receive_buffer(m: Machine) -> Answer:
    granted = f"{in_bytes(UDP_BUFFER_BYTES)} asked, {in_bytes(m.asked.rcvbuf)} granted"
    rmem_max = m.sysctl("net.core.rmem_max")
    limit = "" if rmem_max is None else f" (net.core.rmem_max {in_bytes(rmem_max)}, doubled)"
    if m.asked.rcvbuf >= UDP_BUFFER_BYTES:
        return Answer("ok", granted + limit)
    mend = m.as_root(f"sysctl -w net.core.rmem_max={UDP_BUFFER_BYTES // 2}")
    if (m.asked.forced or 0) >= UDP_BUFFER_BYTES:
        return Answer("note", f"all of it for you by CAP_NET_ADMIN; for others {granted}{limit}", mend)
    return Answer("bad", granted + limit, mend)


@GROUP.check(
    "All UDP sockets together may hold so much; beyond it packets are dropped though each socket's own "
    "buffer has room, and counted as MemErrors.",
)
def udp_memory(m: Machine) -> Answer:
    text = m.text("proc/sys/net/ipv4/udp_mem")
    if text is None:
        return hidden("net.ipv4.udp_mem")
    low, pressure, most = map(int, text.split())
    match = re.search(r"^UDP: .*\bmem (\d+)", m.text("proc/net/sockstat") or "", re.MULTILINE)
    page = resource.getpagesize()
    used = int(match[1]) * page if match else 0
    finding = f"{in_bytes(most * page)} for all UDP sockets (net.ipv4.udp_mem), {in_bytes(used)} in use"
    if most * page - used >= UDP_BUFFER_BYTES:
        return Answer("ok", finding)
    enough = (used + 8 * UDP_BUFFER_BYTES) // page
    return Answer("bad", finding, m.as_root(f"sysctl -w net.ipv4.udp_mem='{low} {pressure} {enough}'"))


@GROUP.check(
    "What comes over lo and veth, or is moved by RPS, waits for its CPU in a queue of this length: 1,000 "
    "are 1 ms at 1 M packets/s. With the packets of lo steered to a slow CPU, 1,079 of 3,000 messages were "
    "dropped there.",
)
def backlog(m: Machine) -> Answer:
    limit = m.sysctl("net.core.netdev_max_backlog")
    if limit is None:
        return hidden("net.core.netdev_max_backlog")
    rows = parse_softnet(m.text("proc/net/softnet_stat") or "", m.cpus.online)
    dropped = sum(row.dropped for row in rows.values())
    finding = (
        f"net.core.netdev_max_backlog is {count(limit, 'packet')}, {count(dropped, 'drop')} since the boot"
    )
    if limit >= _BACKLOG:
        return Answer("ok", finding)
    mend = m.as_root(f"sysctl -w net.core.netdev_max_backlog={_BACKLOG}")
    return Answer("bad" if dropped else "note", finding, mend)


@GROUP.check(
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


@GROUP.check(
    "A buffer that was filled on another CPU goes back to that one, in lots and by an interrupt: with the "
    "receiver on another CPU than the sender these were 15 to 25 % of the receiver's time. What turning it "
    "off brings was not measured.",
)
def deferred_freeing(m: Machine) -> Answer:
    most = m.sysctl("net.core.skb_defer_max")
    if most is None:
        if m.kernel < (5, 19):
            return Answer("ok", "this kernel frees buffers at once")
        return hidden("net.core.skb_defer_max")
    if most == 0:
        return Answer("ok", "turned off (net.core.skb_defer_max 0)")
    mend = m.as_root("sysctl -w net.core.skb_defer_max=0")
    return Answer("note", f"up to {count(most, 'buffer')} wait (net.core.skb_defer_max)", mend)


@GROUP.check(
    "A connected socket (--connect) is found before the packet is routed. Others gain nothing by it; what "
    "it costs them was not measured.",
)
def early_demux(m: Machine) -> Answer:
    names = ("net.ipv4.ip_early_demux", "net.ipv4.udp_early_demux")
    values = {name: m.sysctl(name) for name in names}
    if values[names[0]] is None:
        return hidden(names[0])
    off = [name for name, value in values.items() if value == 0]
    if not off:
        return Answer("ok", "on for UDP")
    mend = m.as_root(f"sysctl -w {' '.join(f'{name}=1' for name in off)}")
    return Answer("note", f"off ({', '.join(off)} 0)", mend)


@GROUP.check(
    "Each receiver, ring and TCP connection takes one; a connection that finds none is not accepted.",
)
def open_files(m: Machine) -> Answer:
    soft, hard = m.limit("Max open files")
    finding = f"{in_figures(soft)} for a process"
    if soft >= _FILES:
        return Answer("ok", finding)
    if hard >= _FILES:
        return Answer("note", finding, f"ulimit -n {_FILES}")
    raised = m.as_root(f"prlimit --nofile={_FILES}:{_FILES} --pid") + " $$"
    return Answer("note", f"{finding}, and it may not have more", raised)


@GROUP.check(
    "NET_ADMIN grants a receive buffer beyond rmem_max and --busy-poll, NET_RAW lets `pin verify --traffic` "
    "tap a device, SYS_NICE is for --fifo, IPC_LOCK for --mlock. All else works without.",
)
def capabilities(m: Machine) -> Answer:
    missing = [name for name in CAPABILITIES if not m.has(name)]
    if not missing:
        return Answer("ok", f"has {', '.join(CAPABILITIES)}")
    if m.asked.is_root:  # what root lacks, whoever started it has taken away
        option = " ".join(f"--cap-add={name}" for name in missing)
        return Answer(
            "note", f"root has no {', '.join(missing)}", f"docker run {option} …" if m.container else None
        )
    caps = ",".join(f"+{name.lower()}" for name in missing)
    options = f"--reuid=$(id -u) --regid=$(id -g) --init-groups --inh-caps={caps} --ambient-caps={caps}"
    mend = f'sudo setpriv {options} "$SHELL"'
    return Answer("note", f"has no {', '.join(missing)}; mended for a shell, and what runs in it", mend)


@GROUP.check(
    "The network's settings are those of the host, and often its limits on CPUs and memory, too: what is to "
    "be mended there is not seen, or not written, in here.",
)
def container(m: Machine) -> Answer:
    if m.container:
        return Answer("note", "this is one: what cannot be written in here is mended on the host")
    return Answer("ok", "this is no container")
