"""The reconcile loop under failures: crashes between write and action, an unreachable store, lost workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgpack
import pytest
from control_harness import backend, replica
from controller_harness import CrashingStore, ScriptedReplica, Stage, hang, staged
from tables import each_case

from daskserve.cluster.local.process import LocalProcess
from daskserve.cluster.long_poll import WORKERS
from daskserve.common.types import Location, ReplicaState
from daskserve.control.observed.watch import MISSES
from daskserve.control.reconcile import ACTION_RETRY_S, LOG_S, TICK_S
from daskserve.control.records.records import BackendRecord, CodeRecord, ReplicaRecord
from daskserve.control.records.storing.encoding import encode
from daskserve.errors import (
    ActorLostError,
    BadRequestError,
    DeployError,
    ReplicaStartError,
    SupersededError,
    UnavailableError,
)
from daskserve.options.http import HTTPOptions
from daskserve.testing import run_virtual

# ---- the controller dies


async def live(stage: Stage) -> None:
    """Make all calls that a client makes about a backend, one after the other."""
    await stage.create(num_replicas=2, version="1", user_config=b"one")
    await stage.endpoint()
    await stage.update(user_config=b"two")
    await stage.update(num_replicas=3)
    await stage.deploy("d", "/d", version="1")
    await stage.deploy("d", "/d", version="2", num_replicas=2)
    await stage.update(num_replicas=1)
    await stage.create("gone")
    await stage.delete("gone")


#: Approximate number of commits in a life; the test below fails if there are more. The first is that of the
#: controller's own start.
CRASHES = range(2, 35)


@each_case("crash_at", CRASHES)
def test_changes_complete_wherever_the_controller_dies(crash_at: int) -> None:
    """It is killed after each commit in turn, before it can act, notify listeners or answer."""

    async def main() -> None:
        store = CrashingStore(crash_at)
        stage = store.stage = Stage(store=store)
        async with stage.cluster:
            await stage.open()
            await live(stage)
            await stage.clock.sleep(60)
            assert {tag: len(stage.running_of(tag)) for tag in ("b", "d", "gone")} == {
                "b": 1,
                "d": 2,
                "gone": 0,
            }
            assert {each.user_config for each in stage.running_of("b")} == {b"two"}
            assert set(stage.stored("endpoint")) == {"endpoint/e", "endpoint/d"}
            assert set(stage.stored("backend")) == {"backend/b", "backend/d"}
            assert set(stage.stored("code")) == {"code/b@1", "code/d@2"}
            replicas = stage.stored("replica")
            assert {key.removeprefix("replica/") for key in replicas} == set(stage.running)
            actors = {each.name for each in stage.cluster.actors()}
            assert actors == {"local/controller", *(f"local/replica/{tag}" for tag in stage.running)}
            assert store.epochs == sorted(store.epochs)
            assert stage.cluster.epoch == (2 if store.commits >= crash_at else 1)

    run_virtual(main)


@staged()
async def test_the_controller_was_killed_at_every_commit_of_a_life(stage: Stage) -> None:
    await live(stage)
    await stage.clock.sleep(60)
    assert CRASHES[0] < stage.store.commits < CRASHES[-1]


@staged(workers=4)
async def test_a_new_controller_adopts_what_runs_and_restarts_nothing(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    await stage.endpoint()
    actors = {each for each in stage.cluster.actors() if "/controller" not in each.name}
    assert (await stage.cluster.program.controller()).worker not in stage.replica_workers()
    before, routes = await stage.published("backend/b"), await stage.published("routes")
    await stage.crash_controller()
    # The number of replicas never falls, not even for a moment.
    assert await stage.published("backend/b") == before
    assert await stage.published("routes") == routes
    await stage.clock.sleep(60)
    assert {each for each in stage.cluster.actors() if "/controller" not in each.name} == actors
    assert len(stage.started) == 2
    assert stage.stopped == []
    assert await stage.published("backend/b") == before
    await stage.update(num_replicas=3)
    assert len(stage.started) == 3


@staged()
async def test_a_new_controller_adopts_a_replica_that_is_still_starting(stage: Stage) -> None:
    stage.start_s = 30.0
    creating = asyncio.create_task(stage.create())
    await stage.until(lambda: stage.started)
    await stage.crash_controller()
    await creating
    assert len(stage.started) == 1
    assert stage.clock.now() < 32


@staged()
async def test_a_config_that_changed_while_a_replica_started_is_sent_by_the_next_controller(
    stage: Stage,
) -> None:
    stage.start_s = 5.0
    await stage.call("create_backend", **stage.spec(user_config=b"one"))
    await stage.until(lambda: stage.started)
    await stage.call(
        "update_backend_config", tag="b", config={}, user_config=b"two", sets_user_config=True, timeout_s=60.0
    )
    await stage.crash_controller()
    await stage.clock.sleep(10)
    assert [each.user_config for each in stage.running_of("b")] == [b"two"]
    assert len(stage.started) == 1


@staged(http=HTTPOptions(location=Location.EVERY_WORKER), workers=4)
async def test_proxies_are_adopted_too(stage: Stage) -> None:
    urls = (await stage.call("wait_for_http", timeout_s=5))["urls"]
    before = dict(stage.proxies)
    controller = await stage.cluster.program.controller()
    await stage.crash_controller()
    assert set((await stage.call("wait_for_http", timeout_s=5))["urls"]) == {
        url for url in urls if controller.worker not in url
    }
    before.pop(controller.worker)
    assert stage.proxies == before


# ---- the store is out of reach


@staged()
async def test_a_verb_that_cannot_be_written_fails_and_nothing_of_it_is_there(stage: Stage) -> None:
    stage.store.failures = 1
    wanted = stage.spec()
    controller = await stage.cluster.program.controller()
    with pytest.raises(OSError, match="the store cannot be reached"):
        await stage.cluster.program.call(controller, "create_backend", **wanted)
    assert await stage.call("list_backends") == {}
    assert stage.stored("backend") == {}
    assert await stage.published("backend/b") is None
    await stage.clock.sleep(30)
    assert stage.started == []
    await stage.change("create_backend", **wanted)
    assert len(stage.running) == 1


@staged()
async def test_a_step_that_cannot_be_written_is_not_acted_on_and_tried_again(stage: Stage) -> None:
    def fail_from_now_on(records: Any) -> None:
        stage.store.after_commit = None
        stage.store.failures = 5

    stage.store.after_commit = fail_from_now_on
    began = stage.clock.now()
    answer = await stage.call("create_backend", **stage.spec(num_replicas=2))
    await stage.until(lambda: stage.started)
    assert stage.store.failures == 0
    assert stage.clock.now() - began >= 4 * ACTION_RETRY_S
    assert (await stage.call("wait_for_goal", goal_id=answer["goal"], timeout_s=30))["is_done"]
    assert len(stage.started) == 2


@staged(workers=4)
async def test_serving_continues_while_the_store_is_out_of_reach(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.create(num_replicas=2)
    before = await stage.published("backend/b")
    stage.store.failures = 10**6
    lost = next(iter(stage.running.values()))
    stage.cluster.remove_worker(lost.worker)
    await stage.clock.sleep(LOG_S)
    assert await stage.published("backend/b") == before
    said = [each.args[0] for each in caplog.records if "A control step of" in each.msg and each.args]
    assert said.count("backend 'b'") in (1, 2), "not one line per attempt"
    stage.store.failures = 0
    await stage.until(lambda: len(stage.running_of("b")) == 2 and len(stage.started) == 3, timeout_s=1)
    await stage.until(lambda: lost.tag not in {key[8:] for key in stage.stored("replica")})


def test_a_worker_that_comes_back_while_its_loss_cannot_be_written_is_lost_once() -> None:
    """The worker's address returns before the records of its lost actors could be removed."""

    async def scenario(stage: Stage) -> None:
        await stage.create(actor_options={"num_gpus": 1}, timeout_s=60.0)
        (before,) = stage.running
        stage.store.failures = 10
        (info,) = [each for each in stage.cluster.workers() if each.resources]
        stage.cluster.remove_worker(info.address)
        stage.cluster.add_worker(info)
        began = stage.clock.now()
        await stage.until(lambda: stage.running and before not in stage.running)
        assert stage.clock.now() - began < 10 * ACTION_RETRY_S + 0.5
        await stage.clock.sleep(60)
        assert len(stage.started) == 2

    async def main() -> None:
        stage = Stage()
        async with stage.cluster:
            await stage.open()
            stage.cluster.add_worker(resources={"GPU": 1.0})
            await scenario(stage)

    run_virtual(main)


# ---- one backend is poisoned


def poisoned_records() -> Mapping[str, bytes]:
    """Return an invalid backend, for which each step fails, under a tag that sorts before all others."""
    records = (
        backend("a"),
        replica("a#1", ReplicaState.SHOULD_START, demand={"CPU": "many"}),
        CodeRecord("a@v1", "a", b""),
    )
    return {each.key: encode(each) for each in records}


def test_a_faulty_backend_does_not_block_another() -> None:
    async def main() -> None:
        stage = Stage()
        stage.store.data.update(poisoned_records())
        async with stage.cluster:
            await stage.open()
            began = stage.clock.now()
            await stage.create("b", num_replicas=2)
            assert stage.clock.now() - began < 1
            await stage.endpoint()
            await stage.delete("a", force=True)
            assert set(stage.stored("backend")) == {"backend/b"}

    run_virtual(main)


def test_a_poisoned_backend_does_not_stop_the_proxies_nor_they_it() -> None:
    async def main() -> None:
        stage = Stage(http=HTTPOptions(location=Location.EVERY_WORKER))
        stage.store.data.update(poisoned_records())
        async with stage.cluster:
            stage.broken_ports = {each.address: RuntimeError("odd") for each in stage.cluster.workers()}
            await stage.open()
            await stage.create("b")
            stage.broken_ports.clear()
            await stage.clock.sleep(TICK_S)
            assert len((await stage.call("wait_for_http", timeout_s=5))["urls"]) == 3

    run_virtual(main)


# ---- workers and replicas


@staged(workers=4)
async def test_replicas_of_a_lost_worker_are_replaced_and_get_no_more_requests(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    lost = next(iter(stage.running.values()))
    began = stage.clock.now()
    stage.cluster.remove_worker(lost.worker)
    await stage.clock.sleep(0.001)
    published = await stage.published("backend/b")
    assert lost.tag not in {tag for tag, _, _ in published["replicas"]}
    await stage.until(lambda: len(stage.started) == 3 and len(stage.running_of("b")) == 2)
    assert stage.clock.now() - began < 0.1


@staged()
async def test_an_answer_that_comes_after_the_loss_of_a_worker_leaves_nothing_behind(stage: Stage) -> None:
    core = stage.controller()._core
    answers = asyncio.Event()

    async def wait(replica: ScriptedReplica) -> None:
        if len(stage.started) == 1:
            await answers.wait()

    stage.start = wait
    creating = asyncio.create_task(stage.create())
    (first,) = await stage.until(lambda: list(core.state.replicas.values()))
    await stage.until(lambda: stage.started)
    core._on_message({"kind": WORKERS, "left": [first.worker], "joined": []})
    await creating
    answers.set()
    await stage.clock.sleep(1)
    assert core.observed.ready.keys() == core.observed.rank_infos.keys() == core.state.replicas.keys()


@staged()
async def test_a_worker_that_cannot_be_reached_is_asked_again_and_is_no_failed_constructor(
    stage: Stage,
) -> None:
    tries = 0

    async def unreachable(replica: ScriptedReplica) -> None:
        nonlocal tries
        tries += 1
        if tries < 6:
            raise ActorLostError("the connection broke")

    stage.start = unreachable
    await stage.create()
    assert tries == 6
    assert len(set(stage.started)) == 1
    assert stage.clock.now() >= 5 * ACTION_RETRY_S


def break_looks(process: LocalProcess, refused: dict[str, int]) -> None:
    """Let the first queries of a process to each given worker fail, and count them."""
    inspect = process.inspect

    async def broken(
        worker: str, *, metrics_of: Collection[str] = (), by_scheduler: bool = False
    ) -> Sequence[Mapping[str, Any]]:
        if refused.get(worker, MISSES) < MISSES - 1:
            refused[worker] += 1
            raise ActorLostError("cannot be reached", begun=False)
        return await inspect(worker, metrics_of=metrics_of, by_scheduler=by_scheduler)

    process.inspect = broken  # type: ignore[method-assign]


@staged(workers=4)
async def test_a_running_replica_that_cannot_be_reached_by_a_new_controller_stays_published(
    stage: Stage,
) -> None:
    """The replica is not known to be dead, so no replica set loses it."""
    await stage.create(num_replicas=2)
    before = await stage.published("backend/b")
    holders = {each.worker for each in stage.running_of("b")}
    refused = dict.fromkeys(holders, 0)
    for host in stage.cluster._hosts.values():
        break_looks(host.process, refused)
    await stage.crash_controller()
    await stage.clock.sleep(20)
    assert refused == dict.fromkeys(holders, MISSES - 1)
    assert await stage.published("backend/b") == before
    assert len(stage.started) == 2


@staged()
async def test_a_replica_that_does_not_stop_in_time_is_given_up(stage: Stage) -> None:
    await stage.create(experimental_graceful_shutdown_timeout_s=5)
    stage.drain_s = 1e6
    (replica,) = stage.running_of("b")

    async def never(grace_s: float) -> None:
        await asyncio.Event().wait()

    replica.stop = never  # type: ignore[method-assign]
    began = stage.clock.now()
    await stage.delete()
    assert 5 <= stage.clock.now() - began <= 16


@staged()
async def test_a_replica_that_cannot_be_stopped_is_asked_again(stage: Stage) -> None:
    await stage.create()
    (replica,) = stage.running_of("b")
    stop, tries = replica.stop, []

    async def refuse(grace_s: float) -> None:
        tries.append(stage.clock.now())
        if len(tries) < 4:
            raise UnavailableError("the Host is not open")
        await stop(grace_s)

    replica.stop = refuse  # type: ignore[method-assign]
    entries = stage.cluster._hosts[replica.worker].registry.entries
    name = f"local/replica/{replica.tag}"
    held = entries[name]
    deleting = asyncio.create_task(stage.delete())
    while not deleting.done():
        await stage.clock.sleep(0.01)
        if len(tries) < 4:
            entries.setdefault(name, held)  # a Host removes an actor even if its stop fails
    await deleting
    assert len(tries) == 4
    assert min(after - before for before, after in itertools.pairwise(tries)) >= ACTION_RETRY_S


@staged()
async def test_draining_has_the_configured_grace_and_force_has_none(stage: Stage) -> None:
    stage.drain_s = 3.0
    await stage.create("b", experimental_graceful_shutdown_timeout_s=7)
    await stage.create("c", experimental_graceful_shutdown_timeout_s=7)
    began = stage.clock.now()
    await stage.delete("b")
    assert stage.clock.now() - began >= 3
    began = stage.clock.now()
    await stage.delete("c", force=True)
    assert stage.clock.now() - began < 1
    assert [grace_s for _, grace_s in stage.stopped] == [7.0, 0.0]


@staged()
async def test_a_forced_delete_does_not_wait_for_the_patience_of_an_earlier_one(stage: Stage) -> None:
    stage.drain_s = 15.0
    await stage.create()
    patient = asyncio.create_task(stage.delete())
    await stage.clock.sleep(1)
    began = stage.clock.now()
    await stage.delete(force=True)
    await patient
    assert stage.clock.now() - began < 1
    assert [grace_s for _, grace_s in stage.stopped] == [20.0, 0.0]
    await stage.clock.sleep(30)
    await stage.create()


@staged()
async def test_scaling_down_cancels_a_start_that_hangs(stage: Stage) -> None:
    await stage.create()
    stage.start = hang
    growing = asyncio.create_task(stage.update(num_replicas=3))
    await stage.until(lambda: len(stage.started) == 3)
    await stage.update(num_replicas=1)
    with pytest.raises(SupersededError):
        await growing
    assert len(stage.running_of("b")) == 1
    assert len([each for each in stage.cluster.actors() if "/replica/" in each.name]) == 1


# ---- reconfiguring


@staged()
async def test_a_reconfiguration_that_fails_is_rolled_back_everywhere(stage: Stage) -> None:
    await stage.create(num_replicas=3, user_config=b"one")
    victim = sorted(stage.running)[1]

    async def refuse(replica: ScriptedReplica) -> None:
        if replica.tag == victim:
            raise ReplicaStartError("not with me")

    stage.reconfigure = refuse
    with pytest.raises(ReplicaStartError, match="not with me"):
        await stage.update(user_config=b"two")
    await stage.clock.sleep(10)
    assert {each.user_config for each in stage.running_of("b")} == {b"one"}
    assert len(stage.running) == 3
    # The replica rejects the rollback, too, so it is replaced.
    assert victim not in stage.running
    assert len(stage.started) == 4


@staged()
async def test_a_replica_that_refuses_every_config_is_replaced_and_not_asked_for_ever(stage: Stage) -> None:
    await stage.create(num_replicas=2, rebalance_after_s=None, user_config=b"one")
    both = set(stage.running)

    async def refuse(replica: ScriptedReplica) -> None:
        if stage.reconfigured.index(replica.tag) > 0:  # the second replica
            raise ReplicaStartError("not with me")
        if stage.reconfigured.count(replica.tag) > 1:
            raise ReplicaStartError("I will not go back")

    stage.reconfigure = refuse
    with pytest.raises(ReplicaStartError, match="not with me"):
        await stage.update(user_config=b"two")
    await stage.clock.sleep(60)
    assert len(stage.running) == 2
    assert both.isdisjoint(stage.running)
    assert {each.user_config for each in stage.running_of("b")} == {b"one"}
    assert len(stage.reconfigured) == 4


@staged()
async def test_a_config_that_is_superseded_before_it_fails_does_no_harm(stage: Stage) -> None:
    await stage.create(user_config=b"one")

    async def slowly_refuse(replica: ScriptedReplica) -> None:
        if len(stage.reconfigured) == 1:
            await stage.clock.sleep(2)
            raise BadRequestError("bad config")

    stage.reconfigure = slowly_refuse
    first = asyncio.create_task(stage.update(user_config=b"bad"))
    await stage.until(lambda: stage.reconfigured)
    await stage.update(user_config=b"good")
    with pytest.raises(SupersededError):
        await first
    assert [each.user_config for each in stage.running_of("b")] == [b"good"]


@staged()
async def test_an_unreachable_replica_is_reconfigured_again_after_a_pause(stage: Stage) -> None:
    await stage.create(user_config=b"one")

    async def unreachable(replica: ScriptedReplica) -> None:
        if len(stage.reconfigured) < 5:
            raise UnavailableError("still starting")

    stage.reconfigure = unreachable
    began = stage.clock.now()
    await stage.update(user_config=b"two")
    assert stage.clock.now() - began >= 4 * ACTION_RETRY_S
    assert len(stage.reconfigured) == 5


class TextlessError(Exception):
    """Its text cannot be created, as may be with any user's class."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@staged(http=HTTPOptions(location=Location.EVERY_WORKER))
async def test_errors_without_a_text_are_errors_as_any_other(stage: Stage) -> None:
    async def fail(replica: ScriptedReplica) -> None:
        raise TextlessError

    stage.start = fail
    with pytest.raises(DeployError, match="TextlessError: <its text cannot be made"):
        await stage.create()
    stage.start = None
    await stage.create(user_config=b"one")
    stage.reconfigure = fail
    with pytest.raises(DeployError, match="TextlessError"):
        await stage.update(user_config=b"two")
    stage.reconfigure = None
    stage.start = fail
    stage.cluster.remove_worker(stage.running_of("b")[0].worker)
    stage.broken_ports[stage.cluster.add_worker().address] = TextlessError()
    await stage.clock.sleep(5)
    status = await stage.call("status")
    assert "its text cannot be made" in status["backends"]["b"]["message"]
    assert any("its text cannot be made" in each["message"] for each in status["actors"])


# ---- rolling


@staged()
async def test_a_new_version_rolls_without_a_gap(stage: Stage) -> None:
    await stage.deploy("d", version="1", num_replicas=3)
    stage.start_s = 2.0
    fewest, most = 3, 3
    rolling = asyncio.create_task(stage.deploy("d", version="2", num_replicas=3))
    while not rolling.done():
        await stage.clock.sleep(0.1)
        published = (await stage.published("backend/d"))["replicas"]
        fewest, most = min(fewest, len(published)), max(most, len(stage.running_of("d")))
    await rolling
    assert (fewest, most) == (3, 4)
    assert {each.message.code for each in stage.running_of("d")} == {b"code"}
    assert len(stage.started) == 6


@staged(workers=3)
async def test_an_update_of_a_full_cluster_survives_its_controller_and_a_worker(stage: Stage) -> None:
    options: dict[str, Any] = {"num_replicas": 3, "actor_options": {"num_cpus": 4}}
    await stage.deploy("d", version="1", **options)
    stage.start_s = 2.0
    rolling = asyncio.create_task(stage.deploy("d", version="2", **options))
    await stage.until(lambda: len(stage.started) == 4)
    await stage.crash_controller()
    await stage.clock.sleep(5)
    assert len(stage.running_of("d")) == 2
    stage.cluster.add_worker()
    await rolling
    assert len(stage.running_of("d")) == 3
    assert {each.named_version for each in stage.stored("replica").values()} == {"2"}  # type: ignore[union-attr]


# ---- at rest


@staged()
async def test_an_instance_at_rest_writes_starts_and_publishes_nothing(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    await stage.endpoint()
    heard: list[Any] = []
    await stage.cluster.program.subscribe(heard.append)
    await stage.clock.sleep(1)
    commits, started = stage.store.commits, len(stage.started)
    await stage.clock.sleep(3600)
    assert (stage.store.commits, len(stage.started)) == (commits, started)
    assert heard == []


@staged()
async def test_stored_records_are_plain_and_have_a_format_number(stage: Stage) -> None:
    await stage.create()
    stored = {key: msgpack.unpackb(data) for key, data in stage.store.data.items()}
    assert {each["format"] for each in stored.values()} == {1}
    record = next(each for each in stage.stored("replica").values())
    assert isinstance(record, ReplicaRecord)
    assert record.state is ReplicaState.RUNNING
    (wanted,) = stage.stored("backend").values()
    assert isinstance(wanted, BackendRecord)
    assert wanted.goal is None
