"""Autoscaling in a controller: loads arrive, targets are recorded, and replicas follow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from control_harness import backend
from controller_harness import ScriptedReplica, Stage, play, staged
from scaler_harness import Desk, attended

from daskserve.autoscaling import AutoscalingContext
from daskserve.client.views.explanation import Explanation
from daskserve.common.clock import LoopClock
from daskserve.control.observed.loads import STALE_S
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.control.scaling import policy_calls
from daskserve.control.scaling.recorded import carried_over
from daskserve.control.scaling.scaler import PENDING_S, Scaler
from daskserve.errors import BadRequestError, NotFoundError, ReplicaStartError
from daskserve.payload.pickling import dump_bytes
from daskserve.testing import run_virtual, wait_until

#: Short intervals and delays, so that a test sees every step.
QUICK: Mapping[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 1,
    "upscale_delay_s": 2.0,
    "downscale_delay_s": 5.0,
    "look_back_period_s": 5.0,
}


def test_a_decision_stands_until_it_is_applied_or_has_waited_for_long() -> None:
    async def scene(desk: Desk) -> None:
        desk.put("classic", target_ongoing_requests=1)
        desk.request_waits()
        await wait_until(lambda: desk.wants() == 7)
        first, enqueued = desk.decided(), desk.enqueued
        await asyncio.sleep(PENDING_S - 1)
        assert desk.decided() is first
        assert desk.enqueued > enqueued, "the decision is queued again"
        await asyncio.sleep(2)
        assert desk.decided().at >= first.at + PENDING_S

    run_virtual(attended, scene)


async def explained(stage: Stage, tag: str = "b") -> Explanation:
    return Explanation.of(await stage.call("explain", name=tag))


def recorded(stage: Stage, tag: str = "b") -> BackendRecord:
    record = stage.stored("backend")[f"backend/{tag}"]
    assert isinstance(record, BackendRecord)
    return record


async def report(stage: Stage, waiting: int, in_flight: int = 0, router: str = "r") -> None:
    await stage.call("report_load", router=router, loads={"b": [waiting, in_flight]})


async def load(stage: Stage, waiting: int, in_flight: int = 0, *, seconds: float) -> None:
    """Report the same load every second for some time."""
    for _ in range(int(seconds)):
        await report(stage, waiting, in_flight)
        await stage.clock.sleep(1.0)


def count(stage: Stage) -> int:
    return len(stage.running_of("b"))


@staged()
async def test_a_backend_at_zero_is_healthy_and_starts_as_soon_as_a_request_waits(stage: Stage) -> None:
    await stage.create(autoscaling_config=QUICK)
    await stage.clock.sleep(20.5)
    assert count(stage) == 0
    status = (await stage.call("status"))["backends"]["b"]
    assert (status["status"], status["wanted"]) == ("HEALTHY", 0)
    asked_at = stage.clock.now()
    await report(stage, 3)
    await stage.until(lambda: count(stage) >= 1)
    assert stage.clock.now() - asked_at < stage.start_s + 0.05


@staged()
async def test_a_burst_at_zero_starts_all_its_replicas_before_the_first_one_runs(stage: Stage) -> None:
    """The first report shows only one request. Others follow while the first decision is applied."""
    await stage.create(autoscaling_config={**QUICK, "upscale_delay_s": 600.0})
    await stage.clock.sleep(20.5)
    stage.start_s = 2.0
    for waiting in (1, 2, 4):
        await report(stage, waiting)
        await stage.clock.sleep(0.001)
    await stage.until(lambda: recorded(stage).scaled_to == 4, timeout_s=0.2)
    await stage.until(lambda: len(stage.started) == 4, timeout_s=0.1)
    assert not stage.running


@staged(workers=4)
async def test_the_target_and_its_reason_outlive_the_controller(stage: Stage) -> None:
    await stage.create(autoscaling_config={**QUICK, "downscale_delay_s": 600.0})
    await load(stage, 4, seconds=10)
    await stage.until(lambda: count(stage) == 4)
    before = recorded(stage)
    assert before.scaled_to == 4
    await stage.crash_controller()
    await stage.until(lambda: count(stage) == 4)
    await load(stage, 0, 4, seconds=10)
    after = recorded(stage)
    assert (after.scaled_to, after.scalings) == (4, before.scalings)
    assert [event.after for event in (await explained(stage)).events] == [4]


@staged()
async def test_the_last_report_of_a_lost_router_does_not_keep_replicas(stage: Stage) -> None:
    await stage.create(autoscaling_config=QUICK)
    await load(stage, 4, seconds=8)
    await stage.until(lambda: count(stage) == 4)
    gone_at = stage.clock.now()
    await stage.until(lambda: not stage.running)
    # Down to 1 after the delay, and to 0 after another delay.
    assert 5.0 <= stage.clock.now() - gone_at <= STALE_S + 3 * 5.0 + 3.0
    assert recorded(stage).scaled_to == 0
    assert (await explained(stage)).samples[-1].queued == 0


@staged()
async def test_new_bounds_apply_at_once(stage: Stage) -> None:
    await stage.create(autoscaling_config={**QUICK, "min_replicas": 1})
    assert count(stage) == 1
    await stage.update(autoscaling_config={**QUICK, "min_replicas": 3})
    assert count(stage) == 3
    await stage.update(autoscaling_config={**QUICK, "min_replicas": 1, "max_replicas": 2})
    await stage.until(lambda: count(stage) == 2)
    assert "allowed now" in (await explained(stage)).events[-1].reason
    await stage.update(autoscaling_config=None, num_replicas=4)
    assert count(stage) == 4
    assert recorded(stage).scaled_to is None
    await stage.update(autoscaling_config=QUICK)
    assert recorded(stage).scaled_to == 4


@staged()
async def test_a_fixed_number_together_with_autoscaling_is_refused(stage: Stage) -> None:
    await stage.create(autoscaling_config=QUICK)
    with pytest.raises(BadRequestError, match="num_replicas=2 cannot be combined with autoscaling_config"):
        await stage.update(num_replicas=2)


@staged()
async def test_an_explanation_shows_the_options_that_apply(stage: Stage) -> None:
    def shown(found: Any) -> tuple[Any, ...]:
        bounds = found.min_replicas, found.max_replicas
        return found.wanted, found.policy_wants, *bounds, found.policy, found.is_dry_run, found.is_external

    await stage.create(num_replicas=2)
    assert shown(await explained(stage)) == (2, None, None, None, "", False, False)
    await stage.update(num_replicas=None, autoscaling_config={**QUICK, "min_replicas": 1})
    await load(stage, 4, seconds=10)
    assert shown(await explained(stage)) == (4, 4, 1, 4, "target_ongoing_requests", False, False)
    await stage.update(autoscaling_config=None, num_replicas=1, external_scaler_enabled=True)
    assert shown(await explained(stage)) == (1, None, None, None, "", False, True)


@staged()
async def test_a_dry_run_only_reports(stage: Stage) -> None:
    await stage.create(num_replicas=1, autoscaling_config={**QUICK, "dry_run": True})
    await load(stage, 4, seconds=10)
    assert count(stage) == 1
    explanation = await explained(stage)
    assert (explanation.wanted, explanation.policy_wants, explanation.is_dry_run) == (1, 4, True)
    assert "dry run" in str(explanation)


@staged()
async def test_enabling_dry_run_keeps_the_replicas(stage: Stage) -> None:
    await stage.create(autoscaling_config={**QUICK, "min_replicas": 1})
    await load(stage, 4, seconds=10)
    await stage.until(lambda: count(stage) == 4)
    await stage.update(autoscaling_config={**QUICK, "min_replicas": 1, "dry_run": True})
    await load(stage, 0, seconds=30)
    assert count(stage) == 4
    explanation = await explained(stage)
    assert (explanation.wanted, explanation.policy_wants, explanation.is_dry_run) == (4, 1, True)
    await stage.update(num_replicas=2)
    await stage.until(lambda: count(stage) == 2)


def two_and_the_load(context: AutoscalingContext) -> int:
    return 2 + int(context.samples[-1].queued)


async def patient(context: AutoscalingContext) -> int:
    return 3


def broken(context: AutoscalingContext) -> int:
    raise RuntimeError("no idea")


@pytest.mark.parametrize(("policy", "expected"), [(two_and_the_load, 3), (patient, 3), (broken, 1)])
def test_a_user_function_decides(policy: Any, expected: int) -> None:
    config = {**QUICK, "min_replicas": 1, "upscale_delay_s": 0.0, "policy": dump_bytes(policy)}

    async def scenario(stage: Stage) -> None:
        await stage.create(autoscaling_config=config)
        await load(stage, 1, seconds=5)
        await stage.until(lambda: count(stage) == expected)
        explanation = await explained(stage)
        assert explanation.wanted == expected
        assert ("no idea" in explanation.reason) == (policy is broken)

    play(scenario)


@staged()
async def test_custom_metrics_of_replicas_decide(stage: Stage) -> None:
    def report_value(value: float) -> None:
        for each in stage.running_of("b"):
            metrics = {"ongoing": 0, "ended": 0, "custom": {"tokens": value}}
            each.metrics = lambda metrics=metrics: metrics  # type: ignore[attr-defined]

    kwargs = {"metric": "tokens", "target": 10}
    config = {**QUICK, "min_replicas": 1, "policy": "custom_metric", "policy_kwargs": kwargs}
    await stage.create(autoscaling_config=config)
    await stage.clock.sleep(5.0)
    assert "none of 1 replica reports tokens" in (await explained(stage)).reason
    report_value(25.0)
    await stage.until(lambda: count(stage) == 3)
    report_value(1.0)
    await stage.until(lambda: count(stage) == 1)


@staged()
async def test_a_policy_that_does_not_load_keeps_the_number_and_is_reported(stage: Stage) -> None:
    config = {**QUICK, "min_replicas": 1, "policy": "no_such_module:decide"}
    await stage.create(autoscaling_config=config)
    await load(stage, 4, seconds=5)
    assert count(stage) == 1
    assert "no_such_module" in (await explained(stage)).reason
    await stage.update(autoscaling_config={**config, "policy": "target_ongoing_requests"})
    await load(stage, 4, seconds=5)
    assert count(stage) == 4


@staged()
async def test_a_rollout_completes_although_the_load_needs_more_replicas_than_fit(stage: Stage) -> None:
    config = {**QUICK, "min_replicas": 1, "max_replicas": 20}
    options = {"num_cpus": 4}
    await stage.create("b", autoscaling_config=config, actor_options=options)
    await load(stage, 20, seconds=6)
    await stage.until(lambda: count(stage) == 3)
    explanation = await explained(stage)
    assert explanation.running == 3
    assert explanation.wanted > 10
    assert "CPU" in explanation.waiting
    assert stage.cluster.reported.waiting_workers == explanation.wanted - 3
    await stage.update(user_config=b"other")
    assert {each.user_config for each in stage.running_of("b")} == {b"other"}


@staged()
async def test_a_failed_change_is_rolled_back_and_the_number_is_kept(stage: Stage) -> None:
    async def refuse_late(replica: ScriptedReplica) -> None:
        await stage.clock.sleep(8.0)
        raise ReplicaStartError("it does not like it", user_traceback="Traceback ...")

    await stage.create(autoscaling_config={**QUICK, "min_replicas": 1})
    stage.reconfigure = refuse_late
    change = asyncio.create_task(stage.update(user_config=b"bad"))
    await load(stage, 4, seconds=6)
    assert recorded(stage).scaled_to == 4
    with pytest.raises(ReplicaStartError, match="does not like it"):
        await change
    assert (recorded(stage).scaled_to, recorded(stage).user_config) == (4, None)
    assert recorded(stage).scalings[-1][2] == 4


@staged()
async def test_a_backend_that_cannot_start_from_zero_is_not_healthy(stage: Stage) -> None:
    async def fail(replica: ScriptedReplica) -> None:
        raise RuntimeError("no weights")

    await stage.create(autoscaling_config=QUICK)
    stage.start = fail
    await load(stage, 1, seconds=3)
    status = (await stage.call("status"))["backends"]["b"]
    assert status["status"] == "UNHEALTHY"
    assert "no weights" in (await explained(stage)).waiting


@staged()
async def test_explain_reports_unknown_and_not_autoscaled_backends(stage: Stage) -> None:
    await stage.create(num_replicas=2)
    explanation = await explained(stage)
    assert (explanation.running, explanation.wanted, explanation.policy) == (2, 2, "")
    assert "There is no autoscaling" in str(explanation)
    with pytest.raises(NotFoundError, match="there are: b"):
        await stage.call("explain", name="c")


@staged()
async def test_only_on_an_adaptive_cluster_scaling_down_empties_workers(stage: Stage) -> None:
    for is_adaptive, expected in ((False, 3), (True, 2)):
        stage.cluster.is_adaptive = is_adaptive
        await stage.create(num_replicas=6, actor_options={"num_cpus": 1})
        assert len(stage.replica_workers()) == 3
        await stage.update(num_replicas=3)
        workers = {each.worker for each in stage.running_of("b")}
        assert len(workers) == expected
        await stage.delete()


class Blocking:
    """A policy that blocks until released; it is pickled by reference, so the test can release it."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[str] = []

    def __call__(self, context: AutoscalingContext) -> int:
        self.begun.append(context.name)
        self.go_on.wait(10)
        return 2

    def __reduce__(self) -> str:
        return "blocking"


blocking = Blocking()


def test_a_blocking_policy_blocks_no_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**QUICK, "min_replicas": 1, "metrics_interval_s": 0.01, "upscale_delay_s": 0.0}
    stuck = backend("stuck", config={"autoscaling_config": {**options, "policy": dump_bytes(blocking)}})
    quick = backend("quick", config={"autoscaling_config": options})
    state, observed = State(), Observed()
    for each in (stuck, quick):
        state.apply({each.key: carried_over(each, None, 0.0)})
    monkeypatch.setattr(policy_calls, "ANSWER_TIMEOUT_S", 0.05)

    async def main() -> None:
        enqueued: list[str] = []
        running = asyncio.create_task(Scaler(state, observed, LoopClock(), enqueue=enqueued.extend).run())
        await wait_until(lambda: "stuck" in observed.scalings and "quick" in observed.scalings)
        assert "has not answered" in observed.scalings["stuck"].reason
        decided_at = observed.scalings["stuck"].at
        await wait_until(lambda: observed.scalings["stuck"].at > decided_at)
        assert blocking.begun == ["stuck"]
        blocking.go_on.set()
        await wait_until(lambda: "stuck" in enqueued)
        assert observed.scalings["stuck"].replicas == 2
        running.cancel()
        await asyncio.wait([running])

    try:
        asyncio.run(main())
    finally:
        blocking.go_on.set()
