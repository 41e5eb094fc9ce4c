"""Decisions about backends: their changes and refusals, and that repeating them is safe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from control_harness import backend, endpoint, goal, spec, state_of
from tables import each_case

from daskserve.control.decisions import backends as decisions
from daskserve.control.decisions.backends import Outcome
from daskserve.control.records.records import BackendRecord, Change, CodeRecord
from daskserve.control.records.state import State
from daskserve.errors import AlreadyRegisteredError, BadRequestError, NotFoundError, NotRegisteredError
from daskserve.options.backend import BackendConfig
from daskserve.options.specs import BackendSpec


def backend_of(outcome: Outcome, tag: str = "b") -> BackendRecord:
    record = outcome.change[f"backend/{tag}"]
    assert isinstance(record, BackendRecord)
    return record


def created(wanted: BackendSpec | None = None) -> State:
    """Return a state with one backend whose goal is reached."""
    state = State()
    state.apply(decisions.create_backend(state, wanted or spec(), goal_id="g1", now=0.0).change)
    return settled(state)


def settled(state: State) -> State:
    """Return the state with all goals reached."""
    for record in list(state.backends.values()):
        change: Change = {record.key: replace(record, goal=None)}
        if record.goal is not None:
            change[f"goal/{record.goal}"] = None
        state.apply(change)
    return state


def deploy(state: State, wanted: BackendSpec, goal_id: str = "g2") -> Outcome:
    """Deploy in a separate call."""
    return decisions.deploy(state, replace(wanted, request_id=goal_id), goal_id=goal_id, now=0.0)


def deployed(*wishes: BackendSpec) -> State:
    state = State()
    for number, wanted in enumerate(wishes):
        state.apply(deploy(state, wanted, f"d{number}").change)
        settled(state)
    return state


# ---- create_backend


def test_creating_writes_the_backend_its_code_and_a_goal() -> None:
    outcome = decisions.create_backend(State(), spec(num_replicas=2, version="7"), goal_id="g1", now=0.0)
    assert set(outcome.change) == {"backend/b", "code/b@7", "goal/g1"}
    assert outcome.change["code/b@7"] == CodeRecord("b@7", "b", b"code")
    record = backend_of(outcome)
    assert (record.version, record.code_key, record.goal, record.num_replicas) == ("7", "b@7", "g1", 2)
    assert record.place_options == {"demand": {"CPU": 0.1}}
    assert not record.is_deployment


def test_without_a_version_the_code_is_the_version() -> None:
    one, same, other = (
        backend_of(decisions.create_backend(State(), spec(code=code), goal_id="g", now=0.0)).version
        for code in (b"1", b"1", b"2")
    )
    assert one == same != other


def test_concurrency_depends_on_the_callable_unless_it_is_given() -> None:
    def concurrency(**config: Any) -> int:
        wanted = spec(**config)
        return backend_of(
            decisions.create_backend(State(), wanted, goal_id="g", now=0.0)
        ).config.concurrency()

    assert concurrency() == 8
    assert concurrency(internal_metadata={"is_blocking": False}) == 100
    assert concurrency(max_concurrent_queries=3) == 3
    assert concurrency(max_batch_size=16) == 32


def test_a_retried_call_changes_nothing_and_waits_for_the_same_goal() -> None:
    state = State()
    state.apply(decisions.create_backend(state, spec(), goal_id="g1", now=0.0).change)
    assert decisions.create_backend(state, spec(), goal_id="g2", now=0.0) == Outcome({}, "g1")
    settled(state)
    assert decisions.create_backend(state, spec(), goal_id="g3", now=0.0) == Outcome({}, None)


def test_an_invalid_option_is_rejected_when_the_spec_is_read() -> None:
    with pytest.raises(ValueError, match="num_replicas"):
        BackendSpec.from_plain({**spec().to_plain(), "config": {"num_replicas": 0}})


# ---- deploy


def test_the_same_deployment_again_changes_nothing() -> None:
    state = deployed(spec(version="1"))
    assert deploy(state, spec(version="1")) == Outcome({}, None, is_update=False)


def test_the_same_deployment_waits_for_the_goal_that_is_pending() -> None:
    state = State()
    state.apply(deploy(state, spec(version="1"), "g1").change)
    assert deploy(state, spec(version="1"), "g2") == Outcome({}, "g1", is_update=False)


def test_a_retried_deploy_changes_nothing_whatever_its_outcome() -> None:
    state = State()
    wanted = spec(version="2", user_version="2", request_id="mine")
    state.apply(decisions.deploy(state, wanted, goal_id="g1", now=0.0).change)
    assert decisions.deploy(state, wanted, goal_id="g2", now=0.0) == Outcome({}, "g1")
    settled(state)
    retried = replace(wanted, prev_version="1")  # it was so when the call was made
    assert decisions.deploy(state, retried, goal_id="g3", now=0.0) == Outcome({}, None)


@each_case("version", ["__v1__", "Unversioned"])
def test_reserved_versions_are_refused(version: str) -> None:
    with pytest.raises(BadRequestError, match=f"Version '{version}' is reserved"):
        deploy(State(), spec(version=version, user_version=version))


def test_a_deploy_may_depend_on_the_version_before() -> None:
    def versioned(version: str | None, before: str | None = None) -> BackendSpec:
        return spec(version=version, user_version=version, prev_version=before, code=str(version).encode())

    for state in (State(), deployed(versioned(None))):
        with pytest.raises(ValueError, match="no existing deployment"):
            deploy(state, versioned("2", before="1"))
    state = deployed(versioned("1"))
    with pytest.raises(ValueError, match="does not match with the existing version '1'"):
        deploy(state, versioned("2", before="0"))
    assert backend_of(deploy(state, versioned("2", before="1"))).user_version == "2"


def test_another_config_of_the_same_version_keeps_the_version() -> None:
    state = deployed(spec(version="1"))
    outcome = deploy(state, spec(version="1", num_replicas=3))
    assert backend_of(outcome).version == "1"
    assert backend_of(outcome).num_replicas == 3


def test_another_version_has_its_own_code() -> None:
    outcome = deploy(deployed(spec(version="1")), spec(version="2", code=b"new"))
    assert backend_of(outcome).code_key == "b@2"
    assert outcome.change["code/b@2"] == CodeRecord("b@2", "b", b"new")


def test_other_actor_options_are_another_version() -> None:
    state = deployed(spec(version="1"))
    outcome = deploy(state, spec(version="1", actor_options={"num_cpus": 2}))
    assert backend_of(outcome).version != "1"
    assert backend_of(outcome).version.startswith("1")
    assert backend_of(outcome).place_options["demand"] == {"CPU": 2.0}


def test_deploying_other_actor_options_a_second_time_changes_nothing() -> None:
    wider = spec(version="1", actor_options={"num_cpus": 2})
    state = deployed(spec(version="1"), wider)
    assert deploy(state, wider) == Outcome({}, None, is_update=False)


def test_the_order_of_resources_does_not_matter() -> None:
    def wants(*names: str) -> BackendSpec:
        return spec(version="1", actor_options={"resources": dict.fromkeys(names, 1.0)})

    state = deployed(spec(version="1"), wants("a", "b"))
    assert deploy(state, wants("b", "a")) == Outcome({}, None, is_update=False)


def test_back_and_forth_between_actor_options_is_a_new_version_each_time() -> None:
    narrow, wide = spec(version="1"), spec(version="1", actor_options={"num_cpus": 2})
    state = deployed(narrow, wide)
    second = state.backends["b"].version
    outcome = deploy(state, narrow)
    assert backend_of(outcome).version != second
    assert backend_of(outcome).place_options["demand"] == {"CPU": 0.1}


def test_a_deployment_cannot_take_over_a_classic_backend() -> None:
    with pytest.raises(AlreadyRegisteredError, match="a classic backend of that name"):
        deploy(created(), spec(version="2"))


# ---- update_backend_config


def update(state: State, config: dict[str, Any], **fields: Any) -> Outcome:
    defaults: dict[str, Any] = {"user_config": None, "sets_user_config": False}
    return decisions.update_backend_config(
        state, "b", BackendConfig(**config), **{**defaults, **fields}, goal_id="g2", now=0.0
    )


def test_only_the_given_options_change() -> None:
    state = created(spec(num_replicas=2, max_queued_requests=5, user_config=b"kept"))
    record = backend_of(update(state, {"num_replicas": 3}))
    assert record.config.num_replicas == 3
    assert record.config.max_queued_requests == 5
    assert record.user_config == b"kept"


def test_the_user_config_changes_only_if_it_is_given() -> None:
    state = created(spec(user_config=b"old"))
    assert backend_of(update(state, {}, user_config=b"new", sets_user_config=True)).user_config == b"new"
    assert backend_of(update(state, {}, user_config=None, sets_user_config=True)).user_config is None


@each_case(
    ("policy", "arguments", "match"),
    [
        ("schedule", {"schedule": {"99 * * * *": 1}}, "'99 \\* \\* \\* \\*' is not a cron expression"),
        ("schedule", {"schedule": {"0 8 * * *": 1}, "timezone": "Nowhere"}, "timezone is 'Nowhere'"),
        ("schedule", {"schedule": {"0 8 * * *": 1}, "policy": "latency"}, "missing a required argument"),
        ("latency", {"objective_s": -1}, "objective_s is -1"),
        ("latency", {"objective_s": "1"}, "not supported"),
        ("classic", {"target": 1}, "does not accept policy_kwargs"),
    ],
)
def test_arguments_that_a_built_in_policy_does_not_accept_are_refused(
    policy: str, arguments: dict[str, Any], match: str
) -> None:
    config = {"max_replicas": 3, "policy": policy, "policy_kwargs": arguments}
    with pytest.raises(BadRequestError, match=f"autoscaling_config of backend 'b' cannot be used: .*{match}"):
        created(spec(autoscaling_config=config))
    with pytest.raises(BadRequestError, match=f"autoscaling_config of backend 'b' cannot be used: .*{match}"):
        update(created(), {"autoscaling_config": config, "num_replicas": None})


def test_an_update_with_equal_options_changes_nothing() -> None:
    assert update(created(spec(num_replicas=2)), {"num_replicas": 2}) == Outcome({}, None)


@each_case(
    ("config", "is_sent"),
    [
        ({"num_replicas": 3}, False),
        ({"max_queued_requests": 3}, False),
        ({"experimental_graceful_shutdown_timeout_s": 3}, False),
        ({"max_concurrent_queries": 3}, True),
        ({"max_batch_size": 3}, True),
        ({"batch_wait_timeout": 3}, True),
    ],
)
def test_only_options_that_concern_replicas_reconfigure_them(config: dict[str, Any], is_sent: bool) -> None:
    state = created()
    before = state.backends["b"].config_id
    assert (backend_of(update(state, config)).config_id != before) == is_sent


def test_a_new_user_config_reconfigures_the_replicas() -> None:
    state = created()
    outcome = update(state, {}, user_config=b"new", sets_user_config=True)
    assert backend_of(outcome).config_id != state.backends["b"].config_id


@each_case("state", [State(), state_of(backend(is_deleting=True))])
def test_an_unknown_backend_cannot_be_updated(state: State) -> None:
    with pytest.raises(
        NotRegisteredError, match=r"^Backend b is not registered\. Registered backends: none\.$"
    ):
        update(state, {"num_replicas": 2})


# ---- delete_backend


def delete(state: State, *, is_forced: bool = False) -> Outcome:
    return decisions.delete_backend(state, "b", is_forced=is_forced, goal_id="g2")


def test_deleting_marks_the_backend() -> None:
    record = backend_of(delete(created(spec(num_replicas=3))))
    assert record.is_deleting
    assert not record.is_forced
    assert record.num_replicas == 0
    assert record.goal == "g2"


@each_case("used", [{"traffic": {"b": 1.0}}, {"traffic": {"x": 1.0}, "shadows": {"b": 0.1}}])
def test_a_backend_in_use_cannot_be_deleted(used: dict[str, Any]) -> None:
    state = state_of(backend(), endpoint("e2", "/2", **used), endpoint("e1", "/1", **used))
    words = r"^Backend 'b' is used by endpoint 'e1', 'e2' and cannot be deleted\."
    with pytest.raises(BadRequestError, match=words):
        delete(state)


def test_deleting_an_unknown_backend_changes_nothing() -> None:
    assert delete(State()) == Outcome({}, None)


def test_deleting_twice_waits_for_the_first_unless_the_second_is_forced() -> None:
    state = state_of(backend(is_deleting=True, goal="g1"), goal("g1"))
    assert delete(state) == Outcome({}, "g1")
    forced = delete(state, is_forced=True)
    assert backend_of(forced).is_forced
    state.apply(forced.change)
    assert delete(state, is_forced=True) == Outcome({}, "g2")
    assert delete(state) == Outcome({}, "g2")


# ---- looking


def test_the_plain_values_of_a_backend_restore_its_config() -> None:
    wanted = spec(num_replicas=2, max_batch_size=4, user_config=b"pickled")
    description = decisions.describe(created(wanted), "b")
    assert description["user_config"] == b"pickled"
    config = BackendConfig(**description["config"])
    assert (config.num_replicas, config.max_batch_size) == (2, 4)


def test_the_error_for_an_unknown_backend_lists_the_registered_ones() -> None:
    state = state_of(backend("z"), backend("a"), backend("gone", is_deleting=True))
    with pytest.raises(NotRegisteredError, match="Registered backends: a, z"):
        decisions.get(state, "b")


def test_the_plain_values_of_an_endpoint() -> None:
    state = state_of(endpoint(shadows={"s": 0.5}))
    assert decisions.get_endpoint(state, "e") == {
        "route": "/e",
        "methods": ["GET"],
        "traffic": {"b": 1.0},
        "shadows": {"s": 0.5},
        "python_methods": [],
        "is_legacy": True,
    }
    with pytest.raises(NotFoundError, match=r"^Endpoint 'x' does not exist\.$"):
        decisions.get_endpoint(state, "x")
