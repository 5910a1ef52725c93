"""SIGKILL at random under load: the survivors go on or end in order, and every count still adds up.

RXRING_KILL_ROUNDS says how many rounds; each has several deaths.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Child, await_
from numpy.typing import NDArray
from runs import Run, Source, check_ledger

import rings
from engine.net.stamp import MAGIC
from rings.ring import ReaderInfo

Fork = Callable[..., Child]
ROUNDS = int(os.environ.get("RXRING_KILL_ROUNDS", "6"))
SENT, ENOUGH = range(2)  # on the board
RECEIVER, VICTIM, WITNESS = range(3)  # workers by their index


def stamped(sequence: int, length: int) -> bytes:
    stamp = struct.pack("<IIQqq", MAGIC, 0, sequence, 1, 1)
    return stamp + bytes(length)


def flood(port: int, board: NDArray[Any], seed: int) -> None:
    """Send stamped packets of all kinds of lengths until there are enough; count them on the board."""
    lengths = random.Random(seed).choices([0, 20, 70, 100, 1400, 3000, 9000], [4, 8, 8, 8, 4, 1, 1], k=997)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        while board[ENOUGH] == 0:
            try:
                sock.send(stamped(int(board[SENT]), lengths[board[SENT] % 997]))
            except ConnectionRefusedError:
                return  # the last process of the run is gone
            board[SENT] += 1


def accounts_add_up(reader: ReaderInfo, published: int) -> bool:
    counts = reader.delivered + reader.skipped + reader.passed + reader.unread
    return counts == published - reader.joined_packets


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_workers_die_and_the_run_goes_on(name: str, fork: Fork, board: NDArray[Any], round_: int) -> None:
    chance = random.Random(round_)
    receive = ("recvmmsg", "recvmsg")[round_ % 2]
    with (
        Source(f"{name}.s") as source,
        Run(
            name,
            *("--consumer", "rate,name=victim", "--consumer", "gaps,name=witness", "--ring", "1MiB"),
            *("--sender", f"{name}.s", "--receive", receive, "--every", "0.05"),
        ) as run,
    ):
        sender = fork(flood, run.port, board, round_)
        deaths = [0, 0]
        for _ in range(6):
            target = int(board[SENT]) + chance.randrange(2000)
            await_(lambda: board[SENT] > target, 60)  # noqa: B023
            victims = [w for w in (RECEIVER, VICTIM) if deaths[w] < 3 and chance.random() < 0.7]
            pids = [run.worker(w) for w in victims]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for worker, pid in zip(victims, pids, strict=True):
                await_(lambda: run.worker(worker) != pid)  # noqa: B023
                deaths[worker] += 1
        board[ENOUGH] = 1
        assert sender.wait() == 0
        # One more, when all is received: behind it every loss is a gap.
        run.await_interval(lambda view: _arrived(view) == board[SENT])
        source.connect(run)
        source.send([stamped(int(board[SENT]), 0)])
        source.sent += int(board[SENT])
        source.done()
        summary = run.end()
    check_ledger(summary)
    receiver = summary["receivers"][0]
    victim, witness = summary["consumers"]
    assert [receiver["restarts"], victim["restarts"], witness["restarts"]] == [*deaths, 0]
    assert [c["joined"] for c in summary["consumers"]] == [0, 0]
    # Nobody waits for the dead: what was overwritten before the victim came back is skipped, and counted.
    assert [c["unread"] for c in summary["consumers"]] == [0, 0]
    assert victim["delivered"] + victim["skipped"] == receiver["packets"]
    assert witness["delivered"] == receiver["packets"]
    assert receiver["lost_in_flight"] <= 64 * deaths[RECEIVER]
    gaps = witness["result"]
    lost = receiver["socket_dropped_frames"] + receiver["lost_in_flight"]
    assert (gaps["duplicated"], gaps["reordered"]) == (0, 0)
    assert gaps["lost"] + gaps["before_first"] == lost
    handled = sum(victim["result"]["sizes"].values())
    assert handled + victim["since_packet"] <= receiver["packets"]
    assert handled + victim["since_packet"] + victim["skipped"] >= receiver["packets"]


def _arrived(view: dict[str, Any]) -> int:
    receiver = view["receivers"][0]
    arrived: int = receiver["packets"] + receiver["socket_dropped_frames"] + receiver["lost_in_flight"]
    return arrived


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_the_supervisor_dies_and_the_workers_end_in_order(
    name: str, fork: Fork, board: NDArray[Any], round_: int
) -> None:
    """Alone, or together with any of them."""
    chance = random.Random(round_)
    with Run(name, *("--consumer", "rate", "--consumer", "gaps,policy=skip", "--ring", "256KiB")) as run:
        workers = [run.worker(w) for w in (RECEIVER, VICTIM, WITNESS)]
        sender = fork(flood, run.port, board, round_)
        target = chance.randrange(5000)
        await_(lambda: board[SENT] > target, 60)
        also = [pid for pid in workers if chance.random() < 0.3]
        with rings.attach(name) as ring:
            for pid in [*also, run.pid] if round_ % 2 else [run.pid, *also]:
                os.kill(pid, signal.SIGKILL)
            run.await_all_gone()
            board[ENOUGH] = 1
            assert sender.wait() == 0
            assert run.wait() == -signal.SIGKILL
            counters, published = ring.counters, ring.published()[1]
            killed = workers[RECEIVER] in also
            if not killed:
                assert ring.state == "closed"
                assert counters["received"] == published + sum(counters["refused"])
            for reader in ring.readers():
                assert accounts_add_up(reader, published)
                if workers[1 + ("rate", "gaps").index(reader.name)] not in also:
                    assert (reader.state, reader.unread) == ("left", 0)
    # The last survivor removes what is left; where there is none, `rxring rings gc` does.
    objects = [f"rxring-{os.getuid()}-{name}-{part}" for part in ("0", "status")]
    assert sorted(set(rings.collect()) & set(objects)) == (objects if len(also) == len(workers) else [])
    assert not list(Path("/dev/shm").glob(f"rxring-*-{name}-*"))
