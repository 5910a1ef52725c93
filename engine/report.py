"""How a run speaks: JSON for programs, plain lines for pipes and logs, a live table on a terminal.

A run says `note` (progress, on stderr), `ready` once, `interval` again and again, and `summary` at the
end. The last three take the very objects that `--json` prints; every form shows the same numbers.

A reader of stdout who goes away surfaces as BrokenPipeError from whichever method wrote.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Protocol, Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from engine import figures, screen
from engine.errors import Failed

Object = Mapping[str, Any]
LOG_WIDTH = 80  # of the closing tables, where stdout has no width


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
    *, json: bool = False, plain: bool = False, out: IO[str] | None = None, err: IO[str] | None = None
) -> Report:
    """The form that was asked for, or that suits what stdout is."""
    out, err = out or sys.stdout, err or sys.stderr
    if json:
        return JsonReport(out, err)
    console = Console(file=out, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and not plain:
        return LiveReport(console, err)
    return PlainReport(out, err, console.width if out.isatty() else None)


class JsonReport:
    """One JSON object a line on stdout and nothing else there; each line is flushed."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self.out, self.err = out, err

    def note(self, text: str) -> None:
        print(text, file=self.err, flush=True)

    def _write(self, view: Object) -> None:
        try:
            line = msgspec.json.encode(view, enc_hook=_plain_data)
        except (TypeError, ValueError, OverflowError) as error:
            raise Failed(
                f"a handler's report is no JSON ({error}): return str, int, float, list, dict"
            ) from None
        self.out.write(f"{line.decode()}\n")
        self.out.flush()

    ready = interval = summary = _write

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


def _plain_data(found: Any) -> Any:
    """numpy's numbers and arrays, as a handler's report may hold them."""
    if hasattr(found, "tolist"):
        return found.tolist()
    raise TypeError(f"{type(found).__name__} in it")


class PlainReport:
    """A line for each part of the run at every interval, and the tables at the end.

    width: where lines are broken; None: a pipe or a file, each part stays on its line.
    """

    def __init__(self, out: IO[str], err: IO[str], width: int | None = None) -> None:
        self.out, self.err, self.width = out, err, width
        self.name = ""

    def note(self, text: str) -> None:
        print(text, file=self.err, flush=True)

    def ready(self, view: Object) -> None:
        self.name = view["name"]
        self._write(ready_lines(view))

    def interval(self, view: Object) -> None:
        self._write(interval_lines(view, self.width))

    def summary(self, view: Object) -> None:
        console = Console(file=io.StringIO(), width=self.width or LOG_WIDTH, color_system=None)
        with console.capture() as tables:
            console.print(screen.summary(self.name, view))
        self._write([Text(line) for line in tables.get().splitlines()])

    def _write(self, lines: Sequence[Text]) -> None:
        self.out.writelines(f"{line.plain.rstrip()}\n" for line in lines)
        self.out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


class LiveReport:
    """A table on the terminal, drawn again at every interval; the last one stays.

    Drawn by whoever calls, without a thread: the supervisor forks.
    """

    def __init__(self, console: Console, err: IO[str]) -> None:
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
        self.live.update(screen.interval(self.name, view), refresh=True)

    def summary(self, view: Object) -> None:
        self.live.update(screen.summary(self.name, view), refresh=True)

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
    """One line for each receiver, ring and consumer, its time before the first."""
    stamp = figures.clock(view["seconds"]).rjust(8)
    lines: list[Text] = []
    for name, pieces in _interval_parts(view):
        head = Text(f"{stamp if not lines else ' ' * len(stamp)}  {screen.printable(name)}")
        lines += screen.flow(head, pieces, width, indent=len(stamp) + 4)
    return lines


def _interval_parts(view: Object) -> Iterator[tuple[str, list[Text]]]:
    for receiver in view["receivers"]:
        told = [
            figures.magnitude(receiver["packets_per_second"], "/s"),
            figures.magnitude(8 * receiver["bytes_per_second"], "bit/s"),
            f"{figures.magnitude(receiver['packets_per_call'])} a call",
            f"{figures.exact(receiver['packets'])} packets",
            f"{screen.dropped(receiver).plain} dropped",
        ]
        yield receiver["name"], [*map(Text, told), *screen.troubles(receiver)]
    for ring in view["rings"]:
        told = [
            f"{figures.exact(ring['published'])} published",
            f"{screen.share_of_ring(ring, 'lag_frames')} used",
            f"peak {screen.share_of_ring(ring, 'high_water')}",
            f"full {figures.exact(ring['full_events'])} times",
        ]
        yield f"ring {ring['name']}", list(map(Text, told))
    for consumer in view["consumers"]:
        told = [f"{figures.exact(consumer[key])} {key}" for key in ("delivered", "skipped", "unread")]
        if consumer["alive"] is False:
            told.append("dead")
        if consumer["restarts"]:
            told.append(f"{consumer['restarts']} restarts")
        yield consumer["name"], [*map(Text, told), *screen.digest(consumer.get("result") or {})]
