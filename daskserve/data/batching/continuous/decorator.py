"""``continuous_batch``, for models that generate step by step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, overload

from daskserve.data.batching.checks import check_number, check_seconds, check_whole
from daskserve.data.batching.continuous.function import (
    ContinuousFunction,
    StepOptions,
    check_function,
    check_max_cost,
)
from daskserve.data.batching.continuous.slots import SlotLimits


@overload
def continuous_batch(_func: Callable[..., Any], /) -> ContinuousFunction: ...


@overload
def continuous_batch(
    _func: None = None,
    /,
    *,
    max_slots: int = 8,
    max_queued: int = 1000,
    max_cost: float | None = None,
    cost_fn: Callable[..., float] | None = None,
    cost_per_step: float = 1.0,
    priority_fn: Callable[..., float] | None = None,
    user_fn: Callable[..., Hashable] | None = None,
    max_outputs: int = 100_000,
    step_timeout_s: float | None = None,
) -> Callable[[Callable[..., Any]], ContinuousFunction]: ...


def continuous_batch(
    _func: Callable[..., Any] | None = None,
    /,
    *,
    max_slots: int = 8,
    max_queued: int = 1000,
    max_cost: float | None = None,
    cost_fn: Callable[..., float] | None = None,
    cost_per_step: float = 1.0,
    priority_fn: Callable[..., float] | None = None,
    user_fn: Callable[..., Hashable] | None = None,
    max_outputs: int = 100_000,
    step_timeout_s: float | None = None,
) -> Any:
    """Answer many calls together, step by step; calls join and leave between two steps.

    The decorated function or method makes one step. Each caller passes its own arguments and gets an async
    iterator of its own outputs. The function itself gets the list of active requests (`ActiveRequest`), makes
    one step for all of them, and returns one output per request, in order. Instead of an output, it may
    return None for no output in this step, ``StopIteration`` to end the request, or an exception to end it
    with that error. ``request.finish()`` ends it with the output of this step.

    ``@name.prefill`` decorates a function that is called once for requests that join, before their first
    step. It takes a list of them and returns a list of their states, which become ``request.state``.
    ``@name.release`` decorates a function that frees the model's resources for requests that have left. It
    takes a list of requests that are done, failed or preempted, or whose callers left, timed out or were
    cancelled.

    Plain functions run in a thread, one call at a time, while the event loop hands out outputs. Async ones
    run on the event loop. An exception that a function raises ends all requests of its list; `StepError`
    ends those that it names, and the others take the step again.

    If the budget does not suffice for the next step, or a function raises `MemoryError`, the newest request
    of the lowest priority is preempted: it is released, returns to its place in the queue, keeps its outputs,
    and goes through ``prefill`` again later. So raise `MemoryError` before you change any state. A call with
    ``resume_from=[...]`` begins with these outputs in the same way.

    Each instance of the class has its own batch. ``name.stats()`` returns its load, and
    ``name.set_max_slots(n)`` and ``name.set_max_cost(n)`` change its limits, as in ``reconfigure``.

    Parameters
    ----------
    max_slots : int
        Maximum number of active requests.
    max_queued : int
        Maximum number of calls that wait for a slot. A further call replaces the newest waiting call of a
        lower priority; if there is none, it gets a `BackPressureError` (HTTP status 503).
    max_cost : float, optional
        Maximum sum of the costs of active requests, such as tokens or bytes. Default: no limit.
    cost_fn : callable, optional
        Takes the arguments of a call and returns its cost before its first step, such as the number of tokens
        of its prompt. Default: 0.
    cost_per_step : float
        The growth of the cost of an active request per step.
    priority_fn : callable, optional
        Takes the arguments of a call and returns a number. Calls with higher numbers join first, and are
        preempted last.
    user_fn : callable, optional
        Takes the arguments of a call and returns its user, any hashable value. Users get equal shares of the
        steps while they have calls of the same priority.
    max_outputs : int
        Maximum number of outputs of a call; a call with more fails.
    step_timeout_s : float, optional
        Timeout of each call of a function. Its requests then get a `RequestTimeoutError`. Waiting requests,
        and new ones until the function returns, get an `UnavailableError`. Default: no limit.

    Raises
    ------
    TypeError, ValueError
        The function is a generator or not a function, or an option is invalid.

    Examples
    --------
    >>> class Writer:
    ...     @continuous_batch(max_slots=8)
    ...     def generate(self, active):
    ...         tokens = self.model.step([each.state for each in active])
    ...         for each, token in zip(active, tokens):
    ...             if token == "." or len(each.outputs) + 1 == each.kwargs["max_tokens"]:
    ...                 each.finish()
    ...         return tokens
    ...
    ...     @generate.prefill
    ...     def _prefill(self, new):
    ...         return [self.model.cache_of(each.args[0], each.outputs) for each in new]
    ...
    ...     async def __call__(self, request):
    ...         return self.generate(await request.json(), max_tokens=100)
    """
    limits = SlotLimits(
        max_slots=check_whole("max_slots", max_slots),
        max_queued=check_whole("max_queued", max_queued, at_least=0),
        max_cost=check_max_cost(max_cost),
        cost_per_step=check_number("cost_per_step", cost_per_step, at_least=0.0),
    )
    for name, value in (("cost_fn", cost_fn), ("priority_fn", priority_fn), ("user_fn", user_fn)):
        if value is not None and (not callable(value) or inspect.iscoroutinefunction(value)):
            raise TypeError(
                f"{name} must be a plain function of the arguments of a call, or None; got {value!r}"
            )
    options = StepOptions(
        check_whole("max_outputs", max_outputs),
        cost_fn,
        priority_fn,
        user_fn,
        None if step_timeout_s is None else check_seconds("step_timeout_s", step_timeout_s),
    )

    def decorate(function: Callable[..., Any]) -> ContinuousFunction:
        check_function("step", function)
        return ContinuousFunction({"step": function}, limits, options)

    return decorate if _func is None else decorate(_func)
