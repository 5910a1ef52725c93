"""Addresses as people write them, what they stand for, and the network devices they are reached on.

HOST:PORT, an IPv6 address in brackets: [::1]:5000. The device of a link-local one stands behind its %:
[fe80::1%eth0]:5000. A name stands for its IPv4 address, if it has one.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.errors import Refused

_HOST_PORT = re.compile(r"(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_DEVICE = re.compile(r"[A-Za-z0-9_.+-]{1,15}")

# rtnetlink: struct nlmsghdr and struct rtmsg, then attributes.
_NLMSGHDR, _RTMSG, _RTATTR = struct.Struct("=IHHII"), struct.Struct("=8BI"), struct.Struct("=HH")
_RTM_NEWROUTE, _RTM_GETROUTE, _NLM_F_REQUEST = 24, 26, 1
_RTA_DST, _RTA_OIF = 1, 4

Address = tuple[Any, ...]  # what socket.bind and socket.connect take: two items, with IPv6 four


@dataclass(frozen=True, slots=True)
class Destination:
    """Where packets are sent. `ttl`: of multicast, None: 1, they stay on the link."""

    host: str
    port: int
    interface: str | None = None
    ttl: int | None = None


def parse_host_port(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """("10.0.0.1", 5000) from "10.0.0.1:5000"; IPv6 addresses stand in brackets. Refused otherwise."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or not least_port <= int(match["port"]) <= 65535:
        raise Refused(f"{text!r} is no address: give HOST:PORT, like 127.0.0.1:5000 or [::1]:5000")
    return match["literal"] or match["host"], int(match["port"])


def parse_destination(text: str) -> Destination:
    """HOST:PORT, a multicast one with [?interface=DEV&ttl=N]. Refused otherwise."""
    where, question, rest = text.partition("?")
    host, port = parse_host_port(where)
    try:
        options = parse_options(rest, ("interface", "ttl")) if question else {}
        if options and not is_multicast(host):
            raise ValueError(f"{host} is no multicast address: leave out ?{rest}")
        interface = options.get("interface", (None,))[0]
        check_device(host, interface)
        ttl = options.get("ttl", (None,))[0]
        if ttl is not None and not (re.fullmatch("[0-9]{1,3}", ttl) and int(ttl) <= 255):
            raise ValueError(f"ttl {ttl}: give 0 to 255")
    except ValueError as error:
        raise Refused(f"{text!r}: {error}") from None
    return Destination(host, port, interface, None if ttl is None else int(ttl))


def parse_options(text: str, known: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """KEY=VALUE&KEY=VALUE…, each value of a key in order; only `source` may stand there several times.

    ValueError where it is something else.
    """
    options: dict[str, tuple[str, ...]] = {}
    for item in text.split("&"):
        key, _, value = item.partition("=")
        if key not in known or not value:
            raise ValueError(f"{item!r} is no option: give {' or '.join(f'{key}=' for key in known)}")
        if key == "interface" and not _DEVICE.fullmatch(value):
            raise ValueError(f"{value!r} is no name of a device: `ip link` lists them")
        if (key in options and key != "source") or value in options.get(key, ()):
            raise ValueError(f"{item} is given twice: give it once")
        options[key] = (*options.get(key, ()), value)
    return options


def literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is; None: it is a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def is_multicast(host: str) -> bool:
    found = literal(host)
    return found is not None and found.is_multicast


def check_device(host: str, interface: str | None) -> None:
    """ValueError where an address needs a device and has none, or has one and can't."""
    found = literal(host)
    if not isinstance(found, ipaddress.IPv6Address):
        return
    # ff01 and ff02: multicast that stays on the machine, and on the link.
    link_local = found.is_link_local or (found.is_multicast and found.packed[1] & 0xF in (1, 2))
    if found.scope_id is not None and not (link_local and _DEVICE.fullmatch(found.scope_id)):
        raise ValueError(f"{host} is not link-local: leave out %{found.scope_id}")
    if found.scope_id is not None and interface is not None:
        raise ValueError(f"{host} names its device already: leave out interface={interface}")
    if link_local and found.scope_id is None and interface is None:
        raise ValueError(f"{host} is link-local, say on which device: [{host}%DEV]")
    if found.ipv4_mapped is not None:
        raise ValueError(f"{host} is an IPv4 address: give {found.ipv4_mapped}")


def check_sources(host: str, sources: tuple[str, ...]) -> None:
    """ValueError where these can't be senders to this group."""
    group = literal(host)
    if not sources:
        return
    if not (group and group.is_multicast):
        raise ValueError(f"source= is for a multicast group, {host} is none: leave it out")
    for text in sources:
        source = literal(text)
        if not source or "%" in text or source.version != group.version or source.is_multicast:
            raise ValueError(f"source={text}: give a host's address, IPv4 or IPv6 as {host}")


def resolve(host: str, port: int, device: str | None = None, *, advice: str = "give another host") -> Address:
    """The socket address of a host; what stands behind a %, else `device`, is its scope. Refused without."""
    host, _, scope = host.partition("%")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise Refused(f"{host!r} has no address ({reason}): {advice}") from None
    address: Address = min(found, key=lambda info: info[0] != socket.AF_INET)[4]
    scope = scope or device or ""
    if len(address) == 2 or not scope:
        return address
    return (*address[:3], device_index(scope))


def family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if len(address) == 2 else socket.AF_INET6


def format_address(address: Address) -> str:
    """HOST:PORT; the host of an IPv6 address in brackets, with its device."""
    host, port = address[:2]
    if len(address) == 4 and address[3]:
        with suppress(OSError):  # it is gone
            host += f"%{socket.if_indextoname(address[3])}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def device_names() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def device_index(name: str) -> int:
    """Refused where there is no such device."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        raise Refused(f"there is no device {name}: there are {device_names()}") from None


def route_device(host: str) -> str | None:
    """The device that the routing table takes for an address; None: it has no route. Nothing is sent."""
    destination = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    kind = socket.AF_INET if len(destination) == 4 else socket.AF_INET6
    body = _RTMSG.pack(kind, 8 * len(destination), 0, 0, 0, 0, 0, 0, 0)
    body += _RTATTR.pack(_RTATTR.size + len(destination), _RTA_DST) + destination
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.send(_NLMSGHDR.pack(_NLMSGHDR.size + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + body)
        answer = asking.recv(8192)
    if _NLMSGHDR.unpack_from(answer)[1] != _RTM_NEWROUTE:
        return None
    at = _NLMSGHDR.size + _RTMSG.size
    while at + _RTATTR.size <= len(answer):
        size, attribute = _RTATTR.unpack_from(answer, at)
        if attribute == _RTA_OIF:
            return socket.if_indextoname(struct.unpack_from("=I", answer, at + _RTATTR.size)[0])
        at += (size + 3) & -4 or len(answer)
    return None
