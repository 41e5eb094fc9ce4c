"""Waits of a client end at the timeout that it was given, even if the controller answers later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tables import each_case

from daskserve.client.instance.calls import ANSWER_S, ControllerCalls
from daskserve.client.verbs.declared import DeclaringVerbs
from daskserve.client.verbs.models import ModelVerbs
from daskserve.common.clock import LoopClock
from daskserve.errors import RequestTimeoutError

TIMEOUT_S = 5.0


class LateCalls(ControllerCalls):
    """Calls to a controller that waits half a minute for a proxy that hangs, and then answers."""

    def __init__(self, answer: Any) -> None:
        super().__init__(self, "instance")  # type: ignore[arg-type]
        #: This object is also the connection of the process and of its instance.
        self.calls = self
        self.clock = LoopClock()
        self.shared: dict[str, Any] = {}
        self._answer = answer

    def check_open(self) -> None: ...

    def cluster(self, instance: str) -> LateCalls:
        return self

    async def wait(self, coroutine: Awaitable[Any]) -> Any:
        return await coroutine

    async def call(self, verb: str, **message: Any) -> Any:
        if verb == "load_model":
            return {"version": 1}
        await asyncio.sleep(30)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def _goal(calls: LateCalls) -> None:
    assert not await calls.wait_for_goal("goal", TIMEOUT_S)


async def _change(calls: LateCalls) -> None:
    assert not await calls.wait_until_reached("goal", TIMEOUT_S)


async def _config(calls: LateCalls) -> None:
    verbs = DeclaringVerbs(calls, asynchronous=True)  # type: ignore[arg-type]
    with pytest.raises(RequestTimeoutError, match=r"not deployed after 5\.0 s"):
        await verbs.wait_for_config(1, timeout_s=TIMEOUT_S)


async def _model(calls: LateCalls) -> None:
    verbs = ModelVerbs(calls, asynchronous=True)  # type: ignore[arg-type]
    with pytest.raises(RequestTimeoutError, match=r"not loaded within 5\.0 s"):
        await verbs.load_model("shop", "model", timeout_s=TIMEOUT_S)


@each_case("wait", [_goal, _change, _config, _model])
@pytest.mark.virtual_time
async def test_a_wait_ends_at_its_timeout(wait: Callable[[LateCalls], Awaitable[None]]) -> None:
    began = LoopClock().now()
    await wait(LateCalls({"is_done": True, "error": None, "successor": None, "state": "READY"}))
    assert LoopClock().now() - began <= TIMEOUT_S + ANSWER_S


@pytest.mark.virtual_time
async def test_an_answer_within_the_timeout_is_used_even_if_it_is_an_error_of_time() -> None:
    late = LateCalls({"is_done": True, "error": None, "successor": None})
    assert await late.wait_for_goal("goal", 30)
    assert await late.wait_for_goal("goal", None)
    with pytest.raises(RequestTimeoutError, match="a constructor"):
        await LateCalls(RequestTimeoutError("a constructor took too long")).wait_for_goal("goal", 60)
