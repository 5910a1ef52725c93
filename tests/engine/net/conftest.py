"""Plain Python sockets at the other end: what they get is what was really sent."""

import socket
from collections.abc import Iterator

import pytest


class Receiver:
    """A UDP socket on 127.0.0.1; `take` gives what has arrived, in order."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.to = f"127.0.0.1:{self.port}"

    def take(self) -> list[tuple[bytes, int]]:
        """(payload, source port) of every packet that is there; loopback delivers within the send."""
        packets = []
        self.socket.setblocking(False)
        while True:
            try:
                payload, (_, port) = self.socket.recvfrom(65536)
            except BlockingIOError:
                return packets
            packets.append((payload, port))

    def wait(self, timeout: float = 20) -> bytes:
        """The next packet."""
        self.socket.settimeout(timeout)
        return self.socket.recv(65536)

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()
