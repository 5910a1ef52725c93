"""Case 5: CPU masks held in 32 bits; the code that should have read back what was got never ran."""

import os
import subprocess
import sys

import pytest

from engine.affinity import pinning, topology
from engine.affinity.topology import format_cpu_list, parse_cpu_list
from engine.errors import Refused


def test_ids_up_to_4095_are_read_and_written() -> None:
    assert parse_cpu_list("31-33,63-65,4095") == (31, 32, 33, 63, 64, 65, 4095)
    assert format_cpu_list((4095, 31, 32, 33, 63, 64, 65)) == "31-33,63-65,4095"


@pytest.mark.parametrize("beyond", [32, 64, 1024])
def test_a_high_id_never_wraps_to_a_low_one(beyond: int) -> None:
    low = topology.allowed()[0]
    if low + beyond in topology.present():
        pytest.skip("this machine has that CPU")
    before = os.sched_getaffinity(0)
    with pytest.raises(Refused, match=f"CPU {low + beyond} does not exist"):
        pinning.pin(os.getpid(), [low + beyond])
    assert os.sched_getaffinity(0) == before


def test_a_partly_possible_mask_is_not_narrowed_silently() -> None:
    """The kernel would take {0, 4095} and give {0}."""
    if topology.MAX_CPU in topology.present():
        pytest.skip("this machine has that CPU")
    before = os.sched_getaffinity(0)
    with pytest.raises(Refused, match="4095"):
        pinning.pin(os.getpid(), [topology.allowed()[0], topology.MAX_CPU])
    assert os.sched_getaffinity(0) == before


def test_what_was_got_is_read_back() -> None:
    cpu = topology.allowed()[-1]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert [thread.cpus for thread in pinning.pin(child.pid, [cpu])] == [(cpu,)]
        child.kill()
