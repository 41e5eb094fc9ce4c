"""A change of ``user_config`` while requests arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tables import each_case

import daskserve as serve
from daskserve.testing import local_instance

SLOW_S = 0.5


@serve.deployment(name="model", max_ongoing_requests=4)
class Model:
    """Applies its config in two parts. Only the first call of ``reconfigure`` is quick."""

    def __init__(self) -> None:
        self.first = self.second = 0

    async def reconfigure(self, config: int) -> None:
        is_new = not self.first
        self.first = config
        if not is_new:
            await asyncio.sleep(SLOW_S)
        if config < 0:
            raise ValueError("no such model")
        self.second = config

    async def __call__(self) -> tuple[int, int]:
        first = self.first
        await asyncio.sleep(0.005)
        return first, self.second


class Calls:
    """Successive calls, and the duration of the slowest one."""

    def __init__(self, handle: serve.Handle) -> None:
        self.answers: list[tuple[int, int]] = []
        self.slowest_s = 0.0
        self._handle = handle
        self._ends = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._ends:
            began = loop.time()
            self.answers.append(await self._handle.remote())
            self.slowest_s = max(self.slowest_s, loop.time() - began)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._ends = True


@each_case("replicas", [1, 3])
def test_callers_see_the_old_config_or_the_new_one_and_all_are_answered(replicas: int) -> None:
    """With several replicas, nobody waits for the one that is reconfigured."""
    with local_instance(workers=3) as client:
        handle = serve.run(Model.options(num_replicas=replicas, user_config=1).bind())

        async def scenario() -> Calls:
            calls = Calls(handle)
            with calls.until_end():
                callers = [asyncio.create_task(calls.run()) for _ in range(3)]
                await asyncio.to_thread(client.update_backend_config, "model", {"user_config": 2})
            await asyncio.gather(*callers)
            return calls

        calls = asyncio.run(scenario())
        assert set(calls.answers) <= {(1, 1), (2, 2)}
        assert handle.remote().result(10) == (2, 2)
        if replicas > 1:
            assert calls.slowest_s < SLOW_S
        with pytest.raises(serve.errors.ReplicaStartError, match="no such model"):
            client.update_backend_config("model", {"user_config": -1})
        assert handle.remote().result(10) == (2, 2)
        assert client.get_backend_config("model").user_config == 2
