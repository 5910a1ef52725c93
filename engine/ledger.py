"""Every packet accounted for: the counters of every layer, and whether they balance.

    sent     = nic_dropped + softnet_dropped + socket_dropped + other_errors − of_others
               + lost_in_flight + after_stop + received + residual
    received = refused + published
    published − joined = delivered + skipped + passed + unread, for each consumer

With GRO the kernel counts what a socket drops in frames, and nobody knows how many packets those held. Once
there are such drops, `exact` is False and the first line is in frames: of the sender's messages (GSO).

`received` is counted where the calls return, `published` where readers see it, `delivered` by each
reader: none is worked out from another. NIC, softnet and UDP counters belong to the whole network namespace:
they are the change over the run, and other traffic of the machine is in them. So they can explain no more
than what is missing; what they counted beyond that is `of_others`. Loss of ours beside as much of others is
told from it by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Counter:
    """One line of the ledger. ours: counted for our socket alone; else for the network namespace."""

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


@dataclass(frozen=True, slots=True)
class NamespaceCounters:
    """Counters of the network namespace at one moment, packets.

    udp_errors: all that UDP dropped. udp_full: those of them for which a buffer or memory was full.
    """

    softnet_dropped: int
    udp_errors: int
    udp_full: int

    @classmethod
    def read(cls) -> NamespaceCounters:
        softnet = Path("/proc/net/softnet_stat").read_text()
        snmp = Path("/proc/net/snmp").read_text()
        return cls(sum(parse_softnet_dropped(softnet)), *parse_udp_errors(snmp))

    def since(self, before: NamespaceCounters) -> NamespaceCounters:
        return NamespaceCounters(
            self.softnet_dropped - before.softnet_dropped,
            self.udp_errors - before.udp_errors,
            self.udp_full - before.udp_full,
        )


def parse_softnet_dropped(text: str) -> list[int]:
    """Column 2 of /proc/net/softnet_stat, one value for each online CPU; hexadecimal."""
    return [int(line.split()[1], 16) for line in text.splitlines() if line.strip()]


def parse_udp_errors(text: str) -> tuple[int, int]:
    """(InErrors, those of them that RcvbufErrors and MemErrors count) of /proc/net/snmp."""
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Udp:"))
    udp = dict(zip(names, map(int, values), strict=True))
    return udp["InErrors"], udp.get("RcvbufErrors", 0) + udp.get("MemErrors", 0)


def other_udp_errors(namespace: NamespaceCounters, socket_dropped: int) -> int:
    """UDP errors that neither full buffers nor the drops of our own sockets explain.

    A socket's drop for any reason, a bad checksum too, is both in its own count and in InErrors.
    """
    return max(namespace.udp_errors - max(namespace.udp_full, socket_dropped), 0)


def balance(
    *,
    sent: int | None,
    sent_frames: int | None,
    nic_dropped: int | None,
    namespace: NamespaceCounters,
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
    other_errors = other_udp_errors(namespace, socket_dropped_frames)
    shared = (nic_dropped or 0) + namespace.softnet_dropped + other_errors
    if socket_dropped is None or after_stop is None:
        exact, total = False, sent_frames
        ours = socket_dropped_frames + after_stop_frames + frames
    else:
        exact, total = True, sent
        ours = socket_dropped + after_stop + lost_in_flight + received
    of_others = residual = None
    if total is not None:
        of_others = shared - min(max(total - ours, 0), shared)
        residual = total - ours - (shared - of_others)
    adds_up = received == refused + published and all(
        published - c["joined"] == c["delivered"] + c["skipped"] + c["passed"] + c["unread"]
        for c in consumers.values()
    )
    return {
        "sent": sent,
        "nic_dropped": nic_dropped,
        "softnet_dropped": namespace.softnet_dropped,
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
