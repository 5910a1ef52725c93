from __future__ import annotations

import errno
import os
import random
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import Refused
from engine.sinks.raw import _IOVECS, handler
from tests.engine.handlers.batches import Frame, feed, fresh, gro, one


def opened(path: Path, **options: Any) -> NDArray[Any]:
    return fresh(handler, argument=str(path), **options)


def dumped(path: Path, *frames: Frame) -> dict[str, Any]:
    state = opened(path)
    assert feed(handler, state, *frames) == 0
    handler.finish(state[0])
    return handler.report(state[0])


def test_payloads_in_order_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "out"
    found = dumped(file, one(b"abc"), one(b""), gro(b"1234", b"5678", b"9"), one(b"z" * 1316))
    assert file.read_bytes() == b"abc123456789" + b"z" * 1316
    assert found == {"bytes": 3 + 9 + 1316, "packets": 6, "file": str(file), "error": None}


def test_more_frames_than_one_call_takes(tmp_path: Path) -> None:
    payloads = [random.Random(i).randbytes(i % 200) for i in range(3 * _IOVECS + 1)]
    found = dumped(tmp_path / "out", *map(one, payloads))
    assert (tmp_path / "out").read_bytes() == b"".join(payloads)
    assert found["packets"] == len(payloads)


@pytest.mark.parametrize("count", [1, _IOVECS - 1, _IOVECS, _IOVECS + 1])
def test_packets_of_length_zero_are_written_and_counted(tmp_path: Path, count: int) -> None:
    found = dumped(tmp_path / "out", *[one(b"")] * count)
    assert (found["packets"], found["bytes"]) == (count, 0)


frames = st.lists(st.binary(max_size=50), min_size=1, max_size=5)


@given(st.lists(frames, max_size=20))
@settings(deadline=None)
def test_any_frames(tmp_path_factory: pytest.TempPathFactory, batch: list[list[bytes]]) -> None:
    file = tmp_path_factory.getbasetemp() / "any"
    laid = [one(packets[0]) if len(packets) == 1 else _segmented(packets) for packets in batch]
    found = dumped(file, *laid)
    assert file.read_bytes() == b"".join(packet for frame in laid for packet in frame.packets)
    assert found["packets"] == sum(len(frame.packets) for frame in laid)


def _segmented(packets: list[bytes]) -> Frame:
    """The same bytes as segments of a frame."""
    payload = b"".join(packets) or b"x"
    segment = max(len(payload) // len(packets), 1)
    return gro(*[payload[i : i + segment] for i in range(0, len(payload), segment)])


def test_a_file_that_is_there_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_bytes(b"old" * 100)
    dumped(file, one(b"new"))
    assert file.read_bytes() == b"new"


def test_a_restarted_consumer_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "out"
    first = opened(file)
    feed(handler, first, one(b"before"))
    os.close(int(first[0]["fd"]))  # killed
    second = opened(file, restarts=1)
    feed(handler, second, one(b" after"))
    handler.finish(second[0])
    assert file.read_bytes() == b"before after"


class LateReader(threading.Thread):
    """Drains a pipe in small bites, but first lets its writer be interrupted 20 times while it is full."""

    def __init__(self, pipe: Path, signals: int) -> None:
        super().__init__()
        self.fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self.fd, True)
        self.signals, self.got = signals, bytearray()

    def run(self) -> None:
        select.select([self.fd], [], [])
        os.read(self.signals, 1 << 16)  # those that came before the writer was at it
        for _ in range(20):
            os.read(self.signals, 1)
        while bite := os.read(self.fd, 1000):
            self.got += bite
        os.close(self.fd)


@pytest.fixture
def alarms() -> Iterator[int]:
    """Interrupts system calls every millisecond; readable: a byte for each time."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    handled = signal.signal(signal.SIGALRM, lambda *_: None)
    waked = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield readable
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.set_wakeup_fd(waked)
    signal.signal(signal.SIGALRM, handled)
    os.close(readable)
    os.close(writable)


def test_partial_writes_and_signals_lose_nothing(tmp_path: Path, alarms: int) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = LateReader(pipe, alarms)
    state = opened(pipe)
    payloads = [random.Random(i).randbytes(i * 37 % 9000) for i in range(500)]
    reader.start()
    code = feed(handler, state, *map(one, payloads))
    handler.finish(state[0])
    reader.join()
    assert code == 0
    assert bytes(reader.got) == b"".join(payloads)
    assert state[0]["bytes"] == len(reader.got)


def test_an_error_ends_it_with_its_errno() -> None:
    state = opened(Path("/dev/full"))
    assert feed(handler, state, one(b"abc")) == errno.ENOSPC
    handler.finish(state[0])
    assert handler.report(state[0]) == {
        "bytes": 0,
        "packets": 0,
        "file": "/dev/full",
        "error": "No space left on device",
    }


def test_a_pipe_whose_reader_has_gone_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    state = opened(pipe)
    os.close(reader)
    assert feed(handler, state, one(b"abc")) == errno.EPIPE
    handler.finish(state[0])


def test_what_can_not_be_opened_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for argument, reason in [
        (None, "dump needs a file to write to: give dump=FILE"),
        ("", "dump needs a file to write to: give dump=FILE"),
        (str(tmp_path), "Is a directory: give a file that can be written"),
        (str(tmp_path / "no" / "file"), "No such file or directory: give"),
        (str(tmp_path / ("x" * 5000)), "File name too long: give"),
        ("zero\0byte", "embedded null"),
        (str(tmp_path / "pipe"), "No such device or address: give"),  # nobody reads it: no waiting for ever
    ]:
        with pytest.raises(Refused) as caught:
            fresh(handler, argument=argument)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_finish_closes_once_and_only_what_was_opened(tmp_path: Path) -> None:
    handler.finish(np.zeros(1, handler.dtype)[0])
    state = opened(tmp_path / "out")
    fd = int(state[0]["fd"])
    handler.finish(state[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    handler.finish(state[0])


def test_names_that_are_no_text_are_reported_as_text(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    report = dumped(Path(name), one(b"x"))
    report["file"].encode()
    assert report["file"].startswith(str(tmp_path))


def test_merging_adds_up(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "a"), opened(Path("/dev/full"))
    feed(handler, first, one(b"abc"), one(b"d"))
    feed(handler, second, one(b"xyz"))
    handler.merge(first[0], second[0])
    handler.finish(second[0])
    found = handler.report(first[0])
    handler.finish(first[0])
    assert (found["packets"], found["bytes"], found["file"]) == (2, 4, str(tmp_path / "a"))
    assert found["error"] == "No space left on device"
