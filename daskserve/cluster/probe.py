"""A probe of the daskserve version in another process, which works even if daskserve is missing there.

A module's function is pickled by name, and unpickling fails where the module is missing. A nested function
is pickled by value, so it runs anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from daskserve._version import PROTOCOL, __version__
from daskserve.errors import VersionMismatchError


def version_probe() -> Callable[..., dict[str, Any]]:
    """Return a function that reports the daskserve version of the process in which it runs."""

    def probe(dask_scheduler: Any = None) -> dict[str, Any]:
        import sys

        found: dict[str, Any] = {
            "version": None,
            "protocol": None,
            "detail": "",
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "is_supervised": "daskserve" in getattr(dask_scheduler, "handlers", {}),
        }
        try:
            from daskserve import _version
        except Exception as error:
            found["detail"] = f"{type(error).__name__}: {error}"
        else:
            found["version"] = _version.__version__
            found["protocol"] = getattr(_version, "PROTOCOL", None)
        return found

    return probe


def silence_probe() -> Callable[..., dict[str, float]]:
    """Return a function that reports for how long the scheduler has heard nothing of each worker."""

    def probe(dask_scheduler: Any = None) -> dict[str, float]:
        import time

        now = time.time()
        return {each.address: now - each.last_seen for each in dask_scheduler.workers.values()}

    return probe


def can_mix(version: str, protocol: int | None) -> bool:
    """Return whether a process with this version can work together with this one.

    Patch versions of the same minor version can if their protocols are the same, so that workers can be
    upgraded one after the other.
    """
    return version.split(".")[:2] == __version__.split(".")[:2] and protocol == PROTOCOL


def check_caller(scheduler: str, version: str, protocol: int | None) -> None:
    """Raise `VersionMismatchError` in the scheduler if a caller's version cannot mix with this one."""
    if not can_mix(version, protocol):
        raise VersionMismatchError(
            f"The scheduler {scheduler} has daskserve {__version__}, this program has {version}; install the "
            "same version on both and restart the older one."
        )


def mismatch(place: str, installed: Mapping[str, Any]) -> str | None:
    """Return an error text about the daskserve of ``place``; None if the versions can mix."""
    if installed["version"] is None:
        return (
            f"{place} cannot import daskserve ({installed['detail']}); install daskserve {__version__} there "
            f"(pip install daskserve=={__version__}) and restart it."
        )
    if not can_mix(installed["version"], installed["protocol"]):
        return (
            f"{place} has daskserve {installed['version']}, this program has {__version__}; install the same "
            f"version on both (pip install daskserve=={__version__}) and restart it."
        )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if installed["python"] != here:
        return (
            f"{place} runs Python {installed['python']} but this program runs {here}; user code cannot "
            "travel between different Python versions. Use the same version on both."
        )
    return None
