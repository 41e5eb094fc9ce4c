"""Blocking verbs whose change another program replaces, or whose deployment it deletes, before it serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import daskserve as serve
from daskserve.client.instance.connection import this_program
from daskserve.errors import DeletedError, DeployError, SupersededError
from daskserve.testing import local_instance_async, wait_until


class Late:
    """Starts when the test allows it."""

    async def __init__(self, folder: Path) -> None:
        (folder / "begun").touch()
        await wait_until(lambda: (folder / "go").exists())

    def __call__(self, request: Any) -> str:
        return "late"


def quick(request: Any = None) -> str:
    return "quick"


@contextlib.asynccontextmanager
async def under_way(
    folder: Path, verb: Callable[[serve.AsyncClient], Awaitable[Any]]
) -> AsyncIterator[tuple[serve.AsyncClient, asyncio.Task[Any]]]:
    """Yield a client, and a running call that waits because its replica has not started yet."""
    async with local_instance_async() as client:
        waiting = asyncio.ensure_future(verb(client))
        await wait_until(lambda: (folder / "begun").exists())
        yield client, waiting
        waiting.cancel()
        (folder / "go").touch()


def run(client: serve.AsyncClient, folder: Path) -> Awaitable[Any]:
    return client.run(serve.deployment(Late).bind(folder), route_prefix=None)


def deploy(client: serve.AsyncClient, folder: Path) -> Awaitable[Any]:
    return client.deploy("Late", Late, folder, version="1")


@pytest.mark.parametrize("verb", [run, deploy])
def test_a_change_that_a_later_one_replaces_says_by_whom_and_which_version(verb: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with under_way(tmp_path, lambda client: verb(client, tmp_path)) as (client, first):
            if verb is run:
                await client.run(serve.deployment(quick, version="2").bind(), route_prefix=None)
            else:
                await client.deploy("Late", quick, version="2")
            with pytest.raises(SupersededError) as caught:
                await first
            assert (caught.value.by, caught.value.version) == (this_program(), "2")
            assert await client.wait_for_goal(caught.value.goal, 5)

    asyncio.run(main())


@pytest.mark.parametrize("verb", [run, deploy])
def test_a_change_under_way_whose_deployment_is_deleted_says_so(verb: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with under_way(tmp_path, lambda client: verb(client, tmp_path)) as (client, first):
            if verb is run:
                await client.delete_application("default")
            else:
                await client.delete_deployment("Late", force=True)
            with pytest.raises(DeletedError) as caught:
                await first
            assert caught.value.by == this_program()

    asyncio.run(main())


def test_the_applications_of_one_call_are_reported_one_by_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_instance_async() as client:
            both = [
                serve.RunTarget(serve.deployment(Late).bind(tmp_path), "a", None),
                serve.RunTarget(serve.deployment(quick).bind(), "b", None),
            ]
            first = asyncio.ensure_future(client.run_many(both))
            await wait_until(lambda: (tmp_path / "begun").exists())
            await client.run(serve.deployment(quick).bind(), name="a", route_prefix=None)
            with pytest.raises(SupersededError, match="Deploying application 'a' failed"):
                await first
            assert await (await client.get_app_handle("b")).remote() == "quick"

    asyncio.run(main())


def test_a_goal_that_a_later_change_replaces_is_complete_for_who_waits_for_it(tmp_path: Path) -> None:
    """CL44"""

    async def main() -> None:
        async with local_instance_async() as client:
            goal = await client.deploy("Late", Late, tmp_path, version="1", blocking=False)
            assert isinstance(goal, str)
            later = await client.deploy("Late", quick, version="2", blocking=False)
            assert await client.wait_for_goal(goal, 5)
            (goal_status,) = (each for each in (await client.status()).goals if each.goal_id == goal)
            assert (goal_status.state, goal_status.successor, goal_status.by) == (
                "DONE",
                later,
                this_program(),
            )
            (tmp_path / "go").touch()

    asyncio.run(main())


def test_both_errors_are_failed_changes() -> None:
    assert issubclass(SupersededError, DeployError)
    assert (SupersededError.http_status, DeletedError.http_status) == (409, 410)
