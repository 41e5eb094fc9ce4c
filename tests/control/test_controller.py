"""The verbs of a running controller: their effects when they return, and the state after they fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from controller_harness import ScriptedReplica, Stage, boom, play, staged
from controller_starts import controller_start

from daskserve.cluster.local.process import LocalProcess
from daskserve.cluster.protocols.base import ActorContext, ActorSpec
from daskserve.common.types import ActorKind, Location
from daskserve.control.action_executor import ACTION_RETRY_S
from daskserve.control.controller import Controller
from daskserve.control.core import MAX_WAIT_S, REFRESH_S
from daskserve.control.reconcile import Reconciler
from daskserve.control.records.records import EndpointRecord
from daskserve.control.records.storing.encoding import encode
from daskserve.errors import (
    AlreadyRegisteredError,
    BadRequestError,
    NotFoundError,
    NotRegisteredError,
    PortInUseError,
    ReplicaStartError,
    RequestTimeoutError,
    UnavailableError,
)
from daskserve.options.backend import BackendConfig
from daskserve.options.http import HTTPOptions
from daskserve.testing import run_virtual, wait_until

EVERY_WORKER = HTTPOptions(location=Location.EVERY_WORKER)
KEPT = "local://worker-3"


# ---- a whole life


@staged()
async def test_the_life_of_a_backend_from_creation_to_deletion(stage: Stage) -> None:
    await stage.create(num_replicas=2, user_config=b"one")
    assert len(stage.running_of("b")) == 2
    assert len(stage.replica_workers()) == 2
    assert {each.user_config for each in stage.running_of("b")} == {b"one"}
    await stage.endpoint()
    published = await stage.published("backend/b")
    assert {tag for tag, _, _ in published["replicas"]} == set(stage.running)
    assert (await stage.published("endpoint/e"))["traffic"] == {"b": 1.0}
    assert set(await stage.published("routes")) == {"/e"}

    before = set(stage.running)
    await stage.update(user_config=b"two", max_concurrent_queries=3)
    assert set(stage.running) == before
    assert {(each.user_config, each.concurrency) for each in stage.running_of("b")} == {(b"two", 3)}
    assert (await stage.published("backend/b"))["concurrency"] == 3

    await stage.update(num_replicas=4)
    assert before < set(stage.running)
    await stage.update(num_replicas=1)
    assert len(stage.running) == 1
    assert set(await stage.published("backend/b")) == {
        "replicas",
        "concurrency",
        "max_queued",
        "max_crash_retries",
        "kind",
    }

    await stage.change("delete_endpoint", name="e")
    await stage.delete()
    assert stage.running == {}
    assert await stage.published("backend/b") is None
    assert await stage.published("routes") == {}
    assert {key.partition("/")[0] for key in stage.store.records()} == {"event", "goal"}


@staged()
async def test_a_repeated_call_does_not_repeat_the_change(stage: Stage) -> None:
    """The client's connection broke before the answer came, so it asks again with the same request id."""
    wanted = stage.spec(num_replicas=2)
    first = await stage.call("create_backend", **wanted)
    again = await stage.call("create_backend", **wanted)
    assert first == again
    await stage.change("create_backend", **wanted)
    commits = stage.store.commits
    assert await stage.call("create_backend", **wanted) == {"goal": None}
    fields: dict[str, Any] = {"route": "/e", "methods": ["GET"], "backend": "b", "request_id": "r"}
    for _ in range(2):
        await stage.change("create_endpoint", name="e", **fields)
    for _ in range(2):
        await stage.change("delete_endpoint", name="e")
    assert stage.store.commits == commits + 2
    for _ in range(2):
        await stage.delete()
    assert len(stage.started) == 2


@staged()
async def test_errors_reach_the_caller_and_change_nothing(stage: Stage) -> None:
    await stage.create()
    await stage.endpoint()
    commits = stage.store.commits
    with pytest.raises(AlreadyRegisteredError, match="Backend 'b' is already registered"):
        await stage.create()
    with pytest.raises(AlreadyRegisteredError, match="Route '/e' is already registered"):
        await stage.endpoint("other")
    with pytest.raises(NotRegisteredError, match="backend 'x' that is not registered"):
        await stage.endpoint("other", "/x", backend="x")
    with pytest.raises(NotRegisteredError, match="Backend x is not registered"):
        await stage.update("x", num_replicas=2)
    with pytest.raises(BadRequestError, match="is used by endpoint 'e'"):
        await stage.delete()
    with pytest.raises(BadRequestError, match="sum to 1"):
        await stage.change("set_traffic", name="e", traffic={"b": 0.5})
    with pytest.raises(ValueError, match="num_replicas"):
        await stage.update(num_replicas=0)
    with pytest.raises(NotFoundError):
        await stage.call("get_endpoint", name="x")
    assert stage.store.commits == commits


@staged()
async def test_lists_contain_what_is_registered(stage: Stage) -> None:
    await stage.create(num_replicas=2, user_config=b"pickled")
    await stage.create("c")
    await stage.endpoint()
    await stage.change("set_traffic", name="e", traffic={"b": 0.25, "c": 0.75})
    await stage.change("shadow_traffic", name="e", backend="c", proportion=0.5)
    backends = await stage.call("list_backends")
    assert set(backends) == {"b", "c"}
    assert backends["b"]["config"]["num_replicas"] == 2
    assert backends["b"]["user_config"] == b"pickled"
    assert await stage.call("get_backend_config", tag="b") == backends["b"]
    endpoints = await stage.call("list_endpoints")
    assert endpoints["e"]["traffic"] == {"b": 0.25, "c": 0.75}
    assert endpoints["e"]["shadows"] == {"c": 0.5}
    assert await stage.call("get_endpoint", name="e") == endpoints["e"]


@staged()
async def test_status_shows_what_waits_and_why(stage: Stage) -> None:
    stage.cluster.refused["local://old"] = "has another version"
    await stage.create()
    await stage.call("create_backend", **stage.spec("big", actor_options={"num_gpus": 1}))
    await stage.clock.sleep(1)
    status = await stage.call("status")
    assert status["backends"]["b"]["running"] == 1
    assert "GPU 1 (most free on one worker: 0)" in status["backends"]["big"]["message"]
    replicas = [each for each in status["actors"] if each["kind"] == "replica"]
    assert sorted(each["state"] for each in replicas) == ["RUNNING", "SHOULD_START"]
    assert status["refused_workers"] == {"local://old": "has another version"}
    assert (status["instance"], status["epoch"]) == ("local", 1)


# ---- goals


@staged()
async def test_a_failed_goal_raises_its_error_and_removes_the_backend(stage: Stage) -> None:
    stage.start = boom()
    with pytest.raises(ReplicaStartError, match="the constructor raised") as info:
        await stage.create(num_replicas=1)
    assert info.value.user_traceback == "Traceback ..."
    assert len(stage.started) == 3
    await stage.until(lambda: {key.partition("/")[0] for key in stage.store.records()} == {"event", "goal"})
    assert stage.cluster.actors() == [await stage.cluster.program.controller()]
    stage.start = None
    await stage.create()


@staged()
async def test_capacity_that_arrives_in_time_is_used(stage: Stage) -> None:
    asyncio.get_running_loop().call_later(10, lambda: stage.cluster.add_worker(resources={"GPU": 1.0}))
    began = stage.clock.now()
    await stage.create(actor_options={"num_gpus": 1}, timeout_s=20.0)
    assert 10 <= stage.clock.now() - began < 11


@staged()
async def test_a_deletion_waits_for_the_end_of_one_that_replaces_it(stage: Stage) -> None:
    await stage.create()
    stage.drain_s = 5.0
    gentle = await stage.call("delete_backend", tag="b", force=False)
    await stage.call("delete_backend", tag="b", force=True)
    assert await stage.calls.wait_for_goal(gentle["goal"], 0.0)
    assert stage.stored("backend")
    assert await stage.calls.wait_until_reached(gentle["goal"], 60.0)
    assert not stage.stored("backend")


@staged()
async def test_a_wait_for_a_goal_times_out_with_the_reason(stage: Stage) -> None:
    answer = await stage.call("create_backend", **stage.spec(actor_options={"num_gpus": 1}))
    began = stage.clock.now()
    waited = await stage.call("wait_for_goal", goal_id=answer["goal"], timeout_s=5)
    assert stage.clock.now() == began + 5
    assert not waited["is_done"]
    assert "GPU 1" in waited["why"]
    await stage.call("wait_for_goal", goal_id=answer["goal"], timeout_s=1e9)
    assert stage.clock.now() == began + 5 + MAX_WAIT_S
    with pytest.raises(NotFoundError, match="Goal never does not exist"):
        await stage.call("wait_for_goal", goal_id="never", timeout_s=5)


# ---- deployments


@staged()
async def test_a_deployment_that_fails_leaves_its_route_free(stage: Stage) -> None:
    stage.start = boom()
    with pytest.raises(ReplicaStartError):
        await stage.deploy("bad", "/")
    stage.start = None
    await stage.deploy("good", "/")
    assert set(stage.stored("endpoint")) == {"endpoint/good"}


def test_a_deployment_is_one_transaction() -> None:
    written: list[set[str]] = []

    async def scenario(stage: Stage) -> None:
        stage.store.after_commit = lambda records: written.append(set(records))
        await stage.deploy("d", "/d", version="1")
        assert {"backend/d", "code/d@1", "endpoint/d"} <= written[0]
        written.clear()
        await stage.change("delete_deployment", name="d")
        assert {"backend/d", "endpoint/d"} <= written[0]
        assert stage.stored("backend") == stage.stored("endpoint") == {}

    play(scenario)


@staged()
async def test_a_deployment_in_use_elsewhere_is_not_half_deleted(stage: Stage) -> None:
    await stage.deploy("d", "/d")
    await stage.endpoint("other", "/other", backend="d")
    with pytest.raises(BadRequestError, match="is used by endpoint 'other'"):
        await stage.change("delete_deployment", name="d")
    assert set(stage.stored("endpoint")) == {"endpoint/d", "endpoint/other"}


@staged(http=EVERY_WORKER)
async def test_a_new_route_of_an_unchanged_deployment_is_known_when_the_call_returns(stage: Stage) -> None:
    await stage.deploy("d", "/old", version="1")
    stage.cluster.topic.deliver = lambda message: [0.25]
    await stage.deploy("d", "/new", version="1")
    assert {tuple(each.routes) for each in stage.proxies.values()} == {("/new",)}
    assert len(stage.started) == 1


# ---- proxies


@staged(http=EVERY_WORKER)
async def test_every_proxy_knows_a_route_before_the_call_returns(stage: Stage) -> None:
    urls = (await stage.call("wait_for_http", timeout_s=5))["urls"]
    assert len(urls) == len(stage.proxies) == 3
    assert await stage.call("http_urls") == urls
    await stage.create()
    # Each process is notified at a different time, and one process not at all.
    delays = iter([0.1, 0.4, None, 0.2] * 100)
    stage.cluster.topic.deliver = lambda message: [each] if (each := next(delays)) is not None else []
    await stage.endpoint()
    assert all("/e" in each.routes for each in stage.proxies.values())
    await stage.change("delete_endpoint", name="e")
    assert all("/e" not in each.routes for each in stage.proxies.values())


@staged(http=HTTPOptions(location=Location.HEAD_ONLY), workers=4)
async def test_a_proxy_that_does_not_answer_delays_a_change_but_does_not_prevent_it(stage: Stage) -> None:
    await stage.call("wait_for_http", timeout_s=5)
    await stage.create()
    proxy = next(iter(stage.proxies.values()))
    stage.cluster.process(proxy.worker).kill()
    await stage.endpoint()
    assert set(await stage.published("routes")) == {"/e"}


def test_waiting_for_http_raises_if_the_port_is_in_use() -> None:
    async def main() -> None:
        stage = Stage(http=EVERY_WORKER)
        async with stage.cluster:
            taken = PortInUseError("port 8000 is taken")
            stage.broken_ports = {each.address: taken for each in stage.cluster.workers()}
            await stage.open()
            with pytest.raises(PortInUseError, match="port 8000 is taken"):
                await stage.call("wait_for_http", timeout_s=5)
            stage.broken_ports.clear()
            await stage.clock.sleep(1)
            assert len((await stage.call("wait_for_http", timeout_s=5))["urls"]) == 3

    run_virtual(main)


def test_proxies_that_never_listen_are_a_timeout() -> None:
    async def main() -> None:
        stage = Stage(http=EVERY_WORKER)
        async with stage.cluster:
            stage.broken_ports = {stage.cluster.workers()[0].address: None}
            await stage.open()
            with pytest.raises(
                RequestTimeoutError,
                match="The instance did not serve within 5 s: the HTTP proxies do not listen",
            ):
                await stage.call("wait_for_http", timeout_s=5)
            assert 5 <= stage.clock.now() < 6

    run_virtual(main)


@staged()
async def test_waiting_for_http_returns_immediately_without_proxies(stage: Stage) -> None:
    assert await stage.call("wait_for_http", timeout_s=0) == {"urls": ()}
    assert await stage.call("http_urls") == ()


# ---- listeners


@staged()
async def test_listeners_block_until_their_key_changes(stage: Stage) -> None:
    await stage.create()
    found = await stage.call("listen_for_change", snapshot_ids={"backend/b": None, "endpoint/e": None})
    seen = {key: snapshot for key, (snapshot, _) in found.items()}
    listening = asyncio.create_task(stage.call("listen_for_change", snapshot_ids=seen))
    await stage.clock.sleep(1)
    assert not listening.done()
    await stage.endpoint()
    assert set(await listening) == {"endpoint/e"}


# ---- workers


@staged()
async def test_the_list_of_workers_is_refreshed_in_case_an_event_was_lost(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    controller = await stage.cluster.program.controller()
    lost = next(each for each in stage.replica_workers() if each != controller.worker)
    stage.cluster.topic.deliver = lambda message: []
    stage.cluster.remove_worker(lost)
    began = stage.clock.now()
    await stage.until(lambda: len(stage.running_of("b")) == 2 and len(stage.started) == 3)
    assert stage.clock.now() - began < REFRESH_S + 1


@staged()
async def test_a_task_of_the_controller_that_fails_is_in_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    stage.controller()._core.spawn(fail(), "mistaken")
    await stage.clock.sleep(0.1)
    assert "The task daskserve-mistaken of the controller failed" in caplog.text


@staged()
async def test_the_list_of_workers_is_asked_for_again_after_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = LocalProcess.workers
    errors = [
        UnavailableError("no scheduler"),
        OSError("no network"),
        TypeError("a field of another version"),
    ]

    async def fail_at_first(process: Any) -> Any:
        if errors:
            raise errors.pop()
        return await workers(process)

    monkeypatch.setattr(LocalProcess, "workers", fail_at_first)
    await stage.clock.sleep(5 * REFRESH_S)
    assert caplog.text.count("The list of workers could not be refreshed") == 3
    await stage.create()


@staged()
async def test_a_fault_in_a_control_step_does_not_end_the_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, faults = Reconciler.step, [KeyError("a fault")]

    async def fail_once(loop: Reconciler) -> None:
        if faults:
            raise faults.pop()
        await step(loop)

    monkeypatch.setattr(Reconciler, "step", fail_once)
    began = stage.clock.now()
    await stage.create()
    assert not faults
    assert stage.clock.now() - began >= ACTION_RETRY_S
    (record,) = [each for each in caplog.records if "A control step failed" in each.getMessage()]
    assert record.exc_info is not None


@staged()
async def test_an_event_that_overtakes_the_list_of_workers_is_not_undone(stage: Stage) -> None:
    """The list was made before a worker joined, and arrives after the event about this worker."""
    controller = await stage.cluster.program.controller()
    process = stage.cluster.process(controller.worker)
    answers: list[Any] = []
    ask = process.workers

    async def slow() -> Any:
        found = await ask()
        answers.append(found)
        await stage.clock.sleep(2)
        return found

    process.workers = slow  # type: ignore[method-assign]
    await stage.until(lambda: answers, timeout_s=REFRESH_S + 1)
    stage.cluster.add_worker(resources={"GPU": 1.0})
    await stage.create(actor_options={"num_gpus": 1})
    (tag,) = stage.running
    await stage.clock.sleep(10)
    assert len(answers) == 2
    assert list(stage.running) == [tag]


# ---- beginning and ending


def test_a_controller_that_fails_to_start_raises_the_reason() -> None:
    """Its Host stops the controller, which must not hide the reason."""

    async def main() -> None:
        stage = Stage()
        async with stage.cluster:
            spec = ActorSpec(
                ActorKind.CONTROLLER,
                "c",
                1,
                "local",
                controller_start().encode(),
            )
            process = stage.cluster.process(stage.cluster.workers()[0].address)

            async def broken(handler: Any) -> Any:
                raise OSError("no topic")

            process.subscribe = broken  # type: ignore[method-assign]
            controller = Controller(ActorContext(spec, process, stage.clock, stage.cluster.rng, "w"))
            with pytest.raises(OSError, match="no topic"):
                await controller.start()
            await controller.stop(0)

    run_virtual(main)


def test_a_corrupt_record_is_skipped_and_the_rest_runs() -> None:
    async def main() -> None:
        stage = Stage()
        stage.store.data["backend/broken"] = b"?"
        stage.store.data["endpoint/e"] = encode(EndpointRecord("e", "/e", ("GET",), {"b": 1.0}))
        async with stage.cluster:
            await stage.open()
            await stage.create("b")
            assert set(await stage.published("routes")) == {"/e"}
            assert set(await stage.call("list_backends")) == {"b"}

    run_virtual(main)


@staged(workers=4)
async def test_lost_code_does_not_stop_running_replicas(stage: Stage) -> None:
    await stage.create(num_replicas=2, version="1")
    before = dict(stage.running)
    stage.store.data["code/b@1"] = b"?"
    await stage.crash_controller()
    await stage.clock.sleep(60)
    assert stage.running == before
    stage.cluster.remove_worker(next(iter(before.values())).worker)
    await stage.clock.sleep(60)
    assert len(stage.running) == 1
    message = (await stage.call("status"))["backends"]["b"]["message"]
    assert "trying again in" in message
    assert "The store has no code for version 1 of backend 'b'" in message


@staged()
async def test_a_replica_gets_its_start_message_and_runs(stage: Stage) -> None:
    await stage.create(
        code=b"the code",
        user_config=b"config",
        max_batch_size=3,
        batch_wait_timeout=0.5,
        event_loop="worker",
        max_concurrent_queries=7,
    )
    (replica,) = stage.running_of("b")
    assert isinstance(replica, ScriptedReplica)
    message = replica.message
    assert (message.code, message.user_config, message.concurrency) == (b"the code", b"config", 7)
    assert (message.config.max_batch_size, message.config.batch_wait_timeout) == (3, 0.5)
    assert message.config.event_loop == "worker"
    assert message.config.health_check_period_s == BackendConfig().health_check_period_s


@staged(http=HTTPOptions(port=0, system_workers=[KEPT, "kept"]))
async def test_replicas_keep_off_the_workers_of_the_controller_and_the_status_says_if_there_are_none(
    stage: Stage,
) -> None:
    async def message() -> str:
        actors = (await stage.call("status"))["actors"]
        return next(each["message"] for each in actors if each["kind"] == "proxy")

    await stage.create(num_replicas=4)
    assert KEPT not in stage.replica_workers()
    await wait_until(lambda: set(stage.proxies) == {KEPT})
    assert await message() == ""
    published = await stage.published("system")
    assert set(published["workers"]) >= {KEPT}
    stage.cluster.remove_worker(KEPT)
    await wait_until(lambda: len(stage.proxies) == 1 and KEPT not in stage.proxies)
    assert await message() == (
        f"on a worker of replicas: system_workers ('{KEPT}', 'kept') are not in the cluster"
    )
    joined = stage.cluster.add_worker(resources={"kept": 1.0})
    await wait_until(lambda: set(stage.proxies) == {joined.address})
    assert await message() == ""


# ---- another scheduler


@staged()
async def test_a_controller_hands_over_all_records_of_its_store(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    await stage.endpoint()
    left = await stage.calls.call("hand_over")
    assert left["records"] == await stage.store.load()
    assert left["epoch"] == await stage.store.newest_epoch()
    assert list(left["workers"]) == sorted({info.address for info in stage.cluster.workers()})
