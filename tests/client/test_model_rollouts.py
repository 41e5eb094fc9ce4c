"""Rollouts of models: a new version of a model beside the default one, with the gates of rollouts."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.client import AsyncClient
from daskserve.common.clock import LoopClock
from daskserve.control.observed import folder_reads
from daskserve.control.observed.folder_reads import FolderReads
from daskserve.errors import DeployError, NotFoundError
from daskserve.testing import local_instance_async, run_virtual, wait_until

PLAN: dict[str, Any] = {
    "steps": ["50%", "100%"],
    "pause_s": 2,
    "min_requests": 50,
    "gates": [{"detects": "20%"}],
}


class Fault(Exception):
    """The error that a faulty model raises."""


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
        # A thread reads models in real time, not in virtual time.
        await wait_until(lambda: self.answers, timeout_s=60)
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
        await asyncio.sleep(2)  # replicas are notified within a second
        events = [each.kind for each in await client.events() if each.kind.startswith("ROLLOUT")]
        models = (await client.list_models("d"))["m"]
        message = (await client.status()).backends["d"].message
        if what == "bad":
            assert found["state"] == "ROLLED_BACK"
            assert took_s < 10
            assert await load.seen_in(1) == {"1"}
            assert "Version '2' was rolled back, and version '1' has all traffic" in message
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


async def steered(folder: Path) -> None:
    async with served(folder, mode="poll", steps=["0%", "50%", "100%"], pause_s=None) as (client, load):
        put(folder, "2", "good")

        async def until(state: str) -> dict[str, Any]:
            async with asyncio.timeout(30):
                while True:
                    try:
                        found = await client.rollout_status("d", model="m")
                    except NotFoundError:
                        found = {"state": ""}
                    if found["state"] == state:
                        return found
                    await asyncio.sleep(0.5)

        serving = await until("SERVING")
        assert (serving["share"], min(serving["replicas"].values())) == (0, serving["wanted_replicas"])
        assert await load.seen_in(0.5) == {"1"}
        assert (await client.promote_rollout("d", model="m"))["step"] == 2
        await until("SERVING")
        await asyncio.sleep(2)
        assert await load.seen_in(1) == {"1", "2"}
        assert (await client.pause_rollout("d", model="m"))["state"] == "PAUSED"
        assert (await client.abort_rollout("d", model="m"))["state"] == "ABORTED"
        assert (await client.abort_rollout("d", model="m"))["state"] == "ABORTED"
        with pytest.raises(NotFoundError, match="no rollout of model 'm' to pause: it is ABORTED, the roll"):
            await client.pause_rollout("d", model="m")
        await asyncio.sleep(2)
        assert await load.seen_in(0.5) == {"1"}
        put(folder, "3", "good")  # the next versions are still loaded, and the newest becomes the default
        await until("SERVING")
        put(folder, "4", "good")
        while (await until("SERVING"))["version"] != "4":  # noqa: ASYNC110 - a thread reads the folder
            await asyncio.sleep(1)
        models = (await client.list_models("d"))["m"]
        assert {version: each["state"] for version, each in models.items()} == {
            "1": "READY",
            "2": "TAKEN_BACK",
            "3": "AVAILABLE",
            "4": "ROLLING_OUT",
        }
        assert (await client.promote_rollout("d", model="m", full=True))["state"] == "COMPLETED"
        await asyncio.sleep(3)
        assert await load.seen_in(0.5) == {"4"}
        assert (await client.list_models("d"))["m"]["1"]["state"] == "AVAILABLE"


def test_the_rollout_of_a_model_is_steered_and_replaced(tmp_path: Path) -> None:
    run_virtual(steered, tmp_path)


@each_case(
    "plan, wrong",
    [
        ({"sticky": "cookie:a"}, "a model's rollout has no sticky; leave it out"),
        ({"shadow": "10%", "compare": "a:b"}, "a model's rollout has no compare and no shadow"),
        (
            {"gates": [{"metric": "prometheus", "query": "up", "prometheus_address": "http://p"}]},
            "'up' has the same value for both versions of a model",
        ),
    ],
)
def test_unsupported_options_of_a_models_rollout_are_refused(plan: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        serve.deployment(Plain).options(model_repository={"url": "/m", "rollout": plan})


class Hanging:
    async def load_model(self, name: str, version: str, path: str) -> str:
        if version == "2":
            await asyncio.sleep(3600)
        return version

    def __call__(self) -> str:
        return str(serve.get_model("m"))


async def hung(folder: Path) -> None:
    put(folder, "1", "good")
    options = {"url": str(folder), "mode": "explicit", "load_timeout_s": 90}
    async with local_instance_async() as client:
        deployment: Any = serve.deployment(Hanging, name="d", liveness=None, model_repository=options)
        await client.run(deployment.bind())
        await client.load_model("d", "m", "1")
        put(folder, "2", "good")
        loading = asyncio.create_task(client.load_model("d", "m"))
        await asyncio.sleep(40)
        message = (await client.status()).backends["d"].message
        assert "has been loading model version m/2 for more than 30 s" in message
        with pytest.raises(DeployError, match=r"load_model\(\) had not returned after 90 s, the load"):
            await loading


def test_a_load_model_that_hangs_has_a_limit(tmp_path: Path) -> None:
    run_virtual(hung, tmp_path)


async def hung_folder() -> None:
    reads, release, count = FolderReads(), threading.Event(), 0

    def read() -> int:
        nonlocal count
        count += 1
        release.wait(30)
        return count

    clock = LoopClock()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"reading /nfs has not ended within 0\.1 s"):
            await reads.read("/nfs", read, clock)
    assert count == 1, "a folder that hangs has one thread"
    assert await reads.read("/other", lambda: "quick", clock) == "quick"
    release.set()
    assert await reads.read("/nfs", read, clock) == 2
    reads.close()


def test_a_folder_that_hangs_keeps_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_reads, "READ_S", 0.1)
    asyncio.run(hung_folder())
