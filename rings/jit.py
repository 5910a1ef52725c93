"""The one place that decides how our compiled functions are compiled and cached.

`jit` for functions that compiled code calls, `callback(signature)` for functions that compiled code
calls through a pointer (a consumer's handler).

numba keeps compiled code on disk and looks only at the function's own file to see whether it is still
valid: change a constant or a helper in another module and the stale code is served as a hit. So the
folder of the cache carries a fingerprint of every source file that compiled code may come from. A
change anywhere is a new folder; nothing stale can be found.

The base folder is NUMBA_CACHE_DIR, else the user's cache folder. Where it can't be written, code is
compiled anew in each process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba import config

# Folders of this distribution that hold compiled functions. Names only: nothing of them is imported.
_COMPILED_PACKAGES = ("rings", "engine", "bench")


@functools.cache
def cache_folder() -> Path | None:
    """The folder for this version's compiled code, created; None where none can be written."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in _COMPILED_PACKAGES:
        for source in sorted((root / package).rglob("*.py")):
            digest.update(str(source.relative_to(root)).encode())
            digest.update(source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(config.CACHE_DIR) if config.CACHE_DIR else Path(home) / "rxring"
    folder = base / f"compiled-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    _remove_cut_off(folder)
    return folder


def _remove_cut_off(folder: Path) -> None:
    """Remove files whose end a crash or a full disk has cut off: numba would fail on them, not compile anew.

    They are pickles, the last byte of which says that they end.
    """
    for pattern in ("*.nbi", "*.nbc"):
        for path in folder.rglob(pattern):
            with contextlib.suppress(OSError), path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                if file.read(1) != b".":
                    path.unlink()


@contextlib.contextmanager
def _cached() -> Iterator[bool]:
    """Within: numba places caches of functions that are decorated now into our folder."""
    folder = cache_folder()
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")
    try:
        yield folder is not None
    finally:
        config.CACHE_DIR = before


# nogil: a reader that waits in compiled code must not stop the other threads of its process.
_FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile `function` on its first call with each set of argument types; kept on disk."""
    with _cached() as cache:
        return numba.njit(cache=cache, **_FLAGS)(function)


def callback(signature: Any, *, cache: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function now and give it an address that compiled code can call.

    `cache=False` for functions that close over others: numba cannot recognise those on disk.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        with _cached() as folder:
            return numba.cfunc(signature, cache=cache and folder, **_FLAGS)(function)

    return decorate


def compile_for(function: Any, *arguments: Any) -> None:
    """Compile a `jit` function, and all it calls, for arguments like these, without running it."""
    function.compile(tuple(numba.typeof(argument) for argument in arguments))


def compiled_before() -> bool:
    """Is there compiled code of this version on disk? Otherwise the first start takes a while."""
    folder = cache_folder()
    return folder is not None and next(folder.rglob("*.nbc"), None) is not None
