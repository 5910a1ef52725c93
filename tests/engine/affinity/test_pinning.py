"""Real processes are pinned; what the kernel says of them is compared."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from engine.affinity import pinning, topology
from engine.errors import Refused

_THREE_THREADS = """
import sys, threading
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(2)]
for thread in threads: thread.start()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of three threads."""
    with subprocess.Popen(
        [sys.executable, "-c", _THREE_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        yield child
        child.kill()


def in_a_fork(call: Callable[[], None]) -> str:
    """The text of the Refused that `call` raises in a child without privileges; "" if it does none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = "died"
        try:
            for limit in (resource.RLIMIT_RTPRIO, resource.RLIMIT_MEMLOCK):
                resource.setrlimit(limit, (0, 0))
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            call()
            text = ""
        except Refused as refused:
            text = str(refused)
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_every_thread_is_pinned_and_read_back(process: subprocess.Popen[bytes]) -> None:
    cpu = topology.allowed()[-1]
    threads = pinning.pin(process.pid, [cpu])
    assert len(threads) == 3
    assert {thread.cpus for thread in threads} == {(cpu,)}
    assert threads == pinning.verify(process.pid)
    assert not pinning.floating(threads, [cpu])
    for thread in threads:
        assert os.sched_getaffinity(thread.tid) == {cpu}


def test_a_thread_that_floats_is_found(process: subprocess.Popen[bytes]) -> None:
    allowed = topology.allowed()
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    last = pinning.pin(process.pid, [allowed[0]])[-1]
    os.sched_setaffinity(last.tid, allowed)
    assert [t.tid for t in pinning.floating(pinning.verify(process.pid), [allowed[0]])] == [last.tid]
    assert not pinning.floating(pinning.pin(process.pid, [allowed[0]]), [allowed[0]])


def test_facts_of_this_process() -> None:
    ready, end = threading.Barrier(2), threading.Event()
    thread = threading.Thread(target=lambda: (ready.wait(), end.wait()))
    thread.start()
    ready.wait()
    try:
        facts = {fact.tid: fact for fact in pinning.verify(os.getpid())}
    finally:
        end.set()
        thread.join()
    assert {os.getpid(), thread.native_id} <= set(facts)
    me = facts[os.getpid()]
    assert me.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert me.last_cpu in topology.online()
    assert (me.policy, me.priority) == ("other", 0)


def test_a_process_that_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert pinning.verify(child.pid) == []
    with pytest.raises(Refused, match="has ended"):
        pinning.pin(child.pid, [topology.allowed()[0]])


@pytest.mark.root
def test_fifo_is_given_to_every_thread(process: subprocess.Popen[bytes]) -> None:
    if os.getuid():
        pytest.skip("needs root: only it may have real-time priority for certain")
    pinning.set_fifo(process.pid, 1)
    assert [(t.policy, t.priority) for t in pinning.verify(process.pid)] == [("fifo", 1)] * 3


def test_fifo_without_the_right_names_capability_and_limit() -> None:
    text = in_a_fork(lambda: pinning.set_fifo(os.getpid(), 7))
    assert "CAP_SYS_NICE" in text
    assert "RLIMIT_RTPRIO 7 (now 0)" in text


@pytest.mark.parametrize("priority", [0, 100, -1])
def test_fifo_priorities_are_checked(priority: int) -> None:
    with pytest.raises(Refused, match="1 to 99"):
        pinning.set_fifo(os.getpid(), priority)


def test_memory_lock_without_the_right_names_capability_and_limit() -> None:
    text = in_a_fork(pinning.lock_memory)
    assert "CAP_IPC_LOCK" in text
    assert "RLIMIT_MEMLOCK" in text
    assert "now 0 bytes" in text


def test_memory_is_locked() -> None:
    """In a process of its own: what is locked stays so to its end."""
    code = (
        "from engine.affinity import pinning; pinning.lock_memory(); print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "Refused" in done.stderr:
        pytest.skip("no right to lock memory here: needs CAP_IPC_LOCK or a larger RLIMIT_MEMLOCK")
    locked = next(line for line in done.stdout.splitlines() if line.startswith("VmLck:"))
    assert int(locked.split()[1]) > 0


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([9], "CPU 9 does not exist: choose from 2,4"),
        ([3], "CPU 3 is offline: choose from 2,4"),
        ([0], "CPU 0 is outside the cpuset of this process: choose from 2,4"),
        (
            [2, 0, 3, 9],
            "9 does not exist, CPU 3 is offline, CPU 0 is outside the cpuset of this process: choose",
        ),
        ([], "no CPU to pin to: choose from 2,4"),
    ],
)
def test_the_reason_is_said(wanted: list[int], said: str) -> None:
    assert said in pinning.obstacle(wanted, range(8), [0, 1, 2, 4, 5, 6, 7], [2, 4])


def test_whether_it_is_the_cpuset_or_how_it_was_started() -> None:
    said = pinning.obstacle([0, 4, 6], range(8), range(8), [2], cpuset=[2, 4])
    assert "CPU 0,6 is outside the cpuset" in said
    assert "CPU 4 is none that this process was started on (taskset): choose from 2" in said


def test_switches_are_counted() -> None:
    """Of a process of two threads: one moves itself from CPU to CPU, both spin for one of them."""
    cpus = topology.allowed()
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")

    def move() -> None:
        for i in range(10):
            os.sched_setaffinity(0, {cpus[i % 2]})

    migrations, involuntary = pinning.switches(os.getpid())
    thread = threading.Thread(target=lambda: (move(), done.set(), end.wait()))
    done, end = threading.Event(), threading.Event()
    thread.start()
    done.wait()
    after = pinning.switches(os.getpid())
    end.set()
    thread.join()
    assert migrations is None or after[0] is not None
    if migrations is not None and after[0] is not None:
        assert after[0] >= migrations + 9
    assert after[1] >= involuntary
    assert pinning.parse_switches("a\nnonvoluntary_ctxt_switches:\t7\n", "se.nr_migrations   :  3\n") == (
        3,
        7,
    )
    assert pinning.parse_switches("", "") == (None, 0)


def test_nothing_stands_in_the_way_of_allowed_cpus() -> None:
    assert pinning.obstacle([4, 2], range(8), range(8), [2, 4]) == ""
