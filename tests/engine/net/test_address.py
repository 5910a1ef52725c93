import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Refused
from engine.net.address import format_address, parse_host_port, resolve


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
    assert resolve("localhost:5000") == ("127.0.0.1", 5000)


@pytest.mark.parametrize("text", ["[::1]:5000", f"{'a' * 64}.x:1", "..:1"])
def test_what_has_no_ipv4_address_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="has no IPv4 address"):
        resolve(text)
