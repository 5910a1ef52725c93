"""IPv6 and real cables between two network namespaces: unicast, link-local, fragments, a cable pulled."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from forked import await_
from namespaces import Pair, make_pair  # noqa: F401 (the fixture `pair`)
from runs import Object, Run, check_ledger

from engine.net import sender
from engine.net.address import format_address
from engine.net.sender import SendPlan


def run_and_send(
    pair: Pair, name: str, listen: str, plan: Callable[[int], SendPlan]
) -> tuple[Object, Object]:
    """A run on the right, a sender on the left; their summaries, of which the ledger is checked."""
    with ExitStack() as stack:
        with pair.right:
            run = stack.enter_context(Run(name, "--sender", f"{name}s", "--consumer", "gaps", listen=listen))
        ready = run.ready["receivers"][0]
        with pair.left:
            sent = sender.run(plan(ready["port"]), [].append)
        view = run.end()
    check_ledger(view)
    return sent, view


@pytest.mark.parametrize("gso", ["off", 16])
@pytest.mark.parametrize("scope", ["global", "% link-local", "interface= link-local"])
def test_a_run_over_ipv6(pair: Pair, name: str, scope: str, gso: int | str) -> None:
    right, left = pair.right, pair.left
    listen, to = {
        "global": (f"udp://[{right.ipv6}]:0", f"[{right.ipv6}]"),
        "% link-local": (f"udp://[{right.link_local}%vr]:0", f"[{right.link_local}%{left.device}]"),
        "interface= link-local": (
            f"udp://[{right.link_local}]:0?interface=vr",
            f"[{right.link_local}%{left.device}]",
        ),
    }[scope]
    sent, view = run_and_send(
        pair,
        name,
        listen,
        lambda port: SendPlan(
            to=f"{to}:{port}",
            name=f"{name}s",
            size=100,
            rate=20_000,
            gso=gso,  # type: ignore[arg-type]
            packets=2000,
        ),
    )
    assert sent["sent"] == view["ledger"]["received"] == 2003
    said = view["receivers"][0]["listen"]
    host = right.ipv6 if scope == "global" else f"{right.link_local}%vr"
    assert said.startswith(f"udp://[{host}]:")


@pytest.mark.parametrize("mtu", [1500, 9000])
@pytest.mark.parametrize("kind", ["IPv4", "IPv6"])
def test_fragments(pair: Pair, name: str, kind: str, mtu: int) -> None:
    """Datagrams of 20,000 bytes: 14 or 3 packets on the cable, one for us."""
    pair.set_mtu(mtu)
    host = pair.right.ipv4 if kind == "IPv4" else f"[{pair.right.ipv6}]"
    sent, view = run_and_send(
        pair,
        name,
        f"udp://{host}:0",
        lambda port: SendPlan(to=f"{host}:{port}", name=f"{name}s", size=20_000, rate=2000, packets=500),
    )
    assert sent["sent"] == view["ledger"]["received"] == 503
    assert view["receivers"][0]["bytes"] == 503 * 20_000


@pytest.mark.parametrize("kind", ["IPv4", "IPv6"])
def test_the_cable_is_pulled_and_put_back_under_load(pair: Pair, name: str, kind: str) -> None:
    """Each packet has been received, or refused by the sender's kernel, or dropped by its end of the cable.

    In the instant of pulling, Linux drops what it has said yes to; its count holds packets of others, too.
    """
    host = pair.right.ipv4 if kind == "IPv4" else f"[{pair.right.ipv6}]"
    flags = ("--every", "0.05", "--consumer", "gaps")
    with ExitStack() as stack:
        with pair.right:
            run = stack.enter_context(Run(name, *flags, listen=f"udp://{host}:0"))
        plan = SendPlan(to=f"{host}:{run.port}", size=100, rate=5000, duration=1.5)
        with pair.left:
            sending = stack.enter_context(ThreadPoolExecutor(1)).submit(sender.run, plan, [].append)

        def packets() -> int:
            count: int = run.await_interval()["receivers"][0]["packets"]
            return count

        await_(lambda: packets() > 500)
        pair.left.pull()
        await_(lambda: packets() == packets())  # none come any more
        pair.left.put_back(pair.right)
        sent = sending.result()
        view = run.end()
    received = view["ledger"]["received"]
    assert sent["sent"] + sent["failed"] == 7500 + 3
    assert sent["failed"] > 0
    assert set(sent["errors"]) <= {"ENETUNREACH", "ENETDOWN", "EAGAIN"}  # EAGAIN: sent again
    assert 0 <= sent["sent"] - received <= pair.left.dropped()
    assert view["consumers"][0]["result"]["lost"] == sent["sent"] - received
    assert received > 1000 + sent["closing"]  # also after the cable was put back
    assert view["receivers"][0]["socket_dropped"] == 0


@pytest.mark.parametrize("kind", ["IPv4", "IPv6"])
def test_a_run_for_one_peer(pair: Pair, name: str, kind: str) -> None:
    """Connected: what others send to the port is not received, nor counted as dropped by the socket."""
    left, right = (pair.left.ipv4, pair.right.ipv4) if kind == "IPv4" else (pair.left.ipv6, pair.right.ipv6)
    family = socket.AF_INET if kind == "IPv4" else socket.AF_INET6
    with ExitStack() as stack:
        with pair.left:
            peer, other = (stack.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(2))
        peer.bind((left, 6000))
        with pair.right:
            listen, connect = (format_address((right, 0)), format_address((left, 6000)))
            run = stack.enter_context(Run(name, "--connect", connect, listen=f"udp://{listen}"))
        for _ in range(10):
            for sock in (other, peer):
                sock.sendto(b"x", (right, run.port))
        run.await_interval(lambda view: view["ledger"]["received"] == 10)
        view = run.end()
    assert view["ledger"]["received"] == 10
    assert view["receivers"][0]["socket_dropped_frames"] == 0
