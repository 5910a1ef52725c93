from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from engine.errors import Refused
from engine.handlers import Handler
from engine.handlers.api import BUILT_IN, RAISED, READ_EVERY, compiled, load, packets_in
from rings.layout import ALIGN
from tests.engine.handlers.batches import NOW_NS, Frame, feed, fresh, gro, lay, on_batch_of, one

COUNT = np.dtype([("count", "i8")], align=True)
SEEN = np.dtype([("n", "i8"), ("kept", "i8", (400, 8))], align=True)


def keep(state, payload, meta):
    """Writes down everything that a handler is told."""
    row = state.kept[state.n]
    row[0] = payload.size
    row[1] = payload[0] if payload.size > 0 else -1
    row[2] = payload[payload.size - 1] if payload.size > 0 else -1
    row[3] = meta.number
    row[4] = meta.kernel_ns
    row[5] = meta.received_ns
    row[6] = meta.read_ns
    row[7] = meta.flags
    state.n += 1


keeper = Handler(SEEN, on_packet=keep)


def kept(*frames: Frame, number: int = 0) -> list[list[int]]:
    state = fresh(keeper)
    assert feed(keeper, state, *frames, number=number) == 0
    rows: list[list[int]] = state[0]["kept"][: state[0]["n"]].tolist()
    return rows


def test_on_packet_sees_every_packet_of_every_kind_of_frame() -> None:
    rows = kept(
        one(b"abc"),
        one(b""),
        gro(b"wxyz", b"1234", b"56"),  # the last one shorter
        gro(b"pqrs"),
        gro(b"a", b"b"),
        number=1000,
    )
    assert [row[0] for row in rows] == [3, 0, 4, 4, 2, 4, 1, 1]
    assert bytes(row[1] for row in rows if row[0]) == b"aw15pab"
    assert bytes(row[2] for row in rows if row[0]) == b"cz46sab"
    assert [row[3] for row in rows] == list(range(1000, 1008))


def test_meta_holds_the_frames_times_and_flags() -> None:
    before_ns = time.time_ns()
    (row,) = kept(one(b"x", kernel_ns=NOW_NS, socket_ns=(1 << 32) - 1, flags=9))
    assert row[4:6] == [NOW_NS, NOW_NS + (1 << 32) - 1]
    assert before_ns <= row[6] <= time.time_ns()
    assert row[7] == 9


def test_read_is_taken_anew_every_16_packets_and_for_each_gro_frame() -> None:
    read = [row[6] for row in kept(*[one(b"x")] * 100)]
    for i in range(1, 100):
        assert (read[i] == read[i - 1]) == (i % READ_EVERY != 0)
    frames = [row[6] for row in kept(*[gro(b"x", b"y", b"z")] * 5)]
    assert len(set(frames)) == 5
    long = [row[6] for row in kept(gro(*[b"x"] * 100))]
    assert len(set(long)) == -(-100 // READ_EVERY)


def test_frames_of_every_length_against_the_layout() -> None:
    """The loop and the arithmetic of packets_in agree with how frames are described."""
    for length in range(12):
        for segment in range(1, 13):
            payload = bytes(range(1, length + 1))
            cut = [payload[i : i + segment] for i in range(0, length, segment)] or [b""]
            descriptors, arena = lay([one(payload)])
            descriptors["segment"] = segment
            state = fresh(keeper)
            on_batch = on_batch_of(keeper).ctypes
            assert on_batch(state.ctypes.data, descriptors.ctypes.data, 1, arena.ctypes.data) == 0
            rows = state[0]["kept"][: state[0]["n"]]
            assert [row[0] for row in rows] == [len(packet) for packet in cut]
            assert packets_in(descriptors[0]) == len(cut)


def test_on_batch_gets_the_frames_and_their_bytes() -> None:
    def sum_of_first_bytes(state, frames, arena):
        for frame in frames:
            state.count += arena[np.int64(frame.offset) * ALIGN]
        state.count += 1000 * frames.size + 1_000_000 * arena.size

    handler = Handler(COUNT, on_batch=sum_of_first_bytes)
    state = fresh(handler)
    assert feed(handler, state, one(b"\1\2\3"), one(b"\5"), gro(b"\7\7", b"\7")) == 0
    assert handler.report(state[0]) == {"count": 1 + 5 + 7 + 3000 + 1_000_000 * (2 * ALIGN + 3)}


def test_an_empty_batch_and_a_batch_of_nothing() -> None:
    def on_batch(state, frames, arena):
        state.count += 10 * frames.size + arena.size

    handler = Handler(COUNT, on_batch=on_batch)
    state = fresh(handler)
    assert on_batch_of(handler).ctypes(state.ctypes.data, 0, 0, 0) == 0
    assert feed(handler, state, one(b"")) == 0
    assert state[0]["count"] == 10


def test_functions_that_are_jitted_already_are_welcome() -> None:
    @numba.njit
    def on_packet(state, payload, meta):
        state.count += helper(payload)

    @numba.njit
    def helper(payload):
        return payload.sum()

    handler = Handler(COUNT, on_packet=on_packet)
    state = fresh(handler)
    feed(handler, state, one(b"\1\2"), one(b""))
    assert state[0]["count"] == 3


def test_what_a_function_returns_is_ignored() -> None:
    def on_packet(state, payload, meta):
        state.count += 1
        return 5

    handler = Handler(COUNT, on_packet=on_packet)
    state = fresh(handler)
    assert feed(handler, state, one(b"x"), one(b"y")) == 0
    assert state[0]["count"] == 2


def test_an_exception_ends_the_batch_and_is_not_swallowed() -> None:
    def on_packet(state, payload, meta):
        state.count += 1
        if payload.size == 0:
            raise ValueError("no bytes")

    def on_batch(state, frames, arena):
        raise ValueError("never")

    handler = Handler(COUNT, on_packet=on_packet)
    state = fresh(handler)
    assert feed(handler, state, one(b"x"), one(b""), one(b"y")) == RAISED
    assert state[0]["count"] == 2
    other = Handler(COUNT, on_batch=on_batch)
    assert feed(other, fresh(other), one(b"x")) == RAISED


def test_the_defaults_of_a_handler() -> None:
    state = fresh(keeper)
    keeper.finish(state[0])
    assert Handler(COUNT, on_packet=keep).report(np.zeros(1, COUNT)[0]) == {"count": 0}
    with pytest.raises(Refused, match="can't add up the states"):
        keeper.merge(state[0], state[0])


# ── What is refused, in one line


def refusal(make: Any) -> str:
    with pytest.raises(Refused) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert ": " in message
    return message


def test_a_dtype_that_is_no_record() -> None:
    for dtype in (np.dtype("i8"), [("count", "i8")], None, np.dtype([("thing", "O")])):
        assert "Handler(dtype=…) must describe a record" in refusal(
            lambda d=dtype: Handler(d, on_packet=keep)
        )


def test_no_function_or_two() -> None:
    assert "needs on_packet or on_batch" in refusal(lambda: Handler(COUNT))
    assert "needs on_packet or on_batch" in refusal(lambda: Handler(COUNT, on_packet=keep, on_batch=keep))


def test_functions_with_other_parameters() -> None:
    def two(state, payload):
        pass

    assert "two (" in refusal(lambda: Handler(COUNT, on_packet=two))
    assert "can't be called as on_packet(state, payload, meta)" in refusal(
        lambda: Handler(COUNT, on_packet=two)
    )
    assert "as on_batch(state, frames, arena)" in refusal(lambda: Handler(COUNT, on_batch=numba.njit(two)))
    assert "as report(state)" in refusal(lambda: Handler(COUNT, on_packet=keep, report=two))
    assert "as merge(into, other)" in refusal(lambda: Handler(COUNT, on_packet=keep, merge=keep))
    assert "on_packet=…) is of type int" in refusal(lambda: Handler(COUNT, on_packet=3))


def test_generators_and_coroutines() -> None:
    def generator(state, payload, meta):
        yield 1

    async def coroutine(state, payload, meta):
        pass

    for function in (generator, coroutine):
        told = refusal(lambda f=function: Handler(COUNT, on_packet=f))
        assert "is a generator or a coroutine: give a plain function" in told


def _unknown_field(state, payload, meta):
    state.cuont += 1


def _unknown_fact(state, payload, meta):
    state.count += meta.reed_ns


def _writes_payload(state, payload, meta):
    payload[0] = 1


def _calls_python(state, payload, meta):
    state.count += plain_python(payload)


def _with(state, payload, meta):
    with open("x"):
        state.count += 1


def plain_python(payload):
    return 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_unknown_field, "no field 'cuont' in a record"),
        (_unknown_fact, "Unknown attribute 'reed_ns' of type Meta"),
        (_writes_payload, "Cannot modify readonly array"),
        (_calls_python, "Untyped global name 'plain_python'"),
        (_with, "context manager"),
    ],
)
def test_what_does_not_compile(function: Any, reason: str) -> None:
    told = refusal(lambda: compiled(Handler(COUNT, on_packet=function)))
    assert told.startswith(f"{function.__name__} ({__file__}:")
    assert reason in told
    assert len(told) < 300


def test_a_batch_of_the_ring_can_not_be_written() -> None:
    def on_batch(state, frames, arena):
        arena[0] = 1

    assert "Cannot modify readonly array" in refusal(lambda: compiled(Handler(COUNT, on_batch=on_batch)))


# ── Finding them


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_handlers_are_compiled_already(name: str) -> None:
    handler = load(name)
    assert isinstance(handler, Handler)
    assert compiled(handler) is handler.on_batch
    assert handler.dtype.isalignedstruct


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, as a user's; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


MODULE = """
import numpy as np
from engine.handlers import Handler

def on_packet(state, payload, meta):
    state.packets += 1

mine = Handler(np.dtype([("packets", "i8")]), on_packet=on_packet)
number = 3
"""


def test_a_handler_of_the_users_own_from_the_current_folder(folder: Path) -> None:
    (folder / "users_own.py").write_text(MODULE)
    handler = load("users_own:mine")
    state = fresh(handler)
    feed(handler, state, gro(b"ab", b"c"))
    assert handler.report(state[0]) == {"packets": 2}


def test_names_that_lead_nowhere(folder: Path) -> None:
    (folder / "users_own.py").write_text(MODULE)
    (folder / "users_empty.py").write_text("")
    assert "no handler latenzy: give one of latency, rate, gaps, dump, or your own" in refusal(
        lambda: load("latenzy")
    )
    assert "no handler users_own:" in refusal(lambda: load("users_own:"))
    assert "no module users_absent: give one from the current folder" in refusal(
        lambda: load("users_absent:x")
    )
    assert "no module users_absent" in refusal(lambda: load("users_absent.sub:x"))
    assert "no yours in module users_own" in refusal(lambda: load("users_own:yours"))
    assert "it has mine" in refusal(lambda: load("users_own:yours"))
    assert "it has no Handler at all" in refusal(lambda: load("users_empty:x"))
    assert "users_own:number is of type int" in refusal(lambda: load("users_own:number"))
    assert "users_own:on_packet is of type function" in refusal(lambda: load("users_own:on_packet"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import users_missing_library", "needs users_missing_library, which is not installed"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("from engine.handlers import Handler; Handler(None)", "must describe a record"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_modules_that_can_not_be_imported(folder: Path, source: str, reason: str) -> None:
    (folder / "users_broken.py").write_text(source)
    assert reason in refusal(lambda: load("users_broken:x"))
