"""Tests that are coroutines, each run by a function that prepares what the test gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tables import each_case as for_each

__all__ = ["for_each", "scenarios"]


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
