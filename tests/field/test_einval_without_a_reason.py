"""Case 25: EINVAL, and no word whether the CPU is missing, offline or outside the cpuset."""

import os

import pytest

from engine.affinity import pinning, topology
from engine.errors import Refused


def test_each_reason_is_told_from_the_others() -> None:
    def reason(cpu: int) -> str:
        return pinning.obstacle([cpu], present=[0, 1, 2, 3], online=[0, 1, 2], allowed=[1, 2])

    assert "CPU 7 does not exist" in reason(7)
    assert "CPU 3 is offline" in reason(3)
    assert "CPU 0 is outside the cpuset" in reason(0)
    assert reason(1) == ""


def test_the_real_refusal_is_one_line_and_names_what_may_be_had() -> None:
    with pytest.raises(Refused) as refused:
        pinning.pin(os.getpid(), [topology.MAX_CPU])
    text = str(refused.value)
    assert "4095" in text
    assert topology.format_cpu_list(topology.allowed()) in text
    assert "\n" not in text
    assert "Errno" not in text
