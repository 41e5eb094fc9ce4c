"""Running programs in the clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_import_error_of_a_part_of_the_package_names_the_problem_and_the_remedy() -> None:
    # Remove the import hooks that an editable installation of the clone adds.
    code = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "import daskserve as serve; serve.deployment"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"ImportError: {ROOT / 'daskserve'} is only a part of daskserve" in ended.stderr
    assert "another directory" in ended.stderr


#: Takes the place of Python in a clone: prints the last line of pytest for each half of the suite.
HALVES = """#!/bin/sh
touch "$TMPDIR/left"
case "$*" in
  *cacheprovider*) echo "=== 2 failed, 10 passed, 1 skipped, 3 warnings in 4.56s ==="; exit {second};;
  *) echo "20 passed, 1 skipped, 2 errors in 65.43s (0:01:05)"; exit {first};;
esac
"""


@pytest.mark.parametrize(("first", "second"), [(0, 0), (2, 0), (0, 1)])
def test_the_halves_of_the_suite_have_one_sum_and_leave_nothing(
    first: int, second: int, tmp_path: Path
) -> None:
    for folder in ("scripts", ".venv/bin", "temporary"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    python = tmp_path / ".venv/bin/python"
    python.write_text(HALVES.format(first=first, second=second))
    python.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    ended = subprocess.run(
        [tmp_path / "scripts/test"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == (first or second), ended.stderr
    *_, last = ended.stdout.splitlines()
    assert re.fullmatch(r"Both halves: 2 failed, 2 error, 30 passed, 2 skipped in \d+ s", last)
    assert list((tmp_path / "temporary").iterdir()) == []
