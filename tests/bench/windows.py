"""A window of a second, as if the engine had reported it."""

from typing import Any

from bench.busy import Busy
from bench.window import Window


def window(came: int, handled: int, lost: int = 0, **receiver: int) -> Window:
    """`came` packets of 1,024 bytes, of which CPU 0 handled so many, CPU 1 the others; some were lost."""
    rose = {"bytes": 1024 * came, "cpu_ns": 300_000_000, **receiver}
    spent = {0: Busy(0.5, 0.25, 0.0), 1: Busy(0.4, 0.1, 0.0)}
    return Window(_view(1.0, 0, 0, 0, dict.fromkeys(rose, 0)), _view(2.0, came, handled, lost, rose), spent)


def _view(seconds: float, came: int, handled: int, lost: int, receiver: dict[str, int]) -> dict[str, Any]:
    softnet = [{"cpu": 0, "processed": handled}, {"cpu": 1, "processed": came - handled}]
    nic = {"lo": {"rx_packets": 0, "rx_dropped": 0}, "rxv1": {"rx_packets": came, "rx_dropped": lost}}
    return {"seconds": seconds, "layers": {"nic": nic, "softnet": softnet}, "receivers": [receiver]}
