"""A call to the controller is retried on its successor, and fails if no successor starts in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daskserve.cluster.actors.controller_calls import call_controller, calls_of
from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress
from daskserve.errors import ActorLostError, BadRequestError, NotRunningError, UnavailableError

pytestmark = pytest.mark.virtual_time


class Controllers:
    """Finds controller number ``present``, and answers calls to each number with ``answers``."""

    def __init__(self, present: int = 1, **answers: Any) -> None:
        self.present: int | None = present
        self.known: int | None = None
        self.answers = answers
        self.called: list[int] = []
        self.cancelled: list[int] = []

    async def controller(self) -> ActorAddress:
        if self.known is None:
            if self.present is None:
                raise UnavailableError("it is being replaced")
            self.known = self.present
        return ActorAddress("controller", "w", self.known)

    def forget_controller(self) -> None:
        self.known = None

    async def call(self, address: ActorAddress) -> str:
        number = address.incarnation
        self.called.append(number)
        answer = self.answers.get(f"from_{number}", "done")
        if isinstance(answer, Exception):
            raise answer
        if answer == "hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(number)
                raise
        return str(answer)

    def start(self, **options: Any) -> asyncio.Task[str]:
        given = {"clock": LoopClock(), "check_s": 1.0, "patience_s": 30.0, **options}
        return asyncio.create_task(call_controller(self, self.call, **given))


async def test_a_call_to_a_lost_controller_is_retried_on_its_successor() -> None:
    controllers = Controllers(from_1=ActorLostError("gone"))
    calling = controllers.start()
    await asyncio.sleep(0.01)
    controllers.present = 2
    assert await calling == "done"
    assert controllers.called == [1, 2]


async def test_a_call_to_a_hanging_controller_ends_once_it_is_replaced() -> None:
    controllers = Controllers(from_1="hang")
    calling = controllers.start()
    await asyncio.sleep(20)
    assert not calling.done()  # slow, and still the present one
    controllers.present = 2
    assert await calling == "done"
    assert (controllers.called, controllers.cancelled) == ([1, 2], [1])
    assert asyncio.get_running_loop().time() < 22


async def test_without_a_controller_the_call_fails_after_the_timeout() -> None:
    controllers = Controllers()
    controllers.present = None
    with pytest.raises(UnavailableError, match="being replaced"):
        await controllers.start(patience_s=30.0)
    assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.2)


async def test_a_call_waits_for_the_controller_after_a_long_outage_of_the_scheduler() -> None:
    """The first attempt waits for the scheduler, for longer than a call is retried."""
    controllers = Controllers()
    loop = asyncio.get_running_loop()
    back_at: list[float] = []

    async def controller() -> ActorAddress:
        if not back_at:
            await asyncio.sleep(40)
            back_at.append(loop.time())
        if loop.time() < back_at[0] + 5:
            raise UnavailableError("it is being replaced")
        return ActorAddress("controller", "w", 2)

    controllers.controller = controller  # type: ignore[method-assign]
    assert await controllers.start(resumed_at=lambda: back_at[0] if back_at else None) == "done"
    assert loop.time() == pytest.approx(45, abs=0.2)
    back_at[0] = float("inf")
    with pytest.raises(UnavailableError, match="being replaced"):
        await controllers.start(resumed_at=lambda: 40.0)
    assert loop.time() == pytest.approx(75, abs=0.2)


async def test_errors_of_the_controller_are_not_retried() -> None:
    for error in [StoreUnavailableError("no"), BadRequestError("no"), NotRunningError("no"), OSError("no")]:
        controllers = Controllers(from_1=error)
        with pytest.raises(type(error)):
            await controllers.start()
        assert controllers.called == [1], error


async def test_a_caller_that_gives_up_cancels_the_call() -> None:
    controllers = Controllers(from_1="hang")
    calling = controllers.start()
    await asyncio.sleep(0.01)
    calling.cancel()
    await asyncio.wait([calling])
    await asyncio.sleep(0)
    assert controllers.cancelled == [1]


async def test_the_second_attempt_to_delete_may_find_nothing() -> None:
    """The first controller is lost after the deletion and before its answer."""
    seen = []

    async def delete(address: ActorAddress, verb: str, *, missing_ok: bool) -> str:
        seen.append((address.incarnation, verb, missing_ok))
        if address.incarnation == 1:
            controllers.present = 2
            raise ActorLostError("gone")
        return "done"

    controllers = Controllers()
    call = calls_of(delete, "delete_application", {"missing_ok": False})
    assert await call_controller(controllers, call, clock=LoopClock(), check_s=1.0) == "done"
    assert seen == [(1, "delete_application", False), (2, "delete_application", True)]
