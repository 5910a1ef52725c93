"""How a run speaks: JSON for programs, plain lines for pipes and logs, a live table on a terminal.

A run says `note` (progress, on stderr), `ready` once, `interval` again and again, and `summary` at the
end. The last three take the very objects that `--json` prints; every form shows the same numbers.

A reader of stdout who goes away surfaces as BrokenPipeError from whichever method wrote.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, TextIO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from engine import figures, screen

Object = Mapping[str, Any]
LOG_WIDTH = 80  # of the closing tables, where stdout has no width
_MOMENT_MS = 50  # how long an interval may wait for whoever reads stdout
_SLICE_MS = 100


class Report(Protocol):
    """What a run may say; a context manager, so that a terminal is left as it was found."""

    def note(self, text: str) -> None:
        """Progress for people, on stderr."""

    def ready(self, view: Object) -> None:
        """Packets will be taken from now on."""

    def interval(self, view: Object) -> None:
        """Counts since the start, rates of this interval."""

    def summary(self, view: Object) -> None:
        """The end, with the ledger."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def choose(
    *, json: bool = False, plain: bool = False, out: TextIO | None = None, err: TextIO | None = None
) -> Report:
    """The form that was asked for, or that suits what stdout is."""
    out, err = out or sys.stdout, err or sys.stderr
    if isinstance(out, io.TextIOWrapper):  # what it cannot say is no reason to end a run
        out.reconfigure(encoding="utf-8" if json else None, errors="replace")
    if json:
        return JsonReport(out, err)
    console = Console(file=out, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and not plain:
        return LiveReport(console, err)
    return PlainReport(out, err, console.width if out.isatty() else None)


class Output:
    """Stdout. Where it is a pipe, what nobody reads is left out, whole, and stops no run.

    Its flags are left alone, since others may share it: a pipe that `poll` calls writable takes PIPE_BUF
    bytes without blocking. What has been begun is kept and goes first; nothing is ever broken off.
    """

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.left_out = 0
        self._fd = _pipe(out)
        self._begun = b""

    def write(self, text: str) -> None:
        """Wait until all is written; in slices, so that Python can see to signals."""
        if self._fd is None:
            self.out.write(text)
            self.out.flush()
            return
        self._begun += self._bytes(text)
        while self._begun:
            self._push(_SLICE_MS)

    def offer(self, text: str) -> None:
        """Write it, or begin to, if that is possible within a moment; else leave it out."""
        if self._fd is None:
            self.write(text)
            return
        self._push(_MOMENT_MS)
        if self._begun or not self._writable(_MOMENT_MS):
            self.left_out += 1
            return
        self._begun = self._bytes(text)
        self._push(_MOMENT_MS)

    def _bytes(self, text: str) -> bytes:
        return text.encode(self.out.encoding or "utf-8", "replace")

    def _push(self, most_ms: int) -> None:
        """Write what was begun, until nothing was taken for so long."""
        while self._begun and self._writable(most_ms):
            assert self._fd is not None
            self._begun = self._begun[os.write(self._fd, self._begun[: select.PIPE_BUF]) :]

    def _writable(self, most_ms: int) -> bool:
        assert self._fd is not None
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(most_ms))  # an error, too: the write says which


def _pipe(out: TextIO) -> int | None:
    """Its descriptor, if it is a pipe or a socket."""
    try:
        mode = os.fstat(out.fileno()).st_mode
    except OSError:  # no file at all
        return None
    out.flush()
    return out.fileno() if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


class JsonReport:
    """One JSON object a line on stdout and nothing else there."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = Output(out), err

    def note(self, text: str) -> None:
        print(text, file=self.err, flush=True)

    def ready(self, view: Object) -> None:
        self.out.write(_line(view))

    def interval(self, view: Object) -> None:
        self.out.offer(_line(view))

    def summary(self, view: Object) -> None:
        _note_left_out(self)
        self.out.write(_line(view))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


def _line(view: Object) -> str:
    return f"{msgspec.json.encode(plain_data(view)).decode()}\n"


def plain_data(view: Object) -> Object:
    """What JSON can say of it: a result that is none becomes `{"error": …}`, and spoils no other.

    Of text, that is what UTF-8 can say: a file's name may hold any bytes.
    """
    told = dict(view)
    for part in ("consumers", "groups"):
        if part in view:
            told[part] = [
                {**c, "result": _plain_result(c["result"])} if "result" in c else c for c in view[part]
            ]
    decoded: Object = _through_json(told)
    return decoded


def _plain_result(result: Any) -> Any:
    try:
        return _through_json(result)
    except Exception as error:  # the user's own objects
        return {"error": f"its report is no JSON: {error}"}


def _through_json(found: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(_utf8(found), enc_hook=_plain_numbers))


def _utf8(found: Any) -> Any:
    if isinstance(found, str):
        return found.encode("utf-8", "replace").decode()
    if isinstance(found, Mapping):
        return {_utf8(key): _utf8(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_utf8(item) for item in found]
    return found


def _plain_numbers(found: Any) -> Any:
    """numpy's numbers and arrays, as a handler's report may hold them."""
    if hasattr(found, "tolist"):
        return _utf8(found.tolist())
    raise TypeError(f"{type(found).__name__} in it")


class PlainReport:
    """A line for each part of the run at every interval, and the tables at the end.

    width: where lines are broken; None: a pipe or a file, each part stays on its line.
    """

    def __init__(self, out: TextIO, err: TextIO, width: int | None = None) -> None:
        self.out, self.err, self.width = Output(out), err, width
        self.name = ""

    def note(self, text: str) -> None:
        print(text, file=self.err, flush=True)

    def ready(self, view: Object) -> None:
        self.name = view["name"]
        self.out.write(_text(ready_lines(view)))

    def interval(self, view: Object) -> None:
        self.out.offer(_text(interval_lines(plain_data(view), self.width)))

    def summary(self, view: Object) -> None:
        console = Console(file=io.StringIO(), width=self.width or LOG_WIDTH, color_system=None)
        with console.capture() as tables:
            console.print(screen.summary(self.name, plain_data(view)))
        _note_left_out(self)
        self.out.write(_text(map(Text, tables.get().splitlines())))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


def _text(lines: Iterable[Text]) -> str:
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)


def _note_left_out(report: JsonReport | PlainReport) -> None:
    if n := report.out.left_out:
        report.note(f"nobody read stdout in time: {n} interval{'s' if n > 1 else ''} left out")


class LiveReport:
    """A table on the terminal, drawn again at every interval; the last one stays.

    Drawn by whoever calls, without a thread: the supervisor forks.
    """

    def __init__(self, console: Console, err: TextIO) -> None:
        self.console, self.err = console, err
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.name = ""

    def note(self, text: str) -> None:
        if self.live.is_started and self.err.isatty():
            self.console.print(Text(screen.printable(text)))  # goes above the table
        else:
            print(text, file=self.err, flush=True)

    def ready(self, view: Object) -> None:
        self.name = view["name"]
        self.live.start()
        self.live.update(screen.waiting(view), refresh=True)

    def interval(self, view: Object) -> None:
        self.live.update(screen.Display(self.name, plain_data(view)), refresh=True)

    def summary(self, view: Object) -> None:
        self.live.update(screen.summary(self.name, plain_data(view)))
        self.live.stop()  # which draws it, as high as it is

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self.live.stop()


def ready_lines(view: Object) -> list[Text]:
    lines = [f"ready: {view['name']}, pid {view['pid']}"]
    for part, verb in (("receivers", "receives"), ("consumers", "consumes")):
        for worker in view[part]:
            where = f" on {worker['listen']}" if "listen" in worker else ""
            cpu = f"cpu {figures.cpu_list(worker['cpus'])}"
            lines.append(f"  {worker['name']} {verb}{where}, {cpu}, pid {worker['pid']}")
    return [Text(screen.printable(line)) for line in lines]


def interval_lines(view: Object, width: int | None) -> list[Text]:
    """What was lost, then one line for each receiver, ring and consumer; the time before the first."""
    stamp = figures.clock(view["seconds"]).rjust(8)
    loss = screen.loss(view)
    parts = [screen.Flow(Text.assemble(f"{stamp}  ", loss.head), loss.pieces, loss.between)]
    for name, pieces in _interval_parts(view):
        parts.append(screen.Flow(Text(f"{' ' * len(stamp)}  {screen.printable(name)}"), pieces))
    return [line for part in parts for line in part.lines(width, indent=len(stamp) + 4)]


def _interval_parts(view: Object) -> Iterator[tuple[str, list[Text]]]:
    for receiver in view["receivers"]:
        told = [
            f"{figures.magnitude(receiver['packets_per_second'])} packets/s",
            figures.magnitude(8 * receiver["bytes_per_second"], "bit/s"),
            f"{figures.magnitude(receiver['packets_per_call'])} packets/call",
            f"{figures.exact(receiver['packets'])} packets",
            f"{screen.dropped(receiver).plain} dropped",
        ]
        yield receiver["name"], [*map(Text, told), *screen.troubles(receiver)]
    for ring in screen.rings_of(view):
        told = [
            f"{figures.exact(ring['published'])} published",
            f"{figures.percent(ring['used'])} in use",
            f"at most {figures.percent(ring['peak'])}",
            f"full {screen.full(ring).plain}" if ring["full_events"] else "never full",
        ]
        if behind := screen.slowest(ring):
            told.append(f"slowest reader {behind}")
        yield f"ring {ring['name']}", list(map(Text, told))
    for consumer in view["consumers"]:
        told = [f"{figures.exact(consumer[key])} {key}" for key in ("delivered", "skipped", "unread")]
        if consumer["alive"] is False:
            told.append("dead")
        if consumer["restarts"]:
            told.append(f"{consumer['restarts']} restarts")
        found = screen.found_by(consumer)
        result = screen.digest(found, screen.as_of(consumer)) if found else []
        yield consumer["name"], [*map(Text, told), *result]
