"""Case 26: an interrupt refuses its affinity (EIO): said which and why, and nothing is half-applied."""

import errno
from pathlib import Path

import pytest
import trees

from engine.affinity import interrupts, journal
from engine.affinity.journal import Write
from engine.errors import Refused
from tools import pin


def test_a_managed_one_is_named_before_anything_is_written(tmp_path: Path) -> None:
    tree = trees.vm(tmp_path)
    tree.irq(40, "virtio2-input.1", "0", "0", managed=True)
    tree.write("sys/devices/pci0000:00/0000:00:01.0/0000:00:03.0/msi_irqs/40", "msix")
    with pytest.raises(Refused, match=r"^interrupt 40 \(virtio2-input\.1\) of eth0 is managed, .* CPU 0: "):
        pin.main(["apply", "split", "--device", "eth0"], tree.root)
    assert [tree.read(f"proc/irq/{n}/smp_affinity_list") for n in (38, 39, 40)] == ["0-1", "0-1", "0"]
    assert not (tmp_path / "run").exists()


def test_one_that_refuses_only_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO comes from hardware that is not here: the one thing that is made up."""
    tree = trees.vm(tmp_path)
    real = journal.store

    def store(path: Path, value: str) -> None:
        if path == interrupts.wish_path(39, tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        real(path, value)

    monkeypatch.setattr(journal, "store", store)
    writes = [Write(interrupts.wish_path(number, tmp_path), "1") for number in (37, 38, 39)]
    with pytest.raises(Refused, match=r"irq/39/.* does not take 1, nothing is changed: .*managed"):
        journal.apply(writes, {}, tmp_path)
    assert [tree.read(f"proc/irq/{n}/smp_affinity_list") for n in (37, 38, 39)] == ["0-1"] * 3
    assert journal.journals(tmp_path) == []
