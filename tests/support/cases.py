"""Tables of cheap cases that one test goes through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that runs a cheap test for all cases in one; takes the arguments of `parametrize`.

    A failure has its case as a note.
    """
    keys = tuple(each.strip() for each in names.split(",")) if isinstance(names, str) else names
    table = [dict(zip(keys, each if len(keys) > 1 else (each,), strict=True)) for each in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @wraps(test)
        def run_test(**given: Any) -> None:
            for each in table:
                with case(each):
                    test(**given, **each)

        others = [each for name, each in signature.parameters.items() if name not in keys]
        run_test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_test

    return decorate


@contextmanager
def case(*values: Any) -> Iterator[None]:
    """Add the case to the error that a test fails with, for a test that loops over a table itself."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(repr, values))}")
        raise
