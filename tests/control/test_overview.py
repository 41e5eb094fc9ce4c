"""The updates for the page: first everything, then changes, at a bounded cost. Fake clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from controller_harness import Stage, staged

from daskserve.cluster.local.process import LocalProcess
from daskserve.control.rpc import overview as overview_module
from daskserve.control.rpc.overview import PERIOD_S


async def ask(stage: Stage, last: Mapping[str, Any] | None = None, timeout_s: float = 1.0) -> dict[str, Any]:
    after, events_after = (0, None) if last is None else (last["number"], last["next"])
    found: dict[str, Any] = await stage.call(
        "next_overview", after=after, events_after=events_after, timeout_s=timeout_s
    )
    return found


@staged(workers=2)
async def test_a_reader_gets_all_parts_and_then_what_changes(stage: Stage) -> None:
    await stage.run("x")
    first = await ask(stage)
    assert first["is_all"]
    assert {"instance", "app/x"} <= first["parts"].keys()
    assert json.loads(first["parts"]["app/x"])["name"] == "x"
    assert first["events"]
    began = stage.clock.now()
    none = await ask(stage, first)
    assert not any(none[name] for name in ("is_all", "parts", "events"))
    assert stage.clock.now() - began >= 1.0
    later = asyncio.create_task(ask(stage, none, 20.0))
    await stage.clock.sleep(2.0)
    began = stage.clock.now()
    await stage.call("set_target_capacity", percent=50)
    found = await later
    assert stage.clock.now() - began < 1.0
    assert not found["is_all"]
    assert "app/x" not in found["parts"]
    await stage.call("delete_application", name="x")
    found = await ask(stage, found)
    while not found["is_all"]:
        found = await ask(stage, found)
    assert "app/x" not in found["parts"]


@staged(workers=2)
async def test_many_readers_share_the_snapshots(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    build = overview_module.overview

    def counted(*given: Any) -> Any:
        looks.append(stage.clock.now())
        return build(*given)

    monkeypatch.setattr(overview_module, "overview", counted)
    await stage.run("x")

    async def read(number: int) -> None:
        await stage.clock.sleep(number / 100)
        found = await ask(stage)
        while stage.clock.now() - began < 5.0:
            found = await ask(stage, found)

    began = stage.clock.now()
    await asyncio.gather(*map(read, range(20)))
    assert len(looks) < 7.0 / 0.1


@staged(workers=2)
async def test_a_scheduler_that_was_slow_once_does_not_hold_up_later_answers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.run("x")
    found = await ask(stage)

    async def hang(_: LocalProcess) -> Mapping[str, str]:
        await stage.clock.sleep(20.0)
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(LocalProcess, "refused_workers", hang)
        found = await ask(stage, found)
    began = stage.clock.now()
    await ask(stage, found)
    assert stage.clock.now() - began < 1.0 + PERIOD_S


@staged(workers=2)
async def test_an_expensive_snapshot_is_rare_and_answers_are_still_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, cost = [], iter(range(0, 10**6, 2))
    build = overview_module.overview

    def counted(*given: Any) -> Any:
        looks.append(stage.clock.now())
        return build(*given)

    await stage.run("x")
    monkeypatch.setattr(overview_module, "overview", counted)
    monkeypatch.setattr(overview_module, "processor_time", lambda: float(next(cost)))  # 2 s for each look
    found = await ask(stage)
    began = stage.clock.now()
    for _ in range(6):
        asked = stage.clock.now()
        found = await ask(stage, found)
        assert stage.clock.now() - asked <= 1.1
        if stage.clock.now() - began < 5:
            assert (await ask(stage))["parts"].keys() >= {"app/x"}  # who comes anew gets what is known
    assert len(looks) == 1
