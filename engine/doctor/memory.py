"""What rings and workers lie in."""

from __future__ import annotations

import re

from engine.doctor.check import Answer, Group, count, in_bytes
from engine.doctor.machine import Machine
from engine.spec import RingSpec

_RING_BYTES = RingSpec().size

GROUP = Group("memory")


@GROUP.check(
    "Rings lie in /dev/shm, all of each taken at the start: what does not fit is refused. A ring has 40MiB "
    "unless told otherwise, one for each receiver; Docker gives 64 MB.",
)
def shm(m: Machine) -> Answer:
    size, free = m.asked.shm_size, m.asked.shm_free
    if not size:
        return Answer("bad", "there is no /dev/shm", m.as_root("mount -t tmpfs tmpfs /dev/shm"))
    finding = (
        f"/dev/shm has {in_bytes(size)}, {in_bytes(free)} free: room for {count(free // _RING_BYTES, 'ring')}"
    )
    if free >= 2 * _RING_BYTES:
        return Answer("ok", finding)
    mend = "docker run --shm-size=1g …" if m.container else m.as_root("mount -o remount,size=1g /dev/shm")
    return Answer("bad" if free < _RING_BYTES else "note", finding, mend)


@GROUP.check(
    "--mlock keeps the workers in RAM, so that none waits for the disk; it needs a limit above all that "
    "they map, rings included, or CAP_IPC_LOCK.",
)
def memlock(m: Machine) -> Answer:
    soft, hard = m.limit("Max locked memory")
    finding = f"{in_bytes(soft)} may be locked"
    if m.has("IPC_LOCK"):
        return Answer("ok", f"all of it, by CAP_IPC_LOCK (without: {in_bytes(soft)})")
    if soft == float("inf"):
        return Answer("ok", finding)
    if hard == float("inf"):
        return Answer("note", finding, "ulimit -l unlimited")
    return Answer("note", finding, m.as_root("prlimit --memlock=unlimited:unlimited --pid") + " $$")


@GROUP.check(
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
