"""The life of a receiver process: it takes up what a dead one left, and ends in order."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from forked import Child, await_
from link import Link
from runs import ended
from stepping import POLL, steps, traced

from engine.net.sockets import SO_MEMINFO, ReceiveBuffer, cut_off
from engine.receiving import Receiving
from engine.spec import Listen, ReceiverSpec
from engine.status import STOP, Status
from engine.worker import Worker
from engine.worker import fork as fork_worker
from rings import locks
from rings.layout import LOCK_OWNER

Fork = Callable[..., Child]


class Life:
    """A link whose receivers are worker processes of a supervisor that is this process."""

    def __init__(self, name: str) -> None:
        self.link = Link(name, size_bytes=256 << 10, batch=8)
        self.link.writer.abandon()
        spec = ReceiverSpec(listen=Listen("udp", *self.link.address, {}))
        self.receiving = Receiving(spec, self.link.sock, self.link.rx, ReceiveBuffer(None, 0), gro=False)
        self.status = Status.create(name, kind="engine", workers=["rx0"])
        self.pids: list[int] = []

    def start(self) -> int:
        readable, ready_fd = os.pipe()
        worker = Worker("rx0", 0, self.status, None, None, False, ready_fd=ready_fd)
        ring = self.link.ring
        pid = fork_worker(worker, lambda w: self.receiving.run(w, ring.name, ring.number), lambda: None)
        os.close(ready_fd)
        assert os.read(readable, 1) == b"r"
        os.close(readable)
        self.pids.append(pid)
        return pid

    def end(self, pid: int) -> int:
        code = ended(pid)
        self.pids.remove(pid)
        return code

    def die_with_packets_taken(self, fork: Fork, lengths: list[int]) -> list[bytes]:
        """A receiver that is killed the moment its call comes back; what that had brought."""
        self.link.writer = self.link.ring.writer()
        sent = self.link.send(lengths)
        child = fork(traced, self.link.receive, 10.0)
        for _ in steps(child, POLL):
            memory = self.link.sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36)
            if struct.unpack("9I", memory)[0] == 0:
                break
        child.kill()
        self.link.writer.abandon()
        assert self.link.published == 0
        return sent

    @property
    def stop_address(self) -> int:
        return Worker("rx0", 0, self.status, None, None, False).stop_address


@pytest.fixture
def life(name: str) -> Iterator[Life]:
    life = Life(name)
    yield life
    for pid in life.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    life.status.close()
    life.link.__exit__()


@pytest.mark.parametrize("lengths", [[100, 100, 100], [10, 9000, 20]])
def test_it_publishes_what_the_dead_had_taken(life: Life, fork: Fork, lengths: list[int]) -> None:
    sent = life.die_with_packets_taken(fork, lengths)
    pid = life.start()
    sent += life.link.send([30])
    life.status.stop = STOP
    assert life.end(pid) == 0
    assert life.link.read() == sent
    life.link.check_balance()
    assert life.link.ring.state == "closed"


def test_in_its_place_the_supervisor_does(life: Life, fork: Fork) -> None:
    sent = life.die_with_packets_taken(fork, [10, 20, 30])
    sent += life.link.send([40])
    cut_off(life.link.sock)
    life.receiving.finish(life.link.ring, life.stop_address)
    assert life.link.read() == sent
    life.link.check_balance()
    assert life.link.ring.state == "closed"


def test_its_time_on_the_processor_adds_up_over_deaths(life: Life) -> None:
    """It is told after each slice, by each one for all before it."""
    before = 0
    for _ in range(3):
        pid = life.start()
        await_(lambda: life.link.ring.counters["cpu_ns"] > before)  # noqa: B023
        os.kill(pid, signal.SIGKILL)
        assert life.end(pid) == -signal.SIGKILL
        before = int(life.link.ring.counters["cpu_ns"])


def test_a_socket_that_cannot_be_received_from_fails(life: Life) -> None:
    life.link.rx.state[0]["fd"] = os.open(os.devnull, os.O_RDONLY)
    pid = life.start()
    assert life.end(pid) == 1
    host, port = life.link.address
    error = life.status.read(0)[0]["error"]
    assert error == f"receiving on udp://{host}:{port}: Socket operation on non-socket"
    os.close(int(life.link.rx.state[0]["fd"]))


def test_without_a_supervisor_it_drains_closes_and_ends(life: Life) -> None:
    pid = life.start()
    os.kill(pid, signal.SIGSTOP)
    sent = life.link.send([100] * 20)
    locks.release(life.status.segment.fd, LOCK_OWNER)
    os.kill(pid, signal.SIGCONT)
    assert life.end(pid) == 0
    assert life.link.ring.state == "closed"
    assert life.link.read() == sent
    life.link.send([100] * 3)  # it was cut off: nobody takes these
    assert life.link.discard() == 0
    assert life.link.drops.read() == 3
