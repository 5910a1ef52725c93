"""Where a run is placed: a layout applied before it starts, watched while it runs, taken back at its end.

    plan → place (the CPUs it gives) → apply → begin → look, look … → restore

What is written stands in the journal of `rxring pin`, with this engine as its owner: if the engine is killed,
`rxring pin restore` takes it back. Without a layout only the threads are watched, and packets counted by CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine.affinity import checks, interrupts, journal, layouts, topology
from engine.affinity.devices import Device
from engine.affinity.journal import Journal, Owner, Write
from engine.affinity.layouts import Layout
from engine.affinity.topology import format_cpu_list
from engine.errors import Failed, Refused
from engine.net.counters import Softnet
from engine.spec import ConsumerSpec, ReceiverSpec, RunSpec, own_cpus


@dataclass(slots=True)
class Placement:
    """Of one run. deviations: a sentence for each thing that was seen not to be as it should, the first time.

    layout, device: None where the run has no layout.
    """

    layout: Layout | None = None
    device: Device | None = None
    writes: list[Write] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)
    _made: Journal | None = None
    _known: set[str] = field(default_factory=set)
    _at_begin: dict[int, Counter[int]] = field(default_factory=dict)
    _now: dict[int, Counter[int]] = field(default_factory=dict)

    # ── before the run ───────────────────────────────────────────────────────────────────────────────

    @classmethod
    def plan(cls, run: RunSpec) -> Placement:
        """What the run asks for; nothing is written. Refused if it can be foreseen that it can't be had."""
        if run.layout is None:
            return cls()
        layout, device = layouts.choose(run.layout, run.device)
        writes = layouts.writes(layout, device)
        reasons = layouts.obstacles(layout, device, topology.read())
        if reason := "; ".join(filter(None, [*reasons, journal.obstacle(writes)])):
            raise Refused(f"--layout {run.layout}: {reason}")
        journal.need_root("--layout")
        return cls(layout, device, writes)

    def place(self, run: RunSpec) -> RunSpec:
        """The run with the layout's CPUs, where it names none itself. Refused if it receives elsewhere."""
        if self.layout is None:
            return run
        return replace(
            run,
            receivers=tuple(_receiver(receiver, self.layout) for receiver in run.receivers),
            consumers=tuple(_consumer(consumer, self.layout) for consumer in run.consumers),
        )

    def apply(self, engine: str) -> None:
        """Refused, and everything as it was, where the kernel refuses a write."""
        if self.layout is not None and self.device is not None:
            about = layouts.about(self.layout, self.device)
            self._made = journal.apply(self.writes, about, owner=Owner.this(engine))

    def begin(self) -> None:
        """Interrupts count from here on."""
        self._at_begin = self._now = _interrupts(self.device)

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Does what was written still stand, and is it in effect?"""
        if self._made is None or self.layout is None:
            return
        self._now = _interrupts(self.device)
        for check in checks.read_back(self.layout, self._made):
            if not check.ok:
                words = f"{check.what}: {check.found}, not {check.wanted} as layout {self.layout.name} has it"
                self._deviates(check.what, f"{words}: look for what else sets it")

    def look_at(self, worker: str, wanted: Collection[int] | None, found: Collection[int] | None) -> None:
        """A worker's threads may run on the `found` CPUs: who pinned it is not the only one who may."""
        if wanted is not None and found and set(found) != set(wanted):
            words = f"{worker} was pinned to CPU {format_cpu_list(wanted)} and may now run on"
            self._deviates(worker, f"{words} {format_cpu_list(found)}: look for what else sets its affinity")

    def weigh(self, frames: int, softnet: Mapping[int, Softnet]) -> None:
        """Of a whole run: can the frames received have had their softirqs on the interrupt CPU?

        softnet counts the packets of all devices, so it can only be too many. Where all CPUs together have
        fewer than we received, the kernel cut packets up behind it (GSO without GRO): it says nothing then.
        """
        if self.layout is None or self.device is None:
            return
        there, everywhere = softnet.get(self.layout.interrupt, Softnet()).processed, _processed(softnet)
        if everywhere >= frames and there < checks.THERE * frames:
            words = (
                f"of {frames} frames received, at most {there} were handled on CPU {self.layout.interrupt}"
            )
            self._deviates("softnet", f"{words}: do they come over {self.device.name}?")

    def _deviates(self, what: str, words: str) -> None:
        if what not in self._known:
            self._known.add(what)
            self.deviations.append(words)

    def as_object(self, softnet: Mapping[int, Softnet]) -> dict[str, Any]:
        """As the JSON of a run has it. softnet: counted since the run began, by CPU."""
        irqs: Counter[int] = Counter()
        for number, counts in self._now.items():
            irqs.update(counts - self._at_begin.get(number, Counter()))
        packets, there = _processed(softnet), None
        if self.layout is not None and packets:
            there = softnet.get(self.layout.interrupt, Softnet()).processed / packets
        roles = self.layout.as_object() if self.layout else dict.fromkeys(_ROLES)
        return {
            **roles,
            "device": self.device.name if self.device else None,
            "interrupt_by": layouts.made_by(self.device) if self.device else None,
            "cpus": [
                {
                    "cpu": cpu,
                    "packets": softnet[cpu].processed,
                    "interrupts": irqs[cpu] if self._now else None,
                }
                for cpu in sorted(softnet)
            ],
            "on_interrupt_cpu": there,
            "deviations": list(self.deviations),
        }

    # ── after it ─────────────────────────────────────────────────────────────────────────────────────

    def restore(self) -> list[str]:
        """Take the layout back; what is to be said of that. Failed where a file refuses."""
        if self._made is None:
            return []
        made, self._made = self._made, None
        try:
            done = journal.restore(owner=made.owner)
        except (Refused, Failed) as error:
            raise Failed(f"layout {made.about['layout']} still stands: {error}") from None
        return [
            f"{file.path}: somebody else had set {file.found} meanwhile, {file.value} is back"
            for file in done
            if file.state == "drifted"
        ]


_ROLES = ("layout", "interrupt", "receive", "process")


def _receiver(spec: ReceiverSpec, layout: Layout) -> ReceiverSpec:
    if spec.rx_cpu is not None and set(spec.rx_cpu) != {layout.receive}:
        raise Refused(
            f"--rx-cpu {format_cpu_list(spec.rx_cpu)}: layout {layout.name} receives on CPU "
            f"{layout.receive}: leave out one of them"
        )
    return replace(spec, rx_cpu=(layout.receive,))


def _consumer(spec: ConsumerSpec, layout: Layout) -> ConsumerSpec:
    """Where a consumer names its CPUs, it is meant: what makes a layout is who receives where."""
    if spec.cpus is not None:
        return spec
    return replace(spec, cpus=own_cpus(layout.process, spec.member, spec.split))


def _processed(softnet: Mapping[int, Softnet]) -> int:
    return sum(counts.processed for counts in softnet.values())


def _interrupts(device: Device | None) -> dict[int, Counter[int]]:
    """How often each interrupt of the device's queues has come, by CPU."""
    return interrupts.arrived(device.packet_irqs) if device and device.packet_irqs else {}
