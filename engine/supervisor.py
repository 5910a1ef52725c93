"""Starts a run, watches it, restarts what dies, ends it in order.

The supervisor compiles everything, owns the rings, the status segment and the sockets, and forks the
workers: a restart is a fork, takes milliseconds and compiles nothing, and a receiver's death leaves the
socket, its queue and its drop count where they are. It stays single-threaded, or it could not fork.

    check → compile → rings and sockets → apply the layout → fork consumers → fork receiver → bind → ready
    … interval, interval …
    cut the sockets off → receivers drain, close the rings → consumers drain, leave → summary
    → take the layout back → remove
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

from engine.affinity import pinning
from engine.consumer import Consumer
from engine.errors import Failed, Refused
from engine.figures import format_size
from engine.handlers.api import load
from engine.known_sender import KnownSender
from engine.net.address import format_address
from engine.net.clock import clock_offset_ns, clock_step_ns
from engine.net.counters import Layers, devices_of
from engine.placement import Placement
from engine.receiving import Receiving
from engine.report import Report, plain_data
from engine.signals import END_SIGNALS
from engine.snapshot import ConsumerPart, ReceiverPart, snapshot
from engine.spec import RunSpec
from engine.status import STOP, Status
from engine.streaming import Streaming
from engine.worker import Worker, fork
from rings.jit import cache_folder, compiled_before
from rings.layout import MAX_READERS, Geometry
from rings.reader import Reader
from rings.ring import create
from rings.segment import RingError

_KINDS: dict[str, type[Receiving] | type[Streaming]] = {"udp": Receiving, "tcp": Streaming, "smc": Streaming}
_START_S = 30.0  # a worker that is not ready by then never will be
_STALLED_S = 5.0  # at the end: a worker that has not moved for so long is not waited for …
_STOPPED_S = 0.3  # … and one that is stopped (SIGSTOP) for so long
_LOOK_S = 0.05  # at the end: how often it is looked whether workers move
_SENDER_S = 0.5  # after the cut: how long a sender that still runs is waited for
_AT_ONCE_S = 2.0  # after a second signal: who is still not through then is ended without a summary
_VISITORS = 8  # slots of each ring for readers that are no consumers of ours
_DEATHS, _WITHIN_S = 5, 10.0  # so many deaths of a worker in so many seconds are a fault, no accident
_PLACEMENT_S = 1.0  # how often it is looked whether masks and threads are as they were
_LOOK_MS = 20  # how often the supervisor looks for the sender, and whether the end has come


@dataclass(slots=True)
class Process:
    """A worker as the supervisor sees it: how to start it, and the process that is it now.

    ready_fd: the end of a pipe that it writes to when it is ready; −1 from then on.
    """

    worker: Worker
    life: Callable[[Worker], None]
    pid: int = 0
    pidfd: int = -1
    ready_fd: int = -1
    ready_by: float = 0.0
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
        self.placement = Placement()
        self.sender = KnownSender(spec.sender) if spec.sender else None
        self._poll = select.poll()
        self._signals = 0
        self._preparing = True
        self._started = False  # have all workers been ready once?
        self._noted: set[str] = set()
        self._errors: list[str] = []
        self._previous: dict[str, Any] | None = None

    # ── the course of a run ──────────────────────────────────────────────────────────────────────────

    def run(self) -> int:
        with self._catching_signals():
            self._check()
            self._compile()
            self._preparing = False
            self._create()
            self.placement.apply(self.spec.name)
            self._start()
            try:
                self._watch()
            finally:  # also when nobody reads our output any more
                self._stop()
            self._take_layout_back()
        return 1 if self._errors or any(consumer.report_error for consumer in self.consumers) else 0

    def _check(self) -> None:
        """Refuse early what would be refused late."""
        self.placement = Placement.plan(self.spec)
        self.spec = self.placement.place(self.spec)
        lists = [("--rx-cpu", r.rx_cpu) for r in self.spec.receivers]
        lists += [(f"--consumer {c.name}", c.cpus) for c in self.spec.consumers]
        for what, cpus in lists:
            if cpus is not None and (reason := pinning.refusal(cpus)):
                raise Refused(f"{what}: {reason}")
        for part in self.spec.receivers:
            if part.member == 0:  # the others share its port
                _KINDS[part.listen.scheme].probe(part.listen)
        if self.sender is not None:
            self.sender.look()
            if self.sender.problem:
                raise Refused(f"--sender {self.sender.name}: {self.sender.problem}")

    def _compile(self) -> None:
        if cache_folder() is None:
            self.report.note("compiling, as at every start: no cache can be written, give NUMBA_CACHE_DIR")
        elif not compiled_before():  # asked before `load`, which compiles, too
            self.report.note(
                "compiling for the first time: this takes up to a minute, the next start does not"
            )
        handlers = [load(c.handler) for c in self.spec.consumers]
        for kind in {_KINDS[receiver.listen.scheme] for receiver in self.spec.receivers}:
            kind.compile()
        Reader.compile()
        for spec, handler in zip(self.spec.consumers, handlers, strict=True):
            if spec.group and not handler.merges:
                raise Refused(f"{spec.handler} can't be split, its states can't be added up: give it a merge")
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
            receiving = _KINDS[spec.listen.scheme].open(spec, self.spec)
            if receiving.buffer.short and not spec.member:
                self.report.note(f"{names[i]}: {receiving.buffer.advice}")
            slots = min(len(self.consumers) + _VISITORS, MAX_READERS)
            ring = create(
                self.spec.name,
                number=i,
                size_bytes=self.spec.ring.size,
                readers=slots,
                sources=self.spec.sources,
            )
            self._note_size(ring.geometry)
            self.receivers.append(ReceiverPart(names[i], receiving, ring))

    def _note_size(self, geometry: Geometry) -> None:
        asked, taken = self.spec.ring.size, geometry.data_bytes
        if taken < 0.9 * asked:
            self._note_once(
                f"the ring takes {format_size(taken)} of {format_size(asked)}: "
                f"its arena and its descriptors{' and source records' * geometry.sources} are powers of two"
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
            while process.ready_fd >= 0 and not self._signals:
                self._look(1.0)
        self._started = True
        self._layers = Layers()
        self.placement.begin()
        self._bind()
        self._layers.devices = self._devices()
        self._began = time.monotonic()
        self._clock_offset_ns, self._clock_steps = int(clock_offset_ns()), 0
        view = self._ready_object()
        self._tell("ready", view)
        self.report.ready(view)

    def _bind(self) -> None:
        port = 0
        for part in self.receivers:
            spec = part.receiving.spec
            if spec.member == 0:
                port = spec.listen.port
            bound = part.receiving.bind(port)
            port = bound[1]  # the others share it
            part.listen = f"{spec.listen.scheme}://{format_address(bound)}"
            if remark := part.receiving.remark():
                self.report.note(remark)

    def _devices(self) -> frozenset[str]:
        """Over which our packets come."""
        found: set[str] = set()
        for part in self.receivers:
            host = part.receiving.sock.getsockname()[0]
            found |= devices_of(host, part.receiving.spec.listen.options.get("interface"))
        return frozenset(found)

    def _watch(self) -> None:
        """Until the run is over: look after the workers, and report."""
        next_look, next_report = self._began, self._began + self.spec.every
        end = self._began + self.spec.duration if self.spec.duration is not None else float("inf")
        while not self._signals and not self._errors and not self._finished():
            now = time.monotonic()
            if now >= end:
                break
            if now >= next_look:
                self._look_at_placement()
                next_look = now + _PLACEMENT_S
            if now >= next_report:
                self._interval()
                next_report += self.spec.every * max(1, int((now - next_report) / self.spec.every))
                continue
            self._look(min(end, next_look, next_report) - now)
            self._look_at_clock()
            for part in self.receivers:
                part.receiving.dropped()  # however rare reports are: the kernel's count wraps

    def _stop(self) -> None:
        """Cut off, drain, close, leave, report: in this order, and bounded."""
        assert self.status is not None
        finished = all(self.status.read(i)[0].get("finished") for i in range(len(self.receivers)))
        # Before the cut: what its filter drops is a UDP error of the namespace, too.
        with contextlib.suppress(OSError):  # a count that can't be read must not cost the rest
            self._layers.update()
            self.placement.look()
        for part in self.receivers:
            part.dropped_at_cut = part.receiving.dropped()
            part.receiving.cut(self._poll)
        self._ended = time.monotonic()
        self.status.stop = STOP
        self._await_end(self.processes[: len(self.receivers)])
        for part, process in zip(self.receivers, self.processes, strict=False):
            if part.ring.state != "closed":
                part.receiving.finish(part.ring, process.worker.stop_address)
            left = part.receiving.discard()
            if words := part.receiving.unfinished():
                self._fail(f"{part.name}: {words}")
            if finished:
                part.discarded_after_stop = left
            else:
                part.discarded_ring_full = left
        self._await_end(self.processes[len(self.receivers) :])
        self._await_sender()
        self._weigh_placement()
        self.report.summary(self._snapshot("summary"))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────

    def _receiver_life(self, part: ReceiverPart) -> Callable[[Worker], None]:
        return lambda worker: part.receiving.run(worker, self.spec.name, part.ring.number)

    def _consumer_life(self, part: ConsumerPart) -> Callable[[Worker], None]:
        rings = len(self.receivers)
        return lambda worker: part.consumer.run(worker, self.spec.name, rings, restarts=part.restarts)

    def _add(
        self, name: str, index: int, cpus: tuple[int, ...] | None, life: Callable[[Worker], None]
    ) -> None:
        assert self.status is not None
        worker = Worker(name, index, self.status, cpus, self.spec.fifo, self.spec.mlock)
        self.processes.append(Process(worker, life))

    def _fork(self, process: Process) -> None:
        """Start a worker; `_look` sees when it is ready."""
        process.ready_fd, process.worker.ready_fd = os.pipe()
        process.pid = fork(process.worker, process.life, lambda: self._forget(process))
        os.close(process.worker.ready_fd)
        process.pidfd = os.pidfd_open(process.pid)
        process.ready_by = time.monotonic() + _START_S
        self._poll.register(process.pidfd, select.POLLIN)
        self._poll.register(process.ready_fd, select.POLLIN)

    def _forget(self, me: Process) -> None:
        """In a forked child: close what holds the supervisor's locks, and what only it may use.

        A socket must not outlive supervisor and receiver in the hands of a consumer: it would keep its port.
        """
        for part, process in zip(self.receivers, self.processes, strict=False):
            part.ring.forget()
            part.receiving.forget(mine=process is me)
        for process in self.processes:
            for descriptor in (process.pidfd, process.ready_fd):
                if descriptor >= 0:
                    os.close(descriptor)
        if self.sender is not None:
            self.sender.close()

    def _reap(self, process: Process) -> int:
        """Collect an ended process: its exit code, negative for a signal."""
        _, how = os.waitpid(process.pid, 0)
        self._poll.unregister(process.pidfd)
        os.close(process.pidfd)
        process.pidfd = -1
        self._close_ready(process)
        process.code = os.waitstatus_to_exitcode(how)
        return process.code

    def _close_ready(self, process: Process) -> None:
        if process.ready_fd >= 0:
            self._poll.unregister(process.ready_fd)
            os.close(process.ready_fd)
            process.ready_fd = -1

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
            if self.sender.problem:
                self._note_once(f"--sender {self.sender.name}: {self.sender.problem}: not looked at")
        often = (self.sender and not self.sender.came) or (self.spec.packets and len(self.receivers) > 1)
        step_ms = min(most_s * 1000, _LOOK_MS if often else 1000)
        events = {descriptor for descriptor, _ in self._poll.poll(max(step_ms, 0))}
        if self._wakeup in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 64)
        for part in self.receivers:
            part.receiving.attend(self._poll)
            if part.receiving.is_full:
                self._note_once(f"{part.name}: as many connections as it can have are open: others wait")
        for process in self.processes:  # each once: a new one may get the descriptors of the old
            if process.ready_fd in events and os.read(process.ready_fd, 1):
                self._close_ready(process)
            elif events & {process.pidfd, process.ready_fd}:  # the end of the pipe is its end, too
                self._ended_early(process, self._reap(process))
            elif process.ready_fd >= 0 and time.monotonic() > process.ready_by:
                os.kill(process.pid, signal.SIGKILL)
                self._reap(process)
                self._give_up(Failed(f"{process.worker.name} did not start within {_START_S:.0f} s"))

    def _ended_early(self, process: Process, code: int) -> None:
        """A worker is gone before the end. Killed: start it anew. Ended by itself: it is done, or failed."""
        assert self.status is not None
        if code == 0:
            return
        if self.status.read(process.worker.index)[0].get("done"):  # it was leaving
            process.code = 0
            return
        words = self._words(process, code)
        now = time.monotonic()
        process.deaths = [at for at in process.deaths if now - at < _WITHIN_S] + [now]
        if code > 0 or len(process.deaths) >= _DEATHS:
            words = words if code > 0 else f"{words} {_DEATHS} times in {_WITHIN_S:.0f} s: given up"
            self._give_up(Refused(words) if code == 2 else Failed(words))
            return
        self.report.note(f"{words}: started anew")
        self._part(process).restarts += 1
        self._fork(process)

    def _give_up(self, error: Failed | Refused) -> None:
        """Of the first start nothing remains; later the run ends in order."""
        if not self._started:
            raise error
        self._fail(str(error))

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.report.note(text)

    def _fail(self, words: str) -> None:
        self._errors.append(words)
        self.report.note(f"rxring: {words}")

    def _part(self, process: Process) -> ReceiverPart | ConsumerPart:
        parts: list[ReceiverPart | ConsumerPart] = [*self.receivers, *self.consumers]
        return parts[process.worker.index]

    def _finished(self) -> bool:
        """Have the receivers what was asked for? One alone ends by itself; several are looked at."""
        if len(self.receivers) > 1 and self.spec.packets is not None:
            received = sum(int(part.ring.counters["received"]) for part in self.receivers)
            return received >= self.spec.packets
        return not any(process.runs for process in self.processes[: len(self.receivers)])

    def _await_end(self, processes: list[Process]) -> None:
        """Wait for workers that were told to end; kill those that no longer move."""
        before, still_s = -1, 0.0
        while any(process.runs for process in processes) and self._signals < 2:
            looked = time.monotonic()
            self._look(_LOOK_S)
            now = sum(int(cursor) for part in self.receivers for cursor in part.ring.slots["cursor"])
            now += sum(int(part.ring.counters["published"]) for part in self.receivers)
            # No more than a look: if we were stopped ourselves, so were they.
            still_s = still_s + min(time.monotonic() - looked, _LOOK_S) if now == before else 0.0
            before = now
            stopped = all(pinning.is_stopped(process.pid) for process in processes if process.runs)
            if still_s > _STALLED_S or (stopped and still_s > _STOPPED_S):
                break
        for process in processes:
            if process.runs:
                os.kill(process.pid, signal.SIGKILL)
                self._reap(process)
                self._fail(f"{process.worker.name} did not end: killed")

    def _await_sender(self) -> None:
        """Wait a moment for a sender that is just ending: how much it sent is known only then."""
        if self.sender is None:
            return
        deadline = self._ended + _SENDER_S
        while self.sender.lives and time.monotonic() < deadline and self._signals < 2:
            self._look(0.01)
        if self.sender.came and self.sender.sent is None:
            what = "still sends" if self.sender.lives else "died"
            self.report.note(f"sender {self.sender.name} {what}: how much it sent is not known")

    # ── signals ──────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """A signal ends the run in order; a second one ends it at once."""
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wakeup, select.POLLIN)
        before = {n: signal.signal(n, self._on_signal) for n in END_SIGNALS}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
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
        if number == signal.SIGHUP and self._signals:
            return  # a terminal that closes sends two
        self._signals += 1
        if self._preparing:
            # Nothing exists yet that would have to be ended. An exception might be swallowed by a
            # callback of the compiler's, and waiting for it takes long.
            os._exit(0)
        if self._signals == 2:
            signal.setitimer(signal.ITIMER_REAL, _AT_ONCE_S)

    def _on_alarm(self, number: int, frame: object) -> None:
        """Something holds us up: output that nobody reads, a handler's report that does not end."""
        with contextlib.suppress(Exception):
            self._clear()
            self.report.__exit__()
        os._exit(1)

    # ── reporting ────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self, kind: str) -> dict[str, Any]:
        assert self.status is not None
        summary = kind == "summary"
        for consumer in self.consumers:
            process = self.processes[consumer.record]
            consumer.alive = process.runs or process.code == 0
        view = snapshot(
            kind,
            (self._ended if summary else time.monotonic()) - self._began,
            self.receivers,
            self.consumers,
            self.status,
            sender=self.sender,
            layers=self._layers,
            placement=self.placement,
            previous=None if summary else self._previous,
            clock_steps=self._clock_steps,
        )
        for consumer, found in zip(self.consumers, view["consumers"], strict=True):
            if found["policy"] != consumer.consumer.spec.policy:
                self._note_once(
                    f"{consumer.name} held the receiver up for {consumer.consumer.spec.demote} s: "
                    "it is waited for no more, and skips what it misses"
                )
            if consumer.report_error:
                self._note_once(f"rxring: consumer {consumer.name}: {consumer.report_error}")
        return view

    def _interval(self) -> None:
        assert self.status is not None
        self._layers.update()
        self._previous = self._snapshot("interval")
        self._tell("ready", self._previous)
        self.report.interval(self._previous)

    def _look_at_clock(self) -> None:
        step_ns = int(clock_step_ns(self._clock_offset_ns))
        if step_ns:
            self._clock_offset_ns += step_ns
            self._clock_steps += 1
            self.report.note(
                f"the clock was set by {step_ns / 1e9:+.6f} s: times before and after it do not compare"
            )

    def _look_at_placement(self) -> None:
        assert self.status is not None
        self.placement.look()
        for process in self.processes:
            cpus = self.status.read(process.worker.index)[0].get("cpus")
            self.placement.look_at(process.worker.name, process.worker.cpus, cpus)
        for words in self.placement.deviations:
            self._note_once(words)

    def _weigh_placement(self) -> None:
        """At the end: of packets, for those of a stream softnet does not count as we do."""
        if all(part.receiving.spec.listen.scheme == "udp" for part in self.receivers):
            frames = sum(int(part.ring.counters["frames"]) for part in self.receivers)
            self.placement.weigh(frames, self._layers.softnet)
        self._look_at_placement()

    def _take_layout_back(self) -> None:
        try:
            for words in self.placement.restore():
                self.report.note(words)
        except Failed as error:
            self._fail(str(error))

    def _tell(self, state: str, view: dict[str, Any]) -> None:
        """The last view, for whoever looks from outside; what does not fit a record is left out, by parts."""
        assert self.status is not None
        for told in (view, *_smaller(view), None):
            with contextlib.suppress(ValueError):
                facts = {"state": state, "view": told and plain_data(told)}
                self.status.publish(len(self.status.workers) - 1, facts)
                break

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
                    "rcvbuf": part.receiving.buffer.as_object(),
                    "gro": part.receiving.gro,
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
        self._clear()
        sys.stdout.flush()

    def _clear(self) -> None:
        for process in self.processes:
            if process.runs:
                os.kill(process.pid, signal.SIGKILL)
                self._reap(process)
        for part in self.receivers:
            part.receiving.close()
            part.ring.close()
        if self.status is not None:
            self.status.close()
        if self.sender is not None:
            self.sender.close()
        self._take_layout_back()


def _smaller(view: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Without a row for each device and CPU; then without results, too."""
    if "layers" in view:
        view = view | {"layers": view["layers"] | {"nic": {}, "softnet": []}}
        view |= {"placement": view["placement"] | {"cpus": []}}
        yield view
    yield view | {"consumers": [c | {"result": None} for c in view["consumers"]]}
