"""Rollouts of models: a new version of a model beside the default one, with the gates of rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.client import AsyncClient
from daskserve.testing import local_instance_async, run_virtual

PLAN: dict[str, Any] = {
    "steps": ["50%", "100%"],
    "pause_s": 2,
    "min_requests": 50,
    "gates": [{"detects": "20%"}],
}


class Fault(Exception):
    """What a faulty model raises."""


def put(folder: Path, version: str, what: str) -> None:
    place = folder / "m" / version
    place.mkdir(parents=True)
    (place / "what").write_text(what)


def load_model(self: Any, name: str, version: str, path: str) -> str:
    return f"{version} {Path(path, 'what').read_text()}"


def answer_of(model: str) -> str:
    if model.endswith("bad"):
        raise Fault(model)
    return model.partition(" ")[0]


class Plain:
    load_model = load_model

    async def __call__(self, value: Any = None) -> str:
        return answer_of(serve.get_model("m"))


class Batched:
    load_model = load_model

    async def __call__(self, value: Any = None) -> str:
        return await self.many(value)

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.01)
    async def many(self, values: list[Any]) -> list[str]:
        return [answer_of(serve.get_model("m"))] * len(values)


class Load:
    """Calls at a steady rate; counts the answers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as calls:
            while True:
                await asyncio.sleep(0.02)
                calls.create_task(self._call())

    async def _call(self) -> None:
        try:
            self.answers[await self._handle.remote()] += 1
        except Fault:
            self.answers["failed"] += 1

    async def seen_in(self, seconds: float) -> set[str]:
        self.answers.clear()
        await asyncio.sleep(seconds)
        return set(self.answers)


@asynccontextmanager
async def served(
    folder: Path, kind: type = Plain, mode: str = "explicit", **plan: Any
) -> AsyncIterator[tuple[AsyncClient, Load]]:
    put(folder, "1", "good")
    options = {"url": str(folder), "mode": mode, "poll_period_s": 1, "rollout": {**PLAN, **plan}}
    async with local_instance_async() as client:
        deployment: Any = serve.deployment(kind, name="d", num_replicas=2, max_ongoing_requests=50)
        handle = await client.run(deployment.options(model_repository=options).bind())
        if mode == "explicit":
            await client.load_model("d", "m", "1")
        load = Load(handle)
        loading = asyncio.create_task(load.run())
        try:
            yield client, load
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


async def ended(client: AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with asyncio.timeout(60):
        while found.get("state") not in ("COMPLETED", "ROLLED_BACK", "ABORTED"):
            await asyncio.sleep(0.5)
            found = await client.rollout_status("d", model="m")
    return found


async def outcome(folder: Path, kind: type, what: str) -> None:
    async with served(folder, kind) as (client, load):
        put(folder, "2", what)
        began = asyncio.get_running_loop().time()
        assert await client.load_model("d", "m") == "2"
        found = await ended(client)
        took_s = asyncio.get_running_loop().time() - began
        await asyncio.sleep(2)  # replicas are told within a second
        events = [each.kind for each in await client.events() if each.kind.startswith("ROLLOUT")]
        models = (await client.list_models("d"))["m"]
        message = (await client.status()).backends["d"].message
        if what == "bad":
            assert found["state"] == "ROLLED_BACK"
            assert took_s < 10
            assert await load.seen_in(1) == {"1"}
            assert "Version '2' was taken back, and version '1' has all traffic" in message
            assert "of the new version failed, 0 of " in message
            assert (models["2"]["state"], models["1"]["is_default"]) == ("TAKEN_BACK", True)
            assert events == ["ROLLOUT_STEP", "ROLLOUT_TAKEN_BACK"]
        else:
            assert found["state"] == "COMPLETED"
            assert await load.seen_in(1) == {"2"}
            assert (models["2"]["is_default"], message) == (True, "")
            assert events == ["ROLLOUT_STEP", "ROLLOUT_STEP", "ROLLOUT_COMPLETED"]


@each_case("kind, what", [(Plain, "bad"), (Plain, "good"), (Batched, "bad"), (Batched, "good")])
def test_a_version_of_a_model_gets_its_requests_step_by_step(tmp_path: Path, kind: type, what: str) -> None:
    run_virtual(outcome, tmp_path / f"{kind.__name__}-{what}", kind, what)
