"""The size of a model in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskserve.errors import WrongTypeError


def size_of_model(model: Any, size_of: Callable[[Any], float] | None) -> int:
    """Return a model's size from ``size_of``, or from its own ``nbytes``.

    Raises
    ------
    WrongTypeError
        The model has no size, or it is not a number of bytes.
    """
    size: Any = size_of(model) if size_of is not None else getattr(model, "nbytes", None)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size < float("inf"):
        source = "size_of" if size_of is not None else "nbytes"
        raise WrongTypeError(
            f"The size of a model is not known: {source} of a {type(model).__name__} is {size!r}. With "
            "max_bytes it must be a number of bytes; pass a function as size_of."
        )
    return int(size)
