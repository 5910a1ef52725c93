"""Starts a run, watches it, restarts what dies, ends it in order.

The supervisor compiles everything, owns the rings, the status segment and the sockets, and forks the
workers: a restart is a fork, takes milliseconds and compiles nothing, and a receiver's death leaves the
socket, its queue and its drop count where they are. It stays single-threaded, or it could not fork.

    check → compile → rings and sockets → fork consumers → fork receiver → bind → ready
    … interval, interval …
    cut the sockets off → receivers drain, close the rings → consumers drain, leave → summary → remove
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from engine.affinity import pinning, topology
from engine.consumer import Consumer
from engine.errors import Failed, Refused
from engine.handlers.api import load
from engine.known_sender import KnownSender
from engine.ledger import NamespaceCounters
from engine.net.receiver import Receiver
from engine.net.sockets import DropCount, ask_for_gro, bind_udp, cut_off, discard, open_udp, probe_udp
from engine.receiving import Receiving, compile_all
from engine.report import Report
from engine.snapshot import ConsumerPart, ReceiverPart, snapshot
from engine.spec import RunSpec, wants_gro
from engine.status import STOP, Status
from engine.worker import Worker, fork
from rings.jit import compiled_before
from rings.reader import Reader
from rings.ring import create
from rings.segment import RingError

_START_S = 30.0  # a worker that is not ready by then never will be
_STALLED_S = 5.0  # at the end: a worker that has not moved for so long is not waited for …
_STOPPED_S = 0.3  # … and one that is stopped (SIGSTOP) for so long
_SENDER_S = 0.5  # at the end: how long a sender that still runs is waited for
_READER_SLOTS = 16  # of each ring at least: others than our consumers may attach
_DEATHS, _WITHIN_S = 5, 10.0  # so many deaths of a worker in so many seconds are a fault, no accident
_LOOK_MS = 20  # how often the supervisor looks for the sender, and whether the end has come


@dataclass(slots=True)
class Process:
    """A worker as the supervisor sees it: how to start it, and the process that is it now."""

    worker: Worker
    life: Callable[[Worker], None]
    pid: int = 0
    pidfd: int = -1
    code: int | None = None  # how the last one ended
    deaths: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.pidfd >= 0


def run(spec: RunSpec, report: Report) -> int:
    """Do a whole run; the exit code. Refused before anything was started, Failed when it broke."""
    try:
        with Supervisor(spec, report) as supervisor:
            return supervisor.run()
    except RingError as error:
        raise Refused(str(error)) from None


class Supervisor:
    """One run. Entering it starts nothing; leaving it ends every process and removes every object."""

    def __init__(self, spec: RunSpec, report: Report) -> None:
        self.spec = spec
        self.report = report
        self.receivers: list[ReceiverPart] = []
        self.consumers: list[ConsumerPart] = []
        self.processes: list[Process] = []  # in the order of their records in the status segment
        self.status: Status | None = None
        self.sender = KnownSender(spec.sender) if spec.sender else None
        self._poll = select.poll()
        self._signals = 0
        self._preparing = True
        self._errors: list[str] = []
        self._previous: dict[str, Any] | None = None

    # ── the course of a run ──────────────────────────────────────────────────────────────────────────

    def run(self) -> int:
        with self._catching_signals():
            self._check()
            self._compile()
            self._preparing = False
            self._create()
            self._start()
            try:
                self._watch()
            finally:  # also when nobody reads our output any more
                self._stop()
        return 1 if self._errors else 0

    def _check(self) -> None:
        """Refuse early what would be refused late."""
        lists = [("--rx-cpu", r.rx_cpu) for r in self.spec.receivers]
        lists += [(f"--consumer {c.name}", c.cpus) for c in self.spec.consumers]
        for what, cpus in lists:
            if cpus is not None:
                reason = pinning.obstacle(cpus, topology.present(), topology.online(), topology.allowed())
                if reason:
                    raise Refused(f"{what}: {reason}")
        for part in self.spec.receivers:
            probe_udp(part.listen.host, part.listen.port)

    def _compile(self) -> None:
        if not compiled_before():  # asked before `load`, which compiles, too
            self.report.note(
                "compiling for the first time: this takes up to a minute, the next start does not"
            )
        handlers = [load(c.handler) for c in self.spec.consumers]
        compile_all()
        Reader.compile()
        for spec, handler in zip(self.spec.consumers, handlers, strict=True):
            consumer = Consumer.compile(spec, handler, self.spec.stamp)
            self.consumers.append(
                ConsumerPart(spec.name, consumer, record=len(self.spec.receivers) + len(self.consumers))
            )

    def _create(self) -> None:
        """The status segment, the rings, the sockets (not bound yet)."""
        names = [f"rx{i}" for i in range(len(self.spec.receivers))]
        self.status = Status.create(
            self.spec.name,
            kind="engine",
            workers=[*names, *(c.name for c in self.consumers), "supervisor"],
            state_bytes=[0 for _ in names] + [c.consumer.state_bytes for c in self.consumers] + [0],
        )
        for i, spec in enumerate(self.spec.receivers):
            sock, buffer = open_udp(timestamps=self.spec.timestamps, rcvbuf=spec.rcvbuf)
            if buffer.short:
                self.report.note(f"{names[i]}: {buffer.advice}")
            gro = wants_gro(spec, self.spec) and ask_for_gro(sock)
            if spec.gro == "on" and not gro:
                raise Refused("--gro on: this kernel has no UDP GRO (Linux 5.0 does): give auto or off")
            rx = Receiver.prepare(
                sock.fileno(),
                batch=spec.batch,
                one_by_one=spec.receive == "recvmsg",
                timestamps=self.spec.timestamps,
                gro=gro,
                packets=self.spec.packets,
            )
            slots = max(_READER_SLOTS, len(self.consumers))
            ring = create(self.spec.name, number=i, size_bytes=self.spec.ring.size, readers=slots)
            self.receivers.append(
                ReceiverPart(names[i], Receiving(spec, sock, rx), ring, buffer, DropCount(sock), gro)
            )

    def _start(self) -> None:
        for i, part in enumerate(self.receivers):
            self._add(part.name, i, part.receiving.spec.rx_cpu, self._receiver_life(part))
        for consumer in self.consumers:
            self._add(
                consumer.name, consumer.record, consumer.consumer.spec.cpus, self._consumer_life(consumer)
            )
        # Consumers first: they have joined before the first packet can come.
        for process in sorted(self.processes, key=lambda p: p.worker.index < len(self.receivers)):
            self._fork(process)
        self._namespace = NamespaceCounters.read()
        for part in self.receivers:
            listen = part.receiving.spec.listen
            host, port = bind_udp(part.receiving.sock, listen.host, listen.port)
            part.listen = f"{listen.scheme}://{host}:{port}"
        self._began = time.monotonic()
        view = self._ready_object()
        self._tell("ready", view)
        self.report.ready(view)

    def _watch(self) -> None:
        """Until the run is over: look after the workers, and report."""
        next_report = self._began + self.spec.every
        end = self._began + self.spec.duration if self.spec.duration is not None else float("inf")
        while not self._signals and not self._errors and not self._finished():
            now = time.monotonic()
            if now >= end:
                break
            if now >= next_report:
                self._interval()
                next_report += self.spec.every * max(1, int((now - next_report) / self.spec.every))
                continue
            self._look(min(end, next_report) - now)

    def _stop(self) -> None:
        """Cut off, drain, close, leave, report: in this order, and bounded."""
        assert self.status is not None
        finished = self._finished()
        # Before the cut: what its filter drops is a UDP error of the namespace, too.
        self._namespace = NamespaceCounters.read().since(self._namespace)
        for part in self.receivers:
            part.dropped_at_cut = part.dropped.read()
            cut_off(part.receiving.sock)
        self._ended = time.monotonic()
        self.status.stop = STOP
        self._await_end(self.processes[: len(self.receivers)])
        for part, process in zip(self.receivers, self.processes, strict=False):
            if part.ring.state != "closed":
                part.receiving.finish(part.ring, process.worker.stop_address)
            left = discard(part.receiving.sock)
            if finished:
                part.discarded_after_stop = left
            else:
                part.discarded_ring_full = left
        self._await_end(self.processes[len(self.receivers) :])
        self._await_sender()
        self.report.summary(self._snapshot("summary"))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────

    def _receiver_life(self, part: ReceiverPart) -> Callable[[Worker], None]:
        return lambda worker: part.receiving.run(worker, self.spec.name, part.ring.number)

    def _consumer_life(self, part: ConsumerPart) -> Callable[[Worker], None]:
        return lambda worker: part.consumer.run(worker, self.spec.name, restarts=part.restarts)

    def _add(
        self, name: str, index: int, cpus: tuple[int, ...] | None, life: Callable[[Worker], None]
    ) -> None:
        assert self.status is not None
        worker = Worker(name, index, self.status, cpus, self.spec.fifo, self.spec.mlock)
        self.processes.append(Process(worker, life))

    def _fork(self, process: Process) -> None:
        """Fork a worker and wait until it is ready. Refused or Failed with its own words if it gives up."""
        readable, process.worker.ready_fd = os.pipe()
        process.pid = fork(process.worker, process.life, self._forget)
        os.close(process.worker.ready_fd)
        process.pidfd = os.pidfd_open(process.pid)
        self._poll.register(process.pidfd, select.POLLIN)
        with os.fdopen(readable, "rb") as pipe:
            watched: list[Any] = [pipe, self._wakeup]
            there, _, _ = select.select(watched, [], [], _START_S)
            if (pipe in there and pipe.read(1)) or (pipe not in there and self._signals):
                return  # a signal ends the run; the worker will see that, too
        if not there:
            raise Failed(f"{process.worker.name} did not start within {_START_S:.0f} s")
        code = self._reap(process)
        if code >= 0:
            raise (Refused if code == 2 else Failed)(self._words(process, code))
        self._ended_early(process, code)

    def _forget(self) -> None:
        """In a forked child: close what holds the supervisor's locks, and what only it may use."""
        for part in self.receivers:
            part.ring.forget()
        for process in self.processes:
            if process.runs:
                os.close(process.pidfd)
        if self.sender is not None:
            self.sender.close()

    def _reap(self, process: Process) -> int:
        """Collect an ended process: its exit code, negative for a signal."""
        _, how = os.waitpid(process.pid, 0)
        self._poll.unregister(process.pidfd)
        os.close(process.pidfd)
        process.pidfd = -1
        process.code = os.waitstatus_to_exitcode(how)
        return process.code

    def _words(self, process: Process, code: int) -> str:
        """Why a worker ended, in its own words if it had time for any."""
        assert self.status is not None
        error = self.status.read(process.worker.index)[0].get("error")
        if error and code > 0:
            return str(error)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{process.worker.name} ended ({how})"

    def _look(self, most_s: float) -> None:
        """Sleep until a worker ends, a signal comes or a moment has passed; see to what happened."""
        if self.sender is not None:
            self.sender.look()
        step_ms = min(most_s * 1000, _LOOK_MS if self.sender and not self.sender.came else 1000)
        for descriptor, _ in self._poll.poll(max(step_ms, 0)):
            for process in self.processes:
                if process.pidfd == descriptor:
                    self._ended_early(process, self._reap(process))
            if descriptor == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 64)

    def _ended_early(self, process: Process, code: int) -> None:
        """A worker is gone before the end. Killed: start it anew. Ended by itself: it is done, or failed."""
        if code == 0:
            return
        words = self._words(process, code)
        now = time.monotonic()
        process.deaths = [at for at in process.deaths if now - at < _WITHIN_S] + [now]
        if code > 0 or len(process.deaths) >= _DEATHS:
            self._fail(words if code > 0 else f"{words} {_DEATHS} times in {_WITHIN_S:.0f} s: given up")
            return
        self.report.note(f"{words}: started anew")
        part = self._part(process)
        part.restarts += 1
        try:
            self._fork(process)
        except (Failed, Refused) as error:
            self._fail(str(error))

    def _fail(self, words: str) -> None:
        self._errors.append(words)
        self.report.note(f"rxring: {words}")

    def _part(self, process: Process) -> ReceiverPart | ConsumerPart:
        parts: list[ReceiverPart | ConsumerPart] = [*self.receivers, *self.consumers]
        return parts[process.worker.index]

    def _finished(self) -> bool:
        """Did all receivers end by themselves, having received what was asked for?"""
        return not any(process.runs for process in self.processes[: len(self.receivers)])

    def _await_end(self, processes: list[Process]) -> None:
        """Wait for workers that were told to end; kill those that no longer move."""
        moved_at, before = time.monotonic(), -1
        while any(process.runs for process in processes) and self._signals < 2:
            self._look(0.05)
            now = sum(int(cursor) for part in self.receivers for cursor in part.ring.slots["cursor"])
            now += sum(int(part.ring.counters["published"]) for part in self.receivers)
            if now != before:
                moved_at, before = time.monotonic(), now
                continue
            still_s = time.monotonic() - moved_at
            stopped = all(pinning.is_stopped(process.pid) for process in processes if process.runs)
            if still_s > _STALLED_S or (stopped and still_s > _STOPPED_S):
                break
        for process in processes:
            if process.runs:
                self.report.note(f"{process.worker.name} did not end: killed")
                os.kill(process.pid, signal.SIGKILL)
                self._reap(process)

    def _await_sender(self) -> None:
        """Wait a moment for a sender that is just ending: how much it sent is known only then."""
        if self.sender is None:
            return
        deadline = time.monotonic() + _SENDER_S
        while self.sender.lives and time.monotonic() < deadline and self._signals < 2:
            self._look(0.01)
        if self.sender.came and self.sender.sent is None:
            what = "still sends" if self.sender.lives else "died"
            self.report.note(f"sender {self.sender.name} {what}: how much it sent is not known")

    # ── signals ──────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in order; a second one ends it at once."""
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wakeup, select.POLLIN)
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        old_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._poll.unregister(self._wakeup)
            os.close(self._wakeup)
            os.close(write_end)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._preparing:
            # Nothing exists yet that would have to be ended. An exception might be swallowed by a
            # callback of the compiler's, and waiting for it takes long.
            os._exit(0)

    # ── reporting ────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self, kind: str) -> dict[str, Any]:
        assert self.status is not None
        summary = kind == "summary"
        for consumer in self.consumers:
            process = self.processes[consumer.record]
            consumer.alive = process.runs or process.code == 0
        return snapshot(
            kind,
            (self._ended if summary else time.monotonic()) - self._began,
            self.receivers,
            self.consumers,
            self.status,
            sent=self.sender.sent if self.sender else None,
            namespace=self._namespace if summary else NamespaceCounters.read().since(self._namespace),
            previous=None if summary else self._previous,
        )

    def _interval(self) -> None:
        assert self.status is not None
        self._previous = self._snapshot("interval")
        self._tell("ready", self._previous)
        self.report.interval(self._previous)

    def _tell(self, state: str, view: dict[str, Any]) -> None:
        """The last view, for whoever looks from outside; results that don't fit a record are left out."""
        assert self.status is not None
        index = len(self.status.workers) - 1
        facts = {"state": state, "view": view}
        try:
            self.status.publish(index, facts)
        except ValueError:
            slim = view | {"consumers": [c | {"result": None} for c in view["consumers"]]}
            self.status.publish(index, {"state": state, "view": slim})

    def _ready_object(self) -> dict[str, Any]:
        assert self.status is not None
        return {
            "type": "ready",
            "name": self.spec.name,
            "pid": os.getpid(),
            "receivers": [
                {
                    "name": part.name,
                    "listen": part.listen,
                    "port": int(part.listen.rsplit(":", 1)[1]),
                    "pid": self.processes[i].pid,
                    "cpus": self.status.read(i)[0].get("cpus"),
                    "rcvbuf": {"asked": part.buffer.asked, "granted": part.buffer.granted},
                    "gro": part.gro,
                }
                for i, part in enumerate(self.receivers)
            ],
            "consumers": [
                {
                    "name": part.name,
                    "pid": self.processes[part.record].pid,
                    "cpus": self.status.read(part.record)[0].get("cpus"),
                }
                for part in self.consumers
            ],
        }

    # ── the end of everything ────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.runs:
                os.kill(process.pid, signal.SIGKILL)
                self._reap(process)
        for part in self.receivers:
            part.receiving.sock.close()
            part.ring.close()
        if self.status is not None:
            self.status.close()
        if self.sender is not None:
            self.sender.close()
        sys.stdout.flush()
