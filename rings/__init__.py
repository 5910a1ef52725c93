"""rings: packets from one process to others through shared memory.

    with rings.create("quotes") as ring:               one process owns it,
        with ring.writer() as writer: …                one writes it,
    with rings.attach("quotes").reader() as reader:    others read it, each at its own pace.
        for batch in reader:
            batch.descriptors, batch.payload(0), batch.matrix

docs/ring.md explains how it works; the modules, one idea each, hold the proofs of their steps.
"""

from rings.ring import Ring, attach, collect, create, remove
from rings.ring import list_rings as list
from rings.segment import RingError

__all__ = ["Ring", "RingError", "attach", "collect", "create", "list", "remove"]
