import ipaddress
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import spec
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


# ── URLs to listen on ────────────────────────────────────────────────────────────────────────────────

DEVICES = st.from_regex(r"[A-Za-z0-9_.+-]{1,15}", fullmatch=True)


@given(st.ip_addresses(v=4), st.integers(0, 65535), DEVICES)
def test_an_ipv4_url_is_read_back(address: ipaddress.IPv4Address, port: int, device: str) -> None:
    where = spec.listen(f"udp://{address}:{port}?interface={device}")
    assert (where.host, where.port, where.interface) == (str(address), port, device)
    assert str(where) == f"udp://{address}:{port}?interface={device}"


@given(st.ip_addresses(v=6), st.integers(0, 65535), DEVICES)
def test_an_ipv6_url_is_read_back(address: ipaddress.IPv6Address, port: int, device: str) -> None:
    for url in (f"udp://[{address}]:{port}?interface={device}", f"udp://[fe80::{port:x}%{device}]:{port}"):
        if address.ipv4_mapped is None:
            assert str(spec.listen(url)) == url


GROUPS = st.sampled_from([("239.1.1.1", 4), ("[ff3e::1]", 6)])


@given(st.data())
def test_sources_are_read_back(data: st.DataObject) -> None:
    group, version = data.draw(GROUPS)
    hosts = st.ip_addresses(v=version).filter(lambda address: not address.is_multicast)
    sources = data.draw(st.lists(hosts.map(str), unique=True))
    url = f"udp://{group}:5000" + "?" * bool(sources) + "&".join(f"source={source}" for source in sources)
    assert spec.listen(url).sources == tuple(sources)
    assert str(spec.listen(url)) == url


@given(st.text(max_size=30))
def test_no_url_is_a_crash(text: str) -> None:
    for url in (text, f"udp://{text}", f"udp://[{text}]:1", f"udp://239.1.1.1:1?{text}"):
        try:
            where = spec.listen(url)
        except ValueError:
            continue
        assert spec.listen(str(where)) == where


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("udp://[::1:5000", "is no URL"),
        ("udp://::1:5000", "is no URL"),
        ("udp://[127.0.0.1]:5000", "no IPv6 address"),
        ("udp://[::1%lo]:5000", "::1%lo is not link-local: leave out %lo"),
        ("udp://[::ffff:127.0.0.1]:5000", "is an IPv4 address: give 127.0.0.1"),
        ("udp://[fe80::1]:5000", "fe80::1 is link-local, say on which device: [fe80::1%DEV]"),
        ("udp://[ff02::1]:5000", "ff02::1 is link-local"),
        ("udp://[fe80::1%eth0]:5000?interface=eth0", "names its device already"),
        ("udp://0.0.0.0:5000?", "'' is no option: give interface= or source="),
        ("udp://0.0.0.0:5000?ttl=2", "'ttl=2' is no option"),
        ("udp://0.0.0.0:5000?interface=", "'interface=' is no option"),
        ("udp://0.0.0.0:5000?interface=a/b", "is no name of a device"),
        ("udp://0.0.0.0:5000?interface=a&interface=b", "interface=b is given twice"),
        ("udp://239.1.1.1:5000?source=10.0.0.1&source=10.0.0.1", "source=10.0.0.1 is given twice"),
        ("udp://10.0.0.2:5000?source=10.0.0.1", "source= is for a multicast group"),
        ("udp://group:5000?source=10.0.0.1", "source= is for a multicast group"),
        ("udp://239.1.1.1:5000?source=::1", "source=::1: give a host's address"),
        ("udp://239.1.1.1:5000?source=239.1.1.2", "give a host's address"),
        ("udp://239.1.1.1:5000?source=somebody", "give a host's address"),
    ],
)
def test_urls_that_make_no_sense(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        spec.listen(url)
