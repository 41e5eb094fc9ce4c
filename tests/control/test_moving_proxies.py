"""Proxies that leave a worker or a host, with a real controller in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from controller_harness import Stage, play, staged
from tables import each_case

from daskserve.common.types import Location, WorkerAddress
from daskserve.control.observed.watch import MISSES, PERIOD_S
from daskserve.options.http import HTTPOptions
from daskserve.testing import run_virtual

GRACE_S = 10.0


def http(location: Location = Location.HEAD_ONLY, port: int = 8000) -> HTTPOptions:
    return HTTPOptions(location=location, port=port, return_grace_s=GRACE_S)


async def listening(stage: Stage) -> WorkerAddress:
    """Return the worker of the only proxy."""
    await stage.call("wait_for_http", timeout_s=5)
    (worker,) = stage.proxies
    return worker


async def proxies(stage: Stage) -> dict[str, Mapping[str, Any]]:
    return {each["name"]: each for each in (await stage.call("status"))["actors"] if each["kind"] == "proxy"}


async def proxy_actors(stage: Stage) -> set[WorkerAddress]:
    return {each.worker for each in stage.cluster.actors() if "/proxy/" in each.name}


@staged(http=http(), workers=3)
async def test_a_retiring_worker_is_in_use_until_the_requests_of_its_proxy_have_ended(stage: Stage) -> None:
    stage.drain_s = 3.0
    old = await listening(stage)
    before = await stage.call("http_urls")
    stage.cluster.retire_worker(old)
    await stage.until(lambda: old not in stage.proxies)
    (new,) = stage.proxies
    assert await proxy_actors(stage) == {old, new}
    assert stage.cluster.reported.in_use == {old, new}
    assert stage.cluster.reported.grace_s == 0.0, "there are no backends"
    assert stage.successors == [(old, {new})]
    assert sorted(each["state"] for each in (await proxies(stage)).values()) == ["DRAINING", "RUNNING"]
    assert len(before) == len(await stage.call("http_urls")) == 1
    began = stage.clock.now()
    await stage.until(lambda: stage.cluster.reported.in_use == {new})
    assert 2.0 < stage.clock.now() - began < 3.5
    assert await proxy_actors(stage) == {new}
    assert list(await proxies(stage)) == ["head"]


@each_case("delay_s", [0.0, 0.001, 0.01, 0.1, 1.0])
@staged(http=http(), workers=4)
async def test_a_controller_that_dies_while_a_proxy_leaves_is_followed_by_one_that_continues(
    stage: Stage, delay_s: float
) -> None:
    stage.drain_s = 3.0
    old = await listening(stage)
    controller = (await stage.cluster.program.controller()).worker
    assert controller != old
    stage.cluster.retire_worker(old)
    await stage.clock.sleep(delay_s)
    began = stage.clock.now()
    stage.cluster.remove_worker(controller)
    await stage.until(lambda: old not in stage.proxies)
    assert [others - {controller} for worker, others in stage.successors if worker == old] != [set()]
    await stage.until(lambda: old not in stage.cluster.reported.in_use and stage.cluster.reported.retiring)
    assert stage.clock.now() - began > 3.0 - delay_s - 0.1
    assert await proxy_actors(stage) == set(stage.proxies)


def two_hosts(stage: Stage) -> tuple[WorkerAddress, WorkerAddress]:
    """Add a worker on another host; return both workers."""
    (home,) = [each.address for each in stage.cluster.workers()]
    away = stage.cluster.add_worker(host="10.0.0.2", is_head=False).address
    return home, away


@staged(http=http(), workers=1)
async def test_the_only_proxy_waits_for_its_host_moves_and_moves_back(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    home, away = two_hosts(stage)
    assert await listening(stage) == home
    stage.cluster.remove_worker(home)
    await stage.clock.sleep(GRACE_S - 1)
    assert not stage.proxies
    assert (await proxies(stage))["head"]["message"] == "waits for a worker on host 127.0.0.1"
    assert list(await stage.call("http_urls")) == []
    with caplog.at_level(logging.WARNING, "daskserve.controller"):
        await stage.until(lambda: set(stage.proxies) == {away}, timeout_s=2)
    assert "moves from host 127.0.0.1" in caplog.text
    assert (await proxies(stage))["head"]["message"] == (
        "moved here from host 127.0.0.1, and moves back once that has a worker for it"
    )
    stage.drain_s = 2.0
    back = stage.cluster.add_worker().address
    await stage.until(lambda: set(stage.proxies) == {back}, timeout_s=GRACE_S + 1)
    assert stage.successors[-1] == (away, {back}), "it accepts until the one at home does"
    await stage.until(lambda: stage.cluster.reported.in_use == {back})
    assert (await proxies(stage))["head"]["message"] == ""


def test_the_proxy_of_a_worker_that_hangs_comes_back_after_its_restart() -> None:
    async def scenario(stage: Stage) -> None:
        home = await listening(stage)
        stage.cluster.suspend_worker(home)
        await stage.clock.sleep((MISSES + 2) * PERIOD_S)
        assert not stage.proxies
        assert home not in {each.address for each in stage.cluster.workers()}, "its nanny has ended it"
        back = stage.cluster.add_worker(host="10.0.0.1").address
        await stage.until(lambda: set(stage.proxies) == {back}, timeout_s=1)

    async def main() -> None:
        stage = Stage(http=http(), workers=2)
        for number, info in enumerate(stage.cluster.workers(), 1):
            stage.cluster.change_worker(info.address, host=f"10.0.0.{number}")
        async with stage.cluster:
            await stage.open()
            await scenario(stage)

    run_virtual(main)


@each_case(
    ("location", "is_held"),
    [(Location.HEAD_ONLY, True), (Location.EVERY_NODE, False), (Location.EVERY_WORKER, False)],
)
def test_a_proxy_alone_holds_its_worker_only_where_it_is_the_only_one(
    location: Location, is_held: bool
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.call("wait_for_http", timeout_s=5)
        await stage.until(lambda: stage.cluster.reported.in_use == set(stage.proxies))
        assert stage.cluster.reported.held == (set(stage.proxies) if is_held else set())
        await stage.create(num_replicas=1)
        held = stage.replica_workers() | (set(stage.proxies) if is_held else set())
        await stage.until(lambda: stage.cluster.reported.held == held)

    play(scenario, http=http(location), workers=3)
