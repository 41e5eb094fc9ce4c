"""The object that ``continuous_batch`` returns for a step function or method."""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from daskserve.common.formatting import shown
from daskserve.context import current_replica, current_request
from daskserve.data.batching.checks import check_number, check_whole
from daskserve.data.batching.continuous.engine import Engine, stream
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.continuous.rounds import Rounds
from daskserve.data.batching.continuous.slots import SlotLimits, Slots
from daskserve.data.batching.instances import BoundFunction, InstanceFunction, QueuesByLoop
from daskserve.telemetry.replica import StepMetrics

logger = logging.getLogger("daskserve.replica")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class StepOptions:
    """The options of ``continuous_batch`` that cannot change at run time."""

    max_outputs: int
    cost_fn: Callable[..., float] | None = None
    priority_fn: Callable[..., float] | None = None
    user_fn: Callable[..., Hashable] | None = None
    step_timeout_s: float | None = None


@dataclass(frozen=True)
class BatchStats:
    """The load of a continuous batch at this moment, and its totals.

    Attributes
    ----------
    active, queued : int
        The numbers of requests that have a slot, and that wait for one.
    active_cost, queued_cost : float
        The sums of their costs, such as tokens.
    steps, outputs, preemptions : int
        Totals since the start of the replica.
    running_s : float
        How long the current step has run, in seconds; 0 if none runs.
    """

    active: int = 0
    queued: int = 0
    active_cost: float = 0.0
    queued_cost: float = 0.0
    steps: int = 0
    outputs: int = 0
    preemptions: int = 0
    running_s: float = 0.0


class _State:
    """The limits and engines of one instance, or of the plain function."""

    def __init__(self, limits: SlotLimits, ref: weakref.ref[Any] | None = None) -> None:
        self.limits = limits
        self.ref = ref
        self.engines: QueuesByLoop[Engine] = QueuesByLoop()

    def stats(self) -> BatchStats:
        engines = [engine for _, engine in self.engines.items()]
        slots = [each.rounds.slots for each in engines]
        metrics = {id(each.rounds.metrics): each.rounds.metrics for each in engines}.values()
        return BatchStats(
            active=sum(len(each.active) for each in slots),
            queued=sum(each.queued for each in slots),
            active_cost=sum(each.used_cost for each in slots),
            queued_cost=sum(each.queued_cost for each in slots),
            steps=sum(each.durations.count for each in metrics),
            outputs=sum(each.outputs for each in metrics),
            preemptions=sum(each.preemptions for each in metrics),
            running_s=max((each.running_s() for each in engines), default=0.0),
        )


class _Settings:
    """The settings and statistics of a continuous batch, per instance."""

    __slots__ = ()

    def _state(self) -> _State:
        raise NotImplementedError

    def set_max_slots(self, max_slots: int) -> None:
        """Change the number of slots; active requests keep theirs. Any thread may call this."""
        self._state().limits.max_slots = check_whole("max_slots", max_slots)

    def set_max_cost(self, max_cost: float | None) -> None:
        """Change the budget, starting with the next step. Any thread may call this."""
        self._state().limits.max_cost = check_max_cost(max_cost)

    def stats(self) -> BatchStats:
        """Return the load and the totals of the batch. Any thread may call this."""
        return self._state().stats()


async def _shape(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Define the code flags and the signature that callers of a `ContinuousFunction` see."""
    yield


class ContinuousFunction(InstanceFunction[_State], _Settings):
    """A function or method that makes its outputs step by step, for many calls together.

    `inspect` and asyncio treat it as an async generator function.
    """

    def __init__(
        self,
        functions: dict[str, Callable[..., Any]],
        limits: SlotLimits,
        options: StepOptions,
        is_method: bool = False,
    ) -> None:
        super().__init__(functions["step"], is_method, _State(limits))
        del self.__wrapped__
        self._functions = functions
        self._limits = limits
        self._options = options

    def __repr__(self) -> str:
        return f"<continuous batch {self.__qualname__} max_slots={shown(self._limits.max_slots)}>"

    def _parts(self) -> tuple[Any, ...]:
        return self._functions, self._limits, self._options, self._is_method

    # ---- attributes that `inspect` reads

    __code__ = _shape.__code__
    __defaults__ = None
    __kwdefaults__ = None

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = list(inspect.signature(_shape).parameters.values())
        if self._is_method:
            parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))
        return inspect.Signature(parameters)

    @overload
    def __get__(self, instance: None, owner: type) -> ContinuousFunction: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> BoundContinuous: ...

    def __get__(self, instance: Any, owner: type | None = None) -> ContinuousFunction | BoundContinuous:
        return self if instance is None else BoundContinuous(self, instance)

    # ---- the other functions of user code

    def prefill(self, function: FunctionT) -> FunctionT:
        """Set the function that prepares new requests: it takes a list and returns their states, or None."""
        return self._add("prefill", function)

    def release(self, function: FunctionT) -> FunctionT:
        """Set the function that frees the model's resources for requests that have left; it takes a list."""
        return self._add("release", function)

    def _add(self, name: str, function: FunctionT) -> FunctionT:
        check_function(name, function)
        is_async = inspect.iscoroutinefunction(self._functions["step"])
        if inspect.iscoroutinefunction(function) and not is_async:
            raise TypeError(
                f"{name} is async, but {self.__qualname__} is a plain function, which runs in a thread; "
                "make both plain, or both async."
            )
        self._functions[name] = function
        return function

    # ---- calls

    def _new_state(self, ref: weakref.ref[Any]) -> _State:
        return _State(replace(self._limits), ref)

    def call(
        self, instance: Any, state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Return the outputs of a call of an instance; the call begins with the first read."""

        # the stream keeps the instance alive
        def begin(instance: Any = instance) -> tuple[Engine, ActiveRequest]:
            engine = state.engines.current(lambda: self._make_engine(state))
            return engine, self._request(args, kwargs)

        return stream(begin)

    def _make_engine(self, state: _State) -> Engine:
        replica = current_replica.get()
        metrics = None if replica is None else replica.metrics
        steps = StepMetrics() if metrics is None else metrics.steps_of(self.__name__)
        rounds = Rounds(
            self.__qualname__,
            Slots(state.limits),
            steps,
            max_outputs=self._options.max_outputs,
            has_prefill="prefill" in self._functions,
        )
        if replica is not None and 0 < replica.max_ongoing_requests < state.limits.max_slots:
            logger.warning(
                "The slots of %s in %s may never fill: it runs %d requests at a time (max_ongoing_requests), "
                "fewer than max_slots, which is %d.",
                self.__qualname__,
                replica.display_name,
                replica.max_ongoing_requests,
                state.limits.max_slots,
            )
        engine = Engine(rounds, self._functions, state.ref, self._options.step_timeout_s)
        steps.watch(engine.load)
        if metrics is not None:
            metrics.watch_queue(engine.queued)
        return engine

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActiveRequest:
        outputs: Iterable[Any] = kwargs.pop("resume_from", ())
        options = self._options
        cost = priority = 0.0
        if options.cost_fn is not None:
            cost = check_number("cost_fn", options.cost_fn(*args, **kwargs), at_least=0.0)
        if options.priority_fn is not None:
            priority = check_number("priority_fn", options.priority_fn(*args, **kwargs))
        user = None if options.user_fn is None else options.user_fn(*args, **kwargs)
        try:
            hash(user)
        except TypeError:
            raise TypeError(f"user_fn must return a hashable value, got {user!r:.120}") from None
        present = current_request.get()
        request_id = "" if present is None else present.request_id
        made = ActiveRequest(
            args,
            kwargs,
            cost=cost,
            priority=priority,
            user=user,
            outputs=outputs,
            request_id=request_id,
        )
        made.cost += self._limits.cost_per_step * len(made.outputs)
        return made


class BoundContinuous(BoundFunction, _Settings):
    """A continuous batch of one instance."""

    __slots__ = ()


# ---- options


def check_function(name: str, function: Any) -> None:
    """Raise `TypeError` unless the object is a plain or ``async def`` function that is not a generator."""
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if not inspect.isfunction(function) or is_generator:
        raise TypeError(
            f"The {name} function of a continuous batch must be a plain function or `async def`, and no "
            f"generator, got {function!r}"
        )


def check_max_cost(value: Any) -> float:
    return math.inf if value is None else check_number("max_cost", value, at_least=0.0)
