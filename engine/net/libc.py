"""What sockets need of the C library, callable from compiled code; the structs of 64-bit Linux.

All fields are signed here, also those that C declares size_t or unsigned: none of their values reaches
the sign bit, and numba would turn a mix of signed and unsigned into floating point.
"""

from __future__ import annotations

import errno as errors
import mmap
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

_i64, _i32 = types.int64, types.int32

# ssize_t recvmsg(int, struct msghdr *, int); −1 and errno when it fails, as all of these.
recvmsg = types.ExternalFunction("recvmsg", _i64(_i32, _i64, _i32))
sendmsg = types.ExternalFunction("sendmsg", _i64(_i32, _i64, _i32))
# int recvmmsg(int, struct mmsghdr *, unsigned, int, struct timespec *). Give no time-out (0): the kernel
# looks at it only after a datagram has arrived.
recvmmsg = types.ExternalFunction("recvmmsg", _i32(_i32, _i64, _i32, _i32, _i64))
# int sendmmsg(int, struct mmsghdr *, unsigned, int). Takes at most MAX_SEND_MESSAGES of them.
sendmmsg = types.ExternalFunction("sendmmsg", _i32(_i32, _i64, _i32, _i32))
# int poll(struct pollfd *, nfds_t, int milliseconds)
poll = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))

MAX_SEND_MESSAGES = 1024  # UIO_MAXIOV: sendmmsg silently takes no more
MAX_DATAGRAM_BYTES = 65507  # UDP payload over IPv4
NAME_BYTES = 28  # sizeof(struct sockaddr_in6), which a sockaddr_in fits into

MSG_TRUNC = int(socket.MSG_TRUNC)
MSG_DONTWAIT = int(socket.MSG_DONTWAIT)
MSG_WAITFORONE = 0x10000  # recvmmsg: wait for the first message only

SOL_UDP = 17
UDP_SEGMENT = 103  # GSO: the size of each packet that a message is cut into
UDP_GRO = 104
MAX_SEGMENTS = 128  # of one GSO message; 64 before Linux 6.9
SO_MEMINFO = 55

EINTR, EAGAIN, ECONNREFUSED = errors.EINTR, errors.EAGAIN, errors.ECONNREFUSED
ERRNOS = 134  # Linux's errno values lie below: a counter for each

IOVEC = np.dtype([("base", "i8"), ("length", "i8")])

# struct mmsghdr. Its first 56 bytes are a struct msghdr, so that its address serves recvmsg and sendmsg too.
MMSGHDR = np.dtype(
    {
        "names": [
            "name",  # address of a sockaddr, or 0
            "name_length",  # in: room; out: what it took. The kernel shrinks it: set it before every call
            "iovecs",  # address of the first IOVEC
            "iovec_count",
            "control",  # address of the control buffer, or 0
            "control_length",  # as name_length
            "flags",  # out: MSG_TRUNC and others
            "length",  # out: bytes received or sent
        ],
        "formats": ["i8", "i4", "i8", "i8", "i8", "i8", "i4", "i4"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    },
    align=True,
)

# struct cmsghdr; its data follows, and the next one begins on a multiple of 8.
CMSGHDR = np.dtype([("length", "i8"), ("level", "i4"), ("type", "i4")])

POLLFD = np.dtype([("fd", "i4"), ("events", "i2"), ("revents", "i2")])
POLLIN = 1
POLLOUT = 4


def shared_zeros(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """`numpy.zeros` in an anonymous mapping that forked children share."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    zeros: NDArray[Any] = (
        np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size].view(dtype).reshape(shape)
    )
    return zeros


@dataclass(frozen=True, slots=True)
class Messages:
    """`count` message headers for recvmmsg and sendmmsg, pointing into memory of their own.

    headers: MMSGHDR (count,). iovecs: IOVEC (count, k), to be filled by the caller.
    names: u1 (count, NAME_BYTES) or (count, 0). control: u1 (count, control_bytes).
    The headers hold addresses: keep this object while a call may use them.
    """

    headers: NDArray[Any]
    iovecs: NDArray[Any]
    names: NDArray[np.uint8]
    control: NDArray[np.uint8]

    @staticmethod
    def prepare(
        count: int, *, iovecs: int = 1, names: bool = False, control_bytes: int = 0, shared: bool = False
    ) -> Messages:
        """Headers with `iovecs` buffers each, room for the peer's address, room for ancillary data.

        shared: in memory that forked children share, so that one may see what another's call had taken.
        """
        zeros = shared_zeros if shared else np.zeros
        if control_bytes % 8:
            raise ValueError("control_bytes must be a multiple of 8: cmsghdr is aligned to it")
        messages = Messages(
            zeros(count, MMSGHDR),
            zeros((count, iovecs), IOVEC),
            zeros((count, NAME_BYTES if names else 0), np.uint8),
            zeros((count, control_bytes), np.uint8),
        )
        headers, index = messages.headers, np.arange(count)
        headers["iovecs"] = messages.iovecs.ctypes.data + index * iovecs * IOVEC.itemsize
        headers["iovec_count"] = iovecs
        if names:
            headers["name"] = messages.names.ctypes.data + index * NAME_BYTES
            headers["name_length"] = NAME_BYTES
        if control_bytes:
            headers["control"] = messages.control.ctypes.data + index * control_bytes
            headers["control_length"] = control_bytes
        return messages

    @property
    def address(self) -> int:
        return int(self.headers.ctypes.data)
