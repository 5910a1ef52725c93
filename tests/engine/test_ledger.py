"""The ledger: sums that hold for any counts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import Run, Source, check_ledger

from engine.affinity import topology
from engine.ledger import (
    COUNTERS,
    Shared,
    balance,
    other_udp_errors,
)
from engine.net.counters import Layers
from engine.net.sockets import DropCount, cut_off


def test_this_machines_shared_counters() -> None:
    layers = Layers()
    layers.update()
    shared = Shared.of(layers)
    assert min(shared) >= 0
    assert shared.udp_errors >= shared.udp_full


@pytest.mark.parametrize(
    ("errors", "full", "dropped", "other"),
    [
        (0, 0, 0, 0),
        (100, 100, 100, 0),  # full buffers, all ours
        (100, 100, 0, 0),  # full buffers, of others
        (3, 0, 0, 3),  # bad checksums, of others
        (3, 0, 3, 0),  # ours: in the socket's own count
        (103, 100, 103, 0),
        (103, 100, 100, 3),
    ],
)
def test_a_drop_is_not_counted_twice(errors: int, full: int, dropped: int, other: int) -> None:
    assert other_udp_errors(Shared(0, 0, errors, full), dropped) == other


count = st.integers(0, 1 << 50)


@given(
    nic=count,
    softnet=count,
    socket=count,
    other=count,
    lost=count,
    after=count,
    refused=count,
    published=count,
    missing=st.integers(-5, 5),
    consumers=st.lists(st.tuples(count, count, count, count, count), max_size=3),
    wrong=st.sampled_from([0, 0, 1, -1]),
)
def test_it_balances_exactly_when_every_sum_does(
    nic: int,
    softnet: int,
    socket: int,
    other: int,
    lost: int,
    after: int,
    refused: int,
    published: int,
    missing: int,
    consumers: list[tuple[int, int, int, int, int]],
    wrong: int,
) -> None:
    received = refused + published + wrong
    sent = nic + softnet + socket + other + lost + after + received + missing
    views: dict[str, dict[str, int]] = {}
    for i, (delivered, skipped, passed, unread, _) in enumerate(consumers):
        joined = published - delivered - skipped - passed - unread
        views[f"c{i}"] = {
            "delivered": delivered,
            "skipped": skipped,
            "passed": passed,
            "unread": unread,
            "joined": joined,
        }
    known: dict[str, Any] = {
        "shared": Shared(nic, softnet, socket + other, socket),
        "socket_dropped": socket,
        "socket_dropped_frames": socket,
        "after_stop": after,
        "after_stop_frames": after,
        "lost_in_flight": lost,
        "received": received,
        "frames": received + lost,
        "sent_frames": None,
        "refused": refused,
        "published": published,
    }
    ledger = balance(sent=sent, consumers=views, **known)
    shared = nic + softnet + other
    # What is found too much was of others, as far as the shared layers counted any.
    assert ledger["of_others"] == min(max(-missing, 0), shared)
    assert ledger["residual"] == missing + ledger["of_others"]
    assert ledger["balanced"] is (ledger["residual"] == 0 and wrong == 0)
    assert ledger["adds_up"] is (wrong == 0)
    assert ledger["other_errors"] == other
    assert ledger["exact"] is True
    unknown = balance(sent=None, consumers=views, **known)
    assert {unknown[key] for key in ("sent", "residual", "balanced", "of_others")} == {None}
    assert unknown["adds_up"] is (wrong == 0)
    if views:
        views["c0"]["delivered"] += 1
        assert balance(sent=sent, consumers=views, **known)["balanced"] is False


def test_drops_of_others_are_not_ours() -> None:
    """Another engine that ends drops what its sender goes on sending: UDP errors of the namespace."""
    known: dict[str, Any] = {
        "sent_frames": 100,
        "shared": Shared(0, 7, 93, 20),
        "socket_dropped": 20,
        "socket_dropped_frames": 20,
        "after_stop": 0,
        "after_stop_frames": 0,
        "lost_in_flight": 0,
        "refused": 0,
        "consumers": {},
    }
    ledger = balance(sent=100, received=80, frames=80, published=80, **known)
    assert (ledger["softnet_dropped"], ledger["other_errors"], ledger["of_others"]) == (7, 73, 80)
    assert (ledger["residual"], ledger["balanced"]) == (0, True)
    ledger = balance(sent=100, received=75, frames=75, published=75, **known)
    assert (ledger["of_others"], ledger["residual"]) == (75, 0)


@given(
    softnet=count,
    dropped=count,
    after=count,
    frames=count,
    received=count,
    missing=st.sampled_from([0, 0, 5, -5]),
    unknown=st.sampled_from([("socket_dropped",), ("after_stop",), ("socket_dropped", "after_stop")]),
)
def test_where_packets_are_not_known_it_balances_in_frames(
    softnet: int, dropped: int, after: int, frames: int, received: int, missing: int, unknown: tuple[str, ...]
) -> None:
    known: dict[str, Any] = {
        "sent_frames": softnet + dropped + after + frames + missing,
        "shared": Shared(0, softnet, dropped, dropped),
        "socket_dropped": dropped,
        "socket_dropped_frames": dropped,
        "after_stop": after,
        "after_stop_frames": after,
        "lost_in_flight": 3,
        "received": received,
        "frames": frames,
        "refused": 0,
        "published": received,
    } | dict.fromkeys(unknown)
    ledger = balance(sent=1 << 60, consumers={}, **known)
    assert ledger["exact"] is False
    assert ledger["of_others"] == min(max(-missing, 0), softnet)
    assert ledger["residual"] == missing + ledger["of_others"]
    assert ledger["balanced"] is (ledger["residual"] == 0)
    nobody = balance(sent=None, consumers={}, **known | {"sent_frames": None})
    assert (nobody["residual"], nobody["balanced"], nobody["exact"]) == (None, None, False)


@pytest.mark.parametrize(
    ("softnet", "packets", "frames", "residual", "exact"),
    [
        (7, 1000 - 7 * 64, 20 - 7, 0, False),  # GSO messages, each counted as one
        (9, 1000 - 7 * 64, 20 - 7, 0, False),  # two of them were of others
        (7, 1000 - 7, 20, 0, True),  # single packets, whatever the messages were
        (9, 1000, 20, 0, True),
        (7, 1000 - 8 * 64, 20 - 8, 8 * 64 - 7, True),  # one is nowhere: no unit explains it
        (0, 1000 - 7 * 64, 20, 7 * 64, True),  # a layer that counted nothing explains nothing
    ],
)
def test_messages_that_were_dropped_whole_are_balanced_in_frames(
    softnet: int, packets: int, frames: int, residual: int, exact: bool
) -> None:
    ledger = balance(
        sent=1000,
        sent_frames=20,
        shared=Shared(0, softnet, 0, 0),
        socket_dropped=0,
        socket_dropped_frames=0,
        after_stop=0,
        after_stop_frames=0,
        lost_in_flight=0,
        received=packets,
        frames=frames,
        refused=0,
        published=packets,
        consumers={},
    )
    assert (ledger["residual"], ledger["exact"]) == (residual, exact)
    assert ledger["of_others"] == (softnet - (20 - frames) if not exact else max(softnet - 1000 + packets, 0))
    assert ledger["balanced"] is (residual == 0)


def test_every_line_has_its_label_and_its_sentence() -> None:
    ledger = balance(
        sent=1,
        sent_frames=1,
        shared=Shared(0, 0, 0, 0),
        socket_dropped=0,
        socket_dropped_frames=0,
        after_stop=0,
        after_stop_frames=0,
        lost_in_flight=0,
        received=1,
        frames=1,
        refused=0,
        published=1,
        consumers={},
    )
    assert {counter.id for counter in COUNTERS} <= set(ledger)
    assert len({counter.id for counter in COUNTERS}) == len(COUNTERS)
    assert all(counter.sentence.endswith(".") for counter in COUNTERS)


def lose_of_others() -> int:
    """Traffic of somebody else, all of it lost: a socket that overflows, a filter that drops, a closed port.

    How many of them UDP counts as an error of another kind than a full buffer.
    """
    with contextlib.ExitStack() as stack:
        out, full, filtered, closed = (
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(4)
        )
        full.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        for sock in (full, filtered, closed):
            sock.bind(("127.0.0.1", 0))
        cut_off(filtered)
        nobody = closed.getsockname()
        closed.close()
        for _ in range(300):
            for address in (full.getsockname(), filtered.getsockname(), nobody):
                out.sendto(b"x" * 500, address)
        assert DropCount(full).read() > 250
        return DropCount(filtered).read()


@pytest.mark.parametrize("ours_too", [False, True])
def test_other_traffic_of_the_machine_leaves_our_ledger_balanced(name: str, ours_too: bool) -> None:
    """The real command beside a stranger that loses packets in the same layers; ours_too: so do we."""
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--consumer", "rate", "--sender", f"{name}.s", "--gro", "off", "--rcvbuf", "16KiB"),
            *("--every", "0.05"),
            command=True,
        ) as run,
    ):
        source.connect(run)
        source.send([b"x" * 100] * 10)
        run.await_interval(lambda view: view["consumers"][0]["delivered"] == 10)
        receiver = run.worker(0)
        if ours_too:
            os.kill(receiver, signal.SIGSTOP)
            source.send([b"x" * 100] * 500)
        others = lose_of_others()
        os.kill(receiver, signal.SIGCONT)
        source.done()
        view = run.await_interval(lambda view: view["ledger"]["balanced"] is True)
        assert view["ledger"]["of_others"] >= others == 300
        summary = run.end()
    check_ledger(summary)
    ledger, layers = summary["ledger"], summary["layers"]
    assert (ledger["socket_dropped"] > 400) is ours_too
    assert ledger["sent"] == ledger["received"] + ledger["socket_dropped"]
    assert ledger["of_others"] == (ledger["nic_dropped"] + ledger["softnet_dropped"] + ledger["other_errors"])
    assert ledger["other_errors"] >= others
    assert layers["udp"]["rcvbuf_errors"] >= 250 + ledger["socket_dropped"]
    assert layers["udp"]["in_errors"] >= 250 + others + ledger["socket_dropped"]
    assert layers["udp"]["no_ports"] >= 300
    assert list(layers["nic"]) == ["lo"]
    assert layers["nic"]["lo"]["rx_packets"] >= source.sent + 900
    online = topology.online()
    assert {row["cpu"] for row in layers["softnet"]} >= set(online)
    assert sum(row["processed"] for row in layers["softnet"]) >= source.sent + 900


@pytest.mark.parametrize(
    ("dropped", "balanced", "others"),
    [(13_095, True, 0), (13_100, True, 5), (13_094, False, None)],
)
def test_whole_messages_from_a_backlog_beside_packets_from_the_socket(
    dropped: int, balanced: bool, others: int | None
) -> None:
    """GSO without GRO: the sender's frames are messages of 8, the receiver's are packets: no unit fits."""
    book = balance(
        sent=1_185_977,
        sent_frames=148_276,
        shared=Shared(0, dropped, 1_065_561, 1_065_561),
        socket_dropped=1_065_561,
        socket_dropped_frames=1_065_561,
        after_stop=0,
        after_stop_frames=0,
        lost_in_flight=0,
        received=15_656,
        frames=15_656,
        refused=0,
        published=15_656,
        consumers={},
    )
    assert book["balanced"] is balanced
    if balanced:
        assert (book["residual"], book["exact"], book["of_others"]) == (0, False, others)
