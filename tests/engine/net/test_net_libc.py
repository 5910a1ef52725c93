"""The structs against the C compiler's layout as ctypes knows it, and against the kernel."""

import ctypes as c
import socket
import struct
from typing import Any

import numpy as np
import pytest

from engine.net import libc
from engine.net.libc import Messages, poll, recvmmsg, recvmsg, sendmmsg, sendmsg
from rings.jit import jit


class Iovec(c.Structure):
    _fields_ = (("base", c.c_void_p), ("length", c.c_size_t))


class Msghdr(c.Structure):
    _fields_ = (
        ("name", c.c_void_p),
        ("name_length", c.c_uint32),
        ("iovecs", c.c_void_p),
        ("iovec_count", c.c_size_t),
        ("control", c.c_void_p),
        ("control_length", c.c_size_t),
        ("flags", c.c_int),
    )


class Mmsghdr(c.Structure):
    _anonymous_ = ("header",)
    _fields_ = (("header", Msghdr), ("length", c.c_uint))


class Cmsghdr(c.Structure):
    _fields_ = (("length", c.c_size_t), ("level", c.c_int), ("type", c.c_int))


class Pollfd(c.Structure):
    _fields_ = (("fd", c.c_int), ("events", c.c_short), ("revents", c.c_short))


@pytest.mark.parametrize(
    ("dtype", "struct_type"),
    [
        (libc.IOVEC, Iovec),
        (libc.MMSGHDR, Mmsghdr),
        (libc.CMSGHDR, Cmsghdr),
        (libc.POLLFD, Pollfd),
    ],
)
def test_layouts(dtype: np.dtype[Any], struct_type: type[c.Structure]) -> None:
    assert dtype.itemsize == c.sizeof(struct_type)
    for name, (field, offset, *_) in dtype.fields.items():  # type: ignore[union-attr]
        there = getattr(struct_type, name)
        assert (name, offset, field.itemsize) == (name, there.offset, there.size)


@jit
def _call(which, fd, address, count, flags):  # type: ignore[no-untyped-def]
    if which == 0:
        return np.int64(recvmmsg(fd, address, count, flags, 0))
    if which == 1:
        return np.int64(sendmmsg(fd, address, count, flags))
    if which == 2:
        return recvmsg(fd, address, flags)
    if which == 3:
        return sendmsg(fd, address, flags)
    return np.int64(poll(address, count, flags))


def _two_parts(messages: Messages, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Give each message the two halves of a row of `memory`."""
    half = memory.shape[1] // 2
    for part in (0, 1):
        messages.iovecs["base"][:, part] = (
            memory.ctypes.data + np.arange(len(memory)) * 2 * half + part * half
        )
    messages.iovecs["length"] = half


def test_messages_go_through_the_kernel() -> None:
    """Two buffers a message, addresses, ancillary data; both calls of each kind."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as a,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as b,
    ):
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        a.connect(b.getsockname())
        b.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS
        outgoing, sent = Messages.prepare(3, iovecs=2), np.arange(3 * 8, dtype=np.uint8).reshape(3, 8)
        _two_parts(outgoing, sent)
        assert _call(1, a.fileno(), outgoing.address, 2, 0) == 2
        assert outgoing.headers["length"].tolist() == [8, 8, 0]
        assert _call(3, a.fileno(), outgoing.address + 2 * libc.MMSGHDR.itemsize, 1, 0) == 8

        waiting = np.array([(b.fileno(), libc.POLLIN, 0)], libc.POLLFD)
        assert _call(4, 0, waiting.ctypes.data, 1, 0) == 1
        assert waiting["revents"].tolist() == [libc.POLLIN]

        incoming, got = (
            Messages.prepare(4, iovecs=2, names=True, control_bytes=64),
            np.zeros((4, 8), np.uint8),
        )
        _two_parts(incoming, got)
        assert _call(0, b.fileno(), incoming.address, 2, libc.MSG_DONTWAIT) == 2
        assert _call(2, b.fileno(), incoming.address + 2 * libc.MMSGHDR.itemsize, 1, libc.MSG_DONTWAIT) == 8
        assert got[:3].tolist() == sent.tolist()
        assert incoming.headers["length"].tolist() == [8, 8, 0, 0]
        assert incoming.headers["name_length"].tolist() == [16, 16, 16, libc.NAME_BYTES]
        family, port = struct.unpack("=H2xxx", incoming.names[0, :6].tobytes())[0], a.getsockname()[1]
        assert (family, int.from_bytes(incoming.names[0, 2:4].tobytes(), "big")) == (socket.AF_INET, port)
        assert incoming.headers["control_length"].tolist() == [32, 32, 32, 64]
        stamp = incoming.control[0, :16].view(libc.CMSGHDR)[0]
        assert stamp.tolist() == (32, socket.SOL_SOCKET, 35)


def test_a_cut_datagram_is_marked() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.sendto(b"12345", sock.getsockname())
        incoming, got = Messages.prepare(1), np.zeros((1, 4), np.uint8)
        incoming.iovecs["base"], incoming.iovecs["length"] = got.ctypes.data, 4
        assert _call(0, sock.fileno(), incoming.address, 1, libc.MSG_WAITFORONE) == 1
        assert incoming.headers["flags"][0] & libc.MSG_TRUNC
        assert incoming.headers["length"][0] == 4


def test_control_buffers_are_aligned() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Messages.prepare(2, control_bytes=20)
    assert Messages.prepare(3, control_bytes=24).headers["control"].tolist()[1] % 8 == 0
