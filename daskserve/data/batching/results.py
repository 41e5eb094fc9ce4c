"""Check what user code returns for a batch."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Mapping,
    Sized,
)
from itertools import islice
from typing import Any

from daskserve.errors import ServeError


def as_results(name: str, results: Any, expected: int) -> list[Any]:
    """Return what the user's code gave for a batch of ``expected`` items as a list.

    Raises
    ------
    ServeError
        It is no sequence of as many results. Errors of the user's own iterators are raised as they are.
    """
    if isinstance(results, (str, bytes, Mapping, set, frozenset)) or not isinstance(results, Iterable):
        raise ServeError(
            f"{name} must return a list of results, one per request of the batch; "
            f"it returned a {type(results).__name__}."
        )
    # One more than wanted will do to see that they are too many: they may have no end.
    count = len(results) if isinstance(results, Sized) else expected
    found = list(islice(results, expected + 1)) if count == expected else []
    if len(found) != expected:
        raise ServeError(
            f"{name} doesn't preserve batch size: it must return one result per request; "
            f"it got {expected} and returned {count if count != expected else len(found)}."
        )
    return found
