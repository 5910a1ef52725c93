"""Without root: all works that the kernel allows; what it does not is refused, and the capability named.

The commands run in forked processes that have become an ordinary user for good. What they import is there
before: the interpreter may be where that user may not look.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import pytest
from forked import Child
from namespaces import Pair, make_pair  # noqa: F401 (the fixture `pair`)
from runs import ROOT, Object, Run, check_ledger, warm

import rings
from engine.handlers.api import load
from engine.net import sender, stream_sender
from engine.streaming import Streaming
from rings import jit
from rings.libc import monotonic_ns
from rings.segment import SHM
from tools import cli

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="becomes an ordinary user: needs root"),
]
NOBODY = pwd.getpwnam("nobody")
PACKETS = 2000
_PR_SET_DUMPABLE = 4
AsUser = Callable[..., None]


def _become(home: Path) -> None:
    """An ordinary user, as after a login: no capabilities, folders of its own."""
    os.chdir(home)
    os.environ |= {"HOME": f"{home}", "NUMBA_CACHE_DIR": f"{home}/cache"}
    numba.config.CACHE_DIR = f"{home}/cache"
    jit.cache_folder.cache_clear()
    os.setgroups([])
    os.setresgid(*[NOBODY.pw_gid] * 3)
    os.setresuid(*[NOBODY.pw_uid] * 3)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as after an exec
    status = Path("/proc/self/status").read_text()
    assert "CapEff:\t0000000000000000\n" in status


def _body(home: Path, body: Callable[..., object], *arguments: object) -> None:
    _become(home)
    body(*arguments)


@pytest.fixture
def home() -> Iterator[Path]:
    """Not below tmp_path, which is closed to others."""
    with tempfile.TemporaryDirectory(prefix="rxring-user-") as folder:
        os.chown(folder, NOBODY.pw_uid, NOBODY.pw_gid)
        yield Path(folder)


def _modules_after(commands: list[tuple[str, ...]], told: int) -> None:
    """Run commands here, with all output to nowhere; tell what is imported then."""
    with open(os.devnull, "w") as sys.stdout:
        assert [cli.main(command) for command in commands] == [0] * len(commands)
    os.write(told, " ".join(sys.modules).encode())


@pytest.fixture(scope="module")
def imported() -> None:
    """All that the commands compile and import; of that, users other than us have to read the sources."""
    ours = str(ROOT / "engine" / "spec.py")
    reading = subprocess.run(["test", "-r", ours], user=NOBODY.pw_uid, group=NOBODY.pw_gid, check=False)
    if reading.returncode != 0:
        pytest.skip(f"an ordinary user may not read {ROOT}")
    warm()
    sender.warm()
    stream_sender.warm()
    Streaming.compile()
    load("dump")
    monotonic_ns()
    told = os.memfd_create("modules")
    run = ("run", "--listen", "udp://localhost:0", "--consumer", "rate", "--duration", "0.01", "--json")
    send = ("send", "--to", "localhost:9", "--packets", "1", "--json")
    assert Child(_modules_after, [run, send, ("rings", "ls")], told).wait() == 0
    for module in os.pread(told, 1 << 20, 0).decode().split():
        importlib.import_module(module)
    os.close(told)


@pytest.fixture
def as_user(home: Path, imported: None) -> AsUser:
    """`as_user(body, *arguments)`: in a process of an ordinary user; all of its assertions must hold."""

    def run(body: Callable[..., object], *arguments: object) -> None:
        assert Child(_body, home, body, *arguments).wait() == 0

    return run


def _limit(which: int, value: int) -> None:
    """For those that are forked from now on."""
    resource.setrlimit(which, (value, value))


# ── what works ───────────────────────────────────────────────────────────────────────────────────────


def _command(*args: str) -> tuple[int, str, str]:
    """`rxring ARGS`: exit code, stdout, stderr."""
    out, err = os.memfd_create("stdout"), os.memfd_create("stderr")
    code = Child(_main, args, out, err).wait()
    texts = [os.pread(fd, 1 << 20, 0).decode() for fd in (out, err)]
    os.close(out)
    os.close(err)
    return code, texts[0], texts[1]


def _main(args: tuple[str, ...], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os._exit(cli.main(args))


def _run_balances(name: str, listen: str, to: str, flags: tuple[str, ...], command: bool = False) -> Object:
    """A run and its sender; `to` gets the port."""
    own = ("--sender", f"{name}.s", "--consumer", "gaps", "--consumer", "rate,split=2", *flags)
    with Run(name, *own, listen=listen, command=command) as run:
        where = to.replace("PORT", str(run.port))
        code, out, err = _command(
            *("send", "--to", where, "--name", f"{name}.s", "--rate", "20000", "--flows", "4"),
            *("--packets", str(PACKETS), "--json"),
        )
        assert (code, err) == (0, "")
        view = run.end()
        assert run.errors == ""
    check_ledger(view)
    assert view["ledger"]["received"] == json.loads(out.splitlines()[-1])["sent"] >= PACKETS
    assert view["consumers"][0]["result"]["lost"] == 0
    return view


@pytest.mark.parametrize(
    ("listen", "to", "flags"),
    [
        ("udp://127.0.0.1:0", "127.0.0.1:PORT", ("--rx-cpu", "0")),
        ("udp://[::1]:0", "[::1]:PORT", ("--receivers", "2", "--rx-wait", "spin")),
        ("udp://0.0.0.0:0?interface=lo", "127.0.0.1:PORT", ("--receivers", "2", "--steer", "cpu")),
        ("udp://[fe80::2%vr]:0", "[fe80::2%vr]:PORT", ()),
        ("udp://239.1.1.1:5000?interface=vr", "239.1.1.1:PORT?interface=vr", ()),
        (
            "udp://232.1.1.1:5000?interface=vr&source=10.77.0.2",
            "232.1.1.1:PORT?interface=vr",
            ("--gro", "off"),
        ),
        ("udp://[ff05::1:1]:5000?interface=vr", "[ff05::1:1]:PORT?interface=vr", ()),
        ("udp://[ff35::1:1]:5000?interface=vr&source=fd77::2", "[ff35::1:1]:PORT?interface=vr", ()),
    ],
)
def test_a_run_receives_and_balances(
    pair: Pair, name: str, as_user: AsUser, listen: str, to: str, flags: tuple[str, ...]
) -> None:
    with pair.right:
        as_user(_run_balances, name, listen, to, flags)


def test_a_stream(name: str, as_user: AsUser) -> None:
    def body() -> None:
        with Run(name, "--consumer", "rate", listen="tcp://127.0.0.1:0") as run:
            to = f"tcp://127.0.0.1:{run.port}"
            code, out, _ = _command("send", "--to", to, "--packets", "20", "--json")
            assert code == 0
            view = run.end()
        assert view["receivers"][0]["bytes"] == json.loads(out.splitlines()[-1])["bytes"] > 0

    as_user(body)


def test_the_command_itself(name: str, home: Path, as_user: AsUser) -> None:
    """With a new interpreter, and compiled code in a folder of the user's own."""
    try:
        subprocess.run([sys.executable, "-c", ""], user=NOBODY.pw_uid, group=NOBODY.pw_gid, check=True)
    except PermissionError:
        pytest.skip(f"an ordinary user may not run {sys.executable}")
    folder = jit.cache_folder()
    assert folder is not None
    shutil.copytree(folder, home / "cache" / folder.name)  # it takes half a minute to make
    for path in (home / "cache").rglob("*"):
        os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
    as_user(_run_balances, name, "udp://127.0.0.1:0", "127.0.0.1:PORT", (), True)


def test_without_a_cache_that_can_be_written(name: str, home: Path, as_user: AsUser) -> None:
    def body() -> None:
        with Run(name) as run:
            run.end()
            assert run.errors == (
                "compiling, as at every start: no cache can be written, give NUMBA_CACHE_DIR\n"
            )

    os.chown(home, 0, 0)
    as_user(body)


def test_locked_memory_within_the_limit(name: str, as_user: AsUser) -> None:
    def body() -> None:
        view = _run_balances(name, "udp://127.0.0.1:0", "127.0.0.1:PORT", ("--mlock", "--ring", "1MiB"))
        assert view["receivers"][0]["packets"] > 0

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        _limit(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    except ValueError:
        pytest.skip("root may not raise RLIMIT_MEMLOCK here: it has no CAP_SYS_RESOURCE")
    try:
        as_user(body)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_rings_of_others_are_not_its_own(name: str, as_user: AsUser) -> None:
    """Root has a ring of that name that lives, and a dead one: the user neither sees nor removes them."""

    def body() -> None:
        assert _command("rings", "ls", "--json") == (0, "", "")
        for command in ("show", "rm"):
            code, out, err = _command("rings", command, name)
            assert (code, out) == (2, "")
            assert err == f"rxring: no ring '{name}': `rxring rings ls` lists them\n"
        with Run(name, "--ring", "1MiB") as run:  # of its own, of the same name
            assert run.ready
            code, out, _ = _command("rings", "ls", "--json")
            assert [(ring["name"], ring["state"]) for ring in map(json.loads, out.splitlines())] == [
                (name, "live")
            ]
            run.end()
        left = SHM / f"rxring-{NOBODY.pw_uid}-{name}-0"
        left.write_bytes(content)
        assert _command("rings", "gc") == (0, f"removed {left.name}\n", "")

    with rings.create(name, frames=16, arena_bytes=4096) as ring:
        content = bytes(ring._memory)
        dead = SHM / f"rxring-0-{name}.dead-0"
        dead.write_bytes(content)
        dead.chmod(0o666)
        try:
            as_user(body)
            assert ring.segment.is_linked()
            assert dead.read_bytes() == content
        finally:
            dead.unlink()


# ── what is refused, or said ─────────────────────────────────────────────────────────────────────────


def _refused(name: str, flags: tuple[str, ...], wanted: str, listen: str = "udp://127.0.0.1:0") -> None:
    with Run(name, *flags, listen=listen) as run:
        assert run.next() is None, "it started"
        assert run.wait() == 2
        assert run.errors == f"rxring: {wanted}\n"
    assert not list(SHM.glob(f"rxring-{NOBODY.pw_uid}-{name}-*"))


def _send_refused(flags: tuple[str, ...], wanted: str) -> None:
    assert _command("send", "--to", "127.0.0.1:9", *flags) == (2, "", f"rxring: {wanted}\n")


FIFO = (
    "SCHED_FIFO 7 needs CAP_SYS_NICE or RLIMIT_RTPRIO 7 (now 0): raise it with `ulimit -r 7`, "
    "or leave out --fifo"
)
MLOCK = (
    "mlockall: Cannot allocate memory: it needs CAP_IPC_LOCK or RLIMIT_MEMLOCK above what the process maps "
    "(now 65536 bytes): raise it with `ulimit -l`, or leave out --mlock"
)


def test_real_time_priority(name: str, as_user: AsUser) -> None:
    def body() -> None:
        _limit(resource.RLIMIT_RTPRIO, 0)
        _refused(name, ("--fifo", "7", "--consumer", "rate"), FIFO)
        _send_refused(("--fifo", "7"), FIFO)

    as_user(body)


def test_locked_memory_beyond_the_limit(name: str, as_user: AsUser) -> None:
    def body() -> None:
        _limit(resource.RLIMIT_MEMLOCK, 65536)
        _refused(name, ("--mlock", "--consumer", "rate"), MLOCK)
        _send_refused(("--mlock",), MLOCK)

    as_user(body)


def test_busy_polling(name: str, as_user: AsUser) -> None:
    wanted = "--busy-poll 50 needs CAP_NET_ADMIN: run it as root, or leave it out"
    as_user(_refused, name, ("--busy-poll", "50"), wanted)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_of_root_s(pair: Pair, name: str, as_user: AsUser, host: str) -> None:
    """In a namespace of its own, where no sysctl has opened them."""
    wanted = f"cannot listen on {host}:1023: ports below 1024 need CAP_NET_BIND_SERVICE: take a higher one"
    with pair.right:
        as_user(_refused, name, (), wanted, f"udp://{host}:1023")


def test_a_port_that_another_user_s_process_has(name: str, as_user: AsUser) -> None:
    """Who that is, only root may see."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        where = "{}:{}".format(*taken.getsockname())
        wanted = f"cannot listen on {where}: another process has the port: end it, or take another"

        def body() -> None:
            taken.close()  # inherited
            _refused(name, (), wanted, f"udp://{where}")

        as_user(body)


def test_a_larger_buffer_than_the_sysctl_allows(name: str, as_user: AsUser) -> None:
    """The run goes on with what there is."""
    most = 2 * int(Path("/proc/sys/net/core/rmem_max").read_text())

    def body() -> None:
        with Run(name, "--rcvbuf", str(most + 2)) as run:
            assert run.ready["receivers"][0]["rcvbuf"] == {"asked": most + 2, "granted": most}
            run.end()
            assert run.stderr.splitlines()[-1] == (
                f"rx0: the receive buffer is {most} bytes, not {most + 2}: "
                f"sysctl -w net.core.rmem_max={most // 2 + 1} (or CAP_NET_ADMIN) grants it"
            )

    as_user(body)


def test_files_that_it_may_not_touch(name: str, as_user: AsUser) -> None:
    with tempfile.TemporaryDirectory() as closed:
        file = Path(closed, "file.toml")
        file.write_text('[[receiver]]\nlisten = "udp://127.0.0.1:0"\n')

        def body() -> None:
            refused = f"rxring: {file}: Permission denied: give a spec file in TOML\n"
            assert _command("run", f"{file}") == (2, "", refused)
            wanted = f"dump='{file}': Permission denied: give a file that can be written"
            _refused(name, ("--consumer", f"dump={file}"), wanted)

        as_user(body)
