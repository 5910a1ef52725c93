"""Writes to files of the kernel, all or none, that can be taken back later.

Before the first write a journal with all old values is on the disk: /run/rxring/pin/N.json. Whenever the
writer dies, `restore` finds what it may have changed. A journal holds for the boot and the network namespace
it was made in: elsewhere the same paths are other things.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.affinity.topology import ROOT, parse_hex_mask, parse_kernel_list, read_text
from engine.errors import Failed, Refused

_FOLDER = "run/rxring/pin"
_TRIES, _PAUSE_S = 50, 0.01  # EBUSY, EAGAIN: an interrupt is just being moved
_NETNS_COOKIE = 71  # SO_NETNS_COOKIE
_PATIENCE_S = 2.0  # for somebody else who applies or restores; it takes him milliseconds
_REASONS = {
    errno.EIO: "the kernel keeps this interrupt where it is (managed): choose the layout after it",
    errno.ENOSPC: "that CPU has no interrupt vector left: choose another",
    errno.EINVAL: "the kernel takes no such CPU there: it is offline or isolated: choose another",
    errno.EOVERFLOW: "the mask names a CPU that this machine cannot have: choose another",
    errno.EROFS: "/sys and /proc are read-only here: apply it outside the container",
}
_REASONS[errno.EPERM] = _REASONS[errno.EIO]
_REASONS[errno.EACCES] = _REASONS[errno.EROFS]


@dataclass(frozen=True, slots=True)
class Write:
    path: Path
    value: str


@dataclass(frozen=True, slots=True)
class Change:
    """One file: what stood there, what was written."""

    path: str
    old: str
    new: str


class Owner(msgspec.Struct, frozen=True):
    """An engine that applied a layout for as long as it runs. started: its process, in ticks since boot."""

    engine: str
    pid: int
    started: int

    @classmethod
    def this(cls, engine: str) -> Owner:
        return cls(engine, os.getpid(), _started(os.getpid(), ROOT) or 0)

    def lives(self, root: Path = ROOT) -> bool:
        return _started(self.pid, root) == self.started


def _started(pid: int, root: Path) -> int | None:
    """When the process began, by which it is told from a later one of its number; None if it has ended."""
    stat = read_text(root / f"proc/{pid}/stat") or ""
    fields = stat[stat.rfind(")") + 1 :].split()  # from the third of proc(5) on
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


class Journal(msgspec.Struct):
    """about: what its maker wants to know again. complete: all is written, nothing is taken back yet.
    owner: None if it is to stay until somebody restores it."""

    number: int
    boot: str
    namespace: int
    changes: list[Change]
    about: dict[str, Any]
    complete: bool = False
    owner: Owner | None = None

    @property
    def whose(self) -> str:
        assert self.owner is not None
        what = f"layout {self.about.get('layout')} on {self.about.get('device')}"
        return f"engine {self.owner.engine} (process {self.owner.pid}), which applied {what},"


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of one file. found: what stood there. state: back · unchanged: it was back already ·
    drifted: somebody else had changed it, it is back · gone: the file is no more."""

    path: str
    found: str | None
    value: str
    state: str


# ── one file ─────────────────────────────────────────────────────────────────────────────────────────


def equal(path: Path | str, one: str, other: str) -> bool:
    """Do two texts mean the same there? The kernel writes lists and masks its own way."""
    name = os.path.basename(path)
    with contextlib.suppress(ValueError):
        if name.endswith("_list"):
            return sorted(parse_kernel_list(one)) == sorted(parse_kernel_list(other))
        if name.endswith("_cpus"):
            return parse_hex_mask(one) == parse_hex_mask(other)
    return one.strip() == other.strip()


def store(path: Path, value: str) -> None:
    """Write it and see it stand there. OSError as the kernel says it; EINVAL where it changed the value."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        for attempt in range(1, _TRIES + 1):
            try:
                os.write(fd, value.encode())  # a buffered write would hide the error until the close
                break
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EAGAIN) or attempt == _TRIES:
                    raise
                time.sleep(_PAUSE_S)
    finally:
        os.close(fd)
    if not equal(path, path.read_text(), value):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))


def need_root(what: str, root: Path = ROOT) -> None:
    """Refused for an ordinary user, before anything is written; a captured tree is anybody's."""
    if root == ROOT and os.geteuid() != 0:
        raise Refused(f"{what} needs root: run it with sudo")


def _why(error: OSError) -> str:
    return _REASONS.get(error.errno or 0, f"{error.strerror}: see dmesg")


# ── journals ─────────────────────────────────────────────────────────────────────────────────────────


def boot_id(root: Path = ROOT) -> str:
    return read_text(root / "proc/sys/kernel/random/boot_id") or "unknown"


def network(root: Path = ROOT) -> int:
    """Which network namespace this process is in, by the kernel's cookie (Linux 5.14), which never comes
    again in a boot as the inode's number may; without one that, and 0 in a captured tree."""
    if root == ROOT:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return int(struct.unpack("Q", sock.getsockopt(socket.SOL_SOCKET, _NETNS_COOKIE, 8))[0])
    return namespace(root)


def need_own_sys(root: Path = ROOT) -> None:
    """Refused where /sys shows the devices of another network namespace, as `nsenter --net` leaves it."""
    if root != ROOT:
        return
    for _ in range(3):  # a device may come or go between the two looks
        shown = {path.name for path in (root / "sys/class/net").iterdir() if (path / "ifindex").exists()}
        if shown == {name for _, name in socket.if_nameindex()}:
            return
    raise Refused("/sys shows another network namespace than this process is in: enter it by ip netns exec")


def namespace(root: Path = ROOT, pid: int | str = "self") -> int:
    """Of network, of a process; 0 if that cannot be seen, and in a captured tree."""
    with contextlib.suppress(OSError):
        return (root / f"proc/{pid}/ns/net").stat().st_ino
    return 0


def journals(root: Path = ROOT) -> list[Journal]:
    """Those of this network namespace, oldest first. Refused if one is of another boot, or unreadable."""
    found = []
    for path in _files(root / _FOLDER):
        try:
            journal = msgspec.json.decode(path.read_bytes(), type=Journal)
        except (msgspec.MsgspecError, OSError) as error:
            raise Refused(f"{path} is no journal of ours ({error}): remove it: rm -r {path}") from None
        if journal.boot != boot_id(root):
            raise Refused(f"{path} is of another boot, nothing of it stands any more: remove it: rm {path}")
        if journal.namespace == network(root):
            found.append(journal)
    return found


def _files(folder: Path) -> list[Path]:
    """By number. Refused where one has none."""
    paths = list(folder.glob("*.json"))
    for path in paths:
        if not path.stem.isdecimal():
            raise Refused(f"{path} is no journal of ours: remove it: rm -r {path}")
    return sorted(paths, key=lambda path: int(path.stem))


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """The folder of the journals, with nobody else at work; the kernel frees the lock of who dies."""
    folder = root / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        until = time.monotonic() + _PATIENCE_S
        while not _try_lock(fd):
            if time.monotonic() >= until:
                raise Refused("another `rxring pin` is applying or restoring: wait for it")
            time.sleep(_PAUSE_S)
        yield folder
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _save(folder: Path, journal: Journal) -> None:
    """Whole or not at all, and on the disk."""
    path = folder / f"{journal.number}.json"
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, msgspec.json.encode(journal))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)
    _sync(folder)


def _remove(folder: Path, journal: Journal) -> None:
    os.unlink(folder / f"{journal.number}.json")
    _sync(folder)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ── apply, restore ───────────────────────────────────────────────────────────────────────────────────


def plan(writes: Sequence[Write]) -> list[Change]:
    """With what stands there now. Refused where it cannot be read."""
    changes: list[Change] = []
    try:
        for write in writes:
            path = write.path
            changes.append(Change(str(path), path.read_text().strip(), write.value))
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}: the device is not as it was a moment ago") from None
    return changes


def obstacle(writes: Sequence[Write], root: Path = ROOT) -> str:
    """Which engine stands in the way of these writes: one that holds a file of theirs, or one that died and
    left its layout behind; "" if none does. Refused if a journal is of another boot."""
    paths = {str(write.path) for write in writes}
    for made in journals(root):
        if made.owner is None:
            continue
        if not made.owner.lives(root):
            return f"{made.whose} is dead: bring back what was there: rxring pin restore"
        if paths & {change.path for change in made.changes}:
            return f"{made.whose} still runs: end it first, or choose another device"
    return ""


def apply(
    writes: Sequence[Write], about: dict[str, Any], root: Path = ROOT, owner: Owner | None = None
) -> Journal:
    """Write all; the journal. Refused, and everything as it was, where the kernel does not take one, or an
    engine stands in the way."""
    need_root("applying a layout", root)
    need_own_sys(root)
    with _locked(root) as folder:
        if reason := obstacle(writes, root):
            raise Refused(reason)
        number = max((int(path.stem) for path in _files(folder)), default=0) + 1
        journal = Journal(number, boot_id(root), network(root), plan(writes), about, owner=owner)
        _save(folder, journal)
        done: list[Change] = []
        try:
            for change in journal.changes:
                done.append(change)
                store(Path(change.path), change.new)
        except OSError as error:
            _take_back(folder, journal, done)
            raise Refused(
                f"{done[-1].path} does not take {done[-1].new}, nothing is changed: {_why(error)}"
            ) from None
        except BaseException:
            _take_back(folder, journal, done)
            raise
        journal.complete = True
        _save(folder, journal)
    return journal


def _take_back(folder: Path, journal: Journal, done: Sequence[Change]) -> None:
    """Failed, and the journal kept, where that cannot be done."""
    for change in reversed(done):
        path = Path(change.path)
        try:
            if not equal(path, path.read_text(), change.old):
                store(path, change.old)
        except OSError as error:
            raise Failed(
                f"{path} does not take {change.old} back ({error.strerror}): try `rxring pin restore`"
            ) from None
    _remove(folder, journal)


def restore(root: Path = ROOT, owner: Owner | None = None) -> list[Restored]:
    """Everything back to what was, newest first. Failed, after all else is done, where a file refuses.

    owner: only what it applied. Without one, what an engine that still runs has applied stays: Refused if
    that is all there is, else Failed after the rest.
    """
    if not journals(root) and not list((root / _FOLDER).glob("*.new")):
        return []
    need_root("restoring", root)
    need_own_sys(root)
    done, refused = [], []
    with _locked(root) as folder:
        wanted = [made for made in journals(root) if owner in (None, made.owner)]
        kept = [made for made in wanted if owner is None and made.owner and made.owner.lives(root)]
        wanted = [made for made in wanted if made not in kept]
        refused += [f"{made.whose} still runs: end it, then it takes its layout back itself" for made in kept]
        if kept and not wanted:
            raise Refused(refused[0])
        for journal in reversed(wanted):
            whole, complete = True, journal.complete
            journal.complete = False  # from here on: what is back already, we may have brought back
            _save(folder, journal)
            for change in reversed(journal.changes):
                try:
                    done.append(_restore(change, complete))
                except OSError as error:
                    whole = False
                    refused.append(f"{change.path} does not take {change.old} back: {_why(error)}")
            if whole:
                _remove(folder, journal)
        for left in folder.glob("*.new"):
            left.unlink()  # of one that died before it wrote anything
    if refused:
        raise Failed("; ".join(refused))
    return done


def _restore(change: Change, complete: bool) -> Restored:
    """complete: the change had been made. Otherwise nobody knows how far its maker came."""
    path = Path(change.path)
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        return Restored(change.path, None, change.old, "gone")
    ours = equal(path, found, change.new)
    if equal(path, found, change.old):
        return Restored(change.path, found, change.old, "back" if ours or not complete else "unchanged")
    store(path, change.old)
    return Restored(change.path, found, change.old, "back" if ours else "drifted")
