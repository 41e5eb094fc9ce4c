"""Check of the results that user code returns for a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from typing import Any

from daskserve.errors import BatchResultError, ServeError


def as_results(name: str, results: Any, expected: int) -> list[Any]:
    """Return the results of user code for a batch of ``expected`` items as a list.

    Raises
    ------
    BatchResultError
        A `TypeError`: the results are not an iterable.
    ServeError
        There are more or fewer of them than expected. Errors of user iterators are raised unchanged.
    """
    if isinstance(results, (str, bytes, Mapping, set, frozenset)) or not isinstance(results, Iterable):
        raise BatchResultError(
            f"{name} must return a list of results, one per request of the batch; "
            f"it returned a {type(results).__name__}."
        )
    # Read at most one more than expected, because the iterable may be endless.
    count = len(results) if isinstance(results, Sized) else expected
    found = list(islice(results, expected + 1)) if count == expected else []
    if len(found) != expected:
        raise ServeError(
            f"{name} doesn't preserve batch size: it must return one result per request; "
            f"it got {expected} and returned {count if count != expected else len(found)}."
        )
    return found
