"""Running programs in the clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import each_case

ROOT = Path(__file__).parents[1]


def test_the_import_error_of_a_part_of_the_package_names_the_problem_and_the_remedy() -> None:
    # Removes the import hooks that an editable installation of the clone adds.
    code = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "import daskserve as serve; serve.deployment"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"ImportError: {ROOT / 'daskserve'} is only a part of daskserve" in ended.stderr
    assert "another directory" in ended.stderr


#: Replaces Python in a clone: prints the last line of pytest for each part of the suite.
PARTS = """#!/bin/sh
touch "$TMPDIR/left"
case "$*" in
  *"/test_[a-k]"*) echo "20 passed, 2 errors in 65.43s (0:01:05)"; exit {first};;
  *tests/data) echo "=== 2 failed, 10 passed, 1 skipped, 3 warnings in 4.56s ==="; exit {second};;
  *) echo "1 passed in 0.10s";;
esac
"""


@each_case("first, second", [(0, 0), (2, 0), (0, 1)])
def test_the_parts_of_the_suite_have_one_sum_and_leave_nothing(first: int, second: int) -> None:
    with tempfile.TemporaryDirectory() as clone:
        root = Path(clone)
        for folder in ("scripts", ".venv/bin", "temporary"):
            (root / folder).mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "test", root / "scripts")
        python = root / ".venv/bin/python"
        python.write_text(PARTS.format(first=first, second=second))
        python.chmod(0o755)
        environment = {**os.environ, "TMPDIR": str(root / "temporary")}
        ended = subprocess.run(
            [root / "scripts/test"], capture_output=True, text=True, env=environment, timeout=60
        )
        assert ended.returncode == (first or second), ended.stderr
        *_, last = ended.stdout.splitlines()
        assert re.fullmatch(r"All parts: 2 failed, 2 error, 35 passed, 1 skipped in \d+ s", last)
        assert list((root / "temporary").iterdir()) == []
