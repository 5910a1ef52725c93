"""The command `rxring` in a process of its own, as a user starts it, read by its JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from engine.errors import Failed

ROOT = Path(__file__).resolve().parent.parent
_END_S = 30


class Rxring:
    """`rxring ARGUMENTS --json`. Leaving the context ends it, whatever state it is in.

    prefix: a command that becomes the one after it, as `ip netns exec NAME`.
    """

    def __init__(self, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self._name = arguments[0]
        command = [*prefix, sys.executable, "-m", "tools.cli", *arguments, "--json"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def next(self, kind: str) -> dict[str, Any]:
        """The next object of this type. Failed where it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found["type"] == kind:
                return found
        raise Failed(f"rxring {self._name} ended with {self._process.wait(_END_S)} before its {kind}")

    def end(self) -> dict[str, Any]:
        """Ask it to end in order; its summary."""
        self._process.send_signal(signal.SIGTERM)
        summary = self.next("summary")
        code = self._process.wait(_END_S)
        if code != 0:
            raise Failed(f"rxring {self._name} ended with {code}")
        return summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
