"""What a network device does of the work on packets: its features, by the names of `ethtool -k`."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSSET_INFO, _GFEATURES = 0x1B, 0x37, 0x3A  # linux/ethtool.h
_SS_FEATURES = 4
_NAME_BYTES = 32


def active(device: str) -> list[str] | None:
    """Names of the features that are on, in order; None where the device does not tell."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            info = _ask(sock, device, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_FEATURES, 0))
            count = struct.unpack_from("=I", info, 16)[0]
            head = struct.pack("=III", _GSTRINGS, _SS_FEATURES, count)
            names = _ask(sock, device, head + bytes(count * _NAME_BYTES))[12:]
            blocks = (count + 31) // 32
            bits = _ask(sock, device, struct.pack("=II", _GFEATURES, blocks) + bytes(16 * blocks))[8:]
    except OSError:
        return None
    on = [struct.unpack_from("=I", bits, 16 * block + 8)[0] for block in range(blocks)]
    return sorted(
        _name(names, index)
        for index in range(count)
        if on[index // 32] >> index % 32 & 1 and _name(names, index)
    )


def _name(names: bytes, index: int) -> str:
    return names[index * _NAME_BYTES :][:_NAME_BYTES].split(b"\0")[0].decode()


def _ask(sock: socket.socket, device: str, request: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(request, len(request))
    fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(buffer)))
    return buffer.raw
