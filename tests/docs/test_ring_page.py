"""docs/ring.md draws the bytes of a ring: each offset it names is the real one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rings.layout import DESCRIPTOR, READER, SOURCE, WRITER, Policy, SlotState

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ring.md").read_text()


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (WRITER, ["published", "floor", "wake", "epoch", "refused", "errors"]),
        (READER, ["word", "cursor", "name"]),
        (SOURCE, ["address", "port", "family", "interface", "flow"]),
        (DESCRIPTOR, ["number", "time_ns", "offset", "length", "socket_ns", "segment", "flags"]),
    ],
)
def test_offsets(dtype: np.dtype[np.void], names: list[str]) -> None:
    assert dtype.fields is not None
    for name in names:
        assert re.search(rf"\b{dtype.fields[name][1]} {name}\b", PAGE), f"{name}: {dtype.fields[name]}"


def test_accounts_and_sizes() -> None:
    at = READER.fields["accounts"][1]  # type: ignore[index]
    first = READER.fields["accounts"][0].subdtype[0].itemsize  # type: ignore[index]
    assert f"{at} account 0" in PAGE
    assert f"{at + first} account 1" in PAGE
    assert f"A reader's slot, {READER.itemsize} bytes" in PAGE
    assert f"A descriptor, {DESCRIPTOR.itemsize} bytes" in PAGE


def test_states_and_policies() -> None:
    states = ", ".join(f"{state.name} {int(state)}" for state in SlotState)
    policies = ", ".join(f"{policy.name.lower()} {int(policy)}" for policy in Policy)
    assert f"state: {states}; policy: {policies}" in PAGE
