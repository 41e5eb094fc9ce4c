"""Priorities in the queues of a replica, and priorities and sessions as user code reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from quick_instance import poll_for

import daskserve as serve
from daskserve.options.http import HTTPOptions
from daskserve.testing import local_instance

DEADLINE_S = 10.0
CONFIG = {"classes": {"urgent": 9}, "header": "X-Priority"}


@serve.deployment(
    max_ongoing_requests=50,
    priority_config=CONFIG,
    request_router_config={"request_router_class": "ConsistentHash", "session": "cookie:sid"},
)
class Model:
    """Answers batches of one, loads one model at a time, and records the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.asked = 0
        self.go = asyncio.Event()

    @serve.batch(max_batch_size=1, max_concurrent_batches=1)
    async def one(self, names: list[str]) -> list[str]:
        await self.go.wait()
        self.order += names
        return names

    @serve.multiplexed(max_num_models_per_replica=1)
    async def get_model(self, model_id: str) -> str:
        self.order.append(model_id)
        return model_id

    async def batched(self, name: str) -> str:
        self.asked += 1
        return await self.one(name)

    async def loaded(self, name: str) -> str:
        self.asked += 1
        found = await self.get_model(name)
        await self.go.wait()
        return found

    async def state(self) -> tuple[int, list[str]]:
        return self.asked, self.order

    async def let_go(self) -> None:
        self.go.set()

    async def __call__(self, request: Any) -> dict[str, Any]:
        found = serve.context.get_request_context()
        return {"session": found.session_id, "priority": found.priority}


@pytest.fixture
def handle() -> Iterator[Any]:
    with local_instance(http_options=HTTPOptions(port=0)):
        yield serve.run(Model.bind(), route_prefix="/")


@pytest.mark.parametrize("method", ["batched", "loaded"])
def test_the_queues_for_batches_and_for_models_go_by_priority(method: str, handle: Any) -> None:
    with ThreadPoolExecutor(5) as pool:
        calls = []
        for number, (name, priority) in enumerate(
            [("first", 0), ("low", -5), ("plain", 0), ("high", 5), ("urgent", "urgent")], 1
        ):
            call = getattr(handle.options(priority=priority), method).remote(name)
            calls.append(pool.submit(call.result, DEADLINE_S))
            poll_for(
                lambda number=number: handle.state.remote().result(DEADLINE_S)[0] == number,
                what=lambda: "not called",
            )
        handle.let_go.remote().result(DEADLINE_S)
        for each in calls:
            each.result(DEADLINE_S)
        order = handle.state.remote().result(DEADLINE_S)[1]
    assert order == ["first", "urgent", "high", "plain", "low"]


def test_user_code_reads_the_session_and_the_priority_of_an_http_request(handle: Any) -> None:
    url = serve.connect().http_urls()[0]
    headers = {"Cookie": "sid=anna", "X-Session-Id": "another", "X-Priority": "urgent"}
    assert httpx.get(url, headers=headers).json() == {"session": "anna", "priority": 9}
    assert httpx.get(url).json() == {"session": "", "priority": 0}
    plain = Model.options(priority_config=None, request_router_config=None)
    serve.run(plain.bind(), route_prefix="/")
    assert httpx.get(url, headers=headers).json() == {"session": "another", "priority": 0}
