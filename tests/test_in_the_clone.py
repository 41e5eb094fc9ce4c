"""Running a program in the clone, where Python finds a part of the package before the installed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_import_error_names_the_problem_and_the_remedy() -> None:
    # Remove the import hooks that an editable installation of the clone adds.
    code = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "import daskserve as serve; serve.deployment"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"ImportError: {ROOT / 'daskserve'} is only a part of daskserve" in ended.stderr
    assert "another directory" in ended.stderr
