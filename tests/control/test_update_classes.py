"""The effect of each option's change on running replicas: none, a reconfiguration, or a replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control_harness import Bench, spec, worker
from tables import each_case

from daskserve.common.types import ReplicaState as S
from daskserve.control.backend.actions import ReconfigureReplica, StartReplica
from daskserve.control.decisions import backends as backend_decisions
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import Effect, effect_of

#: A value other than the default, for each option of a backend.
VALUES: Mapping[str, Any] = {
    "num_replicas": 1,  # the same number, but set
    "logging_config": {"log_level": "DEBUG"},
    "autoscaling_config": {"min_replicas": 1, "max_replicas": 3},
    "external_scaler_enabled": True,
    "max_batch_size": 3,
    "batch_wait_timeout": 1.0,
    "max_ongoing_requests": 3,
    "max_queued_requests": 7,
    "max_crash_retries": 2,
    "max_body_bytes": 5,
    "max_surge": 2,
    "max_unavailable": 1,
    "rollout": {"steps": ["50%"]},
    "max_replicas_per_node": 2,
    "placement": "PACK",
    "rebalance_after_s": None,
    "gang_scheduling_config": {"gang_size": 1},
    "placement_group_bundles": [{"CPU": 1}],
    "placement_group_strategy": "SPREAD",
    "max_constructor_retry_count": 2,
    "start_timeout_s": 3.0,
    "experimental_graceful_shutdown_wait_loop_s": 3.0,
    "experimental_graceful_shutdown_timeout_s": 3.0,
    "liveness": None,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 1.0,
    "health_check_threshold": 1,
    "model_repository": {"url": "/models"},
    "payload_logging": {"sink": "/payloads"},
    "request_router_config": {"request_router_class": "RoundRobin"},
    "priority_config": {"header": "x-priority"},
    "hedging_config": {"budget": 0.02},
    "dask_task_config": {"priority": 2},
    "method_header": True,
    "on_disconnect": "cancel",
    "event_loop": "worker",
    "run_sync_in_threadpool": False,
    "isolation": "process",
}
#: The other options that an option needs.
NEEDED: Mapping[str, Any] = {"placement_group_strategy": {"placement_group_bundles": [{"CPU": 1}]}}
#: The update class of each option in today's Ray Serve, if it has the option, by daskserve's name.
RAY = {
    Effect.AT_ONCE: ("num_replicas", "max_queued_requests", "max_unavailable", "max_surge"),
    Effect.REPLACES: (
        "max_replicas_per_node",
        "gang_scheduling_config",
        "placement_group_bundles",
        "placement_group_strategy",
    ),
}


def effect(before: Mapping[str, Any], after: Mapping[str, Any]) -> Effect:
    """Deploy one version with two configs; return the effect of the second config on the replica."""
    bench = Bench([worker(1)])
    bench.deploy(version="1", **before)
    bench.settle()
    tags, started, reconfigured = bench.tags(S.RUNNING), False, False
    bench.deploy(version="1", **after)
    for _ in range(10):
        actions = bench.step().actions
        started |= any(isinstance(each, StartReplica) for each in actions)
        reconfigured |= any(isinstance(each, ReconfigureReplica) for each in actions)
        for action in actions:
            bench.succeed(action)
    assert started == (bench.tags(S.RUNNING) != tags)
    assert not (started and reconfigured)
    return Effect.REPLACES if started else Effect.RECONFIGURES if reconfigured else Effect.AT_ONCE


def test_every_option_is_in_the_table() -> None:
    assert VALUES.keys() == BackendConfig.model_fields.keys() - {"user_config", "internal_metadata"}


@each_case("name", VALUES)
def test_a_changed_option_acts_as_its_field_says(name: str) -> None:
    expected = effect_of(BackendConfig.model_fields[name])
    before = NEEDED.get(name, {})
    after = {**before, name: VALUES[name]}
    assert effect(before, after) is expected
    assert effect(after, before) is expected


@each_case("name", VALUES)
def test_the_same_option_again_changes_nothing(name: str) -> None:
    bench = Bench([worker(1)])
    options = {**NEEDED.get(name, {}), name: VALUES[name]}
    bench.deploy(version="1", **options)
    bench.settle()
    again = spec(version="1", request_id="another", **options)
    outcome = backend_decisions.deploy(bench.state, again, goal_id="another", now=0.0)
    assert (outcome.change, outcome.goal) == ({}, None)


@each_case(("expected", "name"), [(each, name) for each, names in RAY.items() for name in names])
def test_the_classes_are_those_of_ray_serve(expected: Effect, name: str) -> None:
    assert effect_of(BackendConfig.model_fields[name]) is expected


def test_another_user_config_reconfigures_and_other_resources_replace() -> None:
    assert effect({"user_config": b"one"}, {"user_config": b"two"}) is Effect.RECONFIGURES
    assert effect({}, {"actor_options": {"num_cpus": 1}}) is Effect.REPLACES


def test_more_replicas_leave_the_others_alone() -> None:
    bench = Bench([worker(1)])
    bench.deploy(version="1", num_replicas=2)
    bench.settle()
    tags = bench.tags(S.RUNNING)
    bench.deploy(version="1", num_replicas=3)
    bench.settle()
    assert bench.tags(S.RUNNING)[:2] == tags
