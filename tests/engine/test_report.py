"""The three forms of a report: on pipes, in files, and on a real terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import run_views as views

from engine.errors import Failed
from engine.report import JsonReport, LiveReport, PlainReport, Report, choose


def speak(report: Report) -> None:
    """A whole run."""
    with report:
        report.note("compiling")
        report.ready({"type": "ready", **views.ready()})
        report.interval(views.calm("interval", 1.0))
        report.interval(views.calm("interval", 2.0))
        report.summary(views.calm("summary", 2.5))


def test_json_is_an_object_a_line_and_nothing_else() -> None:
    out, err = io.StringIO(), io.StringIO()
    report = choose(json=True, out=out, err=err)
    assert isinstance(report, JsonReport)
    speak(report)
    objects = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [o["type"] for o in objects] == ["ready", "interval", "interval", "summary"]
    assert objects[1] == views.calm("interval", 1.0)
    assert err.getvalue() == "compiling\n"


def test_json_takes_the_numbers_of_numpy() -> None:
    out = io.StringIO()
    found = {"n": np.int64(3), "x": np.float64(0.5), "a": np.arange(3), "nan": float("nan")}
    JsonReport(out, io.StringIO()).interval({"type": "interval", "result": found})
    assert json.loads(out.getvalue())["result"] == {"n": 3, "x": 0.5, "a": [0, 1, 2], "nan": None}


@pytest.mark.parametrize("bad", [object(), {1.5: object()}, {("a", "b"): 1}, lambda: 1])
def test_what_is_no_json_spoils_no_other_result(bad: object) -> None:
    view = views.calm("interval")
    view["consumers"][0]["result"] = bad
    out = io.StringIO()
    JsonReport(out, io.StringIO()).interval(view)
    found = json.loads(out.getvalue())
    error = found["consumers"][0].pop("result")["error"]
    assert error.startswith("its report is no JSON: ")
    assert view["consumers"][0].pop("result") is bad
    assert found == view
    view["consumers"][0]["result"] = bad
    plain = io.StringIO()
    PlainReport(plain, io.StringIO()).interval(view)
    assert f"error {error}" in plain.getvalue()


def test_text_that_is_no_utf8_is_replaced() -> None:
    view = views.troubled("interval")
    view["consumers"][3]["handler"] = "dump=/tmp/\udcff"
    view["consumers"][1]["result"] = {"symbol": "\ud800", "\udcff": ["\udcff"]}
    out = io.StringIO()
    JsonReport(out, io.StringIO()).interval(view)
    found = json.loads(out.getvalue())["consumers"]
    assert found[3]["handler"] == "dump=/tmp/?"
    assert found[1]["result"] == {"symbol": "?", "?": ["?"]}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_form_fails_at_what_stdout_cannot_say(encoding: str) -> None:
    view = views.troubled("interval")
    view["consumers"][3]["handler"] = "dump=/tmp/\udcff"
    for json_form in (False, True):
        raw = io.BytesIO()
        report = choose(json=json_form, out=io.TextIOWrapper(raw, encoding), err=io.StringIO())
        report.ready(views.ready(name="rx\udcff"))
        report.interval(view)
        report.summary({**view, "type": "summary"})
        if json_form:
            assert [json.loads(line)["type"] for line in raw.getvalue().decode().splitlines()] == [
                "ready",
                "interval",
                "summary",
            ]
        else:
            assert b"residual" in raw.getvalue()


def test_a_pipe_gets_plain_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    report = choose(out=out, err=err)
    assert isinstance(report, PlainReport)
    speak(report)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["ready: rx5000, pid 4100", "  rx0 receives on udp://127.0.0.1:5000, cpu 0, pid 4101"]
    assert "   1.0 s  nothing lost" in lines
    assert (
        "          rx0  200 k packets/s  160 Mbit/s  12.3 packets/call  2,400,000 packets  0 dropped" in lines
    )
    assert (
        "          ring rx5000  2,400,000 published  <0.01 % in use  at most 0.50 %  never full"
        "  slowest reader latency" in lines
    )
    assert sum("as of 2,391,004  network p50" in line for line in lines) == 2
    assert sum("socket p50 21.4 µs p99 70.6 µs" in line for line in lines) == 2
    assert "=         0 residual  balanced" in lines
    assert err.getvalue() == "compiling\n"
    assert "\x1b" not in out.getvalue()
    assert all(line == line.rstrip() for line in lines)


def test_plain_lines_stay_whole_in_a_pipe_and_fold_on_a_terminal() -> None:
    whole, folded = io.StringIO(), io.StringIO()
    PlainReport(whole, io.StringIO()).interval(views.troubled("interval"))
    PlainReport(folded, io.StringIO(), 60).interval(views.troubled("interval"))
    assert len(whole.getvalue().splitlines()) == 8  # losses, receiver, ring, five consumers
    assert max(map(len, folded.getvalue().splitlines())) <= 60
    assert folded.getvalue().replace("·", "").split() == whole.getvalue().replace("·", "").split()


def test_trouble_is_in_the_plain_lines() -> None:
    out = io.StringIO()
    PlainReport(out, io.StringIO()).interval(views.troubled("interval"))
    for told in (
        "24 h 01 min  lost: 1,973 socket frames · 10 NIC, softnet or UDP errors · 64 in flight",
        "1,973 frames dropped",
        "full 31,337 times, for 4.71 s",
        "truncated 12",
        "ECONNREFUSED 2",
        "dead  3 restarts",
        "681,629 skipped",
    ):
        assert told in out.getvalue()


# ── a pipe that nobody reads ─────────────────────────────────────────────────────────────────────────


class Pipe:
    """A small pipe; what was read of it, and how much of it is free."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 8192)
        self.out = os.fdopen(write_end, "w")

    def read(self) -> str:
        """All that comes until the other end is closed."""
        with os.fdopen(self.read_end) as end:
            return end.read()


@pytest.mark.parametrize("json_form", [False, True])
def test_intervals_that_nobody_reads_are_left_out_whole(json_form: bool) -> None:
    pipe, err = Pipe(), io.StringIO()
    report = choose(json=json_form, out=pipe.out, err=err)
    flags = fcntl.fcntl(pipe.out.fileno(), fcntl.F_GETFL)
    report.ready({"type": "ready", **views.ready()})
    for second in range(30):
        report.interval(views.calm("interval", float(second)))
    assert fcntl.fcntl(pipe.out.fileno(), fcntl.F_GETFL) == flags  # others may share it

    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read()))
    reader.start()
    report.summary(views.calm("summary", 30.0))
    pipe.out.close()
    reader.join()
    match = re.fullmatch(r"nobody read stdout in time: (\d+) intervals left out\n", err.getvalue())
    assert match
    shown = 30 - int(match[1])
    assert 0 < shown < 30
    lines = read[0].splitlines()
    if json_form:
        objects = [json.loads(line) for line in lines]
        assert [o["type"] for o in objects] == ["ready", *["interval"] * shown, "summary"]
        assert objects[1:-1] == [views.calm("interval", float(second)) for second in range(shown)]
    else:
        assert sum("s  nothing lost" in line for line in lines) == shown
        assert sum("gaps  2,399,988 delivered" in line for line in lines) == shown
        assert lines[-1].split()[:1] == ["gaps"]


def test_a_reader_that_comes_back_gets_whole_intervals_again() -> None:
    pipe, err = Pipe(), io.StringIO()
    report = JsonReport(pipe.out, err)
    second, read = 0, b""
    while not report.out.left_out:
        report.interval(views.calm("interval", float(second)))
        second += 1
    left_out = second - 1
    while not read.endswith(b"}\n") or len(read) < 8192:
        read += os.read(pipe.read_end, 65536)
        report.interval(views.calm("interval", 99.0))
    seconds = [json.loads(line)["seconds"] for line in read.splitlines()]
    assert seconds[:left_out] == list(map(float, range(left_out)))
    assert set(seconds[left_out:]) <= {99.0}
    pipe.out.close()
    os.close(pipe.read_end)


def test_a_signal_ends_the_wait_for_a_reader() -> None:
    class Enough(Exception):
        pass

    def enough(number: int, frame: object) -> None:
        raise Enough

    pipe = Pipe()
    before = signal.signal(signal.SIGALRM, enough)
    try:
        report = JsonReport(pipe.out, io.StringIO())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            report.summary(views.calm() | {"more than the pipe takes": "x" * 10_000})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(pipe.read_end)
        pipe.out.close()


def test_a_reader_that_goes_away_is_a_broken_pipe() -> None:
    for form in (JsonReport, PlainReport):
        read_end, write_end = os.pipe()
        os.close(read_end)
        out = os.fdopen(write_end, "w")
        with pytest.raises(BrokenPipeError):
            form(out, io.StringIO()).interval(views.calm("interval"))
        out.close()  # nothing was left in its buffer


# ── on a terminal ────────────────────────────────────────────────────────────────────────────────────


class Terminal:
    """A pseudo-terminal of a given width; what was written to it can be read."""

    def __init__(self, width: int, height: int = 50) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.out = os.fdopen(slave, "w")
        self._read = b""
        self._reader = threading.Thread(target=self._drain)
        self._reader.start()

    def _drain(self) -> None:
        try:
            while chunk := os.read(self.master, 65536):
                self._read += chunk
        except OSError:  # EIO: the other end is closed
            return

    def written(self) -> str:
        self.out.close()
        self._reader.join()
        os.close(self.master)
        return self._read.decode()


@pytest.fixture(autouse=True)
def _a_terminal_as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[60, 80, 160])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("COLUMNS", str(request.param))  # rich asks the process's own terminal, if it has one
    opened = Terminal(request.param)
    yield opened
    if not opened.out.closed:
        opened.written()


def test_a_terminal_gets_a_live_table_and_is_left_as_it_was(terminal: Terminal) -> None:
    threads = threading.active_count()
    report = choose(out=terminal.out, err=io.StringIO())
    assert isinstance(report, LiveReport)
    with report:
        report.ready(views.ready())
        report.interval(views.calm("interval", 1.0))
        assert threading.active_count() == threads  # the supervisor must be able to fork
        report.summary(views.calm())
    text = terminal.written()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor
    assert "receiving on udp://127.0.0.1:5000" in text
    assert re.search(r"residual.*balanced", text)
    assert text.endswith("\n\x1b[?25h")


def test_the_end_is_shown_whole_on_a_terminal_that_is_too_low() -> None:
    terminal = Terminal(80, height=12)
    with choose(out=terminal.out, err=io.StringIO()) as report:
        report.ready(views.ready())
        report.interval(views.calm("interval", 1.0))
        report.summary(views.calm())
    last = terminal.written().rpartition("\x1b[2K")[2]
    for shown in ("rx5000", "receiver", "sent", "residual", "= total"):
        assert shown in last


def test_the_live_display_fits_a_low_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")
    terminal = Terminal(60, height=20)
    with choose(out=terminal.out, err=io.StringIO()) as report:
        report.ready(views.ready())
        for _ in range(3):
            report.interval(views.troubled("interval"))
    _, *drawings = terminal.written().split("rxring ")[1:]
    assert len(drawings) == 4  # the last one again, to stay
    for drawing in drawings:
        lines = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", drawing).strip().splitlines()
        assert len(lines) == 20
        assert lines[1].startswith("lost: ")
        assert lines[-1].startswith("… (")


def test_notes_go_above_the_table(terminal: Terminal) -> None:
    with choose(out=terminal.out, err=terminal.out) as report:
        report.note("compiling")
        report.ready(views.ready())
        report.note("latency ended (killed by SIGKILL): started anew")
        report.summary(views.calm())
    text = terminal.written()
    assert text.startswith("compiling\r\n")
    assert re.search(r"\x1b\[2K.*latency ended \(killed by SIGKILL\): started anew", text, re.S)


def test_notes_go_to_stderr_where_that_is_not_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        with choose(out=terminal.out, err=log) as report:
            report.ready(views.ready())
            report.note("started anew")
            report.summary(views.calm())
        log.seek(0)
        assert log.read() == "started anew\n"
    assert "started anew" not in terminal.written()


def test_an_error_leaves_the_last_table_and_the_cursor(terminal: Terminal) -> None:
    def fail(report: Report) -> None:
        with report:
            report.ready(views.ready())
            report.interval(views.calm("interval", 1.0))
            raise Failed("the disk is full")

    with pytest.raises(Failed):
        fail(choose(out=terminal.out, err=io.StringIO()))
    assert terminal.written().endswith("\x1b[?25h")


def test_plain_and_dumb_terminals_get_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose(plain=True, out=terminal.out), PlainReport)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose(out=terminal.out), PlainReport)
