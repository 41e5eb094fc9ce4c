"""A probe of the daskserve version in another process, which works even if daskserve is missing there.

A module's function is pickled by name, and unpickling fails where the module is missing. A nested function
is pickled by value, so it runs anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def version_probe() -> Callable[..., dict[str, Any]]:
    """Return a function that reports the daskserve version of the process in which it runs."""

    def probe(dask_scheduler: Any = None) -> dict[str, Any]:
        import sys

        found: dict[str, Any] = {
            "version": None,
            "detail": "",
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "is_supervised": "daskserve" in getattr(dask_scheduler, "handlers", {}),
        }
        try:
            from daskserve._version import __version__
        except Exception as error:
            found["detail"] = f"{type(error).__name__}: {error}"
        else:
            found["version"] = __version__
        return found

    return probe


def mismatch(place: str, installed: dict[str, Any], wanted: str) -> str | None:
    """Return an error text about the daskserve of ``place``; None if the version matches."""
    if installed["version"] is None:
        return (
            f"{place} cannot import daskserve ({installed['detail']}); install daskserve {wanted} there "
            f"(pip install daskserve=={wanted}) and restart it."
        )
    if installed["version"] != wanted:
        return (
            f"{place} has daskserve {installed['version']}, this program has {wanted}; install the same "
            f"version on both (pip install daskserve=={wanted}) and restart it."
        )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if installed["python"] != here:
        return (
            f"{place} runs Python {installed['python']} but this program runs {here}; user code cannot "
            "travel between different Python versions. Use the same version on both."
        )
    return None
