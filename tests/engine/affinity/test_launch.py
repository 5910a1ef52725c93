"""A command that is run pinned, with all it makes, and what is known of it afterwards."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from forked import Child
from namespace_of_its_own import needs_root

from engine.affinity import launch, topology
from engine.affinity.launch import Ended
from engine.errors import Refused

FIRST, CPU = topology.allowed()[0], topology.allowed()[-1]
ROOT = Path(__file__).resolve().parents[3]
needs_two_cpus = pytest.mark.skipif(FIRST == CPU, reason="needs two CPUs")


def python(code: str, *, cpus: list[int] | None = None, mlock: bool = False) -> Ended:
    """Run by a process of its own, which is the tool: orphans become its children, and end with it."""
    read, write = os.pipe()
    command = [sys.executable, "-c", code]
    child = Child(lambda: os.write(write, pickle.dumps(launch.run(command, cpus, mlock=mlock))))
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    assert child.wait() == 0
    end = pickle.loads(told)
    assert isinstance(end, Ended)
    return end


def test_threads_children_and_orphans_are_pinned_and_seen() -> None:
    end = python(
        "import os, subprocess, threading, time\n"
        f"wanted = {{{CPU}}}\n"
        "ok = [os.sched_getaffinity(0) == wanted]\n"
        "stop = threading.Event()\n"
        "t = threading.Thread(target=lambda: (ok.append(os.sched_getaffinity(0) == wanted), stop.wait()))\n"
        "t.start()\n"
        "subprocess.run(['sh', '-c', 'exec >&- 2>&-; sleep 2 & exit'])\n"  # an orphan
        "time.sleep(1)\n"  # looks are 0.1 s apart
        "stop.set(); t.join()\n"
        "raise SystemExit(7 if all(ok) and len(ok) == 2 else 1)",
        cpus=[CPU],
    )
    assert end.code == 7
    names = [thread.name for thread in end.threads.values()]
    assert names.count("sleep") == 1
    assert len(names) >= 3
    for thread in end.threads.values():
        assert (thread.cpus, thread.allowed, thread.strayed) == ({CPU}, (CPU,), 0)


@needs_two_cpus
def test_one_that_leaves_is_brought_back() -> None:
    end = python(
        "import os, time\n"
        f"os.sched_setaffinity(0, {{{FIRST}, {CPU}}})\n"
        "end = time.monotonic() + 30\n"
        f"while os.sched_getaffinity(0) != {{{CPU}}} and time.monotonic() < end: time.sleep(0.01)\n"
        "raise SystemExit(time.monotonic() >= end)",
        cpus=[CPU],
    )
    assert end.code == 0
    [thread] = end.threads.values()
    assert thread.strayed == 1


@needs_two_cpus
def test_within_its_cpus_it_may_be_where_it_likes() -> None:
    end = python(f"import os, time; os.sched_setaffinity(0, {{{CPU}}}); time.sleep(0.5)", cpus=[FIRST, CPU])
    assert [thread.strayed for thread in end.threads.values()] == [0]


@needs_two_cpus
def test_migrations_are_counted() -> None:
    end = python(f"import os\nfor i in range(20): os.sched_setaffinity(0, {{({FIRST}, {CPU})[i % 2]}})")
    [thread] = end.threads.values()
    if not Path("/proc/self/sched").exists():
        assert thread.migrations is None
    else:
        assert thread.migrations is not None
        assert thread.migrations >= 19
    assert end.involuntary >= thread.involuntary >= 0


def test_a_kernel_without_lists_of_children() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in launch._children_by_parent()(os.getpid())
            assert child.pid in launch._descendants()
        finally:
            child.kill()


def test_it_ends_as_the_command_ends() -> None:
    assert python("raise SystemExit(3)").code == 3
    assert python("import os; os.kill(os.getpid(), 9)").code == 128 + 9


def test_the_tool_goes_back_to_where_it_was() -> None:
    def look() -> None:
        before = os.sched_getaffinity(0)
        assert launch.run(["true"], [CPU]).code == 0
        assert os.sched_getaffinity(0) == before

    assert Child(look).wait() == 0


def test_signals_and_descriptors_reach_the_command() -> None:
    read, write = os.pipe()
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\n"
        f"os.write({write}, b'x')\n"
        "signal.pause()"
    )
    command = [sys.executable, "-m", "tools.cli", "pin", "run", "--", sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[write], stderr=subprocess.PIPE) as tool:
        os.close(write)
        assert os.read(read, 1) == b"x"
        tool.terminate()
        assert tool.wait(30) == 5
    os.close(read)


@pytest.mark.parametrize(
    ("command", "cpus", "fifo", "what"),
    [
        ("touch", [topology.MAX_CPU], None, f"CPU {topology.MAX_CPU} does not exist: choose from"),
        ("touch", None, 0, "SCHED_FIFO has no priority 0"),
        ("no-such-command", None, None, "cannot run 'no-such-command': No such file"),
    ],
)
def test_what_cannot_be_had_is_refused_and_not_started(
    command: str, cpus: list[int] | None, fifo: int | None, what: str, tmp_path: Path
) -> None:
    def refused() -> None:
        with pytest.raises(Refused, match=what):
            launch.run([command, str(tmp_path / "started")], cpus, fifo)

    assert Child(refused).wait() == 0
    assert not (tmp_path / "started").exists()


_LOCKED = "int(next(line for line in open('/proc/self/status') if line.startswith('VmLck')).split()[1])"


@needs_root
@pytest.mark.root
def test_its_memory_is_locked_from_the_start_and_later() -> None:
    code = (
        f"first = {_LOCKED}; more = bytearray(50 << 20); raise SystemExit(first < 1000 or {_LOCKED} < 50000)"
    )
    assert python(code, mlock=True).code == 0
    assert python(code).code == 1  # without: the test can fail
    end = python("import sys, threading; print(sys.argv); raise SystemExit(9)", mlock=True)
    assert end.code == 9  # it is whole: its own first instructions are back


def test_a_lock_that_is_refused_starts_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)

        def refused() -> None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            with pytest.raises(Refused, match=r"^cannot lock the memory of touch: .*: raise it with `ulimit"):
                launch.run(["touch", f"{folder}/locked"], None, mlock=True)
            launch.run(["touch", f"{folder}/other"], None)

        assert Child(refused).wait() == 0
        assert os.listdir(folder) == ["other"]


_WAITS = """
import os, signal, sys, threading
signal.signal(signal.%s, lambda *_: os._exit(9))
print("there", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGQUIT", "SIGTERM"])
def test_what_is_sent_to_the_tool_alone_is_sent_on(name: str) -> None:
    """By a service manager or a script: no terminal has sent it to the command as well."""
    read, write = os.pipe()

    def tool() -> None:
        os.dup2(write, 1)
        os._exit(launch.run([sys.executable, "-c", _WAITS % name], [CPU]).code)

    child = Child(tool)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.readline() == "there\n"
        child.send(signal.Signals[name])
        assert child.wait() == 9
