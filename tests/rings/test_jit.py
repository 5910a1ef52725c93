from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba import types

from rings import jit as jit_module
from rings.jit import cache_folder, callback, compile_for, jit

PROGRAM = "from rings.jit import cache_folder; print(cache_folder())"


def _folder(root: Path, **environment: str) -> str:
    """What a process says whose code stands at `root`."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    here = Path(jit_module.__file__).parent
    shutil.copytree(here, tmp_path / "code" / "rings", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


def test_a_change_in_any_module_is_another_folder(copy: Path, tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    before = _folder(copy, **environment)
    assert before.startswith(str(tmp_path / "cache"))
    assert Path(before).is_dir()
    assert _folder(copy, **environment) == before
    with (copy / "rings" / "layout.py").open("a") as file:
        file.write("\n# changed\n")
    after = _folder(copy, **environment)
    assert after != before


def test_without_numba_cache_dir_it_is_the_users(copy: Path, tmp_path: Path) -> None:
    folder = _folder(copy, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert Path(folder).parent == tmp_path / "xdg" / "rxring"


def test_where_nothing_can_be_written_nothing_is_cached(copy: Path) -> None:
    assert _folder(copy, NUMBA_CACHE_DIR="/proc/nowhere") == "None"


def test_a_cache_file_that_is_cut_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut, empty = (tmp_path / f"{part}.nbi" for part in ("whole", "cut", "empty"))
    whole.write_bytes(pickle.dumps([1, 2]))
    cut.write_bytes(pickle.dumps([1, 2])[:-1])
    empty.write_bytes(b"")
    jit_module._remove_cut_off(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]


def test_decorating_leaves_numbas_own_configuration_alone() -> None:
    before = numba.config.CACHE_DIR

    @jit
    def twice(x):  # type: ignore[no-untyped-def]
        return x * 2

    assert before == numba.config.CACHE_DIR
    assert twice(21) == 42
    assert before == numba.config.CACHE_DIR
    assert str(twice.stats.cache_path).startswith(str(cache_folder()))


def test_a_callback_has_an_address() -> None:
    @callback(types.int64(types.int64), cache=False)
    def plus_one(x):  # type: ignore[no-untyped-def]
        return x + 1

    assert plus_one.address != 0
    assert plus_one.ctypes(41) == 42


def test_compile_for_compiles_and_does_not_run() -> None:
    @jit
    def divide(x):  # type: ignore[no-untyped-def]
        return 1 // x

    compile_for(divide, 0)
    assert len(divide.signatures) == 1
