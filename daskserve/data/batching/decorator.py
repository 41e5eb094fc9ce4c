"""``batch``, which collects calls of an async method or function and answers them with a single call.

`daskserve.data.replica.requests.accept_batch.accept_batch` batches the requests of a replica. ``batch`` works
where user code runs, for calls by HTTP, by a handle or as ``self.method(x)``. Each caller waits for its own
item only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from daskserve.data.batching.checks import check_seconds, check_whole
from daskserve.data.batching.function import BatchedFunction


def _check_function(function: Any) -> None:
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if not is_async or not inspect.isfunction(function):
        raise TypeError(
            f"Only an `async def` function or method can be batched, got {function!r}; make it async, and "
            "run blocking code with asyncio.to_thread."
        )


@overload
def batch(_func: Callable[..., Any], /) -> BatchedFunction: ...


@overload
def batch(
    _func: None = None,
    /,
    max_batch_size: int | None = None,
    batch_wait_timeout_s: float | None = None,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
    latency_target_s: float | None = None,
    preferred_batch_sizes: Sequence[int] = (),
) -> Callable[[Callable[..., Any]], BatchedFunction]: ...


def batch(
    _func: Callable[..., Any] | None = None,
    /,
    max_batch_size: int | None = None,
    batch_wait_timeout_s: float | None = None,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], float] | None = None,
    latency_target_s: float | None = None,
    preferred_batch_sizes: Sequence[int] = (),
) -> Any:
    """Collect calls of an async method or function, and answer them with one call of it.

    Each caller passes its own arguments and gets its own result. The function itself gets a list for each
    argument, and returns one result per item, in order. A result that is an exception is raised for its
    caller only; an exception that the function raises is raised for all callers. A cancelled call leaves its
    batch. If all calls of a batch are cancelled, the batch is cancelled.

    An async generator function yields a list of results at each step. Each caller gets an async generator,
    which ends when its result is ``StopIteration`` (or ``StopAsyncIteration``).

    Each instance of the class has its own batches. Calls with different numbers of arguments, or different
    keywords, do not share a batch. ``method.set_max_batch_size(n)`` and
    ``method.set_batch_wait_timeout_s(s)`` change an instance's limits, as in ``reconfigure``.

    Parameters
    ----------
    max_batch_size : int, optional
        Maximum number of calls in a batch; a full batch runs at once. Default: 10.
    batch_wait_timeout_s : float, optional
        Maximum time that the first call of a batch waits for others, in seconds. Default: 0.01. In a replica,
        a batch starts earlier if the queue has as many calls as the replica has slots, or all calls that
        recent batches lead it to expect.
    max_concurrent_batches : int
        Maximum number of batches of one instance that run at a time; further calls wait.
    batch_size_fn : callable, optional
        Takes the list of the first arguments of calls, and returns the size of a batch of these calls, such
        as the number of tokens. The size is limited by ``max_batch_size``. A call that exceeds the limit
        alone raises `RuntimeError`.
    latency_target_s : float, optional
        How long a call may take, in seconds. The sizes and waits of batches then adapt to the load, so that
        most calls are answered in this time. ``max_batch_size`` (default: 1000) and ``batch_wait_timeout_s``
        (default: this time) are upper bounds. Not for generators, and not with ``batch_size_fn``.
    preferred_batch_sizes : list of int
        Sizes for which the model is optimized, up to ``max_batch_size``. As soon as enough calls wait for one
        of these sizes, a batch of the largest such size runs; other sizes run when the wait is over. Not with
        ``batch_size_fn`` or ``latency_target_s``.

    Raises
    ------
    TypeError, ValueError
        The function is not ``async def``, or an option is invalid.

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
    is_tuned = latency_target_s is not None
    target_s = check_seconds("latency_target_s", latency_target_s) if is_tuned else None
    size, wait_s = 1000 if is_tuned else 10, target_s or 0.01
    if max_batch_size is not None:
        size = check_whole("max_batch_size", max_batch_size)
    if batch_wait_timeout_s is not None:
        wait_s = check_seconds("batch_wait_timeout_s", batch_wait_timeout_s, may_be_zero=True)
    at_once = check_whole("max_concurrent_batches", max_concurrent_batches)
    if batch_size_fn is not None and (
        not callable(batch_size_fn) or inspect.iscoroutinefunction(batch_size_fn)
    ):
        raise TypeError(
            f"batch_size_fn must be a plain function of a list of arguments, or None; got {batch_size_fn!r}"
        )
    preferred = _check_preferred(preferred_batch_sizes, size)
    if preferred and (is_tuned or batch_size_fn is not None):
        raise ValueError(
            "preferred_batch_sizes cannot be combined with latency_target_s or batch_size_fn; leave one out."
        )
    if is_tuned and batch_size_fn is not None:
        raise ValueError(
            "latency_target_s adjusts a number of calls, so it cannot be combined with batch_size_fn; "
            "leave one out."
        )

    def decorate(function: Callable[..., Any]) -> BatchedFunction:
        _check_function(function)
        if is_tuned and inspect.isasyncgenfunction(function):
            raise TypeError(
                f"latency_target_s is for functions with one result, but {function.__qualname__} is a "
                "generator; leave it out, or use continuous_batch."
            )
        return BatchedFunction(function, size, wait_s, at_once, batch_size_fn, target_s, preferred)

    return decorate if _func is None else decorate(_func)


def _check_preferred(values: Any, most: int) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"preferred_batch_sizes must be a list of whole numbers; got {values!r}")
    sizes = tuple(sorted(check_whole("preferred_batch_sizes", each) for each in values))
    if sizes and sizes[-1] > most:
        raise ValueError(f"preferred_batch_sizes has {sizes[-1]}, but max_batch_size is {most}")
    return sizes
