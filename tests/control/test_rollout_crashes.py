"""Rollouts whose controller dies after any of its commits: in the end, one version has all traffic."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from controller_harness import CrashingStore, Stage, play
from tables import each_case

from daskserve.errors import RolloutError, ServeError

PLAN = {"steps": ["10%", "100%"], "pause_s": 2, "min_requests": 50, "gates": [{"detects": "100%"}]}


async def answer(stage: Stage, failed: int, seen: list[Any]) -> None:
    """Report the requests of both versions, like a router that outlives the controllers."""
    key, new, old = "", 0, 0
    while True:
        await asyncio.sleep(0.5)
        try:
            value = await stage.published("backend/b")
            rollout = value.get("rollout")
            if rollout is None:
                continue
            if rollout["key"] != key:
                key, new, old = rollout["key"], 0, 0
                seen.append((rollout["share"], len(value["replicas"]), len(rollout["new"]["replicas"])))
            if rollout["share"]:
                new, old = new + 20, old + 180
            counted = {"key": key, "new": [new, failed * new // 20, []], "old": [old, 0, []]}
            await stage.call("report_load", router="r", loads={}, versions={"b": counted})
        except (ServeError, OSError):
            continue  # between two controllers


def rolled_out(crash_at: int, failed: int) -> tuple[int, list[str], list[Any]]:
    """Roll version 2 out beside version 1; return the commits, the final versions, and the observed steps."""
    store, seen, running = CrashingStore(crash_at), [], []

    async def scenario(stage: Stage) -> None:
        store.stage = stage
        await stage.deploy(version="1", num_replicas=2)
        answering = asyncio.create_task(answer(stage, failed, seen))
        try:
            await stage.deploy(version="2", num_replicas=2, rollout=PLAN)
        except RolloutError:
            pass
        expected = "1" if failed else "2"
        try:
            await stage.until(
                lambda: (
                    sorted(each.message.code_name for each in stage.running_of()) == [f"b@{expected}"] * 2
                ),
                timeout_s=120.0,
            )
        finally:
            running.extend(each.message.code_name for each in stage.running_of())
        status = await stage.call("rollout_status", name="b")
        assert status["state"] == ("ROLLED_BACK" if failed else "COMPLETED")
        assert (await stage.published("backend/b")).get("rollout") is None
        answering.cancel()

    play(scenario, store=store)
    return store.commits, running, seen


def test_a_rollout_whose_controller_lives() -> None:
    _, running, seen = rolled_out(0, failed=0)
    assert running == ["b@2", "b@2"]
    assert seen[-2:] == [(0.1, 2, 1), (1.0, 2, 2)]


def check(crash_at: int, failed: int) -> None:
    _, running, seen = rolled_out(crash_at, failed)
    assert running == [f"b@{1 if failed else 2}"] * 2, crash_at
    assert all(old == 2 for share, old, _ in seen if 0 < share < 1), (crash_at, seen)


@each_case("failed", [0, 5])
def test_a_rollout_ends_as_it_should_if_the_controller_dies_in_the_middle(failed: int) -> None:
    commits, _, _ = rolled_out(0, failed)
    check(commits // 2, failed)


@pytest.mark.nightly
@each_case("failed", [0, 5])
def test_a_rollout_ends_as_it_should_wherever_the_controller_dies(failed: int) -> None:
    commits, _, _ = rolled_out(0, failed)
    assert commits > 8
    for crash_at in range(1, commits + 1):
        check(crash_at, failed)
