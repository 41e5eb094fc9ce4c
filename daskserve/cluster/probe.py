"""Which daskserve another process has, asked by a function that does not need daskserve there.

A function that lives in a module is pickled by name, and unpickling the name fails where the module is
missing. A function made inside another one is pickled by value, so it runs anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def version_probe() -> Callable[..., dict[str, Any]]:
    """Return a function that tells this installation's daskserve version wherever it runs."""

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
    """Return what is wrong with the daskserve of ``place`` and what to do, or None if it fits."""
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
            f"{place} runs Python {installed['python']}, this program runs {here}; user code cannot travel "
            "between different Python versions. Use the same one on both."
        )
    return None
