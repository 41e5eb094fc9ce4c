"""``batch``: calls of an async method, or of an async function, collected into one call of it.

Unlike `daskserve.data.replica.accept_batch.accept_batch`, which works on the requests of a replica, this
works where user code runs: whoever calls the method, by HTTP, by a handle or as ``self.method(x)``, waits for
its item alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, overload

from daskserve.data.batching.function import BatchedFunction, check_max_batch_size, check_wait_s


def _check_max_concurrent_batches(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"max_concurrent_batches must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"max_concurrent_batches must be at least 1, got {value}")
    return value


def _check_function(function: Any) -> None:
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if not is_async or not inspect.isfunction(function):
        raise TypeError(
            f"Only an `async def` function or method can be batched, got {function!r}; make it one, and run "
            "what blocks in it with asyncio.to_thread."
        )


@overload
def batch(_func: Callable[..., Any], /) -> BatchedFunction: ...


@overload
def batch(
    _func: None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
) -> Callable[[Callable[..., Any]], BatchedFunction]: ...


def batch(
    _func: Callable[..., Any] | None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
) -> Any:
    """Have calls of an async method or function collected, and answered by one call of it.

    Each caller calls it with its own arguments and gets its own result. The function itself gets a list for
    each argument, and returns a list of as many results, in order; a result that is an exception is raised
    for its caller alone, an exception that the function raises for all. A call that is cancelled leaves its
    batch; a batch that nobody waits for any more is cancelled.

    An async generator function yields such a list at each step; callers get an async generator each, which
    ends where the list holds ``StopIteration`` (or ``StopAsyncIteration``) for it.

    Each instance of the class batches for itself. Calls with different numbers of arguments, or different
    keywords, do not share a batch. ``method.set_max_batch_size(n)`` and
    ``method.set_batch_wait_timeout_s(s)`` change an instance's limits, as in ``reconfigure``.

    Parameters
    ----------
    max_batch_size : int
        A batch this large runs at once.
    batch_wait_timeout_s : float
        How long the first call of a batch waits for others.
    max_concurrent_batches : int
        How many batches of one instance may run at a time; while so many do, calls gather.
    batch_size_fn : callable, optional
        Takes a list of first arguments and returns how large a batch of them would be, such as the number of
        tokens, held against ``max_batch_size``. A call that is too large alone gets a `RuntimeError`.

    Raises
    ------
    TypeError, ValueError
        The function is not ``async def``, or an option is wrong.

    Examples
    --------
    >>> class Model:
    ...     @batch(max_batch_size=32)
    ...     async def predict(self, rows):
    ...         return [sum(row) for row in rows]
    ...
    ...     async def __call__(self, request):
    ...         return await self.predict(await request.json())
    """
    check_max_batch_size(max_batch_size)
    check_wait_s(batch_wait_timeout_s)
    _check_max_concurrent_batches(max_concurrent_batches)
    if batch_size_fn is not None and (
        not callable(batch_size_fn) or inspect.iscoroutinefunction(batch_size_fn)
    ):
        raise TypeError(
            f"batch_size_fn must be a plain function of a list of arguments, or None; got {batch_size_fn!r}"
        )

    def decorate(function: Callable[..., Any]) -> BatchedFunction:
        _check_function(function)
        return BatchedFunction(
            function, max_batch_size, batch_wait_timeout_s, max_concurrent_batches, batch_size_fn
        )

    return decorate if _func is None else decorate(_func)
