"""What GRO brings: many packets in a frame, one in a frame, and what the bare kernel gives for the same.

The flood of `peers`, in messages of 1, 4, 16 and 64 packets of 100 bytes, and of 1, 16 and 63 of 1024 bytes
(a message holds no more): over loopback and veth the kernel leaves them whole, so that a message is a frame
with `--gro on`. With one packet a frame GRO can only be in the way. The engine has a `latency` consumer on
the receiver's CPU, so that the sender has its own. Beside it ("C") a recvmmsg loop that asks for GRO and
timestamps, and has neither a ring nor a consumer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bench import native, pictures
from bench.flood import BATCH, Flood
from bench.machine import two_cpus
from bench.pictures import Curve
from bench.place import LO
from bench.runner import Case, Claim, Figures, Setting
from bench.section import Picture, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("lo",)
CLAIMS = (
    Claim("64 × 100 B, on", at_least=10),
    Claim("64 × 100 B, on", against="64 × 100 B, off", at_least=8),
    Claim("64 × 100 B, on", against="64 × 100 B, C", at_least=0.5),
    Claim("63 × 1024 B, on", figure="gigabytes_per_second", at_least=4),
    Claim("1 × 100 B, auto", against="1 × 100 B, off", at_least=0.95),
    Claim("1 × 100 B, auto", against="1 × 100 B, off", figure="cpu_ns_per_packet", at_most=1.05),
)

KINDS = ((64, 100), (16, 100), (4, 100), (1, 100), (63, 1024), (16, 1024), (1, 1024))  # packets, bytes each

QUICK_KINDS = ((64, 100), (1, 100), (63, 1024))  # what the claims are about


def cases(setting: Setting) -> Iterator[Case]:
    warm_s, window_s = (0.25, 0.5) if setting.quick else (0.5, 1.0)
    place = setting.places[0] if setting.places else LO
    for packets, size in QUICK_KINDS if setting.quick else KINDS:
        flood = Flood(size, packets, *two_cpus(), warm_s, window_s, place)
        name = f"{packets} × {size} B"
        for gro in ("on", "off", "auto") if packets == 1 else ("on", "off"):
            engine = functools.partial(_engine, flood, gro)
            yield Case(f"{name}, {gro}", "M/s", engine, flood.parameters | {"gro": gro})
        if packets > 16:
            loop = functools.partial(flood.c, timestamps=True, gro=True)
            yield Case(f"{name}, C", "M/s", loop, flood.parameters | {"batch": BATCH}, native.missing())


def _engine(flood: Flood, gro: str) -> Figures:
    found = flood.engine(flood.receive_cpu, gro)
    return {
        **found,
        "gigabytes_per_second": found["value"] * flood.size / 1e3,
        "ok": found["ok"] and found["gro"] == (gro != "off"),
    }


def tell(result: dict[str, Any]) -> Iterator[Section]:
    engine = [case for case in result["cases"] if case["median"] and case["parameters"].get("gro") != "auto"]
    engine = [case for case in engine if "gro" in case["parameters"]]
    if not engine:
        return
    title = "Over the packets in a message"
    yield Section(title, picture=Picture("gro", "Rate over packets in a message", lambda: _picture(engine)))


def _picture(engine: list[dict[str, Any]]) -> Figure:
    panels: dict[str, list[Curve]] = {}
    for size in dict.fromkeys(case["parameters"]["size"] for case in engine):
        for gro in ("on", "off"):
            points = [
                (case["parameters"]["gso"], [run["value"] for run in case["runs"] if run["value"]])
                for case in engine
                if (case["parameters"]["size"], case["parameters"]["gro"]) == (size, gro)
            ]
            if points:
                curve = Curve(f"--gro {gro}", sorted(points))
                panels.setdefault(f"packets of {size} bytes", []).append(curve)
    return pictures.lines(panels, "packets in a message", "10⁶ packets/s", log_x=True, log_y=True)
