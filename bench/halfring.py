"""Reading more than half the ring at once: writer and reader in lockstep, and the cap that prevents it.

While a reader has a batch in hand, the writer has only the rest of the ring. Up to half, both are busy: one
half is read, the other written. Beyond it, one waits for the other: with the whole ring in hand, all the
time. So a `Reader` takes half the ring at most, whatever it is asked for.

The stream of the experiment `ring`, every word checked, to a reader that asks for an eighth of the ring up
to all of it (all but one batch of the writer's), with the cap and without. Three ways to read: `whole` waits
until all it asked for is there, as who reads blocks does: here the drop must show; `spin` and `block` take
what is there. For them it depends on the machine: a spinning reader empties the ring faster than the writer
fills it, or finds the other part filled when it comes back, so that reads stay near half by themselves; one
that sleeps may find all of it full. `above_half` of a run is the share of its reads that were longer than
half the ring: where it is 0, there is nothing for the cap to do. `skip`: the writer waits for nobody, so
nothing can drop; what was delivered and skipped must add up. It copies 1,024 frames at most by default;
without the cap, all.

The report shows the rate and the share of long reads over what was asked for ÷ ring, with the cap and
without, and says whether the drop shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import pictures
from bench.distance import steady
from bench.machine import two_cpus
from bench.pictures import Curve
from bench.pinned import Pinned
from bench.report import number, span
from bench.ring import create, differs, first_came, write_all
from bench.runner import Case, Claim, Figures, Setting
from bench.section import Picture, Section, Table
from bench.spread import median, ratios
from rings.atomics import load_acquire, load_relaxed, pause
from rings.jit import compile_for, jit
from rings.layout import DESCRIPTOR, WRITER, offsets
from rings.libc import monotonic_ns
from rings.reader import READER_STATE, Reader, poll, release
from rings.wait import BLOCK, SPIN, wait
from rings.writer import WRITER_STATE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS = (
    Claim("16384, whole, 1, no cap", against="16384, whole, 0.5", at_most=0.8),
    Claim("16384, whole, 1, no cap", figure="above_half", at_least=0.9),
    Claim("16384, whole, 1", against="16384, whole, 0.5", at_least=0.9),
    Claim("16384, whole, 1", figure="above_half", at_most=0),
    Claim("16384, spin, 1", against="16384, spin, 1, no cap", at_least=0.9),
    Claim("16384, block, 1", against="16384, block, 1, no cap", at_least=0.9),
)

SIZES, QUICK_SIZES = (2048, 16384, 131072), (16384,)  # frames of the ring
FRACTIONS = (0.125, 0.25, 0.5, 0.75, 1)  # of the ring that is asked for
WAYS = ("whole", "spin", "block", "skip")
BATCH = 64  # of the writer
_SPIN = SPIN
(_PUBLISHED,) = offsets(WRITER, "published")
_WAIT_NS = 60_000_000_000  # longer than any run

DROP = 0.8  # of the rate with the cap: what is below it, is a drop
RARE = 0.01  # of the reads: so few long ones explain no drop
_COLUMNS = ("ring", "way", "asked for ÷ ring", "cap", "M/s", "min – max", "frames a read", "reads > half")
_COLUMNS_2024 = ("ring", "a read takes", "2024, GB/s", "ratio", "here, M/s", "ratio")
_2024 = {"half": 3.18, "all": 1.49}  # GB/s; all, to a producer of half the ring: 2.00
_Key = tuple[int, str, float, bool]  # frames, way, fraction, capped


def cases(setting: Setting) -> Iterator[Case]:
    cpus = two_cpus()
    _compile()
    return steady(_cases(setting, cpus), *cpus)


def _cases(setting: Setting, cpus: tuple[int, int]) -> Iterator[Case]:
    count = (1 << 24) if setting.quick else (1 << 26)
    for frames in QUICK_SIZES if setting.quick else SIZES:
        for way in WAYS:
            for fraction in FRACTIONS if way == "whole" else FRACTIONS[2:]:
                for capped in (True, False) if fraction > 0.5 else (True,):
                    yield _case(frames, way, fraction, capped, count, cpus)


def _case(frames: int, way: str, fraction: float, capped: bool, count: int, cpus: tuple[int, int]) -> Case:
    most = min(int(frames * fraction), frames - BATCH)  # the writer needs room for a batch
    config = {"frames": frames, "way": way, "fraction": fraction, "capped": capped, "asked_for": most}
    config |= {"descriptors": count, "batch": BATCH, "cpus": cpus}

    def run() -> Figures:
        return _figures(count, *_read(frames, way, most, capped, count, *cpus))

    return Case(f"{frames}, {way}, {fraction:g}{'' if capped else ', no cap'}", "M/s", run, config)


def _figures(
    count: int, wrong: int, delivered: int, skipped: int, reads: int, above: int, elapsed_ns: int
) -> Figures:
    return {
        "value": delivered / elapsed_ns * 1e3,
        "above_half": above / reads,
        "frames_per_read": delivered / reads,
        "reads": reads,
        "delivered": delivered,
        "skipped": skipped,
        "wrong": wrong,
        "ok": wrong == 0 and delivered + skipped == count,
    }


def _read(
    frames: int, way: str, most: int, capped: bool, count: int, writer_cpu: int, reader_cpu: int
) -> tuple[int, ...]:
    """(wrong, delivered, skipped, reads, reads of more than half the ring, ns)."""
    with ExitStack() as stack:
        ring = create(stack, 0, frames)
        writer = stack.enter_context(ring.writer())
        reader = stack.enter_context(ring.reader(policy="skip" if way == "skip" else "gate"))
        reading = Pinned(reader_cpu, _run, reader, way, most, capped, count)
        Pinned(writer_cpu, write_all, writer.record, BATCH, count).result()
        result: tuple[int, ...] = reading.result()
    return result


def _run(reader: Reader, way: str, most: int, capped: bool, count: int) -> tuple[int, ...]:
    r = reader.record[0]
    if way == "skip":
        copy = np.zeros(0 if capped else int(r["arena_bytes"]) + most * DESCRIPTOR.itemsize, np.uint8)
        if not capped:
            _copy_all(r, copy.ctypes.data, most)
        return tuple(map(int, read_copies(reader.record, count, most)))
    if capped:
        most = min(most, int(r["max_frames"]))
    strategy = BLOCK if way == "block" else SPIN
    return tuple(map(int, read_in_place(reader.record, count, most, strategy, way == "whole")))


def _copy_all(r: Any, address: int, most: int) -> None:
    """Let a skipping reader copy up to `most` frames, into memory at `address`."""
    r["max_frames"] = r["copy_frames"] = most
    r["copied_descriptors"] = address
    r["max_bytes"] = r["copy_bytes"] = r["arena_bytes"]
    r["copied_arena"] = address + most * DESCRIPTOR.itemsize


@jit
def read_in_place(reader_state, count, most, strategy, whole):  # type: ignore[no-untyped-def]
    """What `poll` and `release` do for a gating reader, but for the cap: any `most`, across the end too.

    whole: wait until `most` frames are there. (wrong, delivered, skipped, reads, of more than half, ns).
    """
    r = reader_state[0]
    wrong, reads, above, mask = 0, 0, 0, r.frames - 1
    begin_ns = first_came(r)
    while r.cursor < count:
        ready = load_acquire(r.writer + _PUBLISHED) - r.cursor
        if ready < (min(most, count - r.cursor) if whole else 1):
            if strategy == _SPIN:
                pause()
            else:
                wait(r, strategy, monotonic_ns() + _WAIT_NS)
            continue
        frames, arena_bytes = min(ready, most), r.arena_bytes
        for n in range(r.cursor, r.cursor + frames):
            wrong += differs(r.descriptors + 32 * (n & mask), n, arena_bytes)
        r.batch_frames = frames
        r.batch_end_number = load_relaxed(r.descriptors + 32 * ((r.cursor + frames) & mask))
        release(r, frames)
        reads += 1
        above += 1 if frames > r.frames // 2 else 0
    return wrong, r.delivered, r.skipped, reads, above, monotonic_ns() - begin_ns


@jit
def read_copies(reader_state, count, most):  # type: ignore[no-untyped-def]
    """The same for a skipping reader, by its own `poll`."""
    r = reader_state[0]
    wrong, reads, above = 0, 0, 0
    begin_ns = first_came(r)
    while r.cursor < count:
        frames = poll(r, most)
        if frames == 0:
            pause()
            continue
        for index in range(frames):
            wrong += differs(r.batch_descriptors + 32 * index, r.cursor + index, r.arena_bytes)
        release(r, frames)
        reads += 1
        above += 1 if frames > r.frames // 2 else 0
    return wrong, r.delivered, r.skipped, reads, above, monotonic_ns() - begin_ns


def _compile() -> None:
    r: Any = np.zeros(1, READER_STATE)
    compile_for(write_all, np.zeros(1, WRITER_STATE), 0, 0)
    compile_for(read_in_place, r, 0, 0, 0, True)
    compile_for(read_copies, r, 0, 0)


# ── what the report tells ────────────────────────────────────────────────────────────────────────────


def tell(result: dict[str, Any]) -> Iterator[Section]:
    """Whether the drop shows, the rate and the share of long reads."""
    cases = [case for case in result["cases"] if case["median"] is not None]
    if not cases:
        return
    rate = Picture(
        "rate", "Rate over what was asked for ÷ ring", lambda: _picture(cases, "value", "rate, M frames/s")
    )
    share = Picture(
        "above-half",
        "Share of reads longer than half the ring, over what was asked for ÷ ring",
        lambda: _picture(cases, "above_half", "reads longer than half the ring"),
    )
    yield Section("Does the drop show?", tuple(verdicts(cases)), picture=rate)
    yield Section("Long reads", table=Table(_COLUMNS, tuple(map(_row, cases))), picture=share)
    yield Section(
        "Beside the figures of 2024",
        (
            "SMC-R over 25 Gbit/s, a ring of 256 KiB, the producer's messages as long as the consumer's; "
            "here the way `whole`, whose reader waits for all it asked for. A ratio is to the first line.",
        ),
        table=Table(_COLUMNS_2024, tuple(_beside_2024(cases))),
    )


def verdicts(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each ring and way to read: does asking for all of it cost throughput, and if not, why not?"""
    rates = {_key(case): [run["value"] for run in case["runs"]] for case in cases}
    for case in cases:
        frames, way, fraction, capped = _key(case)
        if fraction < 1 or capped or (frames, way, fraction, True) not in rates:
            continue
        found = ratios(rates[frames, way, fraction, False], rates[frames, way, fraction, True])
        if found:
            above_half = median(_of_runs(case, "above_half"))
            yield f"{frames} frames, {way}: {_verdict(way, median(found), above_half)}"


def _verdict(way: str, ratio: float, above_half: float) -> str:
    without = f"without the cap {number(ratio)} of the rate with it"
    share = f"{number(100 * above_half)} % of the reads were longer than half the ring"
    if way == "skip":
        return f"{without}; the writer waits for nobody, so lockstep is not possible ({share})"
    if above_half < RARE:
        return f"{without}; lockstep needs long reads, and only {share}"
    if ratio <= DROP:
        return f"the drop shows: {without} ({share})"
    if above_half < 0.5:
        return f"the drop does not show: {without}; it needs long reads, and only {share}"
    return (
        f"the drop does not show: {without}, though {share}; something else sets the pace: one of the two is "
        "much the faster, or sleeps, or the machine changed between the runs"
    )


def _key(case: dict[str, Any]) -> _Key:
    parameters = case["parameters"]
    return parameters["frames"], parameters["way"], parameters["fraction"], parameters["capped"]


def _of_runs(case: dict[str, Any], figure: str) -> list[float]:
    return [run[figure] for run in case["runs"] if run["value"] is not None]


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    frames, way, fraction, capped = _key(case)
    reads = (number(median(_of_runs(case, figure))) for figure in ("frames_per_read", "above_half"))
    cap = "half" if capped else "none"
    spread = span(case["min"], case["max"])
    return (str(frames), way, f"{fraction:g}", cap, number(case["median"]), spread, *reads)


def _beside_2024(cases: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Half the ring, all of it, and all of it asked for but the half got, in each ring."""
    runs = {_key(case): [run["value"] for run in case["runs"]] for case in cases}
    for frames in sorted({key[0] for key in runs}):
        first = runs.get((frames, "whole", 0.5, True), [])
        for what, then, key in (
            ("half", "half", (frames, "whole", 0.5, True)),
            ("all, no cap", "all", (frames, "whole", 1, False)),
            ("all asked for, half got", None, (frames, "whole", 1, True)),
        ):
            found, relative = runs.get(key, []), ratios(runs.get(key, []), first)
            if relative:
                figures = ("–", "–") if then is None else (number(_2024[then]), f"{_2024[then] / 3.18:.2f}")
                here = median([value for value in found if value is not None])
                yield (str(frames), what, *figures, number(here), f"{median(relative):.2f}")


def _picture(cases: Sequence[dict[str, Any]], figure: str, y: str) -> Figure:
    """A panel for each ring; dashed: without the cap."""
    panels: dict[str, list[Curve]] = {}
    for frames in sorted({_key(case)[0] for case in cases}):
        curves = panels[f"ring of {frames} frames"] = []
        for (style, way), capped in itertools.product(enumerate(WAYS), (True, False)):
            chosen = [case for case in cases if _is_of(_key(case), frames, way, capped)]
            points = [(_key(case)[2], _of_runs(case, figure)) for case in chosen]
            name = f"{way}{'' if capped else ', no cap'}"
            if points:
                curves.append(Curve(name, points, style, dashed=not capped))
    drawn = pictures.lines(panels, "asked for ÷ ring", y)
    for axes in drawn.axes:
        axes.axvline(0.5, color="grey", linestyle=":", zorder=0)
        axes.annotate("half", (0.49, 0.02), xycoords=("data", "axes fraction"), ha="right", color="grey")
    return drawn


def _is_of(key: _Key, frames: int, way: str, capped: bool) -> bool:
    """Is the case of this curve? The one without the cap parts from the other at half the ring."""
    same = key[2] == 0.5 and way != "skip"
    return key[:2] == (frames, way) and (key[3] == capped or same)
