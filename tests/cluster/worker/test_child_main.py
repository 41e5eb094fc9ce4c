"""The modules that a child process imports before user code runs."""

from __future__ import annotations

import subprocess
import sys

#: Libraries that take longer to import than the rest of a child's start.
SLOW = ("dask", "distributed", "numpy", "pandas", "pydantic", "prometheus_client", "tornado")


def test_a_child_starts_without_the_libraries_that_take_long_to_import() -> None:
    program = (
        "import sys, daskserve.cluster.worker.child_main, daskserve.data.replica.process.replica\n"
        f"print(*(name for name in {SLOW} if name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
