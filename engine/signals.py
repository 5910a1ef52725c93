"""The signals that end a command in order: drain, report, leave nothing behind."""

from __future__ import annotations

import signal

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
