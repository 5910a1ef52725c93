"""The C programs that we measure ourselves against, compiled here, for this CPU, when they are needed."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from bench.machine import cpu_model
from engine.errors import Failed

FLAGS = ("-O3", "-march=native")
_HERE = Path(__file__).parent
_TIMEOUT_S = 120


def missing() -> str:
    """Why the C programs cannot be had here; "" where they can."""
    return "" if shutil.which("cc") else "there is no C compiler: install gcc or clang as `cc`"


@functools.cache
def program(name: str) -> Path:
    """The compiled program, from the user's cache folder if it is there. Failed where cc does not like it."""
    folder = _cache_folder()
    binary = folder / name
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{name}.{os.getpid()}"
        command = ["cc", *FLAGS, "-o", str(fresh), str(_HERE / f"{name}.c")]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        if compiled.returncode != 0:
            raise Failed(f"cc cannot compile {name}.c: {compiled.stderr.partition(chr(10))[0]}")
        fresh.replace(binary)  # at once and whole: two may compile
    return binary


def run(name: str, *arguments: str | int, pass_fds: tuple[int, ...] = ()) -> list[float]:
    """The numbers that a program prints. Failed where it fails."""
    command = [str(program(name)), *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, pass_fds=pass_fds
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{name} did not end within {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise Failed(f"{name} ended with {done.returncode}: {done.stderr.strip()}")
    return [float(word) for word in done.stdout.split()]


def _cache_folder() -> Path:
    """One for each version of the sources, of the compiler and of the CPU, which -march=native means."""
    version = subprocess.run(["cc", "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version + cpu_model().encode() + " ".join(FLAGS).encode())
    for source in sorted(_HERE.glob("*.[ch]")):
        digest.update(source.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rxring" / f"native-{digest.hexdigest()[:16]}"
