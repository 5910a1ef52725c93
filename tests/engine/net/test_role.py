import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from engine.affinity import topology
from engine.errors import Refused
from engine.net import role
from engine.net.role import Stop, drive
from engine.signals import END_SIGNALS


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """Signals that reach the handlers from before; those are put back."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in END_SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [n for n in END_SIGNALS if n != signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_has_its_usual_effect(
    caught: list[int], number: signal.Signals
) -> None:
    with Stop() as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert stop.asked
        assert caught == []
        signal.raise_signal(number)
        assert caught == [number]


def test_a_hangup_asks_and_is_never_the_second_signal(caught: list[int]) -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.asked
        signal.raise_signal(signal.SIGHUP)
        assert caught == []
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM]


@pytest.mark.parametrize("number", END_SIGNALS)
def test_handlers_are_put_back(caught: list[int], number: signal.Signals) -> None:
    with Stop():
        pass
    signal.raise_signal(number)
    assert caught == [number]
    with Stop():
        signal.raise_signal(number)
    signal.raise_signal(number)
    assert caught == [number, number]


def test_what_nohup_had_ignored_stays_ignored() -> None:
    code = "from engine.signals import END_SIGNALS; print(*(n.name for n in END_SIGNALS))"
    for ignored, names in (("HUP", "SIGINT SIGTERM SIGQUIT"), ("INT", "SIGINT SIGTERM SIGHUP SIGQUIT")):
        command = f"trap '' {ignored}; exec {sys.executable} -c '{code}'"
        assert (
            subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout
            == f"{names}\n"
        )


def test_a_signal_breaks_preparations_off(caught: list[int]) -> None:
    steps = []

    def prepare() -> None:
        steps.append("begun")
        signal.raise_signal(signal.SIGTERM)
        steps.append("not reached")

    with Stop() as stop:
        stop.prepare(prepare)
        assert stop.asked
        stop.prepare(prepare)
    assert steps == ["begun"]
    assert caught == []


def test_after_preparations_a_signal_only_asks(caught: list[int]) -> None:
    with Stop() as stop:
        stop.prepare(lambda: None)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked


def slices(count: int, then: Callable[[], None] = lambda: None) -> tuple[list[int], Callable[[int], bool]]:
    """A loop that has work for `count` slices, and the times until which it was asked to run."""
    asked: list[int] = []

    def run_slice(until_ns: int) -> bool:
        asked.append(until_ns)
        if len(asked) == count:
            then()
        return len(asked) < count

    return asked, run_slice


def test_drive_ends_with_the_work() -> None:
    asked, run_slice = slices(5)
    begin = time.monotonic_ns()
    drive(run_slice, Stop(), None, lambda: None)
    assert len(asked) == 5
    assert begin < asked[0] <= time.monotonic_ns() + role.SLICE_NS


def test_drive_ends_when_asked() -> None:
    stop = Stop()
    asked, run_slice = slices(1_000_000, lambda: None)

    def third(until_ns: int) -> bool:
        stop.asked = len(asked) == 2
        return run_slice(until_ns)

    drive(third, stop, None, lambda: None)
    assert len(asked) == 3


def test_no_slice_passes_the_end() -> None:
    asked, run_slice = slices(1_000_000)
    end_ns = time.monotonic_ns() + 1_000_000
    drive(run_slice, Stop(), end_ns, lambda: None)
    assert set(asked) == {end_ns}
    drive(run_slice, Stop(), 1, lambda: pytest.fail("the time was up"))


def test_errors_have_names() -> None:
    counters = [0] * 134
    counters[errno.ENOBUFS] = 3
    assert role.errors_by_name(counters) == {"ENOBUFS": 3}


def test_errors_for_people() -> None:
    assert role.error_lines({"ECONNREFUSED": 1965, "ENOBUFS": 3}, "127.0.0.1:9") == [
        "nobody listens on 127.0.0.1:9 (refused 1,965 times)",
        "ENOBUFS 3 times",
    ]


def test_flags_are_checked() -> None:
    role.check_range("batch", None, 1, 2)
    role.check_duration(None)
    assert role.cpus_of(None) is None
    assert role.cpus_of("0-1") == (0, 1)
    for call in (
        lambda: role.check_range("batch", 3, 1, 2),
        lambda: role.check_duration(0),
        lambda: role.check_duration(float("nan")),
        lambda: role.cpus_of("x"),
    ):
        with pytest.raises(Refused):
            call()


def test_pinned_here() -> None:
    before, cpu = os.sched_getaffinity(0), topology.allowed()[-1]
    try:
        assert role.pin_here(None) == []
        assert role.pin_here([cpu]) == [cpu]
    finally:
        os.sched_setaffinity(0, before)
