"""What a handler is, and how a consumer gets it: compiled, behind one C pointer.

A consumer's loop calls `on_batch(state, frames, count, arena)` for each batch (ON_BATCH; all int64):
address of the state record, address of the first of `count` contiguous DESCRIPTORs, base address of the
arena. 0: go on. Anything else ends the consumer with that code: an errno of ours, or RAISED.

Frames are what the kernel brought, packets are what users mean. `packet_loop` knows the difference:
a frame of `segment` 0 is one packet, of any length, 0 included; with a `segment` it holds packets of that
many bytes, one behind the other, the last maybe shorter.

The built-in handlers hold a `callback(ON_BATCH)`, which numba keeps on disk. A user's plain Python
function is put into the same loop when its consumer is prepared.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import carray, types
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaError

from engine.errors import Refused
from engine.net.stamp import StampName
from rings.atomics import pointer
from rings.jit import callback, jit
from rings.layout import ALIGN, DESCRIPTOR
from rings.libc import realtime_ns

ON_BATCH = types.int64(types.int64, types.int64, types.int64, types.int64)
RAISED = -1  # what on_batch answers when a user's function raised an exception
READ_EVERY = 16  # packets that may share one reading of the clock

BUILT_IN = {
    "latency": "engine.handlers.latency",
    "rate": "engine.handlers.rate",
    "gaps": "engine.handlers.gaps",
    "dump": "engine.sinks.raw",
}


class Meta(NamedTuple):
    """What is known of a packet beside its bytes. Times are CLOCK_REALTIME, ns since the epoch.

    number: its place among all packets of its ring, from 0.
    kernel_ns: when the kernel took it from the device; with NO_KERNEL_TIME the same as received_ns.
    received_ns: when its batch came out of the kernel. Not known with SATURATED (that much or later) and
    with NEGATIVE (earlier than kernel_ns: the clock was set).
    read_ns: when the consumer took it; taken anew every READ_EVERY packets and for every GRO frame.
    flags: layout.FrameFlag, of its frame.
    """

    number: int
    kernel_ns: int
    received_ns: int
    read_ns: int
    flags: int


@dataclass(frozen=True, slots=True)
class Options:
    """What a handler is told before its first packet.

    stamp: what senders put at the beginning of a payload. argument: the text behind `NAME=`.
    name: the consumer's. restarts: how often this consumer was started again within the run.
    """

    stamp: StampName = "rxring"
    argument: str | None = None
    name: str = ""
    restarts: int = 0


def _fields(state: Any) -> dict[str, Any]:
    """The report of a handler that brings none: its fields as they are."""
    return {name: state[name].tolist() for name in state.dtype.names}


def _no_merge(into: Any, other: Any) -> None:
    raise Refused("this handler can't add up the states of several consumers: give Handler(…, merge=…)")


def _nothing(*_: Any) -> None:
    return


@dataclass(frozen=True)
class Handler:
    """What a consumer does with packets: a state record, and compiled code that changes it.

    dtype: structured, of the state; it begins as zeros. Compiled code sees it as a record (`state.count`),
    the functions below as a numpy record (`state["count"]`).
    Exactly one of:
      on_packet(state, payload, meta): payload u1 (length,), a view that ends with the call; meta a Meta.
      on_batch(state, frames, arena): frames DESCRIPTOR (count,); arena u1, the packets of frame i begin at
      frames[i].offset × ALIGN. Or a `callback(ON_BATCH)`.
    Both are compiled by numba, unless they are already; what they return is ignored, an exception ends
    the consumer.
    report(state) → dict for JSON. Called at any time, on a copy that can't be written.
    merge(into, other): make `into` what it were had it seen the packets of both.
    start(state, options), finish(state): in the consumer's process, before the first packet and after the
    last. start raises Refused where it can't.
    """

    dtype: np.dtype[Any]
    _: KW_ONLY
    on_packet: Callable[..., Any] | None = None
    on_batch: Callable[..., Any] | None = None
    merge: Callable[[Any, Any], None] = _no_merge
    report: Callable[[Any], dict[str, Any]] = _fields
    start: Callable[[Any, Options], None] = _nothing
    finish: Callable[[Any], None] = _nothing

    @property
    def merges(self) -> bool:
        """Can the states of several consumers be added up?"""
        return self.merge is not _no_merge

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, np.dtype) or self.dtype.names is None or self.dtype.hasobject:
            raise Refused(
                'Handler(dtype=…) must describe a record of numbers: give numpy.dtype([("count", "i8"), …])'
            )
        if (self.on_packet is None) == (self.on_batch is None):
            raise Refused("Handler(…) needs on_packet or on_batch: give one of them")
        for name, parameters in _PARAMETERS.items():
            function = getattr(self, name)
            if function is not None and not isinstance(function, CFunc):
                _check_parameters(name, function, parameters)


_PARAMETERS = {
    "on_packet": ("state", "payload", "meta"),
    "on_batch": ("state", "frames", "arena"),
    "merge": ("into", "other"),
    "report": ("state",),
    "start": ("state", "options"),
    "finish": ("state",),
}


def _check_parameters(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    form = f"{name}({', '.join(parameters)})"
    if not callable(function):
        raise Refused(f"Handler({name}=…) is {_kind(function)}: give a function {form}")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise Refused(f"{_where(function)} is a generator or a coroutine: give a plain function {form}")
    try:
        inspect.signature(getattr(function, "py_func", function)).bind(*parameters)
    except TypeError:
        raise Refused(f"{_where(function)} can't be called as {form}: give it these parameters") from None


def takes_no_argument(name: str, options: Options) -> None:
    if options.argument is not None:
        raise Refused(f"{name}={options.argument!r}: {name} takes no argument: give {name} alone")


# ── Compiled loops


@jit
def record_at(address, dtype):  # type: ignore[no-untyped-def]
    """The record of type `dtype` at an address."""
    return carray(pointer(address), 1, dtype)[0]


@jit
def payload_as(payload, dtype):  # type: ignore[no-untyped-def]
    """The beginning of a payload as a record; only fields that lie within it may be touched."""
    return record_at(np.int64(payload.ctypes.data), dtype)


@jit
def packets_in(frame):  # type: ignore[no-untyped-def]
    """How many packets a frame (a DESCRIPTOR) holds."""
    segment = np.int64(frame.segment)
    if segment == 0:
        return np.int64(1)
    return max((np.int64(frame.length) + segment - 1) // segment, 1)


@jit
def no_clock():  # type: ignore[no-untyped-def]
    """For handlers that don't look at `meta.read_ns`: the real clock is a third of what they cost."""
    return np.int64(0)


def packet_loop(on_packet: Any, clock: Any, signature: Any = None) -> Any:
    """A compiled loop(state, frames, count, arena) that calls on_packet(state, payload, meta).

    on_packet: a plain function, which is inlined: a call costs as much as all statistics of a stage.
    clock: a jitted one. signature: of on_packet, to be compiled at once; else when the loop is.
    state: passed on. The rest: as in ON_BATCH.
    """
    inlined = _part(on_packet, signature, forceinline=True)

    def loop(state, frames, count, arena):  # type: ignore[no-untyped-def]
        batch = carray(pointer(frames), count, DESCRIPTOR)
        read_ns = np.int64(0)
        reads_left = 0
        for i in range(count):
            frame = batch[i]
            number = np.int64(frame.number)
            address = arena + np.int64(frame.offset) * ALIGN
            left = np.int64(frame.length)
            received_ns = frame.time_ns + np.int64(frame.socket_ns)
            flags = np.int64(frame.flags)
            segment = np.int64(frame.segment)
            if segment == 0:
                segment = left
            else:
                reads_left = 0
            while True:
                if reads_left == 0:
                    read_ns = clock()
                    reads_left = READ_EVERY
                reads_left -= 1
                size = min(segment, left)
                payload = carray(pointer(address), (size,), np.uint8)
                meta = Meta(number, frame.time_ns, received_ns, read_ns, flags)  # type: ignore[arg-type]
                inlined(state, payload, meta)
                number += 1
                address += size
                left -= size
                if left <= 0:
                    break

    return _part(loop)


def _part(function: Any, signature: Any = None, **flags: Any) -> Any:
    """Compile a function that is part of another, which is the one to be kept on disk (or not)."""
    return numba.njit(signature, nogil=True, error_model="numpy", **flags)(function)


@jit
def bytes_spanned(batch):  # type: ignore[no-untyped-def]
    """From the arena's base to behind the last byte of any of these frames."""
    end = np.int64(0)
    for i in range(len(batch)):
        end = max(end, np.int64(batch[i].offset) * ALIGN + np.int64(batch[i].length))
    return end


def compiled(handler: Handler) -> Any:
    """The handler's `on_batch` as an object with an `address`, which compiled code can call (ON_BATCH).

    Refused where numba can't compile the user's function.
    """
    if isinstance(handler.on_batch, CFunc):
        return handler.on_batch
    function: Any = handler.on_packet or handler.on_batch
    plain = getattr(function, "py_func", function)
    wrap = _per_packet if handler.on_packet else _per_batch
    try:
        # Not kept on disk: numba would not see it when something changes that the user's module imports.
        return callback(ON_BATCH, cache=False)(wrap(plain, handler.dtype))
    except Exception as error:  # numba lets some of its own KeyErrors and the like through
        raise Refused(
            f"{_where(function)} does not compile ({_reason(error)}): mend it, or leave it out"
        ) from None


def _reason(error: Exception) -> str:
    """What numba has to say, without its traces: the reason, and the line in the user's file."""
    if isinstance(error, KeyError):
        return f"no field {error} in a record"
    told = str(error)
    specific = re.search(r"raised a specific error:\s*(?:\w+: )?(.+)", told)
    lines = [line for line in told.splitlines() if line.strip() and "nopython mode pipeline" not in line]
    reason = specific.group(1) if specific else next(iter(lines), "")
    place = re.search(r'File ".*", line (\d+):| \((\d+)\)$', told, re.M)
    line = f"line {place.group(1) or place.group(2)}: " if place else ""
    kind = "" if isinstance(error, NumbaError) else f"{type(error).__name__}: "
    return f"{line}{kind}{_one_line(reason)}"


# The ring is mapped read-only: a handler that writes to a payload is to be refused, not to be killed.
_PAYLOAD = types.Array(types.uint8, 1, "C", readonly=True)
_FRAMES = types.Array(numba.from_dtype(DESCRIPTOR), 1, "C", readonly=True)
_META = types.NamedUniTuple(types.int64, len(Meta._fields), Meta)


def _per_packet(on_packet: Any, dtype: np.dtype[Any]) -> Callable[..., Any]:
    loop = packet_loop(on_packet, realtime_ns, (numba.from_dtype(dtype), _PAYLOAD, _META))

    def guarded(state, frames, count, arena):  # type: ignore[no-untyped-def]
        try:
            loop(record_at(state, dtype), frames, count, arena)
        except Exception:
            return RAISED
        return 0

    return guarded


def _per_batch(on_batch: Any, dtype: np.dtype[Any]) -> Callable[..., Any]:
    users = _part(on_batch, (numba.from_dtype(dtype), _FRAMES, _PAYLOAD))

    def guarded(state, frames, count, arena):  # type: ignore[no-untyped-def]
        batch = carray(pointer(frames), count, DESCRIPTOR)
        payloads = carray(pointer(arena), (bytes_spanned(batch),), np.uint8)
        try:
            users(record_at(state, dtype), batch, payloads)
        except Exception:
            return RAISED
        return 0

    return guarded


# ── Finding them


def load(name: str) -> Handler:
    """The handler of a built-in name, or of `module:name`. Refused where there is none."""
    if name in BUILT_IN:
        handler: Handler = importlib.import_module(BUILT_IN[name]).handler
        return handler
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise Refused(f"no handler {name}: give one of {', '.join(BUILT_IN)}, or your own as module:name")
    module = _import(module_name)
    if not hasattr(module, attribute):
        there = [key for key, value in vars(module).items() if isinstance(value, Handler)]
        known = f"it has {', '.join(there)}" if there else "it has no Handler at all"
        raise Refused(f"no {attribute} in module {module_name} ({module.__file__}): {known}")
    found = getattr(module, attribute)
    if not isinstance(found, Handler):
        raise Refused(f"{name} is {_kind(found)}: give the name of an engine.handlers.Handler")
    return found


def _import(name: str) -> Any:
    if os.getcwd() not in sys.path:  # the command's own path holds its own folder only
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except Refused:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise Refused(
                f"no module {error.name}: give one from the current folder, or set PYTHONPATH"
            ) from None
        raise Refused(f"module {name} needs {error.name}, which is not installed: install it") from None
    except (Exception, SystemExit) as error:
        told = _one_line(f"{type(error).__name__}: {error}")
        raise Refused(f"module {name} can't be imported ({told}): mend it") from None


def _kind(thing: Any) -> str:
    return f"of type {type(thing).__name__}"


def _where(function: Any) -> str:
    """A function's name and place, for people."""
    plain = getattr(function, "py_func", function)
    code = getattr(plain, "__code__", None)
    name = getattr(plain, "__qualname__", repr(plain))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _one_line(message: str) -> str:
    return " ".join(message.split())
