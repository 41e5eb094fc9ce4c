"""Rollbacks of applications that files have declared: the declared configuration returns as well."""

from __future__ import annotations

from typing import Any

from controller_harness import CrashingStore, Stage, staged
from scripted_builder import config
from tables import each_case
from test_declared import declare, versions

from daskserve.testing import run_virtual


async def roll_back(stage: Stage, revision: int | None = None) -> None:
    answer = await stage.call("rollback", app="shop", revision=revision, by="prog.py", request_id="one")
    if answer["goal"] is not None:
        await stage.calls.wait_for_goal(answer["goal"], None)


async def declared(stage: Stage) -> Any:
    found = (await stage.call("get_config", name="shop"))["applications"]
    return {name: each["config"] for name, each in found.items()}


async def both(stage: Stage) -> tuple[Any, Any]:
    """Deploy two files; return the configuration that each declares."""
    found = []
    for version in ("1", "2"):
        await declare(stage, config("shop", version), by="ci", source="serve.yaml", version=f"git{version}")
        found.append(await declared(stage))
    return found[0], found[1]


@staged()
async def test_a_file_is_the_origin_of_its_revisions(stage: Stage) -> None:
    await both(stage)
    found = (await stage.call("history", app="shop"))["revisions"]
    assert [(each["source"], each["by"]) for each in found] == [("file", "ci"), ("file", "ci")]
    assert found[1]["origin"] == {"file": "serve.yaml", "version": "git2"}


@staged()
async def test_a_rollback_gives_back_what_was_declared_and_nothing_undoes_it(stage: Stage) -> None:
    before, after = await both(stage)
    built = len(stage.script.built)
    await roll_back(stage)
    await stage.clock.sleep(60)
    assert versions(stage) == {"shop": "1"}
    assert await declared(stage) == before != after
    assert len(stage.script.built) == built
    await declare(stage, config("shop", "2"))
    await stage.until(lambda: versions(stage) == {"shop": "2"})


@staged()
async def test_a_rollback_to_what_a_program_has_deployed_is_not_declared(stage: Stage) -> None:
    await stage.run("shop", {"front": ()}, front={"version": "0"}, route="/shop")
    await declare(stage, config("shop", "1"))
    await roll_back(stage)
    await stage.until(lambda: versions(stage) == {"shop": "0"})
    assert "config/shop" not in stage.store.data


@each_case("crash_at", range(1, 5))
def test_a_rollback_of_a_file_is_whole_wherever_the_controller_dies(crash_at: int) -> None:
    async def main() -> None:
        store = CrashingStore(crash_at=0)
        stage = store.stage = Stage(store=store, workers=4)
        async with stage.cluster:
            await stage.open()
            before, _ = await both(stage)
            store.crash_at = store.commits + crash_at
            await roll_back(stage)
            await stage.clock.sleep(60)
            assert len(set(store.epochs)) == 2, "the controller was not lost"
            assert (versions(stage), await declared(stage)) == ({"shop": "1"}, before)

    run_virtual(main)


@staged()
async def test_files_builds_and_restarts_are_reported(stage: Stage) -> None:
    await declare(stage, config("shop"), by="ci", source="serve.yaml", version="abc")
    answer = await stage.call("restart", application="shop", by="ops")
    await stage.calls.wait_for_goal(answer["goal"], None)
    found = (await stage.call("events", application="shop"))["events"]
    event_of = {each["kind"]: each for each in found}
    assert event_of["CONFIG_DECLARED"]["message"] == "Application 'shop' is declared by serve.yaml abc"
    assert event_of["RESTARTING"]["by"] == "ops"
    assert len((await stage.call("history", app="shop"))["revisions"]) == 1
