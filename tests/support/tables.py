"""Tables of cheap cases: one collected test for all cases; its error lists all failing cases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run a test for each case, as ``pytest.mark.parametrize`` would, but as one test.

    The cases of a coroutine function run one after another on one event loop.
    """
    given = tuple(each.strip() for each in names.split(",")) if isinstance(names, str) else names
    is_single = isinstance(names, str) and len(given) == 1
    rows = [(each,) if is_single else tuple(each) for each in cases]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def arguments(row: tuple[Any, ...]) -> dict[str, Any]:
            return dict(zip(given, row, strict=True))

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            with _failures(len(rows)) as failures:
                for row in rows:
                    with _noted(row, failures):
                        test(**fixtures, **arguments(row))

        @functools.wraps(test)
        async def run_async(**fixtures: Any) -> None:
            with _failures(len(rows)) as failures:
                for row in rows:
                    with _noted(row, failures):
                        await test(**fixtures, **arguments(row))

        found: Any = run_async if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        left = [each for each in signature.parameters.values() if each.name not in given]
        found.__signature__ = signature.replace(parameters=left)
        return found  # type: ignore[no-any-return]

    return decorate


@contextmanager
def _failures(count: int) -> Iterator[list[Exception]]:
    """Raise the errors that a block has collected, together."""
    failures: list[Exception] = []
    yield failures
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {count} cases failed", failures)


@contextmanager
def _noted(row: tuple[Any, ...], failures: list[Exception]) -> Iterator[None]:
    """Collect the error of one case."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {row!r}")
        failures.append(error)


@contextmanager
def case(*values: Any) -> Iterator[None]:
    """Add the case to the error that a test fails with, for a test that loops over a table itself."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(repr, values))}")
        raise
