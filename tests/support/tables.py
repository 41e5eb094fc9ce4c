"""Tables of cheap cases: one collected test, and all cases that fail in one message."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each case, as ``pytest.mark.parametrize`` would, but as one test."""
    given = tuple(each.strip() for each in names.split(",")) if isinstance(names, str) else names
    is_single = isinstance(names, str) and len(given) == 1
    rows = [(each,) if is_single else tuple(each) for each in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for row in rows:
                try:
                    test(**fixtures, **dict(zip(given, row, strict=True)))
                except Exception as error:
                    error.add_note(f"in the case {row!r}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(rows)} cases failed", failures)

        signature = inspect.signature(test)
        left = [each for each in signature.parameters.values() if each.name not in given]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def case(*values: Any) -> Iterator[None]:
    """Add the case to the error that a test fails with, for a test that loops over a table itself."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(repr, values))}")
        raise
