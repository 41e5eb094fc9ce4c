"""Tables of cheap cases: one collected test, and all cases that fail in one message."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each case, as ``pytest.mark.parametrize`` would, but as one test."""
    given = (names,) if isinstance(names, str) else names
    rows = [(case,) if isinstance(names, str) else tuple(case) for case in cases]

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
