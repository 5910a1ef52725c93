"""A stretch of a run of the engine: what came in it, where it was handled, how busy the CPUs were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from bench import busy
from bench.commands import Rxring
from engine.errors import Failed

ELSEWHERE = 0.02  # of the packets: so many may be handled on another CPU than was asked for
SILENCE_S = 20  # nothing came for so long: nothing will
EVERY_S = 0.1  # how often the engine is to report


@dataclass(frozen=True, slots=True)
class Window:
    """begin, end: intervals of the engine, of one receiver. spent: by each CPU in between."""

    begin: dict[str, Any]
    end: dict[str, Any]
    spent: dict[int, busy.Busy]

    @classmethod
    def watch(cls, engine: Rxring, seconds: float) -> Self:
        """From the interval after the one in which the first bytes came, for at least so long."""
        while (first := engine.next("interval"))["receivers"][0]["bytes"] == 0:
            if first["seconds"] > SILENCE_S:
                raise Failed(f"nothing came within {SILENCE_S} s")
        begin, before = engine.next("interval"), busy.read()
        end = engine.next("interval")
        while end["seconds"] < begin["seconds"] + seconds:
            end = engine.next("interval")
        spent = {cpu: after.since(before[cpu]) for cpu, after in busy.read().items()}
        return cls(begin, end, spent)

    @property
    def seconds(self) -> float:
        return float(self.end["seconds"] - self.begin["seconds"])

    def risen(self, key: str) -> int:
        """A count of the receiver."""
        return int(self.end["receivers"][0][key] - self.begin["receivers"][0][key])

    def came(self) -> int:
        """Packets that the engine's devices received."""
        return devices(self.end, "rx_packets") - devices(self.begin, "rx_packets")

    def lost(self) -> int:
        """Packets of the engine's devices that never reached a socket, as for want of room in a backlog."""
        return devices(self.end, "rx_dropped") - devices(self.begin, "rx_dropped")

    def handled(self, cpu: int) -> int:
        """Packets that this CPU's softirqs handled, of all devices of the machine."""
        return _handled(self.end, cpu) - _handled(self.begin, cpu)


def devices(view: dict[str, Any], count: str) -> int:
    """A count of the engine's devices, added up."""
    return sum(device[count] for device in view["layers"]["nic"].values())


def strayed(summary: dict[str, Any], cpu: int) -> list[str]:
    """A sentence if fewer packets were handled on this CPU than came, from start to end.

    Not within a window: what a backlog holds at its ends has come, and is not handled.
    """
    came, handled = devices(summary, "rx_packets"), _handled(summary, cpu)
    if handled >= (1 - ELSEWHERE) * came:
        return []
    return [f"CPU {cpu} was to handle the packets, and handled {handled} of {came}"]


def _handled(view: dict[str, Any], cpu: int) -> int:
    return sum(row["processed"] for row in view["layers"]["softnet"] if row["cpu"] == cpu)
