"""Calls to an instance's controller, which may be lost, hang or be replaced at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from daskserve.clock import Clock
from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.errors import StaleEpochError, UnavailableError
from daskserve.types import ActorAddress

T = TypeVar("T")

#: Pause between two tries to call a controller.
CONTROLLER_RETRY_S = 0.05


class FindsController(Protocol):
    """What knows where the controller lives, such as a `daskserve.cluster.base.Cluster`."""

    async def controller(self) -> ActorAddress: ...

    def forget_controller(self) -> None: ...


async def call_controller(
    finder: FindsController,
    call: Callable[[ActorAddress], Coroutine[Any, Any, T]],
    *,
    clock: Clock,
    check_s: float,
    patience_s: float = float("inf"),
) -> T:
    """Call the controller, and its successor if it is replaced meanwhile.

    Trying again is safe because every verb is idempotent.

    Parameters
    ----------
    call : callable
        Makes the call to the controller at an address.
    check_s : float
        Interval at which a call that takes longer checks whether its controller was replaced.
    patience_s : float
        How long after its start a call is tried again.

    Raises
    ------
    StoreUnavailableError
        The controller is there, its store is not.
    UnavailableError
        No controller could be reached in time.
    Exception
        What the finder or the call raised.
    """
    deadline = clock.now() + patience_s
    while True:
        try:
            return await _call_present(finder, call, check_s)
        except StoreUnavailableError:
            raise
        except UnavailableError:
            finder.forget_controller()
            if clock.now() > deadline:
                raise
        await clock.sleep(CONTROLLER_RETRY_S)


async def _call_present(
    finder: FindsController, call: Callable[[ActorAddress], Coroutine[Any, Any, T]], check_s: float
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
