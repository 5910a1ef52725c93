"""Sockets for streams: TCP, and SMC (AF_SMC), which is TCP's face on shared memory between hosts.

Python knows no addresses of family AF_SMC, which are those of IPv4 or IPv6: bind and connect go to the C
library. Where the kernel has no AF_SMC that is said, and nothing else is taken instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from typing import Any

from engine.errors import Refused
from engine.net.address import parse_host_port
from engine.net.sockets import check_buffer

AF_SMC = 43
SCHEMES = ("tcp", "smc")
_BACKLOG = 1024
_SMC_PROTOCOLS = {socket.AF_INET: 0, socket.AF_INET6: 1}  # SMCPROTO_SMC, SMCPROTO_SMC6
_CONNECT_S = 10.0
_C = ctypes.CDLL(None, use_errno=True)


def open_stream(scheme: str, host: str, *, rcvbuf: int | None, share: bool) -> socket.socket:
    """A socket that is to listen, not bound yet. Refused where the kernel has no such family.

    rcvbuf: bytes of each connection's buffer, None lets the kernel grow it as needed. share: SO_REUSEPORT.
    """
    check_buffer("a receive buffer", rcvbuf)
    family, _ = _resolve(scheme, host, 0)
    sock = _socket(scheme, family)
    sock.setblocking(False)
    if family == socket.AF_INET6 and scheme == "tcp":
        sock.setsockopt(
            socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1
        )  # as for packets: IPv4 is another --listen
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former run may linger
    if share:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if rcvbuf is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf // 2)  # the kernel doubles it
    return sock


def listen_on(sock: socket.socket, scheme: str, host: str, port: int) -> tuple[str, int]:
    """Bind and listen; (address, port) as bound. Refused with the reason."""
    family, address = _resolve(scheme, host, port)
    try:
        _call(_C.bind, sock, family, address)
        sock.listen(_BACKLOG)
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "another process has the port: end it, or take another",
            errno.EADDRNOTAVAIL: "no interface has this address: `ip addr` lists them",
            errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE: take a higher one",
        }
        reason = reasons.get(error.errno or 0, f"{os.strerror(error.errno or 0)}: choose another address")
        raise Refused(f"cannot listen on {scheme}://{host}:{port}: {reason}") from None
    return address[0], _bound_port(sock, family)


def probe_stream(scheme: str, host: str, port: int) -> None:
    """Refused if `listen_on` would be, before anything else is done."""
    with open_stream(scheme, host, rcvbuf=None, share=False) as sock:
        listen_on(sock, scheme, host, port)


def connect_stream(to: str, sndbuf: int | None = None) -> socket.socket:
    """A connected socket to tcp://HOST:PORT or smc://HOST:PORT. Refused where nobody answers."""
    scheme, _, where = to.partition("://")
    host, port = parse_host_port(where)
    check_buffer("a send buffer", sndbuf)
    family, address = _resolve(scheme, host, port)
    try:
        sock = _socket(scheme, family)
    except OSError as error:
        raise Refused(
            f"cannot connect to {to}: {error.strerror}: each stream is an open file, `ulimit -n` allows more"
        ) from None
    try:
        if sndbuf is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf // 2)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_CONNECT_S), 0))
        _call(_C.connect, sock, family, address)
    except OSError as error:
        sock.close()
        reasons = {errno.ECONNREFUSED: "nobody listens there", errno.EINPROGRESS: "nobody answers"}
        reason = reasons.get(error.errno or 0, os.strerror(error.errno or 0))
        raise Refused(f"cannot connect to {to}: {reason}: start the receiver first") from None
    return sock


def _socket(scheme: str, family: int) -> socket.socket:
    if scheme == "tcp":
        return socket.socket(family, socket.SOCK_STREAM)
    try:
        return socket.socket(AF_SMC, socket.SOCK_STREAM, _SMC_PROTOCOLS[socket.AddressFamily(family)])
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT):
            raise
        raise Refused(
            "smc://: this kernel has no AF_SMC (`modprobe smc` loads it where it was built): give tcp://"
        ) from None


def _resolve(scheme: str, host: str, port: int) -> tuple[int, Any]:
    """(family, address) of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise Refused(f"{scheme}://{host}: no such host: give an address") from None
    family, _, _, _, address = found[0]
    return family, address


def _call(function: Any, sock: socket.socket, family: int, address: Any) -> None:
    """bind or connect by a sockaddr of this family, whatever the socket's is."""
    host, port = address[0].partition("%")[0], address[1]
    packed = socket.inet_pton(family, host)
    if family == socket.AF_INET:
        name = struct.pack("=H", family) + struct.pack("!H4s8x", port, packed)
    else:
        name = (
            struct.pack("=H", family) + struct.pack("!HI16s", port, 0, packed) + struct.pack("=I", address[3])
        )
    if function(sock.fileno(), name, len(name)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _bound_port(sock: socket.socket, family: int) -> int:
    """From the raw sockaddr: its port stands at the same place in both families."""
    name, length = ctypes.create_string_buffer(28), ctypes.c_uint(28)
    _C.getsockname(sock.fileno(), name, ctypes.byref(length))
    return int(struct.unpack_from("!H", name, 2)[0])
