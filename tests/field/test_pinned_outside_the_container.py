"""Case 6: a container allows CPUs 2 and 4; pinning to 0 fails, and work goes on unpinned."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.affinity import pinning, topology
from engine.errors import Refused

_CPUSETS = Path("/sys/fs/cgroup/cpuset")


def test_the_container_of_the_report() -> None:
    reason = pinning.obstacle([0], present=range(8), online=range(8), allowed=[2, 4])
    assert reason == "cannot pin: CPU 0 is outside the cpuset of this process: choose from 2,4"


@pytest.fixture
def narrow_cpuset() -> Iterator[int]:
    """Put this process into a cpuset of its last CPU only; that CPU."""
    if not os.access(_CPUSETS / "tasks", os.W_OK) or len(topology.allowed()) < 2:
        pytest.skip("needs root, two CPUs and a cpuset hierarchy that can be written")
    home = next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.split(":", 2)[1] == "cpuset"
    )
    parent = Path(f"{_CPUSETS}{home}")
    before, cpu = os.sched_getaffinity(0), topology.allowed()[-1]
    group = parent / f"rxring-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpuset.mems").write_text((parent / "cpuset.mems").read_text())
        (group / "cpuset.cpus").write_text(str(cpu))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield cpu
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
        os.sched_setaffinity(0, before)


@pytest.mark.root
def test_a_real_cpuset_is_obeyed_and_named(narrow_cpuset: int) -> None:
    assert topology.allowed() == (narrow_cpuset,)
    outside = next(cpu for cpu in topology.online() if cpu != narrow_cpuset)
    with pytest.raises(Refused, match=f"{outside} is outside the cpuset.*choose from {narrow_cpuset}$"):
        pinning.pin(os.getpid(), [outside])
    assert os.sched_getaffinity(0) == {narrow_cpuset}
    assert {thread.cpus for thread in pinning.pin(os.getpid(), [narrow_cpuset])} == {(narrow_cpuset,)}
