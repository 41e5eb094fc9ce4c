"""An instance of this version on stores that earlier versions wrote, made by scripts/make_old_store.py."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from controller_starts import controller_start

from daskserve.client.client import AsyncClient
from daskserve.client.instance.connection import InstanceConnection
from daskserve.cluster.actors.factories import load_factories
from daskserve.cluster.local.cluster import LocalCluster
from daskserve.cluster.scheduler.owned_store import OwnedStore
from daskserve.cluster.store.opening import open_store
from daskserve.common.clock import LoopClock

STORES = sorted((Path(__file__).parent / "old_stores").glob("*.gz"))
FACTORIES = load_factories()
#: The backends of the first version, with the number of their replicas.
CLASSIC = {"text": 2, "placed": 1, "named": 1}
#: A backend whose change was in progress, and one without room here, because a process takes seconds to
#: start.
WAITING = {"waiting", "isolated"}


@pytest.fixture(params=STORES, ids=lambda path: path.name)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "store.db").write_bytes(gzip.decompress(request.param.read_bytes()))
    return f"sqlite:///{tmp_path}/store.db"


def test_there_is_a_store_of_the_first_version() -> None:
    assert any("54bf8fb" in path.name for path in STORES)


def test_everything_in_an_earlier_store_runs_and_can_be_changed(url: str) -> None:
    async def main() -> None:
        store = OwnedStore(open_store(url, "old"), "new.1", LoopClock())
        await store.open()
        await store.begin()
        cluster = LocalCluster(FACTORIES, workers=0, store=store, instance="old")
        cluster.add_worker(resources={"R": 4.0})
        message = controller_start(start_id="test")
        async with cluster:
            await cluster.start(message.encode())
            async with AsyncClient(InstanceConnection(cluster.program.connection, "old")) as client:
                await check(client)
        await store.close()

    asyncio.run(main())


async def check(client: AsyncClient) -> None:
    status = await client.status()
    assert status.problems == {}
    assert {*CLASSIC, *WAITING} <= status.backends.keys()
    wanted = {tag: each.wanted for tag, each in status.backends.items() if tag not in WAITING}
    assert {tag: wanted[tag] for tag in CLASSIC} == CLASSIC
    (controller,) = (each for each in status.actors if each.kind == "controller")
    async with asyncio.timeout(10):
        # Replicas of the old cluster count as running until their worker is known to be gone.
        while any(
            [(each.state, each.worker) for each in status.replicas(tag)]
            != number * [("RUNNING", controller.worker)]
            for tag, number in wanted.items()
        ):
            await asyncio.sleep(0.01)
            status = await client.status()
    # The change in progress is still in progress, and can be cancelled.
    assert [each.backend for each in status.goals if each.state == "PENDING"] == ["waiting"]
    await client.delete_backend("waiting")
    assert (await client.get_backend_config("isolated")).isolation == "process"
    assert status.endpoints["split"].traffic == {"placed": 0.5, "text": 0.5}
    assert status.endpoints["text"].shadows == {"placed": 0.1}
    assert (await client.get_backend_config("placed")).max_concurrent_queries == 3
    for name in status.endpoints:
        assert isinstance(await (await client.get_handle(name)).remote("x"), str)
    # Deploying the same version restarts nothing; another version replaces it.
    before = {each.name for each in status.replicas("named")}
    assert await client.deploy("named", "builtins.repr", version="2") is False
    assert {each.name for each in (await client.status()).replicas("named")} == before
    assert await client.deploy("named", "builtins.str", version="3", prev_version="2") is True
    await client.update_backend_config("text", {"num_replicas": 1})
