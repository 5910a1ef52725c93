"""Case 10 (libtrace#111, rqbit#232): a socket on the port gets the packets of groups that others joined.

And a group joined without saying where is joined on the default route's device, which nobody sees. Ours
is bound to its group, has IP_MULTICAST_ALL off, and says on which device it has joined.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from namespaces import Pair, make_pair  # noqa: F401 (the fixture `pair`)
from runs import Run

from engine.net import sender
from engine.net.sender import SendPlan


@pytest.mark.parametrize("groups", [("239.1.1.1", "239.1.1.2"), ("[ff05::1:1]", "[ff05::1:2]")])
def test_each_engine_gets_its_own_group(pair: Pair, name: str, groups: tuple[str, str]) -> None:
    with ExitStack() as stack:
        with pair.right:
            listens = [f"udp://{group}:5000?interface={pair.right.device}" for group in groups]
            runs = [stack.enter_context(Run(f"{name}.{i}", listen=url)) for i, url in enumerate(listens)]
        for run in runs:
            assert run.ready
        with pair.left:
            for count, group in zip((100, 200), groups, strict=True):
                to = f"{group}:5000?interface={pair.left.device}"
                sender.run(SendPlan(to=to, packets=count, stamp="none"), [].append)
        assert [run.end()["ledger"]["received"] for run in runs] == [100, 200]


def test_it_says_where_it_has_joined(pair: Pair, name: str) -> None:
    pair.right.ip("route", "add", "default", "dev", pair.right.device)
    with pair.right, Run(name, listen="udp://239.1.1.1:5000") as run:
        run.end()
        assert run.errors == f"joined 239.1.1.1 on {pair.right.device}\n"
