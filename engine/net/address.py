"""HOST:PORT as people write it, and the socket address it stands for."""

from __future__ import annotations

import re
import socket
from typing import Any

from engine.errors import Refused

_HOST_PORT = re.compile(r"(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")

Address = tuple[Any, ...]  # what socket.bind and socket.connect take


def parse_host_port(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """("10.0.0.1", 5000) from "10.0.0.1:5000"; IPv6 addresses stand in brackets. Refused otherwise."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or not least_port <= int(match["port"]) <= 65535:
        raise Refused(f"{text!r} is no address: give HOST:PORT, like 127.0.0.1:5000")
    return match["literal"] or match["host"], int(match["port"])


def resolve(text: str, *, least_port: int = 1) -> Address:
    """The IPv4 address of "HOST:PORT". Refused where there is none."""
    host, port = parse_host_port(text, least_port=least_port)
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise Refused(f"{host!r} has no IPv4 address ({reason}): give another host") from None
    return found[0][4]


def format_address(address: Address) -> str:
    """HOST:PORT; the host of an IPv6 address in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
