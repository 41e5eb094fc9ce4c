"""Requests that name a model: how its id is passed on, and which replica answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from quick_instance import poll_for

import daskserve as serve
from daskserve.testing import local_instance

pytestmark = pytest.mark.smoke

DEADLINE_S = 10
HEADER = "serve_multiplexed_model_id"
#: The models that each replica has loaded and unloaded, and the event for which a request waits.
EVENTS: list[tuple[str, str, str]] = []
GO = threading.Event()


def here() -> str:
    return serve.get_replica_context().replica_tag


class Model:
    def __init__(self, model_id: str) -> None:
        self.id = model_id
        EVENTS.append(("load", model_id, here()))

    async def __del__(self) -> None:
        EVENTS.append(("unload", self.id, here()))


@serve.deployment(num_replicas=2, max_ongoing_requests=20)
class Models:
    @serve.multiplexed(max_num_models_per_replica=2)
    async def get_model(self, model_id: str) -> Model:
        return Model(model_id)

    async def __call__(self, request: Any = None) -> dict[str, str]:
        model = await self.get_model(serve.get_multiplexed_model_id())
        return {"model": model.id, "replica": here()}

    async def model_id(self) -> str:
        return serve.get_multiplexed_model_id()

    async def items(self, count: int) -> AsyncIterator[str]:
        for _ in range(count):
            yield (await self.get_model(serve.get_multiplexed_model_id())).id

    @serve.batch(max_batch_size=50, batch_wait_timeout_s=0.05)
    async def predict(self, numbers: list[int]) -> list[Any]:
        contexts = serve.context.get_batch_request_contexts()
        model = await self.get_model(serve.get_multiplexed_model_id())
        return [(model.id, each.multiplexed_model_id, len(numbers)) for each in contexts]

    async def hold(self) -> str:
        model = await self.get_model(serve.get_multiplexed_model_id())
        await asyncio.to_thread(GO.wait, DEADLINE_S)
        return model.id


@serve.deployment
class Front:
    def __init__(self, models: serve.Handle) -> None:
        self.models = models

    async def __call__(self, request: Any = None) -> list[str]:
        inherited = await self.models.model_id.remote()
        passed = await self.models.options(multiplexed_model_id="mine").model_id.remote()
        return [serve.get_multiplexed_model_id(), inherited, passed]


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    options = {"port": 0, "model_id_parameter": "model"}
    with local_instance(http_options=options) as client:
        client.run(Models.bind(), name="models", route_prefix="/models")
        client.run(Front.bind(Models.bind()), name="front", route_prefix="/front")
        yield client


@pytest.fixture
def handle(client: serve.Client) -> serve.Handle:
    EVENTS.clear()
    return client.get_app_handle("models")


def get(client: serve.Client, path: str = "/models", **options: Any) -> httpx.Response:
    (url,) = client.http_urls()
    return httpx.get(url + path, timeout=DEADLINE_S, **options)


@pytest.mark.parametrize(
    "header", [HEADER, HEADER.upper(), "Serve-Multiplexed-Model-Id", "serve_multiplexed-model_id"]
)
def test_a_header_names_the_model(client: serve.Client, header: str) -> None:
    assert get(client, headers={header: "m1"}).json()["model"] == "m1"


def test_a_query_parameter_names_the_model_and_the_header_wins(client: serve.Client) -> None:
    assert get(client, "/models?x=1&model=m%C3%A9+1").json()["model"] == "mé 1"
    assert get(client, "/models?model=m1", headers={HEADER: "m2"}).json()["model"] == "m2"


def test_ids_may_be_odd(client: serve.Client) -> None:
    long = "x" * 6000
    assert get(client, headers={HEADER: long}).json()["model"] == long
    assert get(client, headers={HEADER.encode(): "modèle".encode()}).json()["model"] == "modèle"
    assert get(client, headers={HEADER.encode(): "modèle".encode("latin-1")}).json()["model"] == "modèle"
    assert get(client, headers={HEADER: ""}).status_code == get(client).status_code == 500


def test_calls_and_requests_of_a_model_go_to_the_same_replica(
    client: serve.Client, handle: serve.Handle
) -> None:
    named = handle.options(multiplexed_model_id="same")
    place = named.remote().result(DEADLINE_S)["replica"]
    # Routers of other processes know within a second which replica has the model.
    poll_for(
        lambda: any("same" in each.multiplexed.get("models", ()) for each in client.status().actors),
        what=lambda: "the model is not published",
    )
    for _ in range(5):
        assert named.remote().result(DEADLINE_S)["replica"] == place
        assert get(client, headers={HEADER: "same"}).json()["replica"] == place
    assert list(named.options(stream=True, method_name="items").remote(3)) == ["same"] * 3
    assert [each for each in EVENTS if each[1] == "same"] == [("load", "same", place)]


def test_a_chosen_replica_is_one_that_has_the_model(handle: serve.Handle) -> None:
    named = handle.options(multiplexed_model_id="chosen")
    place = named.remote().result(DEADLINE_S)["replica"]

    async def choose() -> Any:
        async with named.choose_replica() as selection:
            return selection.replica_id, await named.dispatch(selection)

    assert asyncio.run(choose()) == (place, {"model": "chosen", "replica": place})


def test_calls_of_a_request_do_not_inherit_its_model(client: serve.Client) -> None:
    assert get(client, "/front", headers={HEADER: "outer"}).json() == ["outer", "", "mine"]


def test_batches_have_one_model_each(handle: serve.Handle) -> None:
    calls = [(number, f"b{number % 3}") for number in range(30)]
    responses = [
        handle.options(multiplexed_model_id=model_id, method_name="predict").remote(number)
        for number, model_id in calls
    ]
    for (_, model_id), response in zip(calls, responses, strict=True):
        used, named, size = response.result(DEADLINE_S)
        assert used == named == model_id
        assert size <= 10


def test_a_model_in_use_is_not_unloaded(client: serve.Client, handle: serve.Handle) -> None:
    GO.clear()
    held = [handle.options(multiplexed_model_id=f"h{n}", method_name="hold").remote() for n in range(4)]
    waiting = handle.options(multiplexed_model_id="h4").remote()
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    assert not [each for each in EVENTS if each[:2] in [("unload", f"h{n}") for n in range(4)]]
    GO.set()
    assert [each.result(DEADLINE_S) for each in held] == [f"h{n}" for n in range(4)]
    assert waiting.result(DEADLINE_S)["model"] == "h4"


def test_a_cancelled_request_gives_its_model_back(handle: serve.Handle) -> None:
    GO.clear()
    held = [handle.options(multiplexed_model_id=f"c{n}", method_name="hold").remote() for n in range(4)]
    waiting = handle.options(multiplexed_model_id="c4").remote()
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    for each in held:
        each.cancel()
    GO.set()
    assert waiting.result(DEADLINE_S)["model"] == "c4"


def test_the_status_and_the_metrics_have_the_models(client: serve.Client, handle: serve.Handle) -> None:
    for number in range(2):  # wherever they are loaded, older ones make room
        handle.options(multiplexed_model_id=f"s{number}").remote().result(DEADLINE_S)

    def shown() -> dict[str, Any]:
        actors = client.status().actors
        return {model: each.state for each in actors for model in each.multiplexed.get("models", ())}

    deadline = threading.Event()
    for _ in range(100):
        if {"s0", "s1"} <= shown().keys():
            break
        deadline.wait(0.05)
    assert {"s0", "s1"} <= shown().keys()


def test_a_stopped_replica_unloads_its_models(client: serve.Client) -> None:
    client.run(Models.options(num_replicas=1).bind(), name="short", route_prefix=None)
    handle = client.get_app_handle("short")
    handle.options(multiplexed_model_id="last").remote().result(DEADLINE_S)
    client.delete_application("short")
    assert [each[:2] for each in EVENTS if each[1] == "last"] == [("load", "last"), ("unload", "last")]


class ClassicBatches:
    @serve.classic.accept_batch
    def __call__(self, requests: list[Any]) -> list[int]:
        return [len(requests)] * len(requests)


def test_classic_batches_have_one_model_each(client: serve.Client) -> None:
    config = {"max_batch_size": 10, "batch_wait_timeout": 0.2, "max_concurrent_queries": 20}
    client.deploy("classic", ClassicBatches, config=config)
    handle = client.get_handle("classic")
    responses = [handle.options(multiplexed_model_id=f"m{n % 3}").remote() for n in range(12)]
    assert max(each.result(DEADLINE_S) for each in responses) <= 4
