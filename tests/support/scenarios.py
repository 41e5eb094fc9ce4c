"""Decorators of tests: of coroutines, and of tables of cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any


def scenarios(run: Callable[[Any], None], provided: int = 1) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for such tests.

    Parameters
    ----------
    run : callable
        Runs a coroutine function, usually in virtual time, with the test's first arguments.
    provided : int
        The number of these arguments; the others are fixtures and parameters.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @wraps(test)
        def run_test(**given: Any) -> None:
            run(partial(test, **given))

        others = list(signature.parameters.values())[provided:]
        run_test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_test

    return decorate


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
            for case in table:
                try:
                    test(**given, **case)
                except BaseException as error:
                    error.add_note(f"case: {case}")
                    raise

        others = [each for name, each in signature.parameters.items() if name not in keys]
        run_test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_test

    return decorate
