"""A bulk TCP stream into the ring: socket buffers, the size of a packet, and which CPU takes the interrupts.

What netperf measured in 2007 over 10 Gbit/s (S3 below), with `rxring send --to tcp://…` and `rxring run
--listen tcp://…` in two network namespaces, a veth cable between them. Send and receive buffer are of one
size, 64 KiB to 1 MiB, in the sense of setsockopt: the kernel grants twice that, bookkeeping included. The
message is 64 KiB throughout. The engine has no consumer: as netserver, it takes what comes. Right is a run
whose every byte came, in a stream that both sides closed.

`same`: the CPU of the receiver takes the interrupts of its device, too. `different`: another one does, a
third where there is one; with two it is the sender's, which then works for both. The device is steered by an
RPS mask of one bit; the sender's device, with its acknowledgements, to the sender's CPU.

A veth device takes messages of 64 KiB whole, whatever its MTU. So its segmentation offload is off, and the
kernel cuts packets of one MTU before it, as for a card that cannot: the MTU is then what it was in 2007. The
cases `whole` have it on.

Columns as netperf's. CPU is of one CPU, service demand in µs a KiB: the receiver's and the sender's CPU
without their interrupts, which are nobody's (netperf charges them to whom they hit); interrupts of all CPUs
stand beside. Both come from /proc/stat, and are of whatever ran there. `thread` is what the receiving
thread's own clock says, which runs on during interrupts.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import pictures
from bench.machine import two_cpus
from bench.pictures import Curve
from bench.place import Place
from bench.report import number, span
from bench.runner import Case, Claim, Figures, Setting
from bench.section import Picture, Section, Table
from bench.spread import interval, median, overlap, ratios
from bench.window import EVERY_S, Window, strayed
from engine.errors import Refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = ("veth",)
VARIES = ("mtu", "rps", "offloads")  # each case sets its own
SAME, DIFFERENT = "same", "different"
CLAIMS = (
    Claim("9000, 256 KiB, different", against="9000, 256 KiB, same", at_least=1),
    Claim("9000, 1024 KiB, same", against="9000, 256 KiB, same", at_least=0.9),
    Claim("9000, 1024 KiB, different", against="9000, 256 KiB, different", at_least=0.9),
)

BUFFERS, QUICK_BUFFERS = (64, 96, 128, 192, 256, 512, 1024), (64, 256, 1024)  # KiB
MTUS, QUICK_MTUS = (1500, 9000), (9000,)
WHOLE_BUFFER = 256  # KiB, of the cases with segmentation offload
MESSAGE = 64 << 10
COLLAPSE = 0.9  # of the best: what is below it, at the largest buffer, has collapsed

# S3: for each MTU, 10⁶ bits/s (best, its buffer in KiB, at the largest buffer) before and after the change.
# Of 1500 after it only the best is known; 9000 before it was "about 6200" from 192 KiB on.
THEN: dict[int, tuple[tuple[str, float, int, float | None], ...]] = {
    1500: (("2007, before", 2472, 64, 1808), ("2007, after", 2923, 96, None)),
    9000: (("2007, before", 7504, 128, 6200), ("2007, after", 9018, 192, 8632)),
}
_SIOCETHTOOL, _STSO = 0x8946, 0x1F


@dataclass(frozen=True, slots=True)
class Bulk:
    """A stream. buffer: bytes, as setsockopt is asked. interrupt_cpu: handles what comes to the receiver."""

    mtu: int
    buffer: int
    whole: bool
    layout: str
    receive_cpu: int
    interrupt_cpu: int
    send_cpu: int
    window_s: float

    def run(self, place: Place) -> Figures:
        self._prepare(place)
        host, buffer = place.receive.host, str(2 * self.buffer)
        listen = ("--listen", f"tcp://{host}:0", "--rcvbuf", buffer, "--rx-cpu", str(self.receive_cpu))
        with place.receive.rxring("run", *listen, "--every", str(EVERY_S)) as engine:
            port = engine.next("ready")["receivers"][0]["port"]
            what = ("--size", str(MESSAGE), "--sndbuf", buffer, "--cpu", str(self.send_cpu))
            with place.send.rxring("send", "--to", f"tcp://{host}:{port}", *what) as sender:
                window = Window.watch(engine, self.window_s)
                sent = sender.end()
            summary = engine.end()
        flags = strayed(summary, self.interrupt_cpu)
        return self._figures(window) | _checked(sent, summary) | {"flags": flags}

    def _prepare(self, place: Place) -> None:
        """The devices as this stream wants them: runs are in no order, each sets all."""
        for side in (place.receive, place.send):
            with side:
                _set_segmentation(side.device, self.whole)
            words = side.command("ip", "link", "set", side.device, "mtu", str(self.mtu))
            subprocess.run(words, check=True, capture_output=True)
        place.receive.steer(self.interrupt_cpu)
        place.send.steer(self.send_cpu)

    def _figures(self, window: Window) -> Figures:
        seconds, size, packets = window.seconds, window.risen("bytes"), window.came()
        cpu_s = {
            "receiver": window.spent[self.receive_cpu].own,
            "sender": window.spent[self.send_cpu].own,
            "interrupts": sum(cpu.softirq for cpu in window.spent.values()),
            "thread": window.risen("cpu_ns") / 1e9,
        }
        return {
            "value": size * 8 / seconds / 1e6,
            "seconds": seconds,
            "bytes": size,
            "cpu_percent": {who: 100 * spent_s / seconds for who, spent_s in cpu_s.items()},
            "us_per_kb": {who: spent_s * 1e6 / (size / 1024) for who, spent_s in cpu_s.items()},
            "busy": {str(cpu): times._asdict() for cpu, times in window.spent.items()},
            "bytes_per_packet": size / packets if packets else None,
        }


def _set_segmentation(device: str, on: bool) -> None:
    """TCP segmentation offload of a device of this process's network namespace."""
    value = (ctypes.c_uint32 * 2)(_STSO, on)  # struct ethtool_value
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
        fcntl.ioctl(sock, _SIOCETHTOOL, request)


def _checked(sent: dict[str, Any], summary: dict[str, Any]) -> Figures:
    """Did every byte come, and did both sides end the stream?"""
    receiver, ledger = summary["receivers"][0], summary["ledger"]
    ended = receiver["connections"] == {"accepted": 1, "open": 0} and sent["unconfirmed"] == 0
    return {
        "ok": ended and receiver["bytes"] == sent["bytes"] and receiver["published"] == receiver["packets"],
        "sent_bytes": sent["bytes"],
        "received_bytes": receiver["bytes"],
        "ledger_balanced": ledger["adds_up"],
        "rcvbuf": receiver["rcvbuf"]["granted"],
        "sndbuf": sent["sndbuf"]["granted"],
        "received_lengths": receiver["lengths"],
    }


def cases(setting: Setting) -> Iterator[Case]:
    if any(place.name != "veth" for place in setting.places):
        raise Refused(
            "sockbuf sets the MTU of its devices, and who handles their packets: give --device veth"
        )
    receiver, sender = two_cpus()
    third = [cpu for cpu in sorted(os.sched_getaffinity(0)) if cpu not in (receiver, sender)]
    interrupt_cpus = {SAME: receiver, DIFFERENT: third[0] if third else sender}
    window_s = 0.5 if setting.quick else 1.0
    seconds = 2.0 + window_s  # of a run
    buffers, mtus = (QUICK_BUFFERS, QUICK_MTUS) if setting.quick else (BUFFERS, MTUS)
    streams = [(mtu, buffer, False) for mtu in mtus for buffer in buffers]
    streams += [] if setting.quick else [(1500, WHOLE_BUFFER, True)]
    for mtu, buffer, whole in streams:
        for layout, cpu in interrupt_cpus.items():
            bulk = Bulk(mtu, buffer << 10, whole, layout, receiver, cpu, sender, window_s)
            name = f"{mtu}, {buffer} KiB, {layout}{', whole' if whole else ''}"
            run = functools.partial(_run, bulk, setting.places)
            yield Case(
                name,
                "10⁶ bits/s",
                run,
                asdict(bulk) | {"message": MESSAGE, "seconds": seconds},
                _too_large(buffer << 10),
            )


def _run(bulk: Bulk, places: tuple[Place, ...]) -> Figures:
    (place,) = places
    return bulk.run(place)


def _too_large(buffer: int) -> str:
    """Why this machine grants no such buffer; "" where it does."""
    for name in ("rmem_max", "wmem_max"):
        most = int(Path("/proc/sys/net/core", name).read_text())
        if most < buffer:
            return f"net.core.{name} is {most}: sysctl -w net.core.{name}={buffer}"
    return ""


# ── what the report tells ────────────────────────────────────────────────────────────────────────────

_COLUMNS = (
    *("buffer", "granted recv, send", "message", "s", "10⁶ bits/s"),
    *("receiver %", "thread %", "sender %", "interrupts %"),
    *("receiver µs/KB", "sender µs/KB", "interrupts µs/KB"),
)
_THEN_COLUMNS = ("MTU", "which", "best, 10⁶ bits/s", "at KiB", "at the largest buffer", "of the best")


def tell(result: dict[str, Any]) -> Iterator[Section]:
    """S3's tables: one for each MTU and layout; beside them 2007; what agrees, and why."""
    found = [case for case in result["cases"] if case["median"] is not None]
    swept = [case for case in found if not case["parameters"]["whole"]]
    if not swept:
        return
    picture = Picture(
        "throughput", "Throughput over socket buffer, for each layout and MTU", lambda: _picture(swept)
    )
    text = (*_collapses(swept), *_apart(swept), *_whole(found))
    yield Section("Beside 2007", text, Table(_THEN_COLUMNS, tuple(_beside(swept))), picture)
    for (mtu, _), chosen in _by_series(found).items():
        cpu = chosen[0]["parameters"]["interrupt_cpu"]
        title = f"MTU {mtu}, interrupts on CPU {cpu}: {_of_cpu(chosen[0]['parameters'])}"
        units = "Buffers in KiB; % of one CPU; KB as netperf's, 1,024 bytes. Medians of the runs."
        yield Section(title, (units,), Table(_COLUMNS, tuple(map(_row, chosen))))


def _by_series(cases: Sequence[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The cases by MTU and layout."""
    series: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for case in cases:
        series.setdefault((case["parameters"]["mtu"], case["parameters"]["layout"]), []).append(case)
    return series


def _of_cpu(parameters: dict[str, Any]) -> str:
    """Whose CPU takes the interrupts."""
    if parameters["layout"] == SAME:
        return "the receiver's"
    return "the sender's" if parameters["interrupt_cpu"] == parameters["send_cpu"] else "one of their own"


def _runs(case: dict[str, Any]) -> list[Figures]:
    return [run for run in case["runs"] if run["value"] is not None]


def _middle(case: dict[str, Any], figure: str, who: str) -> float:
    return median([run[figure][who] for run in _runs(case)])


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    run = _runs(case)[0]
    buffer = f"{case['parameters']['buffer'] >> 10}{' whole' if case['parameters']['whole'] else ''}"
    granted = f"{run['rcvbuf'] >> 10}, {run['sndbuf'] >> 10}"
    shares = (_middle(case, "cpu_percent", who) for who in ("receiver", "thread", "sender", "interrupts"))
    demands = (_middle(case, "us_per_kb", who) for who in ("receiver", "sender", "interrupts"))
    return (
        *(buffer, granted, str(MESSAGE >> 10), f"{run['seconds']:.1f}", number(case["median"])),
        *(f"{share:.0f}" for share in shares),
        *(f"{demand:.2f}" for demand in demands),
    )


def _best_and_largest(cases: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    best = max(cases, key=lambda case: float(case["median"]))
    return best, max(cases, key=lambda case: int(case["parameters"]["buffer"]))


def _beside(swept: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    series = _by_series(swept)
    for mtu in dict.fromkeys(mtu for mtu, _ in series):
        for which, best, at, largest in THEN[mtu]:
            share = f"{largest / best:.2f}" if largest else "–"
            yield str(mtu), which, number(best), str(at), number(largest), share
        for layout in (layout for of, layout in series if of == mtu):
            best_case, last = _best_and_largest(series[mtu, layout])
            most, end = best_case["median"], last["median"]
            at = best_case["parameters"]["buffer"] >> 10
            yield str(mtu), f"here, {layout}", number(most), str(at), number(end), f"{end / most:.2f}"


def _collapses(swept: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Is it slower with the largest buffer than with the best one?"""
    for (mtu, layout), cases in _by_series(swept).items():
        best, last = _best_and_largest(cases)
        most, end = best["median"], last["median"]
        told = f"MTU {mtu}, {layout}: {number(most)} at {best['parameters']['buffer'] >> 10} KiB"
        if best is last:
            yield f"{told}, the largest buffer: no collapse"
            continue
        told += f", {number(end)} at {last['parameters']['buffer'] >> 10} KiB"
        if end >= COLLAPSE * most:
            yield f"{told}: no collapse at large buffers"
        elif overlap(best["ci"], last["ci"]):
            yield f"{told}: less, but within the spread of the runs"
        else:
            yield f"{told}: it collapses, to {end / most:.2f} of the best"


def _apart(swept: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Do different CPUs win, as the author says?"""
    series = _by_series(swept)
    for mtu in dict.fromkeys(mtu for mtu, _ in series):
        same, apart = (series.get((mtu, layout), []) for layout in (SAME, DIFFERENT))
        values = {
            (case["parameters"]["buffer"], case["parameters"]["layout"]): [
                run["value"] for run in case["runs"]
            ]
            for case in (*same, *apart)
        }
        buffers = [case["parameters"]["buffer"] for case in same]
        found = [
            ratio
            for buffer in buffers
            for ratio in ratios(values.get((buffer, DIFFERENT), ()), values[buffer, SAME])
        ]
        if found:
            shared = apart[0]["parameters"]["interrupt_cpu"] == apart[0]["parameters"]["send_cpu"]
            yield (
                f"MTU {mtu}: interrupts on another CPU than the receiver's give {number(median(found))} of "
                f"the throughput (within a round, all buffers: {span(min(found), max(found))}). "
                + _why(interval(found), shared, _load(same), _load(apart))
            )


def _why(
    ratio: tuple[float, float], shared: bool, same: tuple[float, float], apart: tuple[float, float]
) -> str:
    """ratio: in which its median lies. same, apart: how busy receiver's and sender's CPU were, per cent."""
    low, high = ratio
    verdict = "That makes no difference that could be told"
    if low > 1:
        verdict = "It agrees with what the author says of Linux and Solaris"
    elif high < 1:
        verdict = "It does not agree with what the author says of Linux and Solaris"
    shares = "; with two CPUs it is the sender's that takes them" if shared else ""
    return (
        f"{verdict} (interval of the median: {span(low, high)}). The receiver's CPU was {same[0]:.0f} % busy "
        f"with them and {apart[0]:.0f} % without, the sender's {same[1]:.0f} and {apart[1]:.0f} %{shares}."
    )


def _load(cases: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """How busy the receiver's and the sender's CPU were, interrupts included, per cent."""

    def of(role: str) -> float:
        shares = [
            100 * (run["busy"][cpu]["own"] + run["busy"][cpu]["softirq"]) / run["seconds"]
            for case in cases
            for cpu in (str(case["parameters"][role]),)
            for run in _runs(case)
        ]
        return median(shares)

    return of("receive_cpu"), of("send_cpu")


def _whole(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the MTU would not have shown."""
    by_name = {case["name"]: case for case in found}
    for case in found:
        if case["parameters"]["whole"] and (cut := by_name.get(case["name"].removesuffix(", whole"))):
            size = median([run["bytes_per_packet"] for run in _runs(case)])
            yield (
                f"{case['name']}: with segmentation offload a packet holds {number(size)} bytes whatever the "
                f"MTU, and {number(case['median'])} × 10⁶ bits/s pass instead of {number(cut['median'])}"
            )


def _picture(swept: Sequence[dict[str, Any]]) -> Figure:
    panels: dict[str, list[Curve]] = {}
    for (mtu, layout), cases in _by_series(swept).items():
        points = [
            (case["parameters"]["buffer"] / 1024, [run["value"] for run in _runs(case)]) for case in cases
        ]
        name = f"interrupts on {'the receiver’s CPU' if layout == SAME else 'another CPU'}"
        panels.setdefault(f"MTU {mtu}", []).append(Curve(name, points))
    return pictures.lines(panels, "socket buffer, KiB", "10⁶ bits/s", log_x=True)
