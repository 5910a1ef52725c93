"""Case 30 (sockperf#77, #155): one option made the pace wrong, and another CPU's clock made it be ignored.

Here the pace is in the stamps: packet i is due at start + i / rate, whatever else is chosen, and none is sent
before it is due. What the sender reports is what the stamps say, and the lateness is there to be seen.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.net import sender
from engine.net.sender import SendPlan
from engine.net.stamp import CLOSING, STAMP

RATE, PACKETS = 20_000, 1000
OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch": 1},
    {"batch": 1024},
    {"size": 32},
    {"size": 1400},
    {"send": "sendmsg"},
    {"flows": 7},
    {"gso": 8},
    {"gso": 64, "flows": 3},
    {"gso": 64, "send": "sendmsg", "batch": 2},
    {"cpu": "0"},
    {"duration": PACKETS / RATE, "packets": None},
]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        yield sock


def stamps(sock: socket.socket) -> Any:
    """Of all data packets that have come, by the time they were due."""
    found = []
    for _ in itertools.count():
        try:
            found.append(np.frombuffer(sock.recv(65536)[:32], STAMP)[0])
        except BlockingIOError:
            break
    data = np.array([stamp for stamp in found if not stamp["flow"] & CLOSING], STAMP)
    return np.sort(data, order="scheduled_ns")


@pytest.fixture
def unpinned() -> Iterator[None]:
    """The sender is this process, and pins itself."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_option_changes_the_pace(listener: socket.socket, options: dict[str, Any]) -> None:
    to = f"127.0.0.1:{listener.getsockname()[1]}"
    plan = SendPlan(**{"to": to, "rate": RATE, "packets": PACKETS, "size": 100, **options})
    summary = sender.run(plan, lambda view: None)
    found = stamps(listener)
    assert len(found) == summary["sent"] - summary["closing"] == PACKETS
    due_ns = found["scheduled_ns"] - found["scheduled_ns"][0]
    assert due_ns.tolist() == [i * 1_000_000_000 // RATE for i in range(PACKETS)]
    late_ns = found["sent_ns"] - found["scheduled_ns"]
    assert late_ns.min() >= 0
    assert summary["late_ns"]["max"] == late_ns.max()
    assert summary["seconds"] * 1e9 >= due_ns[-1]
    assert summary["packets_per_second"] == pytest.approx(PACKETS / summary["seconds"])
    assert summary["packets_per_second"] <= RATE
