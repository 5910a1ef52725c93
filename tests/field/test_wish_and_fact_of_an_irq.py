"""Case 27: an interrupt is wished on all CPUs (ffff) and comes on one (0001): both are shown."""

import json
from pathlib import Path

import pytest
import trees

from tools import pin


def test_both_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = trees.Tree(tmp_path)
    tree.cpus({cpu: trees.Place(0, 0, cpu, 0) for cpu in range(16)}, allowed=range(16))
    tree.device("eth0", at="0000:02:00.0", driver="ixgbe", irqs={50: "eth0-TxRx-0"})
    tree.irq(50, "eth0-TxRx-0", "0-15", "0")
    assert pin.main(["show"], tmp_path) == 0
    head, row = (
        line.split() for line in capsys.readouterr().out.splitlines() if "TxRx" in line or "wish" in line
    )
    assert dict(zip(head, row, strict=True)) == {
        "interrupt": "50",
        "of": "eth0",
        "handler": "eth0-TxRx-0",
        "wish": "0-15",
        "fact": "0",
    }
    assert pin.main(["show", "--json"], tmp_path) == 0
    [irq] = json.loads(capsys.readouterr().out)["devices"][0]["irqs"]
    assert (irq["wish"], irq["fact"]) == (list(range(16)), [0])
