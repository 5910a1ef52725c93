"""Several receivers, each with its socket, ring and process; every consumer reads all of their rings."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, Run, check_ledger

RXRING = (sys.executable, "-m", "tools.cli")
RECEIVERS = 2
FLAGS = ("--consumer", "gaps", "--consumer", "rate,split=2,by=flow", "--every", "0.1")


def sending(name: str, port: int, *flags: str) -> subprocess.Popen[bytes]:
    command = [*RXRING, "send", "--to", f"127.0.0.1:{port}", "--name", f"{name}.s", "--json", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def sent_by(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


@pytest.mark.parametrize("steer", ["flow", "cpu"])
def test_a_port_shared_by_several(name: str, steer: str) -> None:
    flags = ("--receivers", "2", "--steer", steer, "--sender", f"{name}.s", *FLAGS)
    with Run(name, *flags) as run:
        first, second = run.ready["receivers"]
        assert first["port"] == second["port"]
        assert [first["name"], second["name"]] == ["rx0", "rx1"]
        flood = ("--flows", "16", "--packets", "20000", "--rate", "50000", "--cpu", "0")
        sent = sent_by(sending(name, run.port, *flood))["sent"]
        summary = run.end()
    check_ledger(summary)
    assert summary["ledger"]["published"] == sent
    packets = [receiver["packets"] for receiver in summary["receivers"]]
    if steer == "flow":  # 16 ports: that all go to one happens once in 32,768 runs
        assert all(packets)
    else:  # on loopback the CPU that takes a packet is its sender's
        assert packets == [sent, 0]
    gaps, *members = summary["consumers"]
    assert (gaps["delivered"], gaps["result"]["lost"], gaps["result"]["flows"]) == (sent, 0, 16)
    assert gaps["result"]["reordered"] == 0
    assert [ring["published"] for ring in summary["rings"]] == packets
    assert sum(member["delivered"] for member in members) == sent
    assert summary["groups"][0]["result"]["packets"] == sent


def test_receivers_of_different_ports(name: str) -> None:
    """Each --listen is a receiver of its own; one consumer reads them all, in the order of each."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out,
        Run(name, "--listen", "udp://127.0.0.1:0", "--consumer", "rate") as run,
    ):
        ports = [receiver["port"] for receiver in run.ready["receivers"]]
        assert len(set(ports)) == 2
        for n in range(100):
            out.sendto(bytes(n), ("127.0.0.1", ports[n % 3 % 2]))
        summary = run.end()
    assert [receiver["packets"] for receiver in summary["receivers"]] == [67, 33]
    (rate,) = summary["consumers"]
    assert rate["delivered"] == rate["result"]["packets"] == 100


def test_any_of_them_dies_and_the_run_goes_on(name: str) -> None:
    flags = ("--receivers", "3", "--sender", f"{name}.s", *FLAGS)
    with Run(name, *flags) as run:
        sender = sending(name, run.port, "--flows", "32", "--rate", "20000", "--duration", "2.5")
        run.await_interval(lambda view: view["ledger"]["published"] > 1000)
        for worker in (1, 3, 0, 4, 2):
            run.kill_worker(worker)
        sent_by(sender)
        summary = run.end()
    check_ledger(summary)
    assert [receiver["restarts"] for receiver in summary["receivers"]] == [1, 1, 1]
    assert [consumer["restarts"] for consumer in summary["consumers"]] == [1, 1, 0]
    assert all(receiver["packets"] for receiver in summary["receivers"])
    gaps, *members = summary["consumers"]
    assert gaps["delivered"] == sum(member["delivered"] for member in members)


def test_packets_are_counted_together(name: str) -> None:
    with Run(name, "--receivers", "2", "--packets", "5000", *FLAGS) as run:
        sender = sending(name, run.port, "--flows", "16", "--rate", "20000")
        summary = run.end(None)
        sender.send_signal(signal.SIGINT)
        sent_by(sender)
    assert summary["ledger"]["received"] >= 5000
    assert summary["ledger"]["adds_up"]


def test_without_a_supervisor_all_of_them_leave(name: str) -> None:
    with Run(name, "--receivers", "2", *FLAGS) as run:
        assert run.ready
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        run.await_all_gone()
    assert not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))


def test_each_has_a_cpu_of_its_own(name: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("there is one CPU only")
    with Run(name, "--receivers", "2", "--rx-cpu", ",".join(map(str, cpus))) as run:
        assert [receiver["cpus"] for receiver in run.ready["receivers"]] == [[cpu] for cpu in cpus]
        run.end()
