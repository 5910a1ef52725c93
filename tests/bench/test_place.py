import os
import signal
import subprocess

import pytest
from forked import Child, readable

from bench.place import open_place
from engine.errors import Refused


def _namespaces() -> list[str]:
    return sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []


@pytest.mark.parametrize("name", ["lo", pytest.param("veth", marks=pytest.mark.root)])
def test_packets_cross_it_and_it_is_gone_afterwards(name: str) -> None:
    if name == "veth" and os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with open_place(name) as place:
        assert place.name == name
        listen = f"udp://{place.receive.host}:0"
        with place.receive.rxring("run", "--listen", listen, "--packets", "1000") as engine:
            port = engine.next("ready")["receivers"][0]["port"]
            what = ("--to", f"{place.receive.host}:{port}", "--packets", "1000", "--rate", "100000")
            with place.send.rxring("send", *what) as sender:
                sent = sender.next("summary")
            summary = engine.next("summary")
    assert sent["sent"] >= 1000  # and closing stamps
    assert summary["receivers"][0]["packets"] == 1000
    assert not any(f"bench{os.getpid()}." in namespace for namespace in _namespaces())


@pytest.mark.root
def test_what_one_who_was_killed_left_is_removed_by_the_next() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    before = _namespaces()
    ready, write_end = os.pipe()

    def live() -> None:
        with open_place("veth"):
            os.write(write_end, b"x")
            signal.pause()

    child = Child(live)
    assert readable(ready, 60)
    left = {*_namespaces()} - {*before}
    child.kill()
    assert len(left) == 2
    with open_place("veth"):
        assert not left & {*_namespaces()}
    assert not left & {*_namespaces()}
    os.close(ready)
    os.close(write_end)


@pytest.mark.root
def test_a_side_is_where_sockets_are_made() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    home = os.readlink("/proc/self/ns/net")
    with open_place("veth") as place:
        with place.send:
            assert os.readlink("/proc/self/ns/net") != home
            assert place.send.device in os.listdir("/proc/self/net/dev_snmp6")
        assert os.readlink("/proc/self/ns/net") == home
        listed = place.receive.command("ls", "/sys/class/net")
        assert place.receive.device in subprocess.check_output(listed, text=True).split()


def test_another_is_refused() -> None:
    with pytest.raises(Refused, match="give lo or veth"), open_place("moon"):
        pass
