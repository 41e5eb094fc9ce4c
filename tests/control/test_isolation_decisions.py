"""Isolation and environment determine where a backend's replicas run, so they are part of its version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from control_harness import spec
from tables import each_case

from daskserve.control.decisions import backends as decisions
from daskserve.control.decisions.backends import Outcome
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.errors import BadRequestError
from daskserve.options.backend import BackendConfig
from daskserve.options.specs import BackendSpec

PROCESS = BackendConfig(isolation="process")


def isolated(env: str | None = None, **options: Any) -> BackendSpec:
    return replace(spec(version="1", isolation="process", **options), env=env)


def backend_of(outcome: Outcome) -> BackendRecord:
    record = outcome.change["backend/b"]
    assert isinstance(record, BackendRecord)
    return record


def deployed(wanted: BackendSpec) -> State:
    state = State()
    state.apply(decisions.deploy(state, wanted, goal_id="g1", now=0.0).change)
    return state


def test_an_isolated_backend_carries_its_environment() -> None:
    record = backend_of(decisions.create_backend(State(), isolated("/env"), goal_id="g", now=0.0))
    assert record.config.isolation == "process"
    assert record.env == "/env"


def test_a_backend_without_isolation_is_recorded_as_before() -> None:
    record = backend_of(decisions.create_backend(State(), spec(), goal_id="g", now=0.0))
    assert set(record.place_options) == {"demand"}


@each_case("wanted", [spec(version="1"), isolated("/other"), isolated("/env", actor_options={"num_cpus": 1})])
def test_deploying_with_another_isolation_or_environment_replaces_the_replicas(wanted: BackendSpec) -> None:
    state = deployed(isolated("/env"))
    outcome = decisions.deploy(state, replace(wanted, request_id="another call"), goal_id="g2", now=0.0)
    assert backend_of(outcome).version != state.backends["b"].version


def test_deploying_with_the_same_environment_changes_nothing() -> None:
    again = replace(isolated("/env"), request_id="another call")
    assert decisions.deploy(deployed(isolated("/env")), again, goal_id="g2", now=0.0) == Outcome(
        {}, "g1", False
    )


def test_the_isolation_of_running_replicas_cannot_be_changed() -> None:
    state = State()
    state.apply(decisions.create_backend(state, spec(), goal_id="g1", now=0.0).change)
    with pytest.raises(BadRequestError, match="isolation of backend 'b' is 'thread' and cannot be changed"):
        decisions.update_backend_config(
            state, "b", PROCESS, None, sets_user_config=False, goal_id="g2", now=0.0
        )


def test_naming_the_present_isolation_again_is_no_change_of_it() -> None:
    state = State()
    state.apply(decisions.create_backend(state, isolated(), goal_id="g1", now=0.0).change)
    outcome = decisions.update_backend_config(
        state, "b", PROCESS, None, sets_user_config=False, goal_id="g2", now=0.0
    )
    assert outcome == Outcome({}, "g1")
