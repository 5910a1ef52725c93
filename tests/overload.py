"""Real runs that are sent more than twice what they take, one after the other: every packet is accounted for.

    PYTHONPATH=tests python -m overload --runs 20 --seed 7

Each run is of about a second: `rxring send` flat out into tiny buffers, before a consumer that is too slow.
Sizes, batches and flows are drawn by lot. Of each kind (IPv4 and IPv6, one receiver and two, GRO off and on,
and stopped while the sender goes on) there are as many runs. The sums are made here, from the counts of those
who count, the sender's own among them:

    GRO off   packets sent  = received + dropped by the socket + after the stop
    GRO on    messages sent = frames received + dropped by the socket + after the stop
    stamps    packets sent  = received + lost + before the first, by `gaps`

but for what a CPU's backlog dropped, which happens where somebody steers the packets of lo (RPS).

A violation ends it with exit code 1, the summary and the seed, which draws the same lots again; the
processes' timing is the machine's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
from forked import Child, await_
from runs import Run, check_ledger, warm

from engine.handlers import Handler
from engine.handlers.api import ON_BATCH, load, no_clock, packet_loop, payload_as, record_at
from engine.net import sender
from engine.net.stamp import CLOSING, STAMP
from engine.status import STOP, Status
from rings.jit import callback
from rings.libc import monotonic_ns, sleep_ns
from tools import cli

Object = dict[str, Any]
PACKET_NS = 50_000  # what the slow consumer takes for each: 20,000 a second
MOST_FLOWS = 16  # a power of two
ATTEMPTS = 5  # at a run that tells something
SLOW = np.dtype([("packets", "i8"), ("closed", "i8", (MOST_FLOWS,))])


def _on_packet(s, payload, meta):  # type: ignore[no-untyped-def]
    s.packets += 1
    stamp = payload_as(payload, STAMP)
    if stamp.flow & CLOSING:
        s.closed[stamp.flow & (MOST_FLOWS - 1)] += 1


_each_packet = packet_loop(_on_packet, no_clock)


@callback(ON_BATCH, cache=False)
def _dawdle(state, frames, count, arena):  # type: ignore[no-untyped-def]
    s, until_ns = record_at(state, SLOW), monotonic_ns()
    before = s.packets
    _each_packet(s, frames, count, arena)
    until_ns += (s.packets - before) * PACKET_NS
    while monotonic_ns() < until_ns:
        sleep_ns(until_ns - monotonic_ns())
    return 0


slow = Handler(SLOW, on_batch=_dawdle)


@dataclass(frozen=True)
class Kind:
    ipv6: bool
    receivers: int
    gro: bool
    stopped: bool = False  # while the sender goes on

    def __str__(self) -> str:
        ends = ", stopped while sent to" if self.stopped else ""
        many = f"{self.receivers} receiver{'s' * (self.receivers > 1)}"
        return f"IPv{6 if self.ipv6 else 4}, {many}, GRO {'on' if self.gro else 'off'}{ends}"


KINDS = (
    *itertools.starmap(Kind, itertools.product((False, True), (1, 2), (False, True))),
    Kind(False, 1, gro=False, stopped=True),
    Kind(True, 2, gro=True, stopped=True),
)


class Violated(Exception):
    pass


class Unknown(Exception):
    """By bad luck a run tells nothing: it was no overload, or a count could not be known."""


def draw_flags(chance: random.Random, kind: Kind) -> list[str]:
    """Of `rxring run`. Rings are small, so that closing stamps, up to 20 ms after all others, find room."""
    rings = ("160KiB", "320KiB") if kind.gro else ("64KiB", "80KiB", "160KiB")
    receive, batch = chance.choice((("recvmsg", 1), ("recvmmsg", 1), ("recvmmsg", 8)))
    flags = {
        "--receive": receive,
        "--batch": batch,
        "--receivers": kind.receivers,
        "--gro": "on" if kind.gro else "off",
        "--rcvbuf": chance.choice(("16KiB", "32KiB", "64KiB")),
        "--ring": chance.choice(rings),
    }
    return [str(word) for pair in flags.items() for word in pair]


def draw_plan(chance: random.Random, kind: Kind) -> list[str]:
    """Flags of `rxring send`."""
    flags = {
        "--rate": "max",
        "--size": chance.choice((32, 100, 250, 1000)),
        "--gso": chance.choice(("off", 8, 64)),
        "--flows": chance.randrange(4, MOST_FLOWS + 1),
        "--batch": chance.choice((16, 64, 256)),
    }
    if not kind.stopped:
        flags["--duration"] = f"{chance.uniform(0.4, 1.0):.2f}"
    return [str(word) for pair in flags.items() for word in pair]


class Sending:
    """`rxring send --json` in a forked process, and what it tells."""

    def __init__(self, name: str, flags: list[str]) -> None:
        self.name = name
        self._out = os.memfd_create("stdout")
        self.process = Child(_send, ["send", "--json", "--name", name, *flags], self._out)

    def sent_so_far(self) -> Object:
        """What it last said to those who ask its status: soon, and then every 50 ms."""
        status = Status.open(self.name)
        try:
            return status.read(0)[0]
        finally:
            status.close()

    def sent_again(self) -> Object:
        """The same, as said from now on."""
        before = self.sent_so_far()
        await_(lambda: self.sent_so_far() != before)
        return self.sent_so_far()

    def summary(self) -> Object:
        if self.process.wait() != 0:
            raise Violated("the sender failed")
        summary: Object = json.loads(os.pread(self._out, 1 << 20, 0).splitlines()[-1])
        return summary

    def close(self) -> None:
        self.process.kill()
        os.close(self._out)


def _send(args: list[str], out: int) -> None:
    os.dup2(out, 1)
    sys.stdout = os.fdopen(1, "w")
    os._exit(cli.main(args))


@dataclass
class Counts:
    """Of a run. Packets; dropped: by the socket, as far as stamps or counts tell. residual: of the ledger."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    after_stop: int = 0
    residual: int = 0

    def __str__(self) -> str:
        after = f", {self.after_stop:,} after the stop" if self.after_stop else ""
        return (
            f"{self.sent:,} sent, {self.received:,} received, {self.dropped:,} dropped{after}, "
            f"residual {self.residual}"
        )

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


def run_once(name: str, kind: Kind, chance: random.Random) -> Counts:
    """One run. Violated where anything does not add up; Unknown where nobody can say."""
    listen = "udp://[::1]:0" if kind.ipv6 else "udp://127.0.0.1:0"
    consumers = ("--consumer", "gaps", "--consumer", "overload:slow")
    flags = [*draw_flags(chance, kind), *consumers, "--every", "0.1", "--sender", f"{name}.s"]
    plan = draw_plan(chance, kind)
    view: Object = {}
    with Run(name, *flags, listen=listen) as run:
        to = f"{'[::1]' if kind.ipv6 else '127.0.0.1'}:{run.port}"
        sending = Sending(f"{name}.s", ["--to", to, *plan])
        try:
            if kind.stopped:
                view, sent, late = _stop_first(run, sending)
            else:
                sent = sending.summary()
                view, late = run.end(), None
        finally:
            sending.close()
    try:
        return check(kind, view, sent, late)
    except (AssertionError, Violated) as error:
        told = json.dumps(view, indent=1)
        raise Violated(f"{error}\n{told}\nrun {' '.join(flags)}\nsend {' '.join(plan)}: {sent}") from error


def _stop_first(run: Run, sending: Sending) -> tuple[Object, Object, Object]:
    """End the run while it is sent to, then the sender. What both say, and the sender soon after the cut.

    The run waits for its sender for half a second.
    """
    run.await_interval(lambda view: view["ledger"]["received"] > 5000)
    status = Status.open(run.name)
    try:
        run.send_signal(signal.SIGINT)
        await_(lambda: status.stop == STOP)
    finally:
        status.close()
    late = sending.sent_again()
    sending.process.send(signal.SIGINT)
    return run.end(None), sending.summary(), late


def check(kind: Kind, view: Object, sent: Object, late: Object | None) -> Counts:
    """The sums of a summary, and what the sender said: at its end, and already after the cut (`late`)."""
    ledger, receivers = view["ledger"], view["receivers"]
    if ledger["sent"] is None:
        raise Unknown("the sender ended too late")
    if ledger["softnet_dropped"] and not kind.gro and sent["frames"] < sent["sent"]:
        raise Unknown("a CPU's backlog dropped messages of several packets, and counted messages")
    check_ledger(view)
    assert sent["failed"] == 0
    assert ledger["sent"] == sent["sent"]
    assert ledger["refused"] == ledger["lost_in_flight"] == 0
    assert [receiver["gro"] for receiver in receivers] == [kind.gro] * kind.receivers

    what = ("frames", "socket_dropped_frames", "after_stop_frames", "frames")
    if not kind.gro:
        what = ("packets", "socket_dropped", "after_stop", "sent")
    received, dropped, after = (sum(receiver[key] for receiver in receivers) for key in what[:3])
    sent_of_them = sent[what[3]]
    missing = sent_of_them - received - dropped - after
    assert 0 <= missing <= ledger["softnet_dropped"], f"{missing} {what[0]} are nowhere"
    if late is None:
        assert after == 0
    else:
        assert after >= sent_of_them - late[what[3]] > 0, "the cut was not clean"

    gaps, dawdler = view["consumers"]
    assert gaps["delivered"] == dawdler["delivered"] == dawdler["result"]["packets"] == ledger["received"]
    if dropped == 0 or sent["sent"] < 2 * ledger["received"]:
        raise Unknown("the sender had too little of the machine for an overload")
    lost = _lost_by_stamps(gaps["result"], dawdler["result"], sent, ended=late is None)
    return Counts(sent["sent"], ledger["received"], lost, ledger["after_stop"] or 0, ledger["residual"])


def _lost_by_stamps(gaps: Object, seen: Object, sent: Object, *, ended: bool) -> int:
    """Packets; closing stamps are not numbered. ended: it went on until the flows were closed."""
    assert gaps["unstamped"] == gaps["untracked"] == gaps["duplicated"] == gaps["too_late"] == 0
    assert gaps["received"] + gaps["closing"] == seen["packets"]
    lost = gaps["lost"] + gaps["before_first"]
    missing = sent["sent"] - sent["closing"] - gaps["received"] - lost
    if not ended:
        assert missing > 0, f"{-missing} packets more than were sent"
        assert gaps["closing"] == 0, "the cut was not clean"
        return int(lost)
    if missing and np.count_nonzero(seen["closed"]) < -(-sent["closing"] // 3):  # three for each flow
        raise Unknown("of some flow all three closing stamps were dropped, and its last packets")
    assert missing == 0, f"{missing} packets are missing in the stamps' sum"
    return int(lost + sent["closing"] - gaps["closing"])


def prepare() -> None:
    """Compile what the forked processes run."""
    warm()
    load("overload:slow")
    sender.warm()


def run_kind(kind: Kind, runs: int, seed: int) -> tuple[Counts, int]:
    """So many runs of a kind: their counts added up, and how many were repeated. Violated: see `run_once`."""
    counts, repeated = Counts(), 0
    for number in range(runs):
        for attempt in range(ATTEMPTS):
            chance = random.Random(f"{seed}, {kind}, {number}, {attempt}")
            try:
                counts += run_once(f"t{os.getpid()}.overload", kind, chance)
                break
            except Unknown as reason:
                if attempt == ATTEMPTS - 1:
                    raise Violated(f"{ATTEMPTS} times over: {reason}") from None
                repeated += 1
    return counts, repeated


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="overload", description="Runs that are sent more than they take.")
    parser.add_argument("--runs", type=int, default=20, help="of each kind (20)")
    parser.add_argument("--seed", type=int, help="which lots to draw (random, and printed)")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    try:
        prepare()
        for kind in KINDS:
            counts, repeated = run_kind(kind, options.runs, seed)
            told = f"{str(kind) + ':':52}{options.runs:3} runs, {counts}"
            print(told + (f", {repeated} repeated" if repeated else ""), flush=True)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        print(f"VIOLATED: seed {seed}", flush=True)
        return 1
    print(f"nothing violated; seed {seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
