"""Atomic memory operations, fences and raw memory for compiled code; all of our intrinsics.

Addresses and values are int64 everywhere: numba turns a mix of signed and unsigned 64-bit integers into
a float. A word that several processes touch is touched through these functions only. A plain array
access is hoisted out of loops by the compiler, and then waits for ever.

Each maps to one LLVM instruction, so the order it promises holds on every CPU: on x86-64 acquire loads
and release stores are plain moves, on aarch64 they are LDAR and STLR.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_SPIN_HINT = {"x86_64": "pause", "aarch64": "isb"}.get(platform.machine(), "")
SCRATCH_BYTES = 64

binding.initialize_native_asmparser()  # numba does not, and without it LLVM aborts at the asm of `pause`


def _at(builder: Any, address: Any, word: Any) -> Any:
    return builder.inttoptr(address, word.as_pointer())


def _loader(name: str, ordering: str, word: Any) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load_atomic(_at(builder, args[0], word), ordering, word.width // 8)
            return value if word is _I64 else builder.zext(value, _I64)

        return types.int64(types.int64), generate

    typed.__name__ = name
    return intrinsic(typed)


def _storer(name: str, ordering: str, word: Any) -> Any:
    def typed(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word_value = args[1] if word is _I64 else builder.trunc(args[1], _I32)
            builder.store_atomic(word_value, _at(builder, args[0], word), ordering, word.width // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    typed.__name__ = name
    return intrinsic(typed)


def _fence(name: str, ordering: str) -> Any:
    def typed(typingctx: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), generate

    typed.__name__ = name
    return intrinsic(typed)


load_acquire = _loader("load_acquire", "acquire", _I64)
load_relaxed = _loader("load_relaxed", "monotonic", _I64)
load_acquire_u32 = _loader("load_acquire_u32", "acquire", _I32)
load_relaxed_u32 = _loader("load_relaxed_u32", "monotonic", _I32)
store_release = _storer("store_release", "release", _I64)
store_relaxed = _storer("store_relaxed", "monotonic", _I64)
store_relaxed_u32 = _storer("store_relaxed_u32", "monotonic", _I32)
fence_acquire = _fence("fence_acquire", "acquire")
fence_release = _fence("fence_release", "release")
fence_seq_cst = _fence("fence_seq_cst", "seq_cst")


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 word, sequentially consistent; returns the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _at(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fetch_add_u32(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to a 32-bit word, sequentially consistent; returns the value before, as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.trunc(args[1], _I32)
        before = builder.atomic_rmw("add", _at(builder, args[0], _I32), value, "seq_cst")
        return builder.zext(before, _I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(typingctx: Any, address: Any, expected: Any, wanted: Any) -> Any:
    """Store `wanted` if the int64 word holds `expected`, sequentially consistent; was it stored?"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], _I64)
        result = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def store_record(typingctx: Any, address: Any, words: Any) -> Any:
    """Write a record of 32 bytes, aligned to as many, from a tuple of four int64: plain, not atomic.

    In stores as wide as the compiler likes: two of 16 bytes on x86-64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four = ir.VectorType(_I64, 4)
        vector = ir.Constant(four, ir.Undefined)
        for i in range(4):
            word = builder.extract_value(args[1], i)
            vector = builder.insert_element(vector, word, ir.Constant(_I32, i))
        builder.store(vector, _at(builder, args[0], four), align=32)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, 4)), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a spin loop. The memory clobber keeps loads inside the loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), _SPIN_HINT, "~{memory}", (), True)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer, for `numba.carray(pointer(address), shape, dtype)`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def scratch(typingctx: Any) -> Any:
    """The address of SCRATCH_BYTES on the calling function's stack, for a struct that a call fills."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = cgutils.alloca_once(builder, ir.ArrayType(_I64, SCRATCH_BYTES // 8))
        return builder.ptrtoint(block, _I64)

    return types.int64(), generate
