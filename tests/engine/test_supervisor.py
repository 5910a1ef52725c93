"""Whole runs: what they report, how they end, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked import await_
from runs import ROOT, RXRING, Run, Source, check_ledger

import rings
from engine.signals import END_SIGNALS
from engine.status import Status
from rings.reader import Reader

# CONTRACT: what an interval and a summary hold, at least, and of what type. None: may be null.
NUMBER = (int, float)
RECEIVER: dict[str, Any] = {
    "name": str,
    "listen": str,
    "cpus": (list, type(None)),
    "packets": int,
    "bytes": int,
    "frames": int,
    "calls": int,
    "refused": dict,
    "errors": dict,
    "socket_dropped": (int, type(None)),
    "socket_dropped_frames": int,
    "rcvbuf": dict,
    "packets_per_call": (*NUMBER, type(None)),
    "packets_per_second": NUMBER,
    "cpu_ns_per_packet": (*NUMBER, type(None)),
    "restarts": int,
    "lost_in_flight": int,
    "after_stop": (int, type(None)),
}
RING = dict.fromkeys(["published", "full_events", "full_ns", "bytes", "frames", "high_water"], int) | {
    "name": str
}
CONSUMER: dict[str, Any] = {
    "name": str,
    "handler": str,
    "cpus": (list, type(None)),
    "policy": str,
    "wait": str,
    "delivered": int,
    "skipped": int,
    "passed": int,
    "unread": int,
    "alive": bool,
    "restarts": int,
    "since_packet": int,
    "result": (dict, type(None)),
}
LEDGER: dict[str, Any] = {
    "sent": (int, type(None)),
    "nic_dropped": (int, type(None)),
    "softnet_dropped": int,
    "socket_dropped": (int, type(None)),
    "socket_dropped_frames": int,
    "other_errors": int,
    "lost_in_flight": int,
    "received": int,
    "refused": int,
    "published": int,
    "consumers": dict,
    "residual": (int, type(None)),
    "balanced": (bool, type(None)),
    "exact": bool,
}
# What is there beyond the contract; whoever adds to it adds it here.
PLACED = {"cpus_asked", "migrations", "involuntary"}
PLACEMENT = {
    *("layout", "device", "interrupt_by", "interrupt", "receive", "process"),
    *("cpus", "on_interrupt_cpu", "deviations"),
}
MORE_OF_RECEIVER = PLACED | {"published", "cpu_ns", "bytes_per_second", "gro", "after_stop_frames"}
MORE_OF_RING = {
    *("number", "slowest", "lag_frames", "lag_bytes", "used", "peak"),
    *("capacity_frames", "arena_bytes", "stride"),
}
MORE_OF_CONSUMER = PLACED | {"joined", "result_at"}
MORE_OF_LEDGER = {"after_stop", "after_stop_frames", "of_others", "adds_up"}


def has_fields(found: dict[str, Any], fields: dict[str, Any], more: set[str]) -> None:
    assert set(found) == set(fields) | more
    for key, kind in fields.items():
        assert isinstance(found[key], kind), f"{key}: {found[key]!r}"


def has_contract_fields(view: dict[str, Any]) -> None:
    assert set(view) == {
        *("type", "seconds", "receivers", "rings", "consumers", "groups", "sender", "layers", "ledger"),
        *("clock_steps", "placement"),
    }
    assert set(view["placement"]) == PLACEMENT
    for receiver in view["receivers"]:
        has_fields(receiver, RECEIVER, MORE_OF_RECEIVER)
        assert set(receiver["rcvbuf"]) == {"asked", "granted"}
    for ring in view["rings"]:
        has_fields(ring, RING, MORE_OF_RING)
    for consumer in view["consumers"]:
        has_fields(consumer, CONSUMER, MORE_OF_CONSUMER)
    has_fields(view["ledger"], LEDGER, MORE_OF_LEDGER)
    for counts in view["ledger"]["consumers"].values():
        assert set(counts) == {"delivered", "skipped", "passed", "unread"}


def send(run: Run, name: str, *flags: str) -> dict[str, Any]:
    """The summary of an `rxring send` to that run."""
    command = [*RXRING, "send", "--to", f"127.0.0.1:{run.port}", "--name", name, *flags, "--json"]
    sent = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    summary: dict[str, Any] = json.loads(sent.stdout.splitlines()[-1])
    return summary


def nothing_left(name: str) -> bool:
    return not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))


def test_a_whole_run_of_the_command_with_our_sender(name: str) -> None:
    """It must show, 2: three commands, and a ledger that balances to the packet."""
    with Run(
        name,
        *("--rx-cpu", "0", "--sender", f"{name}.s", "--every", "0.2"),
        *("--consumer", "latency", "--consumer", "gaps", "--consumer", "rate,policy=skip,wait=yield"),
        command=True,
    ) as run:
        ready = run.ready
        assert set(ready) == {"type", "name", "pid", "receivers", "consumers"}
        assert (ready["name"], ready["pid"]) == (name, run.pid)
        assert ready["receivers"][0]["listen"] == f"udp://127.0.0.1:{run.port}"
        assert ready["receivers"][0]["cpus"] == [0]
        assert [c["name"] for c in ready["consumers"]] == ["latency", "gaps", "rate"]
        pids = [w["pid"] for w in ready["receivers"] + ready["consumers"]]
        assert all(Path(f"/proc/{pid}/comm").read_text().startswith("rx:") for pid in pids)
        sender = send(run, f"{name}.s", "--rate", "20000", "--duration", "0.5", "--size", "100")
        summary = run.end()
        assert run.errors == ""
        assert nothing_left(name)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert summary["ledger"]["sent"] == sender["sent"] == 10_003
    check_ledger(summary)
    has_contract_fields(summary)
    intervals = [view for view in run.objects if view["type"] == "interval"]
    assert len(intervals) >= 2
    for view in intervals:
        has_contract_fields(view)
        assert view["ledger"]["sent"] is None or view["ledger"]["sent"] == sender["sent"]
    for before, after in itertools.pairwise([*intervals, summary]):
        assert before["seconds"] < after["seconds"]
        for key in ("packets", "bytes", "calls", "socket_dropped_frames", "published", "cpu_ns"):
            assert before["receivers"][0][key] <= after["receivers"][0][key]
        for one, other in zip(before["consumers"], after["consumers"], strict=True):
            assert one["delivered"] + one["skipped"] <= other["delivered"] + other["skipped"]
    receiver = summary["receivers"][0]
    assert receiver["packets"] + receiver["socket_dropped"] == sender["sent"]
    assert receiver["bytes"] == 100 * receiver["packets"]
    latency, gaps, rate = summary["consumers"]
    assert [c["alive"] for c in summary["consumers"]] == [True] * 3
    assert latency["result"]["total"]["count"] >= receiver["packets"] - 3
    assert gaps["result"]["lost"] == receiver["socket_dropped"]
    assert rate["delivered"] + rate["skipped"] == receiver["packets"]
    assert rate["result"]["sizes"] == {"100": rate["delivered"]}


def test_packets_ends_it_at_exactly_so_many(name: str) -> None:
    with (
        Source(f"{name}.s") as source,
        Run(name, "--packets", "100", "--consumer", "rate", "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        source.send([b"x" * 60] * 130)
        source.done()
        summary = run.end(None)
        assert nothing_left(name)
    check_ledger(summary)
    assert summary["receivers"][0]["packets"] == 100
    assert summary["consumers"][0]["result"]["sizes"] == {"60": 100}
    assert summary["ledger"]["after_stop"] == 30
    assert summary["ledger"]["refused"] == 0


def test_duration_ends_it(name: str) -> None:
    with Run(name, "--duration", "0.3", "--every", "0.1") as run:
        summary = run.end(None)
        assert nothing_left(name)
    assert 0.3 <= summary["seconds"] < 5
    assert len([view for view in run.objects if view["type"] == "interval"]) >= 2
    assert summary["ledger"]["sent"] is None
    assert summary["ledger"]["residual"] is None
    assert summary["ledger"]["balanced"] is None


def test_ready_means_that_packets_are_taken(name: str) -> None:
    """What is sent the moment that `ready` is there arrives, all of it, with every consumer."""
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--consumer", "gaps", "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        source.send([b"first"])
        source.done()
        summary = run.end()
    check_ledger(summary)
    assert [c["joined"] for c in summary["consumers"]] == [0, 0]
    assert [c["delivered"] for c in summary["consumers"]] == [1, 1]


def test_without_consumers_packets_are_only_received(name: str) -> None:
    with Source(f"{name}.s") as source, Run(name, "--sender", f"{name}.s") as run:
        source.connect(run)
        source.send([b"x"] * 10)
        source.done()
        summary = run.end()
    check_ledger(summary)
    assert summary["ledger"]["published"] == 10
    assert summary["consumers"] == []


@pytest.mark.parametrize("receive", ["recvmmsg", "recvmsg"])
def test_a_sender_that_goes_on_after_the_end(name: str, receive: str) -> None:
    """The end is a clean cut: what came before it is delivered, the rest is `after_stop`."""
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--sender", f"{name}.s", "--receive", receive) as run,
    ):
        source.connect(run)
        receiver = Path(f"/proc/{run.worker(0)}")
        source.send([b"y" * 50] * 1000)
        run.send_signal(signal.SIGINT)
        while receiver.exists():
            source.send([b"z" * 50])
        source.send([b"z" * 50] * 10)
        source.done()
        summary = run.end(None)
    check_ledger(summary)
    assert summary["ledger"]["after_stop_frames"] >= 10
    assert summary["ledger"]["other_errors"] == 0


# ── Refused: exit 2, one line, nothing left ──────────────────────────────────────────────────────────


def refused(name: str, *flags: str, what: str, code: int = 2, **more: Any) -> None:
    with Run(name, *flags, **more) as run:
        assert run.next() is None
        assert run.wait() == code
        assert run.errors.startswith("rxring: ")
        assert run.errors.count("\n") == 1, run.errors
        assert what in run.errors
        assert nothing_left(name)


def test_a_taken_port_names_its_holder(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        refused(
            name,
            listen=f"udp://127.0.0.1:{port}",
            what=f"cannot listen on 127.0.0.1:{port}: process {os.getpid()} (",
        )


@pytest.mark.parametrize(
    ("listen", "what"),
    [
        ("udp://192.0.2.1:5000", "no interface has this address"),
        ("udp://no-such-host.invalid:5000", "give an IPv4 address of this machine"),
    ],
)
def test_an_address_that_is_not_ours(name: str, listen: str, what: str) -> None:
    refused(name, listen=listen, what=what)


def test_a_cpu_that_is_not_there(name: str) -> None:
    refused(name, "--rx-cpu", "4000", what="--rx-cpu: ")
    refused(name, "--consumer", "rate@4000", what="--consumer rate: ")


def test_a_ring_that_does_not_fit_into_shared_memory(name: str) -> None:
    stat = os.statvfs("/dev/shm")
    refused(name, "--ring", str(stat.f_blocks * stat.f_frsize * 2 + (1 << 30)), what="/dev/shm")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a /dev/shm of its own")
@pytest.mark.parametrize("size", ["100k", "8m"])  # full at the status segment, at the ring
def test_a_full_shared_memory(name: str, tmp_path: Path, size: str) -> None:
    listing = tmp_path / "left"
    run = f"{RXRING[0]} -m tools.cli run --name {name} --listen udp://127.0.0.1:0 --duration 1"
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {{ {run}; c=$?; ls /dev/shm >{listing}; exit $c; }}"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = (line for line in ended.stderr.splitlines() if not line.startswith("compiling"))
    assert line.startswith("rxring: /dev/shm has ")
    assert listing.read_text() == ""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to send a packet with a wrong checksum")
@pytest.mark.parametrize(("length", "of_the_socket"), [(3, False), (300, True)])
def test_a_wrong_checksum_is_one_drop_and_not_two(name: str, length: int, of_the_socket: bool) -> None:
    """A short packet is checked before it has a socket; a longer one later, and counted in both places."""
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--sender", f"{name}.s", "--every", "0.05") as run,
    ):
        source.connect(run)
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as raw:
            header = struct.pack(">HHHH", 9, run.port, 8 + length, 0xBAD)
            raw.sendto(header + b"x" * length, ("127.0.0.1", 0))
            source.sent += 1
        source.send([b"good"] * 3)
        source.done()
        run.await_interval(lambda view: view["consumers"][0]["delivered"] == 3)
        summary = run.end()
    check_ledger(summary)
    assert summary["receivers"][0]["socket_dropped_frames"] == of_the_socket
    assert summary["ledger"]["other_errors"] == (not of_the_socket)
    assert summary["consumers"][0]["delivered"] == 3


def test_gro_brings_frames_and_counts_packets(name: str) -> None:
    consumers = ("--consumer", "gaps", "--consumer", "rate,policy=skip", "--consumer", "latency")
    with Run(name, *consumers, "--sender", f"{name}.s", command=True) as run:
        assert run.ready["receivers"][0]["gro"] is True
        sent = send(run, f"{name}.s", "--packets", "64000", "--size", "100", "--gso", "64", "--batch", "4")
        summary = run.end()
    check_ledger(summary)
    receiver = summary["receivers"][0]
    assert receiver["frames"] == sent["frames"] - receiver["socket_dropped_frames"]
    assert receiver["packets"] == 64_003 - 64 * receiver["socket_dropped_frames"]
    for consumer in summary["consumers"]:
        assert consumer["delivered"] + consumer["skipped"] == receiver["packets"]
    assert summary["consumers"][0]["result"]["lost"] == 64 * receiver["socket_dropped_frames"]


def test_where_gro_drops_the_ledger_is_in_frames(name: str) -> None:
    with Run(name, "--consumer", "gaps", "--sender", f"{name}.s", "--rcvbuf", "100000") as run:
        os.kill(run.worker(0), signal.SIGSTOP)
        sent = send(run, f"{name}.s", "--packets", "64000", "--size", "100", "--gso", "64")
        os.kill(run.worker(0), signal.SIGCONT)
        summary = run.end()
    check_ledger(summary)
    receiver, ledger = summary["receivers"][0], summary["ledger"]
    assert (ledger["exact"], ledger["socket_dropped"], receiver["socket_dropped"]) == (False, None, None)
    assert ledger["socket_dropped_frames"] == sent["frames"] - receiver["frames"] > 0


@pytest.mark.parametrize(
    ("flags", "gro"),
    [
        (("--gro", "off"), False),
        (("--packets", "5"), False),  # exactly so many
        (("--packets", "5", "--gro", "on"), True),
        (("--ring", "128KiB"), False),  # would not hold a maximal frame
        (("--ring", "160KiB"), True),
    ],
)
def test_gro_where_it_serves(name: str, flags: tuple[str, ...], gro: bool) -> None:
    with Run(name, *flags) as run:
        assert run.ready["receivers"][0]["gro"] is gro
        assert run.end()["receivers"][0]["gro"] is gro


def test_a_receive_buffer_that_no_kernel_grants(name: str) -> None:
    refused(name, "--rcvbuf", "8GiB", what="give at most 2147483646")


def test_a_second_engine_of_one_name(name: str) -> None:
    with Run(name) as run:
        assert run.ready
        with Run(name) as second:
            assert second.next() is None
            assert second.wait() == 2
            assert f"{name}-status is in use by process" in second.errors
            assert second.errors.count("\n") == 1
        assert run.end()["receivers"][0]["restarts"] == 0


def test_a_second_engine_on_one_port(name: str) -> None:
    with Run(name) as run:
        refused(f"{name}b", listen=f"udp://127.0.0.1:{run.port}", what=f"process {run.pid} (")


def test_a_dump_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    refused(name, "--consumer", f"dump={tmp_path}/no/such/file", what="No such file or directory")


# ── What it does, and what is seen of it ─────────────────────────────────────────────────────────────


def test_a_result_that_does_not_fit_the_status_is_in_the_output(name: str) -> None:
    """Packets of 9000 sizes: 64 KiB of facts do not hold their counts."""
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--sender", f"{name}.s", "--every", "0.02") as run,
    ):
        source.connect(run)
        for first in range(0, 9000, 300):
            source.send(bytes(size) for size in range(first, first + 300))
            run.await_interval(lambda view: view["consumers"][0]["delivered"] == source.sent)
        run.await_interval(lambda view: view["consumers"][0]["result"]["packets"] == source.sent)
        status = Status.open(name)
        facts = status.read(len(status.workers) - 1)[0]
        status.close()
        source.done()
        summary = run.end()
    check_ledger(summary)
    assert facts["state"] == "ready"
    assert facts["view"]["consumers"][0]["result"] is None
    assert summary["consumers"][0]["result"]["sizes"] == {str(size): 1 for size in range(9000)}


def test_the_status_tells_what_the_output_tells(name: str) -> None:
    with Run(name, "--consumer", "rate", "--every", "0.05") as run:
        run.await_interval()
        status = Status.open(name)
        assert (status.kind, status.pid) == ("engine", run.pid)
        assert status.workers == ["rx0", "rate", "supervisor"]
        view = status.read(2)[0]["view"]
        assert view["type"] == "interval"
        assert set(view) == set(run.objects[-1])
        status.close()


def test_all_paused_then_resumed(name: str) -> None:
    """The kernel goes on taking packets, and drops what its buffer does not hold: all of it is counted."""
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--sender", f"{name}.s", "--rcvbuf", "100000") as run,
    ):
        source.connect(run)
        source.send([b"before"] * 10)
        os.killpg(run.pid, signal.SIGSTOP)
        source.send([b"meanwhile"] * 1000)
        os.killpg(run.pid, signal.SIGCONT)
        source.send([b"after"] * 10)
        source.done()
        summary = run.end()
        assert run.errors == ""
    check_ledger(summary)
    assert summary["receivers"][0]["socket_dropped_frames"] > 0
    assert summary["receivers"][0]["restarts"] == summary["consumers"][0]["restarts"] == 0


def test_real_time_priority_and_locked_memory_or_the_reason(name: str) -> None:
    """Of the workers, and not of the supervisor."""
    with Run(name, "--consumer", "rate", "--fifo", "--mlock") as run:
        first = run.next()
        if first is None:
            assert run.wait() == 2
            assert run.errors.startswith("rxring: ")
            assert run.errors.count("\n") == 1
            assert "RLIMIT" in run.errors or "budget" in run.errors
            assert nothing_left(name)
            return
        for worker in first["receivers"] + first["consumers"]:
            assert os.sched_getscheduler(worker["pid"]) == os.SCHED_FIFO
            assert locked_kib(worker["pid"]) > 0
        assert os.sched_getscheduler(run.pid) == os.SCHED_OTHER
        assert locked_kib(run.pid) == 0
        run.send_signal(signal.SIGINT)
        while run.next() is not None:
            pass
        assert run.wait() == 0


def locked_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmLck:")).split()[1])


# ── Handlers of the user's own ───────────────────────────────────────────────────────────────────────

HANDLERS = """
import os
import signal
import time
import numpy as np
from engine.handlers.api import Handler
from rings.layout import ALIGN
from rings.libc import realtime_ns

STATE = np.dtype([("packets", "i8"), ("bytes", "i8"), ("sum", "i8")])

def on_packet(state, payload, meta):
    state.packets += 1
    state.bytes += payload.size
    for byte in payload:
        state.sum += byte

def on_batch(state, frames, arena):
    for i in range(len(frames)):
        at = np.int64(frames[i].offset) * ALIGN
        state.packets += 1
        state.bytes += frames[i].length
        for byte in arena[at : at + frames[i].length]:
            state.sum += byte

def raises(state, payload, meta):
    state.packets += 1
    if payload.size > 0 and payload[0] == 66:
        raise ValueError("no B")

def start(state, options):
    if options.restarts == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def report(state):
    return {"packets": int(state["packets"]), "bytes": int(state["bytes"]), "sum": int(state["sum"])}

def bad_report(state):
    return 1 // int(state["packets"] == 0)

def leave(state):
    raise SystemExit(0)

def endless(state):
    open("begun", "w").close()
    while True:
        pass

def slow(state, payload, meta):
    state.packets += 1
    end_ns = meta.read_ns + 16_000_000
    while realtime_ns() < end_ns:
        pass

def start_slowly(state, options):
    time.sleep(20 * options.restarts)

each = Handler(STATE, on_packet=on_packet, report=report)
whole = Handler(STATE, on_batch=on_batch, report=report)
raising = Handler(STATE, on_packet=raises)
dying = Handler(STATE, on_packet=on_packet, start=start)
unreportable = Handler(STATE, on_packet=on_packet, report=bad_report)
leaving = Handler(STATE, on_packet=on_packet, report=leave)
reporting = Handler(STATE, on_packet=on_packet, report=endless)
slow = Handler(STATE, on_packet=slow, report=report)
late = Handler(STATE, on_packet=on_packet, start=start_slowly)
"""


def test_handlers_of_the_users_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANDLERS)
    payloads = [bytes([n % 256]) * (n * 37 % 1400) for n in range(150)]
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--consumer", "mine:each", "--consumer", "mine:whole,name=all", "--sender", f"{name}.s"),
            command=True,
            folder=tmp_path,
        ) as run,
    ):
        source.connect(run)
        source.send(payloads)
        source.done()
        summary = run.end()
    check_ledger(summary)
    expected = {
        "packets": 150,
        "bytes": sum(map(len, payloads)),
        "sum": sum(map(sum, payloads)),
    }
    assert summary["ledger"]["socket_dropped"] == 0
    assert [c["name"] for c in summary["consumers"]] == ["each", "all"]
    assert [c["handler"] for c in summary["consumers"]] == ["mine:each", "mine:whole"]
    assert [c["result"] for c in summary["consumers"]] == [expected, expected]


def test_a_handler_that_raises_ends_the_run_in_order(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine2.py").write_text(HANDLERS)
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--consumer", "mine2:raising", "--consumer", "rate", "--sender", f"{name}.s"),
            command=True,
            folder=tmp_path,
        ) as run,
    ):
        source.connect(run)
        source.send([b"A"] * 10 + [b"B"])
        source.done()
        summary = run.end(None, code=1)
        assert run.errors == "rxring: consumer raising: the handler raised an exception\n"
        assert nothing_left(name)
    check_ledger(summary)
    raising, rate = summary["consumers"]
    assert (raising["alive"], rate["alive"]) == (False, True)
    assert rate["delivered"] == 11


@pytest.mark.parametrize(
    ("handler", "why"),
    [("unreportable", "ZeroDivisionError: integer division or modulo by zero"), ("leaving", "SystemExit: 0")],
)
def test_a_report_that_fails_costs_the_others_nothing(
    name: str, tmp_path: Path, handler: str, why: str
) -> None:
    (tmp_path / "mine3.py").write_text(HANDLERS)
    consumers = ("--consumer", f"mine3:{handler}", "--consumer", "rate", "--every", "0.05")
    with Run(name, *consumers, command=True, folder=tmp_path) as run:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.sendto(b"x", ("127.0.0.1", run.port))
        run.await_interval(lambda view: view["consumers"][1]["delivered"] == 1)
        run.await_interval()
        summary = run.end(code=1)
        assert run.errors == f"rxring: consumer {handler}: its report failed: {why}\n"
        assert nothing_left(name)
    assert summary["consumers"][0]["result"] == {"error": f"its report failed: {why}"}
    assert summary["consumers"][1]["result"]["sizes"] == {"1": 1}


def test_members_share_the_work_and_their_states_add_up(name: str) -> None:
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--consumer", "rate,split=3", "--consumer", "latency,split=2,policy=skip,name=l"),
            *("--consumer", "gaps", "--sender", f"{name}.s", "--batch", "16"),
            command=True,
        ) as run,
    ):
        assert [c["name"] for c in run.ready["consumers"]] == [
            "rate.0",
            "rate.1",
            "rate.2",
            "l.0",
            "l.1",
            "gaps",
        ]
        source.connect(run)
        source.send([bytes(n % 5) for n in range(1000)])
        source.done()
        run.kill_worker(2)
        summary = run.end()
    check_ledger(summary)
    assert summary["ledger"]["published"] == 1000
    assert all(c["delivered"] > 0 and c["passed"] > 0 for c in summary["consumers"][:5])
    rate, latency = summary["groups"]
    assert (rate["name"], rate["members"]) == ("rate", ["rate.0", "rate.1", "rate.2"])
    assert rate["delivered"] == 1000
    assert latency["delivered"] + latency["skipped"] >= 1000
    # What one had handled before it was killed is in its account, and no more in its handler's state.
    assert 0 < sum(rate["result"]["sizes"].values()) <= 1000
    assert latency["result"]["ring"]["count"] == latency["result_at"] == latency["delivered"]


def test_a_clock_that_is_set_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the look at the clock: setting the real one would disturb the whole machine."""
    steps = iter([0, -2_500_000_000])
    monkeypatch.setattr("engine.supervisor.clock_step_ns", lambda offset_ns: next(steps, 0))
    with Run(name, "--consumer", "latency", "--every", "0.05") as run:
        run.await_interval(lambda view: view["clock_steps"] == 1)
        assert run.end()["clock_steps"] == 1
        assert run.errors == ("the clock was set by -2.500000 s: times before and after it do not compare\n")


@pytest.mark.parametrize("gro", ["on", "off"])
def test_members_share_flows_each_in_order(name: str, gro: str) -> None:
    """What needs every packet of a flow, in order, finds it; a member that is killed goes on where it was."""
    flags = ("--consumer", "gaps,split=3,by=flow", "--consumer", "gaps,name=all", "--gro", gro)
    with Run(name, *flags, "--sender", f"{name}.s", command=True) as run:
        sent = send(run, f"{name}.s", "--flows", "20", "--packets", "20000", "--rate", "50000", "--gso", "8")
        summary = run.end()
    check_ledger(summary)
    published = summary["ledger"]["published"]
    assert published == sent["sent"]
    (group,) = summary["groups"]
    assert group["delivered"] == published
    assert group["result"] == summary["consumers"][3]["result"]
    assert (group["result"]["received"], group["result"]["flows"]) == (20_000, 20)
    assert (group["result"]["lost"], group["result"]["reordered"]) == (0, 0)
    members = summary["consumers"][:3]
    assert sum(member["result"]["flows"] for member in members) == 20
    assert all(member["delivered"] > 0 for member in members)
    assert all(member["delivered"] + member["passed"] == published for member in members)


def test_a_consumer_that_holds_all_up_too_long_is_waited_for_no_more(name: str) -> None:
    flags = ("--consumer", "rate,demote=0.3,name=hangs", "--consumer", "gaps", "--ring", "80KiB")
    with (
        Source(f"{name}.s") as source,
        Run(name, *flags, "--batch", "8", "--every", "0.05", "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        os.kill(run.worker(1), signal.SIGSTOP)
        while run.await_interval()["consumers"][0]["policy"] == "gate":
            source.send([b"x" * 100] * 20)
        source.send([b"x" * 100] * 100)
        run.await_interval(lambda view: view["consumers"][1]["unread"] == 0)
        os.kill(run.worker(1), signal.SIGCONT)
        source.done()
        summary = run.end()
        assert run.errors == (
            "hangs held the receiver up for 0.3 s: it is waited for no more, and skips what it misses\n"
        )
    check_ledger(summary)
    hangs, gaps = summary["consumers"]
    assert hangs["skipped"] > 0
    assert (gaps["skipped"], gaps["unread"], hangs["unread"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("consumer", "what"),
    [
        ("rate,demote=1,policy=skip", "demote= is for policy=gate"),
        ("gaps,split=2", "gaps needs all packets of a flow, in order: give by=flow"),
        ("rate,by=flow", "by=flow says how members share the work: give split=N, too"),
        ("dump=/tmp/x,split=2,by=flow", "dump needs every packet, in order: leave out split=2"),
        ("dump=/tmp/x,split=2", "dump needs every packet, in order: leave out split=2"),
        ("rate,split=0", "'0' is out of range: give a whole number from 1 to 64"),
        ("rate,split=65", "'65' is out of range"),
    ],
)
def test_what_cannot_be_split(name: str, consumer: str, what: str) -> None:
    refused(name, "--consumer", consumer, what=what)


def test_a_handler_without_a_merge_cannot_be_split(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine8.py").write_text(HANDLERS)
    with Run(name, "--consumer", "mine8:each,split=2", command=True, folder=tmp_path) as run:
        assert run.next() is None
        assert run.wait() == 2
        assert "mine8:each can't be split, its states can't be added up: give it a merge" in run.errors


def test_a_second_signal_ends_it_whatever_holds_it_up(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine5.py").write_text(HANDLERS)
    with Run(name, "--consumer", "mine5:reporting", "--every", "0.1", command=True, folder=tmp_path) as run:
        assert run.ready
        await_((tmp_path / "begun").exists)
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGTERM)
        assert run.wait(20) == 1
        assert nothing_left(name)
        run.await_all_gone()


def test_a_slow_handler_gets_all_that_was_received(name: str, tmp_path: Path) -> None:
    """At the end, too: it is waited for as long as it moves."""
    (tmp_path / "mine6.py").write_text(HANDLERS)
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--consumer", "mine6:slow", "--sender", f"{name}.s", "--duration", "60"),
            command=True,
            folder=tmp_path,
        ) as run,
    ):
        source.connect(run)
        source.send([b"x"] * 400)
        source.done()
        summary = run.end()
        assert run.errors == ""
    check_ledger(summary)
    (slow,) = summary["consumers"]
    assert slow["delivered"] == slow["result"]["packets"] == slow["result_at"] == 400


def test_a_slow_restart_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine7.py").write_text(HANDLERS)
    consumers = ("--consumer", "mine7:late,policy=skip", "--consumer", "rate", "--every", "0.05")
    with Run(name, *consumers, command=True, folder=tmp_path) as run:
        os.kill(run.worker(1), signal.SIGKILL)
        run.await_interval(lambda view: view["consumers"][0]["restarts"] == 1)
        os.kill(run.worker(0), signal.SIGKILL)
        run.await_interval(lambda view: view["receivers"][0]["restarts"] == 1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.sendto(b"x", ("127.0.0.1", run.port))
        run.await_interval(lambda view: view["consumers"][1]["delivered"] == 1)
        run.end(code=1)
        assert run.errors.endswith("rxring: late did not end: killed\n")


def test_a_worker_that_is_killed_while_it_leaves_has_done_its_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "close", lambda self: os.kill(os.getpid(), signal.SIGKILL))
    with Source(f"{name}.s") as source, Run(name, "--consumer", "gaps", "--sender", f"{name}.s") as run:
        source.connect(run)
        source.send([b"x"] * 5)
        source.done()
        summary = run.end()
        assert run.errors == ""
    check_ledger(summary)
    (gaps,) = summary["consumers"]
    assert (gaps["delivered"], gaps["result"]["unstamped"], gaps["restarts"]) == (5, 5, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_whatever_tells_it_to_end_ends_it_in_order(name: str, number: signal.Signals) -> None:
    """The whole group gets it, as when a terminal closes."""
    if number not in END_SIGNALS:
        pytest.skip(f"whoever started this had {number.name} ignored")
    with Source(f"{name}.s") as source, Run(name, "--consumer", "rate", "--sender", f"{name}.s") as run:
        source.connect(run)
        source.send([b"x"] * 100)
        source.done()
        os.killpg(run.pid, number)
        summary = run.end(None)
        assert run.errors == ""
    check_ledger(summary)
    assert summary["consumers"][0]["delivered"] == 100


def test_a_thread_that_strays_is_told(name: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("two CPUs are needed, this process may use only one")
    with Run(name, *("--consumer", f"rate@{cpus[0]}", "--every", "0.05")) as run:
        os.sched_setaffinity(run.worker(1), cpus[:2])
        await_(lambda: "rate was pinned" in run.errors)
        run.end()
        assert run.errors.count("\n") == 1


def test_a_file_of_somebody_elses_under_the_senders_name_ends_no_run(name: str) -> None:
    path = Path(f"/dev/shm/rxring-{os.getuid()}-{name}.s-status")
    with Run(name, "--consumer", "rate", "--sender", f"{name}.s") as run:
        assert run.ready
        path.write_bytes(b"x" * 9000)
        await_(lambda: "of another version" in run.errors)
        summary = run.end()
        path.unlink()
        assert run.errors.count("\n") == 1
    assert summary["sender"] == {"name": f"{name}.s", "state": "absent"}


def test_a_ring_that_takes_less_than_was_asked_for(name: str) -> None:
    with Run(name, "--ring", "32MiB") as run:
        run.end()
        assert (
            run.errors == "the ring takes 24MiB of 32MiB: its arena and its descriptors are powers of two\n"
        )


def test_a_disk_that_is_full_ends_the_run_in_order(name: str) -> None:
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "dump=/dev/full", "--consumer", "rate", "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        source.send([b"A" * 100] * 10)
        source.done()
        summary = run.end(None, code=1)
        assert run.errors.startswith("rxring: consumer dump: No space left on device")
        assert run.errors.count("\n") == 1
        assert nothing_left(name)
    check_ledger(summary)
    assert summary["consumers"][1]["delivered"] == 10
    assert summary["consumers"][0]["result"]["error"] == "No space left on device"


# ── Deaths ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_dies_again_and_again_is_given_up(name: str) -> None:
    with Run(name, "--consumer", "rate") as run:
        assert run.ready
        for _ in range(4):
            run.kill_worker(1)
        os.kill(run.worker(1), signal.SIGKILL)
        summary = run.end(None, code=1)
        assert run.errors.count("rate ended (killed by SIGKILL): started anew\n") == 4
        assert run.errors.endswith("rxring: rate ended (killed by SIGKILL) 5 times in 10 s: given up\n")
    assert summary["consumers"][0]["restarts"] == 4
    assert summary["consumers"][0]["alive"] is False


def test_a_worker_that_dies_while_it_starts_is_started_anew(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine4.py").write_text(HANDLERS)
    with Run(name, "--consumer", "mine4:dying", command=True, folder=tmp_path) as run:
        first = run.worker(1)
        run.kill_worker(1)
        assert run.worker(1) != first
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.sendto(b"x", ("127.0.0.1", run.port))
        summary = run.end()
        assert run.errors == "dying ended (killed by SIGKILL): started anew\n" * 2
    assert summary["consumers"][0]["restarts"] == 2
    assert summary["consumers"][0]["delivered"] == 1


def test_a_receiver_given_up_still_leaves_its_packets(name: str) -> None:
    """The queue outlives it: what was sent is delivered, though nobody received any more."""
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--sender", f"{name}.s") as run,
    ):
        source.connect(run)
        for _ in range(4):
            run.kill_worker(0)
        last = run.worker(0)
        os.kill(last, signal.SIGSTOP)
        source.send([b"x" * 10] * 20)
        source.done()
        os.kill(last, signal.SIGKILL)
        summary = run.end(None, code=1)
        assert nothing_left(name)
    check_ledger(summary)
    assert summary["consumers"][0]["delivered"] == 20
    assert summary["consumers"][0]["alive"] is True
    assert summary["receivers"][0]["restarts"] == 4


def test_a_name_of_the_dead_is_free(name: str) -> None:
    with Run(name, "--consumer", "rate") as run:
        for pid in [run.pid, *(w["pid"] for w in run.ready["receivers"] + run.ready["consumers"])]:
            os.kill(pid, signal.SIGKILL)
        run.await_all_gone()
        assert run.wait() == -signal.SIGKILL
        assert not nothing_left(name)
    with Run(name, "--consumer", "rate") as again:
        assert again.end()["receivers"][0]["packets"] == 0
        assert nothing_left(name)


def test_workers_of_a_dead_supervisor_drain_leave_and_remove_the_rings(name: str) -> None:
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate", "--consumer", "gaps") as run,
    ):
        source.connect(run)
        receiver = run.worker(0)
        os.kill(receiver, signal.SIGSTOP)
        source.send([b"x" * 100] * 300)
        with rings.attach(name) as ring:
            run.send_signal(signal.SIGKILL)
            os.kill(receiver, signal.SIGCONT)
            run.await_all_gone()
            assert nothing_left(name)
            assert ring.state == "closed"
            assert ring.published()[1] == 300
            assert [(r.name, r.state, r.delivered, r.unread) for r in ring.readers()] == [
                ("rate", "left", 300, 0),
                ("gaps", "left", 300, 0),
            ]


def test_workers_look_after_themselves_when_supervisor_and_receiver_are_dead(name: str) -> None:
    with (
        Source(f"{name}.s") as source,
        Run(name, "--consumer", "rate") as run,
    ):
        source.connect(run)
        source.send([b"x"] * 5)
        receiver = run.worker(0)
        with rings.attach(name) as ring:
            await_(lambda: ring.published()[1] == 5)
            run.send_signal(signal.SIGSTOP)  # it must not restart it
            os.kill(receiver, signal.SIGKILL)
            await_(lambda: ring.state == "orphaned")
            run.send_signal(signal.SIGKILL)
            run.await_all_gone()
            assert [(r.state, r.delivered) for r in ring.readers()] == [("left", 5)]
        assert nothing_left(name)


def test_a_reader_of_stdout_that_goes_away_ends_the_run_in_order(name: str, tmp_path: Path) -> None:
    """`rxring run … | head -1`: packets that were received are still written."""
    out, write_end = os.pipe()
    dump = tmp_path / "dump"
    flags = ["--name", name, "--json", "--every", "0.1", "--consumer", f"dump={dump}"]
    with subprocess.Popen(
        [*RXRING, "run", "--listen", "udp://127.0.0.1:0", *flags], stdout=write_end, stderr=subprocess.PIPE
    ) as run:
        os.close(write_end)
        ready = json.loads(os.read(out, 1 << 16).split(b"\n")[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"hello", ("127.0.0.1", ready["receivers"][0]["port"]))
        os.close(out)
        assert run.communicate(timeout=60)[1] == b""
        assert run.returncode == 0
    assert dump.read_bytes() == b"hello"
    assert nothing_left(name)
