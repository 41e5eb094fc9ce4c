"""The undocumented parts of Python's standard library that daskserve uses."""

from __future__ import annotations

import atexit

from daskserve.internals.checking import PYTHON, needs

with needs(PYTHON, ">=3.11,<3.15") as check:
    check.attributes(atexit, "_run_exitfuncs")


def run_exit_functions() -> None:
    """Call what was registered with `atexit`, for a process that then ends by `os._exit`."""
    atexit._run_exitfuncs()
