"""The mirror between plain Python sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from forked import Child

from engine.errors import Failed, Refused
from engine.net import mirror
from engine.net.mirror import Mirror, MirrorPlan
from engine.net.role import limit_sends
from engine.signals import END_SIGNALS

_ALL_SIZES = [0, 1, 100, 1472, 9000, 65507, 0, 3]


def bounce(plan: MirrorPlan, feed: Callable[[int], None]) -> dict[str, Any]:
    """Run a mirror; `feed` gets its port once it listens."""

    def on_output(view: dict[str, Any]) -> None:
        if view["type"] == "ready":
            feed(view["port"])

    return mirror.run(plan, on_output)


def payloads(sizes: list[int]) -> list[bytes]:
    return [bytes((i + k) & 0xFF for k in range(size)) for i, size in enumerate(sizes)]


def feeder(source: Any, packets: list[bytes]) -> Callable[[int], None]:
    def feed(port: int) -> None:
        for packet in packets:
            source.socket.sendto(packet, ("127.0.0.1", port))

    return feed


@pytest.mark.parametrize("receive", ["recvmmsg", "recvmsg"])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_packets_come_back_to_their_source_as_they_were(receiver: Any, batch: int, receive: Any) -> None:
    packets = payloads(_ALL_SIZES)
    plan = MirrorPlan(listen="udp://127.0.0.1:0", duration=0.05, batch=batch, receive=receive)
    ports = []
    feed = feeder(receiver, packets)
    summary = bounce(plan, lambda port: (ports.append(port), feed(port))[1])
    back = receiver.take()
    assert [payload for payload, _ in back] == packets
    assert {port for _, port in back} == set(ports)
    assert summary["received"] == summary["forwarded"] == len(packets)
    assert summary["bytes"] == sum(_ALL_SIZES)
    assert (summary["truncated"], summary["failed"], summary["socket_dropped"]) == (0, 0, 0)
    assert summary["errors"] == {}


def test_one_by_one_has_a_call_for_each(receiver: Any) -> None:
    plan = MirrorPlan(listen="udp://127.0.0.1:0", duration=0.05, receive="recvmsg")
    summary = bounce(plan, feeder(receiver, payloads([10] * 20)))
    assert summary["forwarded"] == 20
    assert summary["packets_per_call"] == 1


def test_a_batch_larger_than_one_call_sends(receiver: Any) -> None:
    """sendmmsg takes 1024 messages; they stand in the socket before the mirror begins."""
    half = Mirror(MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, batch=3000, rcvbuf=8 << 20))
    with mirror.ExitStack() as stack:
        half.prepare(stack)
        feeder(receiver, payloads([1] * 1500))(half.bound[1])
        half.start()
        half.drain()
    counts = half.summary()
    assert counts["received"] == counts["forwarded"] == counts["packets_per_call"] == 1500


def test_there_and_back_over_ipv6() -> None:
    """To whom it came from, and from the address it went to."""
    packets = payloads(_ALL_SIZES)
    ports = []
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as source:
        source.bind(("::1", 0))
        source.settimeout(10)

        def feed(port: int) -> None:
            ports.append(port)
            for packet in packets:
                source.sendto(packet, ("::1", port))

        summary = bounce(MirrorPlan(listen="udp://[::]:0", duration=0.05), feed)
        back = [source.recvfrom(65536) for _ in packets]
    assert [payload for payload, _ in back] == packets
    assert {address[:2] for _, address in back} == {("::1", ports[0])}
    assert summary["received"] == summary["forwarded"] == len(packets)
    assert (summary["failed"], summary["errors"]) == (0, {})


def test_from_ipv4_to_ipv6() -> None:
    packets = payloads(_ALL_SIZES)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as end,
    ):
        end.bind(("::1", 0))
        end.settimeout(10)

        def feed(port: int) -> None:
            for packet in packets:
                source.sendto(packet, ("127.0.0.1", port))

        to = f"[::1]:{end.getsockname()[1]}"
        summary = bounce(MirrorPlan(listen="udp://127.0.0.1:0", to=to, duration=0.05), feed)
        assert [end.recv(65536) for _ in packets] == packets
    assert (summary["forwarded"], summary["failed"]) == (len(packets), 0)


def test_each_source_gets_its_own_back(receiver: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.settimeout(10)

        def feed(port: int) -> None:
            for i in range(10):
                (receiver.socket if i % 3 else other).sendto(bytes([i]), ("127.0.0.1", port))

        bounce(MirrorPlan(listen="udp://127.0.0.1:0", duration=0.05), feed)
        assert [payload[0] for payload, _ in receiver.take()] == [1, 2, 4, 5, 7, 8]
        assert [other.recv(9)[0] for _ in range(4)] == [0, 3, 6, 9]


def test_packets_go_to_a_fixed_place(receiver: Any) -> None:
    packets = payloads(_ALL_SIZES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:

        def feed(port: int) -> None:
            for packet in packets:
                source.sendto(packet, ("127.0.0.1", port))

        summary = bounce(MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, duration=0.05), feed)
    assert [payload for payload, _ in receiver.take()] == packets
    assert summary["forwarded"] == len(packets)


def test_a_cut_packet_is_counted_and_not_forwarded(receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_BUFFER_BYTES", 64)
    packets = payloads([64, 65, 3000, 10])
    summary = bounce(MirrorPlan(listen="udp://127.0.0.1:0", duration=0.05), feeder(receiver, packets))
    assert [payload for payload, _ in receiver.take()] == [packets[0], packets[3]]
    assert (summary["received"], summary["forwarded"], summary["truncated"]) == (4, 2, 2)


def test_what_overflows_the_socket_is_counted(receiver: Any) -> None:
    packets = payloads([1000] * 500)
    plan = MirrorPlan(listen="udp://127.0.0.1:0", rcvbuf=20_000, duration=0.05)
    summary = bounce(plan, feeder(receiver, packets))
    assert summary["socket_dropped"] > 0
    assert summary["received"] + summary["socket_dropped"] == 500
    assert summary["forwarded"] == summary["received"] == len(receiver.take())


def test_nobody_there_to_receive(receiver: Any) -> None:
    """The first packet is on the wire; the second meets the news, and is sent all the same."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:

        def feed(port: int) -> None:
            receiver.close()
            for _ in range(10):
                source.sendto(b"x", ("127.0.0.1", port))

        plan = MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, duration=0.05, batch=1)
        summary = bounce(plan, feed)
    assert (summary["forwarded"], summary["failed"]) == (10, 0)
    assert summary["errors"] == {"ECONNREFUSED": 9}


def test_what_cannot_be_forwarded_is_counted(receiver: Any) -> None:
    """With the way out gone, each packet fails by itself."""
    half = Mirror(MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to))
    with mirror.ExitStack() as stack:
        half.prepare(stack)
        half.state[0]["out_fd"] = 10**6  # no such file
        receiver.socket.sendto(b"x", half.bound)
        receiver.socket.sendto(b"y", half.bound)
        half.start()
        half.drain()
    assert (half.counts()["received"], half.counts()["forwarded"], half.counts()["failed"]) == (2, 0, 2)
    assert half.summary()["errors"] == {"EBADF": 2}


def drained(receiver: Any, way_out: socket.socket, packets: int) -> dict[str, Any]:
    """The summary of a mirror that has to drain so many packets, and sends them on by that socket."""
    half = Mirror(MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, batch=4))
    way_out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # room for two or three packets
    limit_sends(way_out)
    with mirror.ExitStack() as stack:
        half.prepare(stack)
        half.state[0]["out_fd"] = way_out.fileno()
        for _ in range(packets):
            receiver.socket.sendto(b"x", half.bound)
        half.start()
        half.drain()
    return half.summary()


def test_a_slow_way_out_loses_nothing_at_the_end(receiver: Any, fork: Callable[..., Child]) -> None:
    """It takes a packet each 10 ms: 100 of them take longer than any stall that ends the draining."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def read_slowly() -> None:
        for _ in range(100):
            assert theirs.recv(9) == b"x"
            time.sleep(0.01)

    with ours, theirs:
        reader = fork(read_slowly)
        summary = drained(receiver, ours, 100)
        assert reader.wait() == 0
    assert (summary["received"], summary["forwarded"], summary["unforwarded"]) == (100, 100, 0)
    assert summary["errors"] == {}


def test_a_stuck_way_out_ends_the_draining_and_the_rest_is_counted(receiver: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    begin = time.monotonic()
    with ours, theirs:
        summary = drained(receiver, ours, 200)
    assert time.monotonic() - begin < 5  # each batch of four would wait for 50 ms: 2.5 s, if it went on
    assert 0 < summary["forwarded"] < 10
    assert summary["received"] == summary["forwarded"] + summary["failed"]
    assert summary["unforwarded"] == 200 - summary["received"] > 100
    assert f"{summary['unforwarded']} unforwarded" in mirror.line(summary)


def test_an_error_that_lasts_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with open(tmp_path / "file", "wb") as file:
        ready = Mirror.ready

        def break_it(self: Mirror) -> dict[str, Any]:
            self.state[0]["fd"] = file.fileno()
            return ready(self)

        monkeypatch.setattr(Mirror, "ready", break_it)
        with pytest.raises(Failed, match="Socket operation on non-socket"):
            bounce(MirrorPlan(listen="udp://127.0.0.1:0"), lambda port: None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"listen": "127.0.0.1:5000"}, "--listen '127.0.0.1:5000' is no URL.*udp://ADDR:PORT"),
        ({"listen": "tcp://127.0.0.1:5000"}, "--listen .*tcp.*: give udp://ADDR:PORT"),
        ({"listen": "udp://127.0.0.1"}, "port missing: give ADDR:PORT"),
        ({"listen": "udp://127.0.0.1:5000?x=1"}, "'x=1' is no option"),
        ({"listen": "udp://192.0.2.1:5000"}, "no interface"),
        ({"to": "nowhere"}, "HOST:PORT"),
        ({"to": "127.255.255.255:5000"}, "broadcast"),
        ({"batch": 0}, "--batch"),
        ({"batch": 3001}, "--batch"),
        ({"rcvbuf": 0}, "--rcvbuf"),
        ({"duration": -1.0}, "--duration"),
        ({"cpu": "4095"}, "4095"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    plan = MirrorPlan(**({"listen": "udp://127.0.0.1:0", "duration": 0.01} | changes))
    with pytest.raises(Refused, match=said):
        mirror.run(plan, lambda view: None)


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_a_mirror_that_faces_itself_is_refused(receiver: Any, listen: str) -> None:
    receiver.close()  # its port is free now
    with pytest.raises(Refused, match="where the mirror listens"):
        mirror.run(MirrorPlan(listen=f"udp://{listen}:{receiver.port}", to=receiver.to), lambda view: None)


@pytest.mark.parametrize(
    ("listen", "to"),
    [
        ("udp://[::1]:{}", "[::1]:{}"),
        ("udp://[::]:{}", "[::1]:{}"),
        ("udp://239.1.1.1:{}?interface=lo", "239.1.1.1:{}?interface=lo"),
    ],
)
def test_so_it_is_over_ipv6_and_within_a_group(receiver: Any, listen: str, to: str) -> None:
    plan = MirrorPlan(listen=listen.format(receiver.port), to=to.format(receiver.port))
    with pytest.raises(Refused, match="where the mirror listens"):
        mirror.run(plan, lambda view: None)


def test_a_taken_port_is_refused(receiver: Any) -> None:
    with pytest.raises(Refused, match=f"cannot listen on {receiver.to}"):
        mirror.run(MirrorPlan(listen=f"udp://{receiver.to}"), lambda view: None)


@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_signal_ends_it_in_order(receiver: Any, number: signal.Signals) -> None:
    code = (
        "import json; from engine.net import mirror; "
        "plan = mirror.MirrorPlan(listen='udp://127.0.0.1:0', duration=600); "
        "mirror.run(plan, lambda view: print(json.dumps(view), flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        receiver.socket.sendto(b"first", ("127.0.0.1", port))
        assert receiver.wait() == b"first"
        process.send_signal(signal.SIGSTOP)
        for packet in payloads([10] * 100):
            receiver.socket.sendto(packet, ("127.0.0.1", port))
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    summary = json.loads(output.splitlines()[-1])
    assert summary["type"] == "summary"
    assert summary["received"] == summary["forwarded"] == 101
    assert [payload for payload, _ in receiver.take()] == payloads([10] * 100)


def test_lines_for_people(receiver: Any) -> None:
    outputs: list[dict[str, Any]] = []
    mirror.run(MirrorPlan(listen="udp://127.0.0.1:0", to=receiver.to, duration=0.01), outputs.append)
    ready, summary = map(mirror.line, outputs)
    port = outputs[0]["port"]
    assert ready == f"mirrors udp://127.0.0.1:{port} to {receiver.to}, cpu any, pid {os.getpid()}"
    assert summary.endswith(
        "0/s, 0 received, 0 forwarded, 0 truncated, 0 failed, 0 unforwarded, 0 dropped by the socket"
    )
    joined = outputs[0] | {"joined": "joined 239.1.1.1 on eth1"}
    assert mirror.line(joined) == f"{ready}; joined 239.1.1.1 on eth1"
    short = outputs[0] | {"rcvbuf": {"asked": 10**9, "granted": 212992}}
    assert "net.core.rmem_max=500000000" in mirror.line(short)


def test_intervals_count_from_the_start(receiver: Any) -> None:
    half = Mirror(MirrorPlan(listen="udp://127.0.0.1:0"))
    with mirror.ExitStack() as stack:
        half.prepare(stack)
        half.start()
        receiver.socket.sendto(b"x" * 10, half.bound)
        half.drain()
        view = half.interval()
        receiver.socket.sendto(b"too late", half.bound)
        half.drain()
        assert half.counts()["received"] == 1
        assert half.drops.read() == 1
    assert (view["received"], view["forwarded"], view["bytes"], view["socket_dropped"]) == (1, 1, 10, 0)
    assert view["packets_per_second"] > 0
    assert mirror.line(view).startswith("   0.0 s")
