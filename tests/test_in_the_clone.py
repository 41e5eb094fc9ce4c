"""A program that is run in the clone, where Python finds a part of the package before the installed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_it_is_told_what_is_wrong_and_what_to_do() -> None:
    # Without what an installation of the clone adds to the ways of finding modules.
    code = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "import daskserve as serve; serve.deployment"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    assert f"ImportError: {ROOT / 'daskserve'} is only a part of daskserve" in told.stderr
    assert "another directory" in told.stderr
