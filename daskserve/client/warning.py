"""Warnings about how user code calls daskserve."""

from __future__ import annotations

import inspect
import warnings


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that called daskserve, even if the call went through several of its
    functions."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("daskserve."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
