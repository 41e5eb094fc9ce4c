"""A replica that is deleted while its constructor runs: the destructor still runs, once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from daskserve.client.client import Client
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import DeletedError
from daskserve.testing import local_instance

DEADLINE_S = 10.0

events: list[str] = []
began, may_end, ended = threading.Event(), threading.Event(), threading.Event()


class Asynchronous:
    async def __init__(self) -> None:  # type: ignore[misc]
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            events.append("interrupted")

    def __del__(self) -> None:
        events.append("destructed")
        ended.set()

    async def __call__(self) -> None: ...


class WithAsynchronousDestructor(Asynchronous):
    async def __del__(self) -> None:
        await asyncio.sleep(0)
        super().__del__()


class Plain:
    def __init__(self) -> None:
        began.set()
        assert may_end.wait(DEADLINE_S)
        events.append("made")

    def __del__(self) -> None:
        events.append("destructed")
        ended.set()

    def __call__(self) -> None: ...


class PlainOnLoop(Plain):
    async def __call__(self) -> None: ...  # type: ignore[override]

    async def __del__(self) -> None:
        super().__del__()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    events.clear()
    for each in (began, may_end, ended):
        each.clear()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_instance() as client:
        yield client


@pytest.mark.parametrize("kind", [Asynchronous, WithAsynchronousDestructor, Plain, PlainOnLoop])
def test_the_destructor_runs_if_the_replica_is_deleted_during_its_constructor(
    client: Client, kind: type
) -> None:
    config = {"graceful_shutdown_timeout_s": 0.1}
    with ThreadPoolExecutor(1) as pool:
        deploying = pool.submit(client.deploy, "d", kind, config=config)
        assert began.wait(DEADLINE_S)
        client.delete_deployment("d")
        with pytest.raises(DeletedError):
            deploying.result(DEADLINE_S)
    may_end.set()
    assert ended.wait(DEADLINE_S)
    assert events == ["made" if issubclass(kind, Plain) else "interrupted", "destructed"]


def test_an_object_whose_constructor_fails_is_not_destructed_by_daskserve() -> None:
    class Failing:
        async def __init__(self) -> None:  # type: ignore[misc]
            raise KeyError("no model")

        async def __call__(self) -> None: ...

    servable = Servable(Failing, (), {})
    with pytest.raises(KeyError):
        asyncio.run(servable.construct())
    assert servable.target is None
