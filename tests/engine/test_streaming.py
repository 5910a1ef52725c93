"""Streams through a whole run: tcp:// in, every byte to every consumer, ends marked, counts that add up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import await_
from runs import ROOT, Run

from engine.net.stream_socket import AF_SMC

RXRING = (sys.executable, "-m", "tools.cli")
TCP = "tcp://127.0.0.1:0"


def counts_add_up(summary: dict[str, Any]) -> None:
    ledger = summary["ledger"]
    assert ledger["adds_up"]
    assert ledger["received"] == ledger["published"]
    assert (ledger["sent"], ledger["balanced"]) == (None, None)
    for receiver in summary["receivers"]:
        assert receiver["packets"] == receiver["frames"]
        assert receiver["connections"]["open"] == 0


def send(run: Run, *flags: str) -> subprocess.Popen[bytes]:
    to = f"tcp://127.0.0.1:{run.port}"
    return subprocess.Popen(
        [*RXRING, "send", "--to", to, "--json", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def summary_of(sender: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, errors = sender.communicate(timeout=60)
    assert sender.returncode == 0, errors
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_a_file_through_socat_and_back(name: str, tmp_path: Path) -> None:
    """Written by another program, dumped by ours: byte for byte."""
    whole, dump = tmp_path / "whole", tmp_path / "dump"
    whole.write_bytes(random.Random(1).randbytes(5_000_003))
    with Run(name, "--consumer", f"dump={dump}", listen=TCP) as run:
        if shutil.which("socat"):
            command = ["socat", "-u", f"FILE:{whole}", f"TCP:127.0.0.1:{run.port}"]
            subprocess.run(command, check=True)
        else:
            with socket.create_connection(("127.0.0.1", run.port)) as client:
                client.sendall(whole.read_bytes())
        await_(lambda: dump.exists() and dump.stat().st_size >= whole.stat().st_size)
        summary = run.end()
    assert dump.read_bytes() == whole.read_bytes()
    counts_add_up(summary)
    assert summary["receivers"][0]["bytes"] == whole.stat().st_size


def test_our_sender_tells_how_fast_and_how_long_each_send_was(name: str) -> None:
    with Run(name, "--consumer", "rate", "--receivers", "2", listen=TCP, command=True) as run:
        sent = summary_of(
            send(run, "--size", "100KiB", "--packets", "300", "--flows", "8", "--sndbuf", "64KiB")
        )
        summary = run.end()
    counts_add_up(summary)
    assert (sent["sent"], sent["bytes"], sent["unconfirmed"]) == (300, 300 * 102_400, 0)
    assert sent["gigabytes_per_second"] > 0
    assert sent["sndbuf"] == {"asked": 65536, "granted": 65536}
    assert sum(sent["lengths"].values()) == sent["calls"] >= 300
    receivers = summary["receivers"]
    assert sum(receiver["bytes"] for receiver in receivers) == sent["bytes"]
    assert sum(receiver["connections"]["accepted"] for receiver in receivers) == 8
    for receiver in receivers:
        assert sum(receiver["lengths"].values()) <= receiver["calls"]
    (rate,) = summary["consumers"]
    assert rate["result"]["bytes"] == sent["bytes"]


def test_a_paced_stream(name: str) -> None:
    with Run(name, "--consumer", "rate", listen=TCP) as run:
        sent = summary_of(send(run, "--size", "1000", "--rate", "500", "--packets", "100"))
        run.end()
    assert sent["sent"] == 100
    assert sent["seconds"] >= 0.19
    assert sent["late_ns"]["max"] >= 0


def test_receiver_and_consumer_die_and_no_byte_is_lost(name: str) -> None:
    flags = (
        "--consumer",
        "rate,policy=gate",
        "--consumer",
        "rate,split=2,by=flow,name=half",
        "--every",
        "0.1",
    )
    with Run(name, *flags, listen=TCP) as run:  # whose ring holds it all: who is dead is in nobody's way
        sender = send(run, "--size", "5000", "--rate", "2000", "--packets", "4000", "--flows", "6")
        run.await_interval(lambda view: view["ledger"]["published"] > 100)
        for worker in (0, 1, 0, 2, 0):
            run.kill_worker(worker)
        sent = summary_of(sender)
        summary = run.end()
    counts_add_up(summary)
    (receiver,) = summary["receivers"]
    assert receiver["restarts"] == 3
    assert receiver["bytes"] == sent["bytes"] == 4000 * 5000
    assert receiver["lost_in_flight"] == 0
    whole, *halves = summary["consumers"]
    assert whole["delivered"] == sum(half["delivered"] for half in halves) == receiver["packets"]


def test_the_end_of_a_run_breaks_streams_off_and_the_sender_hears_it(name: str) -> None:
    with Run(name, "--consumer", "rate", "--every", "0.1", listen=TCP) as run:
        sender = send(run, "--size", "64KiB", "--rate", "1000")
        run.await_interval(lambda view: view["ledger"]["published"] > 10)
        summary = run.end()
        out, errors = sender.communicate(timeout=60)
    counts_add_up(summary)
    assert sender.returncode == 1
    assert b"the other side ended the stream" in errors
    assert json.loads(out.splitlines()[-1])["bytes"] >= summary["receivers"][0]["bytes"]


def short_ones(port: int, count: int) -> None:
    """Connect, say 8 bytes and the end, and wait until the other side has both."""
    for n in range(count):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(n.to_bytes(8, "little"))
            client.shutdown(socket.SHUT_WR)
            client.settimeout(60)
            assert client.recv(1) == b""


def test_rows_go_from_one_connection_to_the_next_and_none_is_lost(
    name: str, tmp_path: Path, fork: Any
) -> None:
    """Thousands, while the receiver is stopped and goes on at moments drawn by lot."""
    dump, chance = tmp_path / "dump", random.Random(5)
    with Run(name, "--consumer", f"dump={dump}", listen=TCP) as run:
        clients = [fork(short_ones, run.port, 3000) for _ in range(2)]
        receiver = run.worker(0)
        for _ in range(100):
            os.kill(receiver, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 0.003))
            os.kill(receiver, signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.01))
        assert [client.wait() for client in clients] == [0, 0]
        summary = run.end()
    counts_add_up(summary)
    assert sorted(dump.read_bytes()[i : i + 8] for i in range(0, 48_000, 8)) == sorted(
        n.to_bytes(8, "little") for n in [*range(3000)] * 2
    )
    assert summary["receivers"][0]["packets"] == 12_000  # each has its bytes and its end


def test_many_streams_are_closed_together(name: str) -> None:
    with Run(name, "--consumer", "rate", listen=TCP) as run:
        sent = summary_of(send(run, "--flows", "300", "--packets", "600", "--size", "100"))
        summary = run.end()
    assert (sent["sent"], sent["unconfirmed"]) == (600, 0)
    assert summary["receivers"][0]["bytes"] == 60_000


def test_without_a_supervisor_the_streams_end(name: str) -> None:
    with Run(name, "--consumer", "rate", listen=TCP) as run:
        with socket.create_connection(("127.0.0.1", run.port)) as client:
            client.sendall(b"x")
            run.send_signal(signal.SIGKILL)
            client.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert run.wait() == -signal.SIGKILL
        run.await_all_gone()
    assert not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))


def test_a_taken_port_is_refused(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with Run(name, listen=url) as run:
            assert run.next() is None
            assert run.wait() == 2
            assert run.errors == (
                f"rxring: cannot listen on {url}: another process has the port: end it, or take another\n"
            )


def test_nobody_there_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [*RXRING, "send", "--to", f"tcp://127.0.0.1:{port}"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"rxring: cannot connect to tcp://127.0.0.1:{port}: nobody listens there: start the receiver first\n"
    )


@pytest.mark.parametrize("flag", ["--gso 4", "--stamp none", "--batch 8", "--send sendmsg", "--name s"])
def test_flags_for_packets_are_refused(flag: str) -> None:
    command = [*RXRING, "send", "--to", "tcp://127.0.0.1:1", *flag.split()]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{flag.split()[0]} is for packets: leave it out with tcp:// and smc://" in done.stderr


def has_smc() -> bool:
    try:
        socket.socket(AF_SMC, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_smc(), reason="this kernel has AF_SMC")
@pytest.mark.parametrize("command", ["run", "send"])
def test_without_smc_in_the_kernel_it_is_refused(command: str) -> None:
    flags = ["--listen", "smc://127.0.0.1:0"] if command == "run" else ["--to", "smc://127.0.0.1:1"]
    done = subprocess.run([*RXRING, command, *flags], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "smc://: this kernel has no AF_SMC" in done.stderr
    assert "give tcp://" in done.stderr
