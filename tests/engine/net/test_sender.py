"""The sender against a plain Python socket: what it says it sent is what arrives."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import Failed, Refused
from engine.net import sender
from engine.net.role import Stop
from engine.net.sender import Sender, SendPlan
from engine.net.stamp import CLOSING, MAGIC, STAMP
from engine.signals import END_SIGNALS
from engine.status import Status

Packets = list[tuple[bytes, int]]


def send(plan: SendPlan, outputs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return sender.run(plan, [].append if outputs is None else outputs.append)


def stamps(packets: Packets) -> Any:
    """The stamps of whole-stamped packets, as a STAMP array."""
    return np.frombuffer(b"".join(payload[:32] for payload, _ in packets), STAMP)


def parted(packets: Packets) -> tuple[Packets, Packets]:
    """Data, and closing stamps."""
    closing = [bool(int.from_bytes(payload[4:8], "little") & CLOSING) for payload, _ in packets]
    return (
        [packet for packet, is_closing in zip(packets, closing, strict=True) if not is_closing],
        [packet for packet, is_closing in zip(packets, closing, strict=True) if is_closing],
    )


@pytest.mark.parametrize("call", ["sendmmsg", "sendmsg"])
def test_what_is_said_is_what_arrives(receiver: Any, call: Any) -> None:
    summary = send(SendPlan(to=receiver.to, packets=150, size=100, send=call))
    packets = receiver.take()
    data, closing = parted(packets)
    assert (len(data), len(closing)) == (150, 3)
    assert summary["sent"] == summary["frames"] == len(packets) == 153
    assert summary["closing"] == 3
    assert summary["bytes"] == sum(len(payload) for payload, _ in packets)
    assert summary["failed"] == 0
    assert summary["errors"] == {}
    assert summary["calls"] == (150 if call == "sendmsg" else 3)
    assert summary["packets_per_second"] > 0
    found = stamps(data)
    assert set(found["magic"]) == {MAGIC}
    assert found["sequence"].tolist() == list(range(150))
    assert not found["flow"].any()


@pytest.mark.parametrize("call", ["sendmmsg", "sendmsg"])
@pytest.mark.parametrize("gso", ["off", 16])
def test_the_same_over_ipv6(gso: Any, call: Any) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as end:
        end.bind(("::1", 0))
        to = f"[::1]:{end.getsockname()[1]}"
        plan = SendPlan(to=to, packets=120, size=100, rate=10**6, flows=3, gso=gso, send=call)
        summary = send(plan)
        packets: Packets = []
        for _ in range(summary["sent"]):
            payload, source = end.recvfrom(65536, socket.MSG_DONTWAIT)
            packets.append((payload, source[1]))
        with pytest.raises(BlockingIOError):
            end.recv(1, socket.MSG_DONTWAIT)
    data, closing = parted(packets)
    assert (len(data), len(closing), summary["failed"], summary["errors"]) == (120, 9, 0, {})
    assert len({port for _, port in packets}) == 3
    found = stamps(data)
    for flow in range(3):
        sequence = found["sequence"][found["flow"] == flow]
        assert sequence.tolist() == list(range(len(sequence)))
    assert set(found["sent_ns"] - found["scheduled_ns"] >= 0) == {True}
    assert summary["late_ns"]["max"] == (found["sent_ns"] - found["scheduled_ns"]).max()


@pytest.mark.parametrize("size", [0, 1, 4, 8, 15, 16, 31, 32, 33, 300, 1472, 65507])
def test_every_size_carries_as_much_of_the_stamp_as_fits(receiver: Any, size: int) -> None:
    before = time.time_ns()
    summary = send(SendPlan(to=receiver.to, packets=3, size=size))
    after = time.time_ns()
    packets = receiver.take()
    assert [len(payload) for payload, _ in packets] == [size] * summary["sent"]
    assert summary["sent"] == (6 if size >= 16 else 3)
    for i, (payload, _) in enumerate(packets[:3]):
        stamp = b"RXR1" + bytes(4) + i.to_bytes(8, "little")
        assert payload[:16] == stamp[:size]
        assert payload[32:] == bytes(k & 0xFF for k in range(32, size))
        if size >= 32:
            scheduled, sent = (int.from_bytes(payload[at : at + 8], "little") for at in (16, 24))
            assert before <= scheduled == sent <= after


def test_gso_makes_packets_of_one_size(receiver: Any) -> None:
    summary = send(SendPlan(to=receiver.to, packets=130, size=40, gso=64))
    packets = receiver.take()
    assert {len(payload) for payload, _ in packets} == {40}
    data, closing = parted(packets)
    assert stamps(data)["sequence"].tolist() == list(range(130))
    assert stamps(closing)["sequence"].tolist() == [130] * 3
    assert summary["frames"] == 3 + 3  # 64 + 64 + 2 packets, and the closing stamps


@pytest.mark.parametrize(("rate", "gso"), [(7000, "off"), (30000, 7), (999_999_999, "off")])
def test_packets_are_scheduled_at_exactly_start_plus_i_by_rate(receiver: Any, rate: int, gso: Any) -> None:
    summary = send(SendPlan(to=receiver.to, packets=100, size=64, rate=rate, gso=gso))
    found = stamps(parted(receiver.take())[0])
    assert len(found) == 100
    since_start = (found["scheduled_ns"] - found["scheduled_ns"][0]).tolist()
    assert since_start == [i * 10**9 // rate for i in range(100)]
    late = found["sent_ns"] - found["scheduled_ns"]
    assert late.min() >= 0
    assert summary["late_ns"]["max"] == late.max()
    assert late.min() <= summary["late_ns"]["p50"] <= summary["late_ns"]["p99"] <= late.max()
    assert summary["packets_per_second"] <= rate * 1.0001
    assert summary["calls"] <= summary["frames"] - summary["closing"]  # none before something was due
    assert summary["errors"] == {}


def test_a_late_sender_catches_up_and_leaves_nothing_out(receiver: Any) -> None:
    late = Sender(SendPlan(to=receiver.to, packets=50, size=64, rate=1000, batch=16))
    with Stop() as stop, sender.ExitStack() as stack:
        stop.prepare(lambda: late.prepare(stack))
        late.start()
        late.state[0]["start_ns"] -= 10**9  # everything was due long ago
        while late.run_slice(time.monotonic_ns() + 10**8):
            pass
    found = stamps(receiver.take())
    assert found["sequence"].tolist() == list(range(50))
    assert late.summary()["calls"] == 4
    assert late.summary()["late_ns"]["max"] >= 10**9
    since_start = (found["scheduled_ns"] - found["scheduled_ns"][0]).tolist()
    assert since_start == [i * 10**6 for i in range(50)]


def test_flat_out_nothing_is_late(receiver: Any) -> None:
    summary = send(SendPlan(to=receiver.to, packets=10))
    assert summary["late_ns"] == {"p50": None, "p99": None, "max": None}


def test_flows_have_ports_and_sequences_of_their_own(receiver: Any) -> None:
    summary = send(SendPlan(to=receiver.to, packets=100, size=48, flows=3, batch=6))
    data, closing = parted(receiver.take())
    assert summary["closing"] == len(closing) == 9
    ports = {}
    for flow in range(3):
        of_flow = [packet for packet in data if stamps([packet])["flow"][0] == flow]
        ports[flow] = {port for _, port in of_flow}
        assert stamps(of_flow)["sequence"].tolist() == list(range(len(of_flow)))
        ends = stamps([packet for packet in closing if packet[1] in ports[flow]])
        assert ends["flow"].tolist() == [flow | CLOSING] * 3
        assert ends["sequence"].tolist() == [len(of_flow)] * 3
    assert [len(found) for found in ports.values()] == [1, 1, 1]
    assert len(set.union(*ports.values())) == 3
    turns = stamps(data)["flow"].tolist()
    assert turns[:12] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]


def test_gso_flows_take_turns_by_message(receiver: Any) -> None:
    send(SendPlan(to=receiver.to, packets=24, size=48, flows=4, batch=4, gso=3))
    assert stamps(parted(receiver.take())[0])["flow"].tolist() == [
        f for f in (0, 1, 2, 3) * 2 for _ in range(3)
    ]


@pytest.mark.parametrize("stamp", ["none", "seed"])
def test_other_stamps_close_nothing(receiver: Any, stamp: Any) -> None:
    before = time.time_ns() // 1000
    summary = send(SendPlan(to=receiver.to, packets=5, size=40, stamp=stamp))
    after = time.time_ns() // 1000
    packets = [payload for payload, _ in receiver.take()]
    assert (summary["sent"], summary["closing"], len(packets)) == (5, 0, 5)
    for payload in packets:
        assert payload[8:] == bytes(range(8, 40))
        if stamp == "none":
            assert payload[:8] == bytes(range(8))
        else:
            assert before <= int.from_bytes(payload[:8], sys.byteorder) <= after


def test_a_receiver_that_is_gone_fails_no_packet(receiver: Any) -> None:
    receiver.close()
    summary = send(SendPlan(to=receiver.to, packets=20, batch=1))
    assert summary["sent"] == 23
    assert summary["failed"] == 0
    assert summary["errors"]["ECONNREFUSED"] > 0


def test_an_error_that_lasts_ends_it(receiver: Any, tmp_path: Path) -> None:
    """A file in the socket's place answers ENOTSOCK."""
    broken = Sender(SendPlan(to=receiver.to, packets=20))
    broken.start()
    with open(tmp_path / "file", "wb") as file:
        broken.flows[0]["fd"] = file.fileno()
        assert not broken.run_slice(time.monotonic_ns() + 10**9)
    assert broken.summary()["errors"] == {"ENOTSOCK": 1}
    assert broken.counts()["failed"] == 1
    with pytest.raises(Failed, match=f"cannot send to {receiver.to}: Socket operation on non-socket"):
        broken.check_end()


def test_a_set_clock_is_noticed_and_followed(receiver: Any) -> None:
    steady = Sender(SendPlan(to=receiver.to, packets=20))
    steady.start()
    steady.run_slice(0)
    assert steady.clock_steps == 0
    steady.state[0]["offset_ns"] -= 10**9  # as if the clock had been set forward by a second
    steady.run_slice(0)
    assert steady.clock_steps == 1
    assert abs(steady.state[0]["offset_ns"] - (time.time_ns() - time.monotonic_ns())) < 10**8


def test_the_outside_reads_what_was_sent(receiver: Any) -> None:
    name = f"test_sender_{os.getpid()}"
    seen: dict[str, dict[str, Any]] = {}

    def look(view: dict[str, Any]) -> None:
        status = Status.open(name)
        seen[view["type"]] = status.read(0)[0] | {"kind": status.kind}
        status.memory.release()  # not close, which removes what this process has created
        status.segment.forget()

    summary = sender.run(SendPlan(to=receiver.to, name=name, packets=30), look)
    assert seen["ready"]["state"] == "starting"
    assert seen["ready"]["sent"] == 0
    assert seen["summary"]["kind"] == "sender"
    assert seen["summary"]["state"] == "done"
    assert {key: seen["summary"][key] for key in ("sent", "closing", "bytes", "frames", "failed")} == {
        key: summary[key] for key in ("sent", "closing", "bytes", "frames", "failed")
    }
    assert summary["sent"] == len(receiver.take()) == 33
    with pytest.raises(FileNotFoundError):
        Status.open(name)


def test_a_name_that_is_taken_is_refused(receiver: Any) -> None:
    name = f"test_taken_{os.getpid()}"
    status = Status.create(name, kind="sender", workers=["sender"])
    try:
        with pytest.raises(Refused, match=name):
            send(SendPlan(to=receiver.to, name=name, packets=1))
    finally:
        status.close()
    assert receiver.take() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"to": "nowhere"},
        {"size": -1},
        {"size": 65508},
        {"rate": 0},
        {"rate": 10**9 + 1},
        {"batch": 0},
        {"batch": 1025},
        {"flows": 0},
        {"packets": 0},
        {"duration": 0.0},
        {"duration": float("nan")},
        {"gso": 0},
        {"gso": 129},
        {"gso": 64, "size": 1024},
        {"gso": 2, "size": 0},
        {"cpu": "0-"},
        {"cpu": "4095"},
        {"fifo": 100},
        {"to": "255.255.255.255:5000"},
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_sent(receiver: Any, changes: dict[str, Any]) -> None:
    plan = SendPlan(**({"to": receiver.to, "packets": 1} | changes))
    with pytest.raises(Refused) as refused:
        send(plan)
    assert "\n" not in str(refused.value)
    assert receiver.take() == []


def test_too_many_flows_for_the_open_files(receiver: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(Refused, match="ulimit -n"):
            send(SendPlan(to=receiver.to, packets=1, flows=100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_paced_duration_is_a_number_of_packets() -> None:
    assert SendPlan(to="h:1", duration=0.05, rate=1000).limit == 50
    assert SendPlan(to="h:1", duration=10, rate=200_000).limit == 2_000_000
    assert SendPlan(to="h:1", duration=1.1, rate=100).limit == 110
    assert SendPlan(to="h:1", duration=0.101, rate=100).limit == 11
    assert SendPlan(to="h:1", duration=5e-324, rate=100).limit == 0
    assert SendPlan(to="h:1", duration=10, rate=200_000, packets=7).limit == 7
    assert SendPlan(to="h:1", duration=10).limit == SendPlan(to="h:1").limit


def test_flat_out_for_a_time(receiver: Any) -> None:
    outputs: list[dict[str, Any]] = []
    summary = send(SendPlan(to=receiver.to, duration=0.05, gso=8, size=64), outputs)
    assert [view["type"] for view in outputs] == ["ready", "summary"]
    assert summary["sent"] > 3
    assert (summary["sent"] - 3) % 8 == 0


def test_lines_for_people(receiver: Any) -> None:
    outputs: list[dict[str, Any]] = []
    send(SendPlan(to=receiver.to, packets=10, rate=100_000), outputs)
    ready, summary = map(sender.line, outputs)
    assert ready.startswith(f"sends to {receiver.to}, cpu any, pid {os.getpid()}")
    assert "/s, 10 packets + 3 closing, 0 failed, late p50 " in summary
    send(SendPlan(to=receiver.to, packets=10, stamp="none"), outputs)
    assert sender.line(outputs[-1]).endswith("/s, 10 packets, 0 failed")
    told = Sender(SendPlan(to=receiver.to))
    told.start()
    assert sender.line(told.interval()).endswith("0/s, 0 packets, 0 failed")


def test_nobody_listens_is_said(receiver: Any) -> None:
    receiver.close()
    outputs: list[dict[str, Any]] = []
    summary = send(SendPlan(to=receiver.to, packets=20, batch=1), outputs)
    times = summary["errors"]["ECONNREFUSED"]
    said = f"20 packets + 3 closing, 0 failed, nobody listens on {receiver.to} (refused {times} times)"
    assert sender.line(outputs[-1]).endswith(said)


def test_packets_too_small_for_their_stamp_are_noted() -> None:
    def note(**changes: Any) -> str | None:
        return SendPlan(to="h:1", **changes).note

    assert note(size=31) == "packets of 31 bytes carry no whole rxring stamp: 32 are needed"
    assert note(size=7, stamp="seed") == "packets of 7 bytes carry no whole seed stamp: 8 are needed"
    assert note(size=32) is note(size=8, stamp="seed") is note(size=0, stamp="none") is None


def started(plan: str, **environment: str) -> subprocess.Popen[str]:
    """A sender in a process of its own, which prints its output as JSON."""
    code = (
        "import json, sys; from engine.net import sender; "
        f"sender.run(sender.SendPlan({plan}), lambda view: print(json.dumps(view), flush=True))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )


@pytest.mark.parametrize("number", END_SIGNALS)
@pytest.mark.parametrize("rate", ["2", "200", "'max'"])
def test_a_signal_ends_it_in_order(receiver: Any, number: signal.Signals, rate: str) -> None:
    with started(f"to='{receiver.to}', rate={rate}, size=64, batch=1, duration=600") as process:
        packets = [(receiver.wait(), 0)]
        process.send_signal(number)
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    summary = json.loads(output.splitlines()[-1])
    assert summary["type"] == "summary"
    packets += receiver.take()
    if rate != "'max'":  # which overflows the socket
        assert len(packets) == summary["sent"]
        assert stamps(parted(packets)[1])["sequence"].tolist() == [summary["sent"] - 3] * 3


def test_a_signal_while_it_compiles_ends_it_at_once() -> None:
    name = f"test_compiling_{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as cache,
        started(f"to='127.0.0.1:9', name='{name}'", NUMBA_CACHE_DIR=cache) as process,
    ):
        status = None
        while status is None and process.poll() is None:
            try:
                status = Status.open(name)
            except FileNotFoundError:
                time.sleep(0.01)  # no event tells that it has begun
        assert status is not None
        status.close()
        process.terminate()
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    summary = json.loads(output)
    assert (summary["type"], summary["sent"], summary["seconds"]) == ("summary", 0, 0.0)
    with pytest.raises(FileNotFoundError):
        Status.open(name)
