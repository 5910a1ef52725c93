"""Multicast between two network namespaces: the groups that were asked for get through, nothing else."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from forked import Child
from namespaces import Namespace, Pair, make_pair  # noqa: F401 (the fixture `pair`)
from runs import Run, check_ledger

from engine import spec
from engine.errors import Refused
from engine.net import mirror, sender
from engine.net.mirror import MirrorPlan
from engine.net.sender import SendPlan
from engine.net.sockets import bind_udp, joined, open_udp, probe_udp

PORT = 5000
NOBODY = 65534
# A group, another one, and a second address for a sender: of IPv4 and of IPv6.
KINDS = {"IPv4": ("239.1.1.1", "239.1.1.2", "10.77.0.9"), "IPv6": ("ff05::1:1", "ff05::1:2", "fd77::9")}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes the sockets of a test."""
    with ExitStack() as stack:
        yield stack


def url(host: str, options: str) -> str:
    return f"udp://[{host}]:{PORT}?{options}" if ":" in host else f"udp://{host}:{PORT}?{options}"


def listening(opened: ExitStack, side: Namespace, listen: str, connect: str | None = None) -> socket.socket:
    where = spec.listen(listen)
    with side:
        sock = opened.enter_context(open_udp(where, timestamps=False, rcvbuf=None)[0])
        bind_udp(sock, where, connect)
    return sock


def send(side: Namespace, source: str, to: str, payload: bytes) -> None:
    """By a plain Python socket of that source address; multicast, too, goes over the cable."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with side, socket.socket(family, socket.SOCK_DGRAM) as out:
        index = socket.if_nametoindex(side.device)
        if family == socket.AF_INET6:
            out.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        else:
            out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("8xi", index))
        out.bind((source, 0))
        out.sendto(payload, (to, PORT))


def own(side: Namespace, kind: str) -> str:
    return side.ipv6 if kind == "IPv6" else side.ipv4


def received(sock: socket.socket) -> list[bytes]:
    """What has come up to the payload "last"."""
    sock.settimeout(20)
    return list(iter(lambda: sock.recv(65536), b"last"))


def test_a_group_from_anybody_and_nothing_else(pair: Pair, kind: str, opened: ExitStack) -> None:
    """Another socket has joined the other group on the same port: by default Linux would give us both."""
    group, other, second = KINDS[kind]
    ours = listening(opened, pair.right, url(group, f"interface={pair.right.device}"))
    theirs = listening(opened, pair.right, url(other, f"interface={pair.right.device}"))
    pair.left.add(second)
    send(pair.left, own(pair.left, kind), group, b"first")
    send(pair.left, second, group, b"second")
    send(pair.left, own(pair.left, kind), other, b"wrong group")
    send(pair.left, own(pair.left, kind), own(pair.right, kind), b"unicast")
    for address in (group, other):
        send(pair.left, second, address, b"last")
    assert received(ours) == [b"first", b"second"]
    assert received(theirs) == [b"wrong group"]


def test_a_group_from_one_source(pair: Pair, kind: str, opened: ExitStack) -> None:
    group, other, second = KINDS[kind]
    right = own(pair.left, kind)
    options = f"interface={pair.right.device}&source={right}"
    ours = listening(opened, pair.right, url(group, options))
    anybody = listening(opened, pair.right, url(group, f"interface={pair.right.device}"))
    pair.left.add(second)
    send(pair.left, second, group, b"wrong source")
    send(pair.left, right, group, b"right source")
    send(pair.left, right, other, b"wrong group")
    send(pair.left, right, own(pair.right, kind), b"unicast")
    send(pair.left, right, group, b"last")
    assert received(ours) == [b"right source"]
    assert received(anybody) == [b"wrong source", b"right source"]


def test_a_group_from_several_sources(pair: Pair, kind: str, opened: ExitStack) -> None:
    group, _, second = KINDS[kind]
    left, options = own(pair.left, kind), f"interface={pair.right.device}"
    ours = listening(opened, pair.right, url(group, f"{options}&source={left}&source={second}"))
    third = second + "9"
    for address in (second, third):
        pair.left.add(address)
    for source in (left, third, second):
        send(pair.left, source, group, source.encode())
    send(pair.left, left, group, b"last")
    assert received(ours) == [left.encode(), second.encode()]


def test_a_group_on_the_chosen_device_only(pair: Pair, kind: str, opened: ExitStack) -> None:
    """Somebody else has joined the same group on the cable; we have it on lo."""
    group = KINDS[kind][0]
    here = listening(opened, pair.right, url(group, "interface=lo"))
    there = listening(opened, pair.right, url(group, f"interface={pair.right.device}"))
    send(pair.left, own(pair.left, kind), group, b"over the cable")
    send(pair.left, own(pair.left, kind), group, b"last")
    assert received(there) == [b"over the cable"]
    here.setblocking(False)
    with pytest.raises(BlockingIOError):
        here.recv(100)


def test_a_wildcard_socket_gets_no_multicast(pair: Pair, kind: str, opened: ExitStack) -> None:
    group = KINDS[kind][0]
    everything = listening(opened, pair.right, "udp://[::]:5000" if kind == "IPv6" else "udp://0.0.0.0:5000")
    with pair.right, socket.socket(everything.family, socket.SOCK_DGRAM) as member:
        level = socket.IPPROTO_IPV6 if kind == "IPv6" else socket.IPPROTO_IP
        index = socket.if_nametoindex(pair.right.device)
        request = struct.pack("I4x", index)
        if kind == "IPv6":
            request += struct.pack("HHI", socket.AF_INET6, 0, 0) + socket.inet_pton(socket.AF_INET6, group)
        else:
            request += struct.pack("HH", socket.AF_INET, 0) + socket.inet_aton(group)
        member.setsockopt(level, 42, request.ljust(136, b"\0"))  # MCAST_JOIN_GROUP
        send(pair.left, own(pair.left, kind), group, b"to a group of others")
        send(pair.left, own(pair.left, kind), own(pair.right, kind), b"to us")
        send(pair.left, own(pair.left, kind), own(pair.right, kind), b"last")
    assert received(everything) == [b"to us"]


def test_the_routing_table_chooses_the_device(pair: Pair, kind: str, opened: ExitStack) -> None:
    group = KINDS[kind][0]
    where = spec.listen(url(group, "").rstrip("?"))
    with pair.right:
        if kind == "IPv4":
            with pytest.raises(Refused, match=r"no route leads there: give \?interface=, of lo, vr$"):
                probe_udp(where)
            pair.right.ip("route", "add", "224.0.0.0/4", "dev", pair.right.device)
        assert joined(where) == f"joined {group} on {pair.right.device}"
        assert joined(spec.listen(url(group, "interface=lo"))) is None
        assert joined(spec.listen("udp://127.0.0.1:5000")) is None
    ours = listening(opened, pair.right, str(where))
    send(pair.left, own(pair.left, kind), group, b"found")
    send(pair.left, own(pair.left, kind), group, b"last")
    assert received(ours) == [b"found"]


def test_a_probe_leaves_nothing_joined(pair: Pair, kind: str) -> None:
    group = KINDS[kind][0]
    with pair.right:
        before = pair.right.ip("maddress", "show", "dev", pair.right.device)
        probe_udp(spec.listen(url(group, f"interface={pair.right.device}")))
        assert pair.right.ip("maddress", "show", "dev", pair.right.device) == before


def as_nobody(side: Namespace, listens: list[str]) -> None:
    with side:
        os.setgroups([])
        os.setresuid(NOBODY, NOBODY, NOBODY)
        for listen in listens:
            probe_udp(spec.listen(listen))
        os._exit(0)  # nobody may not go home


def test_none_of_it_needs_root(pair: Pair, kind: str, fork: Callable[..., Child]) -> None:
    device = pair.right.device
    anywhere = "udp://[::]:0" if kind == "IPv6" else "udp://0.0.0.0:0"
    group, source = KINDS[kind][0], own(pair.left, kind)
    options = (f"interface={device}", f"interface={device}&source={source}")
    listens = [*(url(group, option) for option in options), f"{anywhere}?interface={device}"]
    assert fork(as_nobody, pair.right, listens).wait() == 0


def test_a_device_that_is_not_there(pair: Pair, kind: str) -> None:
    with pair.right, pytest.raises(Refused, match=r"there is no device eth7: there are lo, vr$"):
        probe_udp(spec.listen(url(KINDS[kind][0], "interface=eth7")))


def test_more_sources_than_the_kernel_takes(pair: Pair) -> None:
    sources = "&".join(f"source=10.77.0.{i}" for i in range(10, 40))
    with pair.right, pytest.raises(Refused, match=r"raise net\.ipv4\.igmp_max_msf"):
        probe_udp(spec.listen(url("239.1.1.1", f"interface={pair.right.device}&{sources}")))


def test_a_port_that_others_hold_for_themselves(pair: Pair, opened: ExitStack) -> None:
    with pair.right:
        holder = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        holder.bind(("239.1.1.1", PORT))
        with pytest.raises(Refused, match=r"cannot listen on 239\.1\.1\.1:5000: process"):
            probe_udp(spec.listen(url("239.1.1.1", f"interface={pair.right.device}")))


def test_several_receivers_of_one_group_are_refused() -> None:
    with pytest.raises(Refused, match="each of several receivers would get every packet"):
        open_udp(spec.listen("udp://239.1.1.1:5000"), timestamps=False, rcvbuf=None, share=True)


@pytest.mark.parametrize("gso", ["off", 16])
def test_a_run_with_our_sender(pair: Pair, kind: str, name: str, gso: int | str) -> None:
    """All of the group's packets from the source that may, to the packet, and not that of another."""
    group, _, second = KINDS[kind]
    left, device = own(pair.left, kind), pair.right.device
    pair.left.add(second)
    listen = url(group, f"interface={device}&source={left}")
    flags = ("--sender", f"{name}s", "--consumer", "gaps")
    with ExitStack() as stack:
        with pair.right:
            run = stack.enter_context(Run(name, *flags, listen=listen))
        assert run.ready["receivers"][0]["port"] == PORT
        send(pair.left, second, group, b"wrong source")
        to = f"[{group}]:{PORT}" if kind == "IPv6" else f"{group}:{PORT}"
        plan = SendPlan(
            to=f"{to}?interface={pair.left.device}",
            name=f"{name}s",
            size=200,
            rate=20_000,
            gso=gso,  # type: ignore[arg-type]
            flows=3,
            packets=3000,
        )
        with pair.left:
            sent = sender.run(plan, [].append)
        view = run.end()
    assert (sent["failed"], sent["errors"]) == (0, {})
    assert view["ledger"]["sent"] == view["ledger"]["received"] == 3009
    check_ledger(view)
    result = view["consumers"][0]["result"]
    assert (result["lost"], result["duplicated"], result["flows"]) == (0, 0, 3)


@pytest.mark.parametrize(("ttl", "wanted"), [("", 1), ("&ttl=7", 7)])
def test_how_far_multicast_goes(pair: Pair, kind: str, opened: ExitStack, ttl: str, wanted: int) -> None:
    group = KINDS[kind][0]
    ours = listening(opened, pair.right, url(group, f"interface={pair.right.device}"))
    if kind == "IPv6":
        ours.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
    else:
        ours.setsockopt(socket.IPPROTO_IP, 12, 1)  # IP_RECVTTL
    to = f"[{group}]:{PORT}" if kind == "IPv6" else f"{group}:{PORT}"
    with pair.left:
        sender.run(SendPlan(to=f"{to}?interface={pair.left.device}{ttl}", packets=1, size=8), [].append)
    ours.settimeout(20)
    _, [(_, _, hops)], _, _ = ours.recvmsg(100, 64)
    assert struct.unpack("i", hops)[0] == wanted


def test_multicast_without_a_way_out(pair: Pair) -> None:
    """It says which devices there are."""
    with pair.left, pytest.raises(Refused, match=r"give 239\.1\.1\.1:5000\?interface=, of lo, vl"):
        sender.run(SendPlan(to="239.1.1.1:5000", packets=1), [].append)


def test_a_mirror_answers_a_group_from_its_own_address(
    pair: Pair, kind: str, opened: ExitStack, fork: Callable[..., Child]
) -> None:
    group = KINDS[kind][0]
    plan = MirrorPlan(listen=url(group, f"interface={pair.right.device}"), duration=20)
    answers = listening(opened, pair.left, "udp://[::]:0" if kind == "IPv6" else "udp://0.0.0.0:0")

    def feed(view: dict[str, object]) -> None:
        if view["type"] != "ready":
            return
        level = socket.IPPROTO_IPV6 if kind == "IPv6" else socket.IPPROTO_IP
        with pair.left:
            index = socket.if_nametoindex(pair.left.device)
        if kind == "IPv6":
            answers.setsockopt(level, socket.IPV6_MULTICAST_IF, index)
        else:
            answers.setsockopt(level, socket.IP_MULTICAST_IF, struct.pack("8xi", index))
        answers.sendto(b"there and back", (group, PORT))

    def bounce() -> None:
        with pair.right:
            mirror.run(plan, feed)

    child = fork(bounce)
    answers.settimeout(20)
    payload, source = answers.recvfrom(100)
    child.send(signal.SIGTERM)
    assert child.wait() == 0
    assert (payload, source[:2]) == (b"there and back", (own(pair.right, kind), PORT))
