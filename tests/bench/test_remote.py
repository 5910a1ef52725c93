"""The other machine: what its agent starts for whom, and a measured run across two network namespaces."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.commands import ROOT
from bench.place import Place, open_place
from bench.remote import PORT, RemoteSide, checked
from engine.errors import Failed, Refused

PEER = "10.118.0.1"


@pytest.mark.parametrize(
    "words",
    [
        ["send", "--to", f"{PEER}:5000", "--rate", "max", "--cpu", "0-3,8"],
        ["send", "--to", f"tcp://{PEER}:5000"],
        ["mirror", "--listen", "udp://10.118.0.2:0", "--to", f"{PEER}:5000"],
    ],
)
def test_what_an_experiment_needs_is_started(words: list[str]) -> None:
    assert checked(words, PEER) == words


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (None, "list of words"),
        (["send", 1], "list of words"),
        (["run", "--listen", "udp://0.0.0.0:1"], "'run' is not started"),
        (["send", "--to", "10.118.0.9:5000"], "to 10.118.0.1 only"),
        (["send", "--to", f"{PEER}:5000@10.118.0.9:1"], "only"),
        (["send", "--size", "100"], "--to is missing"),
        (["send", "--to"], "has no value"),
        (["send", "--to", f"{PEER}:5000", "--fifo", "99"], "'--fifo' is not taken"),
        (["send", "--to", f"{PEER}:5000", "--name", "$(reboot)"], "no value of --name"),
        (["mirror", "--listen", "udp://0.0.0.0:5000?interface=eth0"], "nowhere to listen"),
    ],
)
def test_anything_else_is_refused(words: object, why: str) -> None:
    with pytest.raises(Refused, match=why):
        checked(words, PEER)


@pytest.fixture(name="pair")
def make_pair() -> Iterator[tuple[Place, "subprocess.Popen[str]"]]:
    """A cable, and an agent at its sending end that waits for the other."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place("veth") as place:
        words = ("bench", "layouts", "--role", "sender", "--peer", place.receive.host)
        command = place.send.command(sys.executable, "-m", "tools.cli", *words)
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
            assert agent.stderr is not None
            assert f"on port {PORT}" in agent.stderr.readline()
            try:
                yield place, agent
            finally:
                agent.kill()


RUN = """
import json, os
from bench import remote
from bench.flood import Flood
place = remote.place({device!r}, {peer!r})
cpus = sorted(os.sched_getaffinity(0))
found = Flood(100, 1, cpus[0], cpus[-1], 0.2, 0.3, place, rate=20_000).engine(cpus[0], "off")
print(json.dumps(found))
"""


@pytest.mark.root
def test_a_run_knows_what_the_other_machine_sent(pair: tuple[Place, "subprocess.Popen[str]"]) -> None:
    place, agent = pair
    script = RUN.format(device=place.receive.device, peer=place.send.host)
    command = place.receive.command(sys.executable, "-c", script)
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["ledger_balanced"]
    assert found["ledger"]["sent"] == found["ledger"]["received"] > 0
    assert "sender_ns" not in found  # its CPU is not ours to look at

    agent.send_signal(signal.SIGINT)
    assert agent.wait(10) == 0


@pytest.mark.root
def test_only_the_peer_is_served_and_told_why_not(pair: tuple[Place, "subprocess.Popen[str]"]) -> None:
    place, _ = pair
    with place.send:  # from the agent's own address
        stranger = socket.create_connection((place.send.host, PORT), 5)
    with stranger:
        stranger.sendall(b'{"run": ["send", "--to", "10.118.0.1:5000"]}\n')
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    with place.receive:
        sender = RemoteSide("rxv1", place.send.host).rxring("send", "--size", "100")
    with sender, pytest.raises(Failed, match="--to is missing"):
        sender.next("ready")


def test_where_nobody_listens_that_is_said() -> None:
    with pytest.raises(Failed, match=r"no agent on 127\.0\.0\.1"):
        RemoteSide("lo", "127.0.0.1", port=1).rxring("send")
