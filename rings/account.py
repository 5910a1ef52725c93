"""A reader's account as it stands in its slot, read from outside."""

from __future__ import annotations

from typing import Any


def valid_account(slot: Any) -> Any:
    """The account record (ACCOUNT, a copy) that belongs to the cursor of `slot` (READER).

    The reader fills the idle record and then stores its cursor, so one record always matches. A record
    that changed while we copied it no longer matches the cursor looked at afterwards.
    """
    while True:
        cursor = int(slot["cursor"])
        for record in slot["accounts"].copy():
            if int(record["cursor"]) == cursor == int(slot["cursor"]):
                return record
