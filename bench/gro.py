"""What GRO brings: many packets in a frame, one in a frame, and what the bare kernel gives for the same.

The flood of `peers`, in three kinds: 64 packets of 100 bytes in a message; 63 of 1024 bytes, all that a
message holds; and without GSO, where a frame is one packet, and GRO can only be in the way. The engine with
a `latency` consumer takes each with `--gro` on, off and auto. A run of it is two, with the consumer on the
receiver's CPU and on the sender's: the figure is that of the better one, `together` and `apart` tell both.
Beside it ("C") a recvmmsg loop that asks for GRO and timestamps, and has neither a ring nor a consumer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from bench import native
from bench.flood import BATCH, Flood
from bench.machine import two_cpus
from bench.runner import Case, Claim, Figures, Setting

PLACES = ("lo",)
CLAIMS = (
    Claim("64 × 100 B, on", at_least=10),
    Claim("64 × 100 B, on", against="64 × 100 B, off", at_least=8),
    Claim("64 × 100 B, on", against="64 × 100 B, C", at_least=0.5),
    Claim("63 × 1024 B, on", figure="gigabytes_per_second", at_least=4),
    Claim("1 × 100 B, auto", against="1 × 100 B, off", at_least=0.95),
    Claim("1 × 100 B, auto", against="1 × 100 B, off", figure="cpu_ns_per_packet", at_most=1.05),
)

KINDS = ((64, 100), (63, 1024), (1, 100))  # packets in a message, bytes of each


def cases(setting: Setting) -> Iterator[Case]:
    warm_s, window_s = (0.25, 0.5) if setting.quick else (1.0, 2.0)
    for packets, size in KINDS:
        flood = Flood(size, packets, *two_cpus(), warm_s, window_s)
        name = f"{packets} × {size} B"
        for gro in ("on", "off", "auto"):
            engine = functools.partial(_both, flood, gro)
            yield Case(f"{name}, {gro}", "M/s", engine, flood.parameters | {"gro": gro})
        loop = functools.partial(flood.c, timestamps=True, gro=True)
        yield Case(f"{name}, C", "M/s", loop, flood.parameters | {"batch": BATCH}, native.missing())


def _both(flood: Flood, gro: str) -> Figures:
    together, apart = (flood.engine(cpu, gro) for cpu in (flood.receive_cpu, flood.send_cpu))
    return _better(together, apart, flood.size, gro != "off")


def _better(together: Figures, apart: Figures, size: int, gro: bool) -> Figures:
    """The figures of the better run, which are right if both were."""
    runs = (together, apart)
    better = max(runs, key=lambda run: float(run["value"]))
    return {
        **better,
        "gigabytes_per_second": better["value"] * size / 1e3,
        "ok": all(run["ok"] and run["gro"] == gro for run in runs),
        "ledger_balanced": all(run["ledger_balanced"] for run in runs),
        "together": together,
        "apart": apart,
    }
