"""Calls to an instance's controller, which may be lost, hang or be replaced at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.common.clock import Clock
from daskserve.common.types import ActorAddress
from daskserve.errors import StaleEpochError, UnavailableError

T = TypeVar("T")

#: Delay between two attempts to call a controller.
CONTROLLER_RETRY_S = 0.05


class ControllerFinder(Protocol):
    """An object that finds the controller, such as a `daskserve.cluster.protocols.base.Cluster`."""

    async def controller(self) -> ActorAddress: ...

    def forget_controller(self) -> None: ...


def calls_of(
    call: Callable[..., Coroutine[Any, Any, Any]], verb: str, message: Mapping[str, Any]
) -> Callable[[ActorAddress], Coroutine[Any, Any, Any]]:
    """Return a function that calls a verb of the controller at an address, for `call_controller`.

    An attempt whose answer was lost may already have deleted the object. So "not found" is not an error in
    the attempts after it.
    """
    has_tried = False

    def attempt(controller: ActorAddress) -> Coroutine[Any, Any, Any]:
        nonlocal has_tried
        again = {"missing_ok": True} if has_tried and "missing_ok" in message else {}
        has_tried = True
        return call(controller, verb, **{**message, **again})

    return attempt


async def call_controller(
    finder: ControllerFinder,
    call: Callable[[ActorAddress], Coroutine[Any, Any, T]],
    *,
    clock: Clock,
    check_s: float,
    patience_s: float = float("inf"),
    resumed_at: Callable[[], float | None] = lambda: None,
) -> T:
    """Call the controller, or its successor if it is replaced during the call.

    Retries are safe because every verb is idempotent.

    Parameters
    ----------
    call : callable
        Calls the controller at an address.
    check_s : float
        Interval at which a running call checks whether its controller was replaced.
    patience_s : float
        Time after the first attempt during which a call is retried.
    resumed_at : callable
        Returns the time at which a scheduler last replaced a lost one. From then on, ``patience_s`` counts
        again, because its controllers need a moment. An attempt waits for the scheduler, regardless of how
        long it is away.

    Raises
    ------
    StoreUnavailableError
        The controller answers, but its store is not available.
    UnavailableError
        No controller could be reached in time.
    Exception
        Any other error of the finder or the call.
    """
    began = clock.now()
    while True:
        try:
            return await _call_present(finder, call, check_s)
        except StoreUnavailableError:
            raise
        except UnavailableError:
            finder.forget_controller()
            if clock.now() > max(began, resumed_at() or began) + patience_s:
                raise
        await clock.sleep(CONTROLLER_RETRY_S)


async def _call_present(
    finder: ControllerFinder, call: Callable[[ActorAddress], Coroutine[Any, Any, T]], check_s: float
) -> T:
    # A controller whose process is stopped keeps its connections and never answers.
    address = await finder.controller()
    answer = asyncio.ensure_future(call(address))
    try:
        while True:
            done, _ = await asyncio.wait([answer], timeout=check_s)
            if done:
                return answer.result()
            finder.forget_controller()
            if await finder.controller() != address:
                raise StaleEpochError(f"The controller {address} was replaced.")
    finally:
        answer.cancel()
