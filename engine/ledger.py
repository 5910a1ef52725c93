"""Every packet accounted for: the counters of every layer, and whether they balance.

    sent     = nic_dropped + softnet_dropped + socket_dropped + other_errors − of_others
               + lost_in_flight + after_stop + received + residual
    received = refused + published
    published − joined = delivered + skipped + passed + unread, for each consumer

With GRO the kernel counts what a socket drops in frames, and nobody knows how many packets those held. Once
there are such drops, `exact` is False and the first line is in frames: of the sender's messages (GSO). So it
is where those messages were dropped whole before they came to a socket, as over lo and veth.

`received` is counted where the calls return, `published` where readers see it, `delivered` by each
reader: none is worked out from another. NIC and UDP counters belong to the whole network namespace, softnet's
to the whole machine (engine/net/counters.py): they are the change over the run, and other traffic is in them.
So they can explain no more than what is missing; what they counted beyond that is `of_others`. Loss of ours
beside as much of others is told from it by nobody.

Nothing is counted twice: what a socket dropped is taken out of UDP's errors, what softnet dropped out of the
devices' rx_dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.net.counters import Layers


@dataclass(frozen=True, slots=True)
class Counter:
    """One line of the ledger. ours: counted for us alone; else the traffic of others is in it, too."""

    id: str
    label: str
    unit: str
    sentence: str
    ours: bool = True


COUNTERS = (
    Counter("sent", "sent", "packets", "What the sender put on the wire, by its own count."),
    Counter("nic_dropped", "NIC dropped", "packets", "Dropped by the network device.", ours=False),
    Counter(
        "softnet_dropped",
        "softnet dropped",
        "packets",
        "Dropped from a CPU's full backlog queue.",
        ours=False,
    ),
    Counter("socket_dropped", "socket dropped", "packets", "Dropped because the socket's buffer was full."),
    Counter(
        "other_errors",
        "other UDP errors",
        "packets",
        "Dropped by UDP for another reason (checksum …).",
        ours=False,
    ),
    Counter(
        "of_others",
        "of others",
        "packets",
        "Of the shared counts above, what is not missing here.",
        ours=False,
    ),
    Counter("lost_in_flight", "lost in flight", "packets", "Taken by a call whose receiver was killed."),
    Counter("after_stop", "after the stop", "packets", "Arrived after the end of the run."),
    Counter("received", "received", "packets", "Taken from the socket."),
    Counter("refused", "refused", "packets", "Received and, for a reason that is named, not published."),
    Counter("published", "published", "packets", "Made visible in the ring."),
    Counter("residual", "residual", "packets", "Sent, and nowhere else in this list."),
)


# Why a packet that left the socket was not published, in the order of the ring's `refused` counters.
REFUSED = ("truncated", "too_large", "ring_full")
# What a receive call may answer and go on, in the order of the ring's `errors` counters; the last counts
# all others.
ERROR_NAMES = ("ECONNREFUSED", "ENOBUFS", "ENOMEM", "EHOSTUNREACH", "ENETUNREACH", "other")


class Shared(NamedTuple):
    """What the layers counted that other traffic is in, too: packets, since the start.

    nic_dropped: without what softnet_dropped has. udp_errors: all that UDP dropped. udp_full: those of them
    for which a buffer or memory was full.
    """

    nic_dropped: int
    softnet_dropped: int
    udp_errors: int
    udp_full: int

    @classmethod
    def of(cls, layers: Layers) -> Shared:
        return cls(layers.nic_dropped, layers.softnet_dropped, layers.udp_errors, layers.udp_full)


def other_udp_errors(shared: Shared, socket_dropped: int) -> int:
    """UDP errors that neither full buffers nor the drops of our own sockets explain.

    A socket's drop for any reason, a bad checksum too, is both in its own count and in InErrors.
    """
    return max(shared.udp_errors - max(shared.udp_full, socket_dropped), 0)


def _rest(total: int | None, ours: int, explained: int) -> tuple[int | None, int | None]:
    """(of others, residual): the shared layers explain what is missing, and no more than that."""
    if total is None:
        return None, None
    of_others = explained - min(max(total - ours, 0), explained)
    return of_others, total - ours - (explained - of_others)


def balance(
    *,
    sent: int | None,
    sent_frames: int | None,
    shared: Shared,
    socket_dropped: int | None,
    socket_dropped_frames: int,
    after_stop: int | None,
    after_stop_frames: int,
    lost_in_flight: int,
    received: int,
    frames: int,
    refused: int,
    published: int,
    consumers: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """The ledger as the contract has it. consumers: delivered, skipped, passed, unread, joined of each.

    socket_dropped, after_stop: packets; None where only the frames are known. frames: taken from the socket,
    those lost in flight among them.
    Without a known `sent`, `residual` and `balanced` are None: the ledger begins at the first layer
    that counts.
    """
    other_errors = other_udp_errors(shared, socket_dropped_frames)
    explained = shared.nic_dropped + shared.softnet_dropped + other_errors
    exact = False
    of_others, residual = _rest(sent_frames, socket_dropped_frames + after_stop_frames + frames, explained)
    if socket_dropped is not None and after_stop is not None:
        ours = socket_dropped + after_stop + lost_in_flight + received
        in_packets = _rest(sent, ours, explained)
        # Below the socket a GSO message is one: where those explain it all, it is they who were dropped.
        exact = not (explained and in_packets[1] and residual == 0)
        if exact:
            of_others, residual = in_packets
        if exact and residual and sent and sent_frames:
            messages = -(-(sent - ours) // -(-sent // sent_frames))  # the fewest that hold what is missing
            if 0 < messages <= explained:
                exact, of_others, residual = False, explained - messages, 0
    adds_up = received == refused + published and all(
        published - c["joined"] == c["delivered"] + c["skipped"] + c["passed"] + c["unread"]
        for c in consumers.values()
    )
    return {
        "sent": sent,
        "nic_dropped": shared.nic_dropped,
        "softnet_dropped": shared.softnet_dropped,
        "socket_dropped": socket_dropped,
        "socket_dropped_frames": socket_dropped_frames,
        "other_errors": other_errors,
        "of_others": of_others,
        "lost_in_flight": lost_in_flight,
        "after_stop": after_stop,
        "after_stop_frames": after_stop_frames,
        "received": received,
        "refused": refused,
        "published": published,
        "consumers": {
            name: {key: c[key] for key in ("delivered", "skipped", "passed", "unread")}
            for name, c in consumers.items()
        },
        "residual": residual,
        "balanced": None if residual is None else residual == 0 and adds_up,
        "adds_up": adds_up,
        "exact": exact,
    }
