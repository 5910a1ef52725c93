"""The signals that end a command in order: drain, report, leave nothing behind."""

from __future__ import annotations

import signal

# What nohup, or a shell in a script, had ignored from the start stays ignored.
END_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *(n for n in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(n) != signal.SIG_IGN),
)
