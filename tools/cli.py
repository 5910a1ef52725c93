"""The command `rxring`: turns every ending into an exit code.

0 done as asked · 1 something failed while running · 2 bad arguments, or refused by the machine. An
error is one line on stderr: `rxring: what is wrong: what to do`. RXRING_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine.errors import Failed, Refused
from tools import streams

# OpenBLAS starts a thread for each CPU when numpy is imported. The supervisor forks its workers, and
# only a process of a single thread can be forked safely.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    streams.open_missing()
    try:
        from tools import commands  # here: it takes a moment, and Ctrl-C must not show a traceback

        code = commands.invoke(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        streams.drop_output()  # who read it has what he wanted
        return 0
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # how rich answers one
            return 0
        return _unexpected(ending)
    except KeyboardInterrupt:
        return 130
    except Refused as error:
        return _complain(str(error), 2)
    except Failed as error:
        return _complain(str(error), 1)
    except OSError as error:
        streams.drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}: RXRING_DEBUG=1 shows where", 1)
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: BaseException) -> int:
    return _complain(f"unexpected {type(error).__name__}: {error}: RXRING_DEBUG=1 shows where", 1)


def _complain(text: str, code: int) -> int:
    if os.environ.get("RXRING_DEBUG") == "1":
        import traceback

        streams.complain(traceback.format_exc().rstrip())
    streams.complain(f"rxring: {' '.join(text.split())}")
    return code


if __name__ == "__main__":
    sys.exit(main())
