"""A receiver that never sleeps on an empty socket, and one on a connected socket."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator

import pytest
from forked import Child
from link import Link
from runs import Run

from engine.ledger import ERROR_NAMES
from engine.net.receiver import SLICE, STOPPED, Receiver


@pytest.fixture
def link(name: str) -> Iterator[Link]:
    with Link(name) as link:
        link.rx.state[0]["spin"] = True
        yield link


def switches() -> int:
    """How often this thread has waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_it_is_asked_for() -> None:
    for spin in (True, False):
        rx = Receiver.prepare(-1, batch=1, one_by_one=False, timestamps=False, spin=spin, packets=None)
        assert rx.state[0]["spin"] == spin


@pytest.mark.parametrize("one_by_one", [False, True])
def test_it_receives_and_ends_at_the_deadline(link: Link, one_by_one: bool) -> None:
    link.rx.state[0]["one_by_one"] = one_by_one
    sent = link.send([0, 1, 100, 1472, 65507])
    before = switches()
    assert link.take(0.05, drain=False) == SLICE
    spun = switches() - before
    assert link.read() == sent
    link.check_balance()
    link.rx.state[0]["spin"] = False
    before = switches()
    assert link.take(0.12, drain=False) == SLICE
    assert switches() - before > spun == 0  # without, it sleeps


def test_a_packet_ends_no_sleep(link: Link, fork: Callable[..., Child]) -> None:
    """It comes while the loop spins, from another process."""
    link.rx.state[0]["packets"] = 1

    def send() -> None:
        link.out.send(b"x")

    child = fork(send)
    link.sent += 1
    assert link.take(30, drain=False) != SLICE
    assert child.wait() == 0
    assert link.read() == [b"x"]
    link.check_balance()


def test_the_stop_word_ends_it(link: Link, fork: Callable[..., Child]) -> None:
    def stop() -> None:
        link.stop[0] = 1

    child = fork(stop)
    assert link.take(30, drain=False) == STOPPED
    assert child.wait() == 0


@pytest.mark.parametrize("spin", [False, True])
def test_news_that_nobody_is_there_are_counted_and_survived(link: Link, spin: bool) -> None:
    """A connected socket has sent something to a closed port: an ICMP error. Then its peer comes back."""
    link.rx.state[0]["spin"] = spin
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        place = peer.getsockname()
    link.sock.connect(place)
    link.sock.send(b"anybody there?")
    assert link.take(0.05, drain=False) == SLICE
    errors = dict(zip(ERROR_NAMES, map(int, link.ring.counters["errors"]), strict=False))
    assert {name: count for name, count in errors.items() if count} == {"ECONNREFUSED": 1}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(place)
        peer.sendto(b"back again", link.address)
    link.sent += 1
    assert link.take(0.05, drain=False) == SLICE
    assert link.read() == [b"back again"]
    link.check_balance()


def test_a_run_that_spins(name: str) -> None:
    """Without a packet it uses its core, which a receiver that sleeps does not."""
    with Run(name, "--rx-wait", "spin", "--every", "0.05") as run:
        run.await_interval(lambda view: view["receivers"][0]["cpu_ns"] > 300_000_000)
        assert run.end()["ledger"]["received"] == 0
