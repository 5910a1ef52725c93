import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Refused
from engine.net.address import (
    Destination,
    family,
    format_address,
    parse_destination,
    parse_host_port,
    resolve,
    route_device,
)


@given(st.sampled_from(["127.0.0.1", "localhost", "a-b.example", "::1", "fe80::1%lo"]), st.integers(1, 65535))
def test_what_is_written_is_read_back(host: str, port: int) -> None:
    assert parse_host_port(format_address((host, port))) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5000",
        ":5000",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1x",
        "::1:5000",
        "[]:1",
        "[::1]",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="HOST:PORT"):
        parse_host_port(text)


@given(st.text(max_size=20))
def test_no_text_is_a_crash(text: str) -> None:
    try:
        host, port = parse_host_port(text)
    except Refused:
        return
    assert host
    assert 1 <= port <= 65535


def test_port_0_where_one_may_choose() -> None:
    assert parse_host_port("127.0.0.1:0", least_port=0) == ("127.0.0.1", 0)


def test_names_are_resolved() -> None:
    assert resolve("localhost", 5000) == ("127.0.0.1", 5000)
    assert resolve("::1", 5000) == ("::1", 5000, 0, 0)
    index = socket.if_nametoindex("lo")
    assert resolve("fe80::1%lo", 5000) == resolve("fe80::1", 5000, "lo") == ("fe80::1", 5000, 0, index)
    assert resolve("127.0.0.1", 5000, "lo") == ("127.0.0.1", 5000)


def test_families() -> None:
    assert family(resolve("127.0.0.1", 1)) == socket.AF_INET
    assert family(resolve("::1", 1)) == socket.AF_INET6


def test_an_address_shows_its_device() -> None:
    assert format_address(resolve("fe80::1%lo", 5000)) == "[fe80::1%lo]:5000"
    assert format_address(("fe80::1", 5000, 0, 1 << 30)) == "[fe80::1]:5000"  # it is gone


@pytest.mark.parametrize("host", [f"{'a' * 64}.x", ".."])
def test_what_has_no_address_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="has no address"):
        resolve(host, 5000)


@pytest.mark.parametrize("host", ["fe80::1%none0", "fe80::1"])
def test_a_device_that_is_not_there_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="there is no device none0: there are lo"):
        resolve(host, 5000, "none0")


def test_destinations() -> None:
    assert parse_destination("a:1") == Destination("a", 1)
    assert parse_destination("[fe80::1%lo]:1") == Destination("fe80::1%lo", 1)
    assert parse_destination("239.1.1.1:1?interface=lo") == Destination("239.1.1.1", 1, "lo")
    assert parse_destination("[ff02::1]:1?ttl=9&interface=lo") == Destination("ff02::1", 1, "lo", 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1:1?ttl=1", "127.0.0.1 is no multicast address: leave out"),
        ("host:1?interface=lo", "host is no multicast address"),
        ("239.1.1.1:1?", "'' is no option: give interface= or ttl="),
        ("239.1.1.1:1?ttl=256", "ttl 256: give 0 to 255"),
        ("239.1.1.1:1?ttl=-1", "ttl -1: give 0 to 255"),
        ("239.1.1.1:1?source=10.0.0.1", "'source=10.0.0.1' is no option"),
        ("[fe80::1]:1", "fe80::1 is link-local, say on which device"),
        ("[ff02::1]:1?ttl=3", "ff02::1 is link-local, say on which device"),
        ("[::ffff:1.2.3.4]:1", "is an IPv4 address: give 1.2.3.4"),
    ],
)
def test_what_is_no_destination(text: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        parse_destination(text)


def test_routes() -> None:
    assert route_device("127.0.0.1") == route_device("127.8.8.8") == route_device("::1") == "lo"
