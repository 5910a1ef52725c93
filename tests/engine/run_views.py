"""Views of imagined runs: plain data of the shape that a run reports, for the tests of its forms."""

from __future__ import annotations

from typing import Any

View = dict[str, Any]


def stage(p50_ns: float, count: int = 2_399_988, negative: int = 0) -> View:
    return {
        "count": count,
        "negative": negative,
        "mean_ns": p50_ns * 1.21,
        "stddev_ns": p50_ns * 0.4,
        "min_ns": p50_ns * 0.3,
        "max_ns": p50_ns * 91.7,
        "p50_ns": p50_ns,
        "p90_ns": p50_ns * 1.9,
        "p99_ns": p50_ns * 3.3,
        "p999_ns": p50_ns * 12.4,
    }


def no_samples() -> View:
    return {**dict.fromkeys(stage(1.0)), "count": 0, "negative": 0}


def receiver(**changes: Any) -> View:
    return {
        "name": "rx0",
        "listen": "udp://127.0.0.1:5000",
        "cpus": [0],
        "cpus_asked": [0],
        "migrations": 0,
        "involuntary": 12,
        "packets": 2_400_000,
        "bytes": 240_000_000,
        "frames": 2_400_000,
        "calls": 195_122,
        "refused": {"truncated": 0, "too_large": 0},
        "errors": {"ECONNREFUSED": 0, "other": 0},
        "socket_dropped": 0,
        "socket_dropped_frames": 0,
        "rcvbuf": {"asked": 8 << 20, "granted": 8 << 20},
        "packets_per_call": 12.3,
        "packets_per_second": 200_013.2,
        "bytes_per_second": 20_001_320.0,
        "cpu_ns_per_packet": 512.4,
        "restarts": 0,
        "lost_in_flight": 0,
        "after_stop": 0,
        **changes,
    }


def ring(**changes: Any) -> View:
    return {
        "name": "rx5000",
        "number": 0,
        "published": 2_400_000,
        "full_events": 0,
        "full_ns": 0,
        "bytes": 240_000_000,
        "frames": 2_400_000,
        "high_water": 1_311,
        "lag_frames": 12,
        "lag_bytes": 1_536,
        "used": 12 / 262_143,
        "peak": 1_311 / 262_143,
        "slowest": "latency",
        "capacity_frames": 262_143,
        "arena_bytes": 32 << 20,
        "stride": 128,
        **changes,
    }


def consumer(name: str, result: View | None, **changes: Any) -> View:
    return {
        "name": name,
        "handler": name,
        "cpus": [1],
        "cpus_asked": [1],
        "migrations": 0,
        "involuntary": 3,
        "policy": "gate",
        "wait": "block",
        "delivered": 2_399_988,
        "skipped": 0,
        "passed": 0,
        "unread": 12,
        "joined": 0,
        "alive": True,
        "restarts": 0,
        "since_packet": 0,
        "result": result,
        "result_at": 2_399_988,
        **changes,
    }


def latency() -> View:
    return {
        "network": stage(9_812.0),
        "socket": {**stage(21_400.0), "saturated": 0},
        "ring": stage(1_913.0),
        "total": stage(33_600.0),
    }


RATE = {
    "packets_per_second": 200_013.2,
    "bytes_per_second": 20_001_320.0,
    "packets": 2_399_988,
    "bytes": 239_998_800,
    "sizes": {"100": 2_300_000, "1472": 99_000, "64": 900, "1": 40, "2": 30, "3": 20, "4": 10},
}
GAPS = {
    "received": 2_399_988,
    "lost": 0,
    "duplicated": 0,
    "reordered": 0,
    "too_late": 0,
    "before_first": 0,
    "flows": 1,
    "restarted": 0,
    "closing": 3,
    "unstamped": 0,
    "untracked": 0,
}


def ledger(consumers: list[View], **changes: Any) -> View:
    counts = ("delivered", "skipped", "passed", "unread")
    return {
        "sent": 2_400_000,
        "nic_dropped": 0,
        "softnet_dropped": 0,
        "socket_dropped": 0,
        "socket_dropped_frames": 0,
        "other_errors": 0,
        "of_others": 0,
        "lost_in_flight": 0,
        "after_stop": 0,
        "received": 2_400_000,
        "refused": 0,
        "published": 2_400_000,
        "consumers": {c["name"]: {key: c[key] for key in counts} for c in consumers},
        "residual": 0,
        "balanced": True,
        "adds_up": True,
        "exact": True,
        **changes,
    }


def placement(**changes: Any) -> View:
    roles = dict.fromkeys(("layout", "device", "interrupt_by", "interrupt", "receive", "process"))
    cpus = [
        {"cpu": 0, "packets": 12, "interrupts": None},
        {"cpu": 1, "packets": 2_400_120, "interrupts": None},
    ]
    return {**roles, "cpus": cpus, "on_interrupt_cpu": None, "deviations": [], **changes}


def layers(nic: View | None = None, cpu1: View | None = None) -> View:
    """nic: what is not 0, by device."""
    device = ("packets", "errors", "dropped", "missed_errors", "crc_errors", "fifo_errors")
    softnet = dict.fromkeys(("processed", "dropped", "time_squeeze", "received_rps", "flow_limit"), 0)
    udp = dict.fromkeys(("in_datagrams", "no_ports", "in_errors", "rcvbuf_errors", "mem_errors"), 0)
    return {
        "nic": {
            name: {f"rx_{key}": 0 for key in device} | counts
            for name, counts in {"lo": {}, **(nic or {})}.items()
        },
        "softnet": [{"cpu": 0, **softnet}, {"cpu": 1, **softnet, **(cpu1 or {})}],
        "udp": udp,
        "udp6": udp,
    }


def ready(**changes: Any) -> View:
    return {
        "type": "ready",
        "name": "rx5000",
        "pid": 4100,
        "receivers": [
            {"name": "rx0", "listen": "udp://127.0.0.1:5000", "port": 5000, "pid": 4101, "cpus": [0]}
        ],
        "consumers": [
            {"name": "latency", "pid": 4102, "cpus": [1]},
            {"name": "gaps", "pid": 4103, "cpus": None},
        ],
        **changes,
    }


def calm(kind: str = "summary", seconds: float = 12.0) -> View:
    """Nothing wrong anywhere; before the end, packets are under way."""
    at_the_end = {"delivered": 2_400_000, "unread": 0, "result_at": 2_400_000}
    under_way = {"result_at": 2_391_004}
    consumers = [
        consumer(name, result, **(at_the_end if kind == "summary" else under_way))
        for name, result in (("latency", latency()), ("rate", RATE), ("gaps", GAPS))
    ]
    return {
        "type": kind,
        "seconds": seconds,
        "receivers": [receiver()],
        "rings": [ring()],
        "consumers": consumers,
        "groups": [],
        "sender": {"name": "source", "state": "done"},
        "layers": layers(),
        "placement": placement(),
        "ledger": ledger(consumers),
    }


def troubled(kind: str = "summary", seconds: float = 86_512.0) -> View:
    """Everything that can go wrong has, and the numbers are large."""
    consumers = [
        consumer(
            "latency", {**latency(), "network": no_samples()}, cpus=[2, 3, 4, 8], alive=False, restarts=3
        ),
        consumer(
            "a_name_of_32_bytes_at_the_most.1",
            {"seen": 17, "mean_price": 101.25, "symbol": "ÄBC\x1b[2J", "found": True, "levels": [1, 2, 3]},
            handler="quotes.handlers:best_bid",
            policy="skip",
            wait="spin",
            skipped=681_629,
            passed=3,
            since_packet=12,
        ),
        consumer("gaps", {**GAPS, "lost": 1_973}),
        consumer("dump", None, handler="dump=/tmp/out.ts", cpus=None),
        consumer("broken", {"error": "its report failed: KeyError: 'bid'"}),
    ]
    return {
        "type": kind,
        "seconds": seconds,
        "receivers": [
            receiver(
                packets=131_072_345_678,
                bytes=13_107_234_567_800,
                refused={"truncated": 12, "too_large": 3},
                errors={"ECONNREFUSED": 2},
                socket_dropped=None,
                socket_dropped_frames=1_973,
                rcvbuf={"asked": 8 << 20, "granted": 425_984},
                restarts=2,
                lost_in_flight=64,
                after_stop=11,
                packets_per_second=1_534_211.0,
                listen="udp://a.rather.long.host.name.example.org:50000",
                cpus=None,
            )
        ],
        "rings": [
            ring(
                published=131_072_345_663,
                full_events=31_337,
                full_ns=4_712_345_678,
                lag_frames=261_902,
                used=0.9991,
                peak=1.0,
                slowest="gaps",
                frames=4_712_345_678,
            )
        ],
        "consumers": consumers,
        "groups": [],
        "sender": {"name": "source", "state": "done"},
        "placement": placement(
            layout="split",
            device="eth0",
            interrupt_by="irq",
            interrupt=1,
            receive=0,
            process=[1],
            deviations=["/proc/irq/38/smp_affinity_list: 0-1, not 1 as layout split has it: look for …"],
        ),
        "layers": layers({"eth0": {"rx_missed_errors": 3}}, {"dropped": 7, "time_squeeze": 12}),
        "ledger": ledger(
            consumers,
            sent=131_072_472_001,
            nic_dropped=3,
            socket_dropped=None,
            socket_dropped_frames=1_973,
            softnet_dropped=7,
            other_errors=1,
            of_others=1,
            lost_in_flight=64,
            received=131_072_345_678,
            after_stop=11,
            refused=15,
            published=131_072_345_663,
            residual=-44,
            balanced=False,
            exact=False,
        ),
    }


def unknown_sender(kind: str = "summary", sender: View | None = None) -> View:
    """sender: None, or one that is not done."""
    view = calm(kind)
    view["sender"] = sender
    view["ledger"] |= {"sent": None, "of_others": None, "residual": None, "balanced": None}
    view["consumers"] = view["consumers"][:1]
    view["ledger"]["consumers"].pop("gaps")
    view["ledger"]["consumers"].pop("rate")
    return view
