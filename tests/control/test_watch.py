"""Watching the workers: polling finds changes for which no event arrives."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest
from controller_harness import ScriptedReplica, Stage, staged

from daskserve.cluster.protocols.base import ANSWER_S, EPOCH_BITS, ActorSpec, TaskRequest
from daskserve.common.types import ActorKind, Envelope, EnvelopeKind, Load, Location, nothing_to_receive
from daskserve.control.observed.watch import FOLLOW_S, MISSES, PERIOD_S, RESTART_RETRY_S, SWEEP_S
from daskserve.data.caller.calls.handle import routers_of
from daskserve.errors import ActorLostError, NotRunningError, StaleEpochError, UnavailableError
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ProxyStart
from daskserve.testing import run_virtual

#: The time after which a hanging worker is known to hang.
NOTICED_S = MISSES * max(PERIOD_S, ANSWER_S) + 2 * PERIOD_S


async def not_on_the_controllers_worker(stage: Stage) -> ScriptedReplica:
    controller = await stage.cluster.program.controller()
    return next(each for each in stage.running.values() if each.worker != controller.worker)


@staged()
async def test_a_replica_that_vanished_is_replaced_by_a_new_one(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    entries = stage.cluster._hosts[victim.worker].registry.entries
    del entries[f"local/replica/{victim.tag}"], stage.running[victim.tag]
    await stage.clock.sleep(2 * PERIOD_S)
    # The replica may still exist, so its replacement has a new name.
    assert stage.started.count(victim.tag) == 1
    assert len(stage.started) == 3
    assert len(stage.running_of("b")) == 2
    published = await stage.published("backend/b")
    assert victim.tag not in {tag for tag, _, _ in published["replicas"]}


@staged()
async def test_a_replica_that_is_unwell_is_replaced(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    victim.health = lambda: {"is_healthy": False, "detail": "its probe failed"}  # type: ignore[attr-defined]
    await stage.until(lambda: (victim.tag, 0.0) in stage.stopped, timeout_s=2 * PERIOD_S)
    await stage.until(lambda: len(stage.running_of("b")) == 2, timeout_s=1)
    assert victim.tag not in stage.running


@staged()
async def test_a_replica_whose_own_process_got_sigterm_is_replaced_first(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    victim.health = lambda: {"is_leaving": True}  # type: ignore[attr-defined]
    await stage.until(lambda: victim.tag in dict(stage.stopped), timeout_s=2 * PERIOD_S)
    assert (len(stage.started), dict(stage.stopped)[victim.tag] > 0) == (3, True)
    assert len(stage.running_of("b")) == 2


@staged()
async def test_a_replica_that_loads_models_is_polled_until_it_has_them(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    replica = await not_on_the_controllers_worker(stage)
    states = iter(["queued", "loading", "loaded"])
    looks: list[float] = []

    def health() -> dict[str, Any]:
        looks.append(stage.clock.now())
        return {"multiplexed": {"models": {"m": next(states, "loaded")}, "count": 1, "capacity": 3}}

    await stage.clock.sleep(1.5 * PERIOD_S)
    replica.health = health  # type: ignore[attr-defined]
    program = stage.cluster.program
    await program.call(await program.controller(), "note_loading", replicas=[replica.tag, "b#gone"])
    await stage.clock.sleep(5 * FOLLOW_S)
    assert len(looks) == 3
    assert looks[-1] - looks[0] <= 3 * FOLLOW_S < PERIOD_S / 2
    assert (await stage.published("models/b"))[replica.tag]["loaded"] == ("m",)
    await stage.delete("b")
    assert await stage.published("models/b") is None, "nothing else has changed since then"


@staged()
async def test_only_replicas_of_autoscaled_backends_are_asked_for_metrics(stage: Stage) -> None:
    asked: list[str] = []

    def note(replica: ScriptedReplica) -> dict[str, Any]:
        asked.append(replica.tag)
        return {"ongoing": 0, "ended": 0, "custom": {"tokens": 2.0}}

    await stage.create("plain", num_replicas=2)
    await stage.create("b", autoscaling_config={"min_replicas": 2, "max_replicas": 3})
    for each in stage.running.values():
        each.metrics = partial(note, each)  # type: ignore[attr-defined]
    await stage.clock.sleep(3 * PERIOD_S)
    assert set(asked) == {each.tag for each in stage.running_of("b")}


@staged(workers=4)
async def test_replicas_of_a_worker_that_hangs_are_replaced_and_it_is_used_again_when_it_answers(
    stage: Stage,
) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    stage.cluster.suspend_worker(victim.worker)
    await stage.until(
        lambda: sum(each.worker != victim.worker for each in stage.running_of("b")) == 2, timeout_s=NOTICED_S
    )
    published = await stage.published("backend/b")
    assert victim.tag not in {tag for tag, _, _ in published["replicas"]}
    status = await stage.call("status")
    assert list(status["unresponsive_workers"]) == [victim.worker]
    stage.cluster.suspend_worker(victim.worker, is_suspended=False)
    await stage.until(lambda: victim.tag not in stage.running, timeout_s=30)
    await stage.clock.sleep(2 * PERIOD_S)
    assert list((await stage.call("status"))["unresponsive_workers"]) == []
    assert len(stage.running_of("b")) == 2


@staged(http=HTTPOptions(location=Location.HEAD_ONLY), workers=4)
async def test_a_worker_that_hangs_with_a_proxy_is_restarted(stage: Stage) -> None:
    await stage.call("wait_for_http", timeout_s=5)
    (worker,) = stage.proxies
    stage.cluster.suspend_worker(worker)
    await stage.until(lambda: set(stage.proxies) and worker not in stage.proxies, timeout_s=NOTICED_S)
    assert worker not in {each.address for each in stage.cluster.workers()}
    assert len((await stage.call("wait_for_http", timeout_s=5))["urls"]) == 1


@staged(workers=4)
async def test_an_unresponsive_worker_that_leaves_the_cluster_is_forgotten(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    stage.cluster.suspend_worker(victim.worker)
    await stage.until(lambda: len(stage.started) == 3, timeout_s=NOTICED_S)
    stage.cluster.remove_worker(victim.worker)
    await stage.clock.sleep(2 * PERIOD_S)
    assert list((await stage.call("status"))["unresponsive_workers"]) == []


@pytest.mark.parametrize(
    ("outcomes", "attempts"),
    [
        pytest.param([None], 1, id="the worker restarts"),
        pytest.param(
            [UnavailableError("the scheduler is away"), OSError("reset"), None], 3, id="unavailable"
        ),
        pytest.param([StaleEpochError("a newer controller")], 1, id="a newer controller"),
        pytest.param([NotRunningError("no such instance")], 1, id="the instance has ended"),
    ],
)
@staged(http=HTTPOptions(location=Location.HEAD_ONLY), workers=4)
async def test_the_restart_of_a_worker_with_a_proxy_is_repeated_only_while_it_is_unavailable(
    stage: Stage, outcomes: list[Exception | None], attempts: int
) -> None:
    await stage.call("wait_for_http", timeout_s=5)
    (worker,) = stage.proxies
    asked = list[str]()

    async def restart_worker(epoch: int, worker: str) -> None:
        asked.append(worker)
        error = outcomes[min(len(asked), len(outcomes)) - 1]
        if error is not None:
            raise error

    process = stage.cluster.process((await stage.cluster.program.controller()).worker)
    process.restart_worker = restart_worker  # type: ignore[method-assign]
    stage.cluster.suspend_worker(worker)
    await stage.clock.sleep(NOTICED_S + 5 * RESTART_RETRY_S)
    stage.cluster.suspend_worker(worker, is_suspended=False)
    assert asked == [worker] * attempts


@staged(workers=4)
async def test_requests_on_a_worker_that_hangs_are_repeated_or_fail(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    await stage.endpoint()
    victim = await not_on_the_controllers_worker(stage)

    async def answer(replica: ScriptedReplica, *_: Any) -> Load:
        if replica.tag == victim.tag:
            await asyncio.Event().wait()
        return Load()

    def handle(replica: ScriptedReplica, envelope: Envelope) -> TaskRequest:
        return TaskRequest(partial(answer, replica))

    for each in stage.running.values():
        each.handle = partial(handle, each)  # type: ignore[method-assign]
    router = (await routers_of(stage.cluster.program)).router("e")
    await router.wait_until_known()

    async def send(method: str) -> int:
        head = {"type": "http", "method": method}
        envelope = Envelope(EnvelopeKind.HTTP, head, has_body=False)
        try:
            await router.send(envelope, nothing_to_receive, nothing_to_receive)
        except ActorLostError as error:
            return error.http_status
        return 200

    sent = {method: [asyncio.create_task(send(method)) for _ in range(8)] for method in ("GET", "POST")}
    await stage.clock.sleep(0.5)
    under_way = {method: sum(not each.done() for each in tasks) for method, tasks in sent.items()}
    assert min(under_way.values()) > 0, "chance would have it otherwise"
    stage.cluster.suspend_worker(victim.worker)
    began = stage.clock.now()
    await asyncio.wait([each for tasks in sent.values() for each in tasks], timeout=NOTICED_S)
    took_s = stage.clock.now() - began
    stage.cluster.suspend_worker(victim.worker, is_suspended=False)
    found = {
        method: Counter(each.result() if each.done() else 0 for each in tasks)
        for method, tasks in sent.items()
    }
    assert found == {"GET": {200: 8}, "POST": {200: 8 - under_way["POST"], 502: under_way["POST"]}}
    assert took_s < NOTICED_S


@staged()
async def test_a_worker_that_only_the_scheduler_reaches_is_no_worker_that_hangs(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    other = await not_on_the_controllers_worker(stage)
    controller = await stage.cluster.program.controller()
    process = stage.cluster.process(controller.worker)

    async def hear_nothing(*_: Any) -> Load:
        await asyncio.Event().wait()
        raise AssertionError

    def reach_nobody(*_: Any) -> TaskRequest:
        return TaskRequest(hear_nothing)

    reach, process.channels.request = process.channels.request, reach_nobody  # type: ignore
    await stage.clock.sleep(2 * NOTICED_S)
    assert len(stage.started) == 2
    status = await stage.call("status")
    assert list(status["unresponsive_workers"]) == []
    process.channels.request = reach  # type: ignore[method-assign]

    # Once the controller's process has noticed it, too, it connects through the scheduler.
    stage.cluster.network.cut(controller.worker, other.worker)
    await stage.clock.sleep(2 * PERIOD_S)
    status = await stage.call("status")
    assert status["broken_routes"] == {controller.worker: {other.worker: "scheduler"}}
    stage.cluster.network.mend(controller.worker, other.worker)
    await stage.clock.sleep(60)
    assert (await stage.call("status"))["broken_routes"] == {}
    assert len(stage.started) == 2


@staged(workers=4)
async def test_a_worker_that_another_one_cannot_reach_is_in_the_status(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    one, other = sorted(each.worker for each in stage.running.values())
    await stage.cluster.process(one).channels.connect(other)
    stage.cluster.network.cut(one, other)
    await stage.cluster.process(one).channels.connect(other)
    await stage.clock.sleep(2 * PERIOD_S)
    found = (await stage.call("status"))["broken_routes"]
    assert found[one] == {other: "scheduler"}
    stage.cluster.remove_worker(other)
    await stage.clock.sleep(2 * PERIOD_S)
    assert one not in (await stage.call("status"))["broken_routes"]


@staged(workers=3)
async def test_a_worker_on_which_the_supervisor_has_lost_a_controller_is_noticed_at_once(
    stage: Stage,
) -> None:
    await stage.create(num_replicas=2)
    controller = (await stage.cluster.program.controller()).worker
    victim = next(each for each in stage.running_of() if each.worker != controller)
    stage.cluster.change_worker(victim.worker, is_suspect=True)
    await stage.clock.sleep(60)  # the controller has read the list of workers again
    assert victim.tag in stage.running, "it answers"
    stage.cluster.suspend_worker(victim.worker)
    began = stage.clock.now()
    await stage.until(lambda: len(stage.started) == 3, timeout_s=NOTICED_S)
    assert stage.clock.now() - began < PERIOD_S + ANSWER_S + 0.1
    stage.cluster.suspend_worker(victim.worker, is_suspended=False)


@staged()
async def test_a_short_silence_is_forgiven(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    for _ in range(4):
        stage.cluster.suspend_worker(victim.worker)
        await stage.clock.sleep(ANSWER_S * 1.2)
        stage.cluster.suspend_worker(victim.worker, is_suspended=False)
        await stage.clock.sleep(2 * PERIOD_S)
    assert len(stage.started) == 2


@staged()
async def test_actors_without_a_record_are_stopped(stage: Stage) -> None:
    await stage.create()
    known = set(stage.cluster.actors())
    payload = ProxyStart(
        HTTPOptions(port=0), None, False, True, False, "127.0.0.1", tracing={}, logging=None
    ).encode()
    for info in stage.cluster.workers():
        orphan = ActorSpec(ActorKind.PROXY, "local/proxy/orphan", 1, "local", payload)
        await stage.cluster.program.create(orphan, info.address)
    assert set(stage.cluster.actors()) != known
    await stage.clock.sleep(SWEEP_S + 2 * PERIOD_S)
    assert set(stage.cluster.actors()) == known


@staged(workers=4)
async def test_a_replaced_controller_does_not_end_its_successors_actors(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    controller = await stage.cluster.program.controller()
    old = stage.cluster.actor(controller)
    await start_successor(stage)
    assert stage.cluster.actor(controller) is old  # it runs, and does not know that it was replaced
    await stage.update(num_replicas=4)
    stopped = len(stage.stopped)
    await stage.clock.sleep(2 * SWEEP_S)
    assert len(stage.running_of("b")) == 4
    assert len(stage.stopped) == stopped


async def start_successor(stage: Stage) -> None:
    """Start a newer controller on another worker, as if the first one did not answer. Both run."""
    controller = await stage.cluster.program.controller()
    stage.cluster.change_worker(controller.worker, is_retiring=True)
    stage.cluster._controller = None
    stage.cluster._controller_up.clear()
    stage.cluster._replace_controller()
    await stage.until(lambda: stage.cluster._controller is not None)


@staged(workers=3)
async def test_one_late_answer_makes_no_worker_unresponsive_while_the_scheduler_is_away(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    victim = await not_on_the_controllers_worker(stage)
    process = stage.cluster.process((await stage.cluster.program.controller()).worker)
    inspect, asked = process.inspect, list[bool]()

    async def slow_once(worker: str, *, by_scheduler: bool = False, **options: Any) -> Any:
        if worker == victim.worker:
            asked.append(by_scheduler)
            if by_scheduler or len(asked) == 1:
                await asyncio.Event().wait()
        return await inspect(worker, **options)

    process.inspect = slow_once  # type: ignore[method-assign]
    await stage.clock.sleep((MISSES + 2) * PERIOD_S)
    assert asked[:3] == [False, True, False]
    assert stage.stopped == []


@staged(workers=4)
async def test_a_replaced_controller_ends_no_actor_that_its_successor_may_have_adopted(stage: Stage) -> None:
    await stage.create(num_replicas=3)
    first = await stage.cluster.program.controller()

    async def inspect_nothing(worker: str, **options: Any) -> Any:
        await asyncio.Event().wait()

    for info in stage.cluster.workers():
        if info.address != first.worker:
            stage.cluster.process(info.address).inspect = inspect_nothing  # type: ignore[method-assign]
    await start_successor(stage)
    # The first controller started it, and wrote its record just before it was cut off.
    victim = next(each for each in stage.running.values() if each.worker != first.worker)
    payload = ProxyStart(
        HTTPOptions(port=0), None, False, True, False, "127.0.0.1", tracing={}, logging=None
    ).encode()
    incarnation = (first.incarnation << EPOCH_BITS) + 1000
    adopted = ActorSpec(ActorKind.PROXY, "local/proxy/adopted", incarnation, "local", payload)
    await stage.cluster.program.create(adopted, victim.worker)
    await stage.clock.sleep(1.5 * PERIOD_S)
    assert "local/proxy/adopted" in {each.name for each in stage.cluster.actors()}


@staged(workers=3)
async def test_a_draining_replica_keeps_its_grace_if_only_the_connection_to_it_breaks(stage: Stage) -> None:
    await stage.create(num_replicas=4, experimental_graceful_shutdown_timeout_s=20)
    controller = await stage.cluster.program.controller()
    stage.drain_s = 15
    updating = asyncio.create_task(stage.update(num_replicas=2))
    await stage.until(lambda: len(stage.stopped) == 2)
    await stage.clock.sleep(1)
    for info in stage.cluster.workers():
        if info.address != controller.worker:
            stage.cluster.process(controller.worker).channels.drop(info.address)
    await stage.clock.sleep(5 * PERIOD_S)
    assert all(grace_s > 0 for _, grace_s in stage.stopped)
    await updating


# ---- workers that leave in order


@staged(workers=3)
async def test_actors_of_a_retiring_worker_move_before_it_ends(stage: Stage) -> None:
    await stage.create(num_replicas=3)
    await stage.endpoint()
    leaving = (await stage.cluster.program.controller()).worker
    held = {each.tag for each in stage.running.values() if each.worker == leaving}
    if not held:
        leaving = next(iter(stage.running.values())).worker
        held = {each.tag for each in stage.running.values() if each.worker == leaving}
    stage.start_s = 3.0
    fewest = 3
    stage.cluster.retire_worker(leaving)
    for _ in range(200):
        await stage.clock.sleep(0.1)
        fewest = min(fewest, len((await stage.published("backend/b"))["replicas"]))
    assert fewest == 3
    assert all(each.worker != leaving for each in stage.running.values())
    assert {each.worker for each in stage.cluster.actors()}.isdisjoint({leaving})
    assert leaving not in stage.cluster.reported.in_use
    stage.cluster.remove_worker(leaving)
    await stage.clock.sleep(10)
    assert len(stage.running_of("b")) == 3
    assert len(stage.started) == 3 + len(held)


@staged()
async def test_a_controller_on_a_retiring_worker_moves_too(stage: Stage) -> None:
    await stage.create()
    controller = await stage.cluster.program.controller()
    stage.cluster.retire_worker(controller.worker)
    successor = await stage.cluster.program.controller()
    assert successor.worker != controller.worker
    await stage.until(lambda: controller not in stage.cluster.actors())
    await stage.update(num_replicas=2)
    assert len(stage.running) == 2


# ---- everything goes


def test_a_new_cluster_on_an_old_store_brings_everything_back() -> None:
    async def main() -> None:
        first = Stage(http=HTTPOptions(location=Location.EVERY_WORKER))
        async with first.cluster:
            await first.open()
            await first.create(num_replicas=2, user_config=b"kept")
            await first.endpoint()
            await first.deploy("d", "/d", version="1")
        assert first.running == {}
        second = Stage(http=first.http, store=first.store)
        async with second.cluster:
            for info in second.cluster.workers():
                second.cluster.remove_worker(info.address)
            for number in range(3):
                second.cluster.add_worker(address=f"local://new-{number}")
            await second.open()
            await second.until(lambda: len(second.running_of("b")) == 2 and len(second.running_of("d")) == 1)
            assert {each.user_config for each in second.running_of("b")} == {b"kept"}
            assert set(await second.published("routes")) == {"/e", "/d"}
            assert len((await second.call("wait_for_http", timeout_s=5))["urls"]) == 3
            assert second.cluster.epoch == 2
            await second.update(num_replicas=1)

    run_virtual(main)
