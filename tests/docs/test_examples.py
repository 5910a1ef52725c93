"""Every example in README.md and docs/ runs: python blocks as scripts, sh blocks as commands.

A python block that begins with `# file: NAME` is saved under that name for the blocks after it, and
imported. Blocks of one page share a folder and run in the order of the page. `make` lines are this very
suite, and are left out. What runs for several seconds does so for one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|sh|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    rxring = tmp_path / "bin" / "rxring"
    rxring.parent.mkdir()
    rxring.write_text(f'#!/bin/sh\nexec {sys.executable} -m tools.cli "$@"\n')
    rxring.chmod(0o755)
    path = f"{rxring.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    for language, code in blocks:
        code = re.sub(r"(--duration) [1-9]\d*\b", r"\1 1", code)
        named = re.match(r"# file: (\S+)\n", code)
        if named:
            (tmp_path / named[1]).write_text(code)
        if language == "toml":
            continue
        if language == "python":
            command = [sys.executable, "-c", f"import {named[1][:-3]}" if named else code]
        else:
            lines = [line for line in code.splitlines() if not line.startswith("make ")]
            command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
