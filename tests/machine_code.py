"""What the compiled code of a protocol step does to shared memory, on a machine that need not be this one.

x86 keeps the order of nearly all accesses by itself, so no run on it shows a fence that is missing or stands
on the wrong side. LLVM compiles for other machines from here: this module, run as a program, prints the
assembly of each step for each of MACHINES, made from numba's unoptimised code by the passes of -O3, all calls
within a step inlined. `Code` reads it: the control flow, and for each instruction which word it touches.
That follows from how its address was computed out of the step's record.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rings import layout, reader, wait, writer

MACHINES = {
    "armv8": ("aarch64-unknown-linux-gnu", "generic"),
    "neoverse": ("aarch64-unknown-linux-gnu", "neoverse-n1"),  # LDAPR, and atomics of one instruction
    "x86": ("x86_64-unknown-linux-gnu", "x86-64"),
}
STEPS = (
    *("writer.reserve", "writer.publish", "writer.append", "writer._look", "writer._wake"),
    *("writer.set_state", "reader.poll", "reader._poll_copy", "reader._poll_entry", "reader._keep_account"),
    *("reader.release", "reader.number_at", "reader.is_closed", "reader.activate", "reader._start_account"),
    *("wait._sleep", "wait._sleep_any"),
)


# Making it -----------------------------------------------------------------------------------------------


def _print_assembly() -> None:
    """For a process of its own: numba must not optimise, nor serve from a cache what it once optimised."""
    import numba
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.set_option("", "--x86-asm-syntax=intel")
    records = {
        "writer": numba.typeof(np.zeros(1, writer.WRITER_STATE)).dtype,
        "reader": numba.typeof(np.zeros(1, reader.READER_STATE)).dtype,
    }
    made: dict[str, dict[str, str]] = {machine: {} for machine in MACHINES}
    for step in STEPS:
        where, name = step.split(".")
        function = getattr({"writer": writer, "reader": reader, "wait": wait}[where], name)
        first, *others = function.py_func.__code__.co_varnames[: function.py_func.__code__.co_argcount]
        record = records["writer" if first == "w" else "reader"]
        # An array of records is passed in parts; a tuple of them is the records.
        many = {"state": 1, "readers": 2}.get(first)
        signature = (record if many is None else numba.types.UniTuple(record, many),)
        signature += tuple(numba.types.bool_ if name == "fresh" else numba.types.int64 for name in others)
        function.compile(signature)
        compiled = function.overloads[signature]
        text = function.inspect_llvm(signature)
        text = re.sub(r"^(define linkonce_odr .*)\{$", r"\1alwaysinline {", text, flags=re.M)
        for machine, (triple, cpu) in MACHINES.items():
            assembly = _assembly(binding, text, triple, cpu)
            symbol = re.escape(compiled.fndesc.llvm_func_name)
            body = re.search(rf'^"?{symbol}"?:[^\n]*\n(.*?)^\.Lfunc_end', assembly, re.M | re.S)
            assert body is not None
            made[machine][step] = body[1]
    print(json.dumps(made))


def _assembly(binding: Any, text: str, triple: str, cpu: str) -> str:
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(opt=3, reloc="pic", codemodel="small", cpu=cpu)
    text = re.sub(r"^target triple = .*", f'target triple = "{triple}"', text, flags=re.M)
    text = re.sub(
        r"^target datalayout = .*", f'target datalayout = "{machine.target_data}"', text, flags=re.M
    )
    module = binding.parse_assembly(text)
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    made: str = machine.emit_assembly(module)
    return made


@functools.cache
def _all_assembly() -> dict[str, dict[str, str]]:
    here = Path(__file__)
    environment = {**os.environ, "NUMBA_OPT": "0", "NUMBA_CACHE_DIR": "/proc/nowhere"}
    environment["PYTHONPATH"] = str(Path(layout.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, str(here)], env=environment, stdout=subprocess.PIPE, check=True, timeout=300
    )
    made: dict[str, dict[str, str]] = json.loads(result.stdout)
    return made


@functools.cache
def code(machine: str, step: str) -> Code:
    state = writer.WRITER_STATE if step.startswith("writer.") else reader.READER_STATE
    return Code(step, _all_assembly()[machine][step], state, _x86 if machine == "x86" else _aarch64)


# Reading it ----------------------------------------------------------------------------------------------

# What a register holds, as far as it matters: a base and the distance from it, None where that is not known.
# The bases are the record, the stack, the fields of the record, "" for plain numbers and "?" for the rest.
Value = tuple[str, int | None]
UNKNOWN: Value = ("?", None)
# Calls that return the address of memory that nobody else knows, and their result.
_OWN = {"NRT_MemInfo_alloc_aligned": ("own", 0), "__errno_location": ("own", 0)}
Registers = dict[str, Value]
_SECTIONS = {"writer": layout.WRITER, "slot": layout.READER}  # of whose words we know the names
_POINTERS = (
    *("writer", "waiting", "slot", "slots", "descriptors", "sources", "arena"),
    *("copied_descriptors", "copied_sources", "copied_arena"),
    *("batch_descriptors", "batch_arena"),
)


def _plus(one: Value, other: Value, sign: int = 1) -> Value:
    pointers = [v for v in (one, other) if v[0] in (*_POINTERS, "record", "stack", "result", "own")]
    if other[0] == "" and other[1] is not None and one[1] is not None:
        return one[0], one[1] + sign * other[1]
    if one[0] == "" and one[1] is not None and other[1] is not None and sign > 0:
        return other[0], one[1] + other[1]
    return (pointers[0][0], None) if len(pointers) == 1 else UNKNOWN


def _joined(one: Value, other: Value) -> Value:
    return one if one == other else (one[0], None) if one[0] == other[0] else UNKNOWN


class Code:
    """The compiled code of one step: what each instruction may do, and which may follow it.

    What it does is told in words: "store release published", "load acquire floor", "atomic wake", "fence
    full", "fence loads", "call memmove", "entry", "return". A word of a place that was computed has the name
    of its section: "load slots". A release store is also a "store", an acquire load a "load", a full fence
    also one of loads.
    """

    def __init__(self, step: str, text: str, state: np.dtype[Any], decode: Decoder) -> None:
        self.step = step
        self.state, self.decode = state, decode
        self.lines = ["entry"]
        labels: dict[str, int] = {}
        for line in text.splitlines():
            line = " ".join(line.partition(" # ")[0].split())
            if line.endswith(":"):
                labels[line[:-1]] = len(self.lines)
            elif line and line[0] not in ".#":
                self.lines.append(line)
        self.after = [self._successors(i, labels) for i in range(len(self.lines))]
        self.does: list[set[str]] = [{"entry"}, *(set() for _ in self.lines[1:])]
        self._follow()

    def _successors(self, at: int, labels: dict[str, int]) -> list[int]:
        op, _, operands = self.lines[at].partition(" ")
        target = labels.get(operands.rpartition(", ")[2])
        if op == "ret":
            return []
        if op in ("b", "jmp"):
            assert target is not None
            return [target]
        return [at + 1] if target is None else [at + 1, target]

    def _follow(self) -> None:
        """Carry what the registers hold along all paths, until nothing new comes."""
        at_entry: Registers = {"sp": ("stack", 0), "rsp": ("stack", 0)}
        for kind in (("x0", "x1", "x2", "x3"), ("rdi", "rsi", "rdx", "rcx")):
            given = ["result", "result", "record", *["record"] * (self.step == "wait._sleep_any")]
            at_entry |= {register: (base, 0) for register, base in zip(kind, given, strict=False)}
        before: list[Registers | None] = [None] * len(self.lines)
        before[0] = at_entry
        waiting = [0]
        while waiting:
            at = waiting.pop()
            registers = dict(before[at] or {})
            if at > 0:
                self.decode(self, at, registers)
            for following in self.after[at]:
                known = before[following]
                if known is None:
                    joined = dict(registers)
                else:
                    joined = {
                        key: _joined(known[key], registers[key]) for key in known.keys() & registers.keys()
                    }
                if joined != known:
                    before[following] = joined
                    waiting.append(following)
        for at in range(1, len(self.lines)):  # once more, now that all is known
            self.does[at] = set()
            if before[at] is not None:
                self.decode(self, at, dict(before[at] or {}))

    def touch(self, at: int, what: str, address: Value) -> None:
        """`what`: "load", "store acquire" … Private memory, the stack and results, is not looked at."""
        base, distance = address
        if base in ("record", "stack", "result", "own"):
            return
        word = base
        section = _SECTIONS.get(base)
        if section is not None and distance is not None and section.fields is not None:
            names = [
                n for n, (kind, begin, *_) in section.fields.items() if 0 <= distance - begin < kind.itemsize
            ]
            word = names[0] if names else "?"
        self.does[at] |= {f"{what} {word}", f"{what.split()[0]} {word}"}

    def loaded(self, address: Value, registers: Registers) -> Value:
        base, distance = address
        if base == "own":
            return base, None
        if base == "stack":
            return registers.get(f"stack{distance}", UNKNOWN)
        if base == "record" and distance is not None and self.state.fields is not None:
            return next(name for name, field in self.state.fields.items() if field[1] == distance), 0
        return UNKNOWN

    # Asking it --------------------------------------------------------------------------------------------

    def having(self, what: str) -> list[int]:
        return [at for at, done in enumerate(self.does) if what in done]

    def count(self, what: str) -> int:
        return len(self.having(what))

    def reaches(self, first: str, then: str, *, avoiding: str = "") -> list[str]:
        """A way from an instruction that does `first` to one that does `then`; [] if there is none."""
        avoided = set(avoiding.split(" or "))
        for start in self.having(first):
            ways = [[start]]
            seen = set()
            while ways:
                way = ways.pop()
                for at in self.after[way[-1]]:
                    if then in self.does[at]:
                        return [self.lines[i] for i in (*way, at)]
                    if at not in seen and not avoided & self.does[at]:
                        seen.add(at)
                        ways.append([*way, at])
        return []

    def check(self, first: str, between: str, then: str) -> None:
        """No way leads from `first` to `then` but through `between` ("one or other"); and there is one."""
        assert self.reaches(first, then), f"{self.step}: no {then!r} after a {first!r}"
        way = self.reaches(first, then, avoiding=between)
        assert not way, f"{self.step}: from {first!r} to {then!r} without {between!r}:\n" + "\n".join(way)


Decoder = Callable[[Code, int, Registers], None]


def _operands(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    return (part.strip() for part in re.split(r",\s*(?![^\[]*\])", text) if part)


# aarch64 -------------------------------------------------------------------------------------------------

_LOADS = {"ldr": "load", "ldp": "load", "ldur": "load", "ldrb": "load", "ldrh": "load", "ldxr": "load"}
_LOADS |= dict.fromkeys(("ldar", "ldapr", "ldapur", "ldaxr"), "load acquire")
_STORES = dict.fromkeys(("str", "stp", "stur", "strb", "strh"), "store")
_STORES |= dict.fromkeys(("stlr", "stlur"), "store release")
_ATOMICS = ("stlxr", "casal", "ldaddal", "swpal")
_NO_RESULT = ("cmp", "ccmp", "tst", "cbz", "cbnz", "tbz", "tbnz", "b", "clrex", "ret")
_FENCES = {"dmb ish": {"fence full", "fence loads"}, "dmb ishld": {"fence loads"}, "dmb ishst": set()}


def _aarch64(code: Code, at: int, registers: Registers) -> None:
    line = code.lines[at]
    op, _, rest = line.partition(" ")
    operands = list(_operands(rest))

    def value(operand: str) -> Value:
        if operand.startswith("#"):
            return "", int(operand[1:], 0)
        return ("", 0) if operand in ("xzr", "wzr") else registers.get(operand, UNKNOWN)

    def put(register: str, held: Value) -> None:
        registers["x" + register[1:] if register[0] == "w" else register] = held

    if line in _FENCES:
        code.does[at] |= _FENCES[line]
    elif op == "ret":
        code.does[at].add("return")
    elif op == "bl":
        code.does[at].add(f"call {operands[0]}")
        for i in range(19):  # what a call may use
            registers.pop(f"x{i}", None)
        registers["x0"] = _OWN.get(operands[0], UNKNOWN)
    elif op in _LOADS or op in _STORES or op in _ATOMICS:
        place = next(i for i, operand in enumerate(operands) if operand[0] == "[")
        inner = operands[place].rstrip("!").strip("[]").split(", ")
        base, held = inner[0], value(inner[0])
        address = held if len(inner) == 1 else _plus(held, UNKNOWN if len(inner) > 2 else value(inner[1]))
        size = 16 if operands[0][0] == "q" else 8
        if op in _ATOMICS:
            code.touch(at, "atomic", address)
            put(operands[0], UNKNOWN)
            put(operands[place - 1], UNKNOWN)
        for i, register in enumerate(operands[:place]):
            part = _plus(address, ("", i * size))
            if op in _LOADS:
                code.touch(at, _LOADS[op], part)
                put(register, code.loaded(part, registers))
            elif op in _STORES:
                code.touch(at, _STORES[op], part)
                if part[0] == "stack":
                    registers[f"stack{part[1]}"] = value(register)
        if operands[place].endswith("!"):
            put(base, address)
        elif len(operands) > place + 1:
            put(base, _plus(held, value(operands[place + 1])))
    elif op not in _NO_RESULT and not op.startswith("b."):
        shifted = len(operands) > 3
        if op == "mov":
            put(operands[0], value(operands[1]))
        elif op in ("add", "sub"):
            last = UNKNOWN if shifted else value(operands[2])
            put(operands[0], _plus(value(operands[1]), last, 1 if op == "add" else -1))
        elif op == "madd":
            put(operands[0], _plus(value(operands[3]), UNKNOWN))
        else:
            put(operands[0], UNKNOWN)


# x86-64, in Intel's notation -----------------------------------------------------------------------------

_READ_ONLY = ("cmp", "test", "call", "push")
_WRITE_ONLY = ("mov", "movaps", "movups", "movabs", "pop")
_WHOLE = {f"r{i}{part}": f"r{i}" for i in range(8, 16) for part in "dwb"}  # of a part of a register, it
_WHOLE |= {f"{n[0]}{part}": f"r{n}" for n in ("ax", "bx", "cx", "dx") for part in "lh"}
_WHOLE |= {f"{n}l": f"r{n}" for n in ("si", "di", "bp")}
_WHOLE |= {e + n: f"r{n}" for n in ("ax", "bx", "cx", "dx", "si", "di", "bp") for e in ("e", "")}


def _x86(code: Code, at: int, registers: Registers) -> None:
    line = code.lines[at]
    locked = line.startswith("lock ")
    op, _, rest = line.removeprefix("lock ").partition(" ")
    operands = [_WHOLE.get(operand, operand) for operand in _operands(rest)]

    def value(operand: str) -> Value:
        if re.fullmatch(r"-?\d+", operand):
            return "", int(operand)
        return registers.get(operand, UNKNOWN)

    def address(operand: str) -> Value:
        """Of `qword ptr [rcx + 8*rsi + 256]`."""
        inner = operand[operand.index("[") + 1 : -1]
        found: Value = ("", 0)
        for sign, term in re.findall(r"([+-]?) ?([^ +-]+)", inner):
            found = _plus(found, value(term), -1 if sign == "-" else 1)
        return found

    if op == "mfence" or locked:
        code.does[at] |= {"fence full", "fence loads"}
    if op == "ret":
        code.does[at].add("return")
    elif op == "call":
        called = operands[0].partition("@")[0]
        code.does[at].add(f"call {called}")
        for register in ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11"):
            registers.pop(register, None)
        registers["rax"] = _OWN.get(called, UNKNOWN)
        return
    elif op == "lea":
        registers[operands[0]] = address(operands[1])
        return
    for i, operand in enumerate(operands):
        if "[" in operand and "rip" not in operand:
            reads = i > 0 or op not in _WRITE_ONLY
            writes = i == 0 and op not in _READ_ONLY
            if locked or op == "xchg":
                code.touch(at, "atomic", address(operand))
            elif reads:
                code.touch(at, "load", address(operand))
            if writes:
                code.touch(at, "store", address(operand))
    if op == "cmpxchg":
        registers["rax"] = UNKNOWN
    if op in _READ_ONLY or op.startswith("j") or not operands:
        return
    if "[" in operands[0]:
        held = address(operands[0])
        if held[0] == "stack":
            registers[f"stack{held[1]}"] = value(operands[1]) if op == "mov" else UNKNOWN
        return
    last = operands[-1]
    held = code.loaded(address(last), registers) if "[" in last and "rip" not in last else value(last)
    if op in ("mov", "movabs"):
        registers[operands[0]] = held
    elif op in ("add", "sub"):
        registers[operands[0]] = _plus(value(operands[0]), held, 1 if op == "add" else -1)
    else:
        registers[operands[0]] = UNKNOWN


if __name__ == "__main__":
    _print_assembly()
