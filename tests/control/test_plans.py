"""Plans: the changes that a configuration would make, and their effects."""

from __future__ import annotations

import itertools
import time
from typing import Any

from control_harness import app_spec, state_of
from scripted_builder import config, instance_config
from tables import each_case

from daskserve.control.declared import plan
from daskserve.control.declared.apply import apply
from daskserve.control.declared.settling import settled
from daskserve.control.records.declared import Origin
from daskserve.control.records.state import State
from daskserve.options.specs import ApplicationSpec

REQUESTS = map(str, itertools.count())


def spec(name: str = "shop", **fields: Any) -> ApplicationSpec:
    """Return an application of two deployments; ``fields`` are those of the ingress, ``d``."""
    route = fields.pop("route", f"/{name}")
    request_id = next(REQUESTS)
    return app_spec(name, {"back": (), "d": ("back",)}, route=route, request_id=request_id, d=fields)


def deployed(*specs: ApplicationSpec) -> State:
    """Return the state after these applications were declared and built."""
    state = state_of()
    declared = instance_config(*(config(each.name, route=each.route) for each in specs))
    options: dict[str, Any] = {"now": 1.0, "new_goal": lambda: next(REQUESTS)}
    applied = apply(state, declared, merges=False, expected=None, request_id="", origin=Origin(), **options)
    state.apply(applied.change)
    built = {each.name: (state.declared.configs[each.name], each) for each in specs}
    state.apply(settled(state, built, {}, **options).change)
    return state


def planned(
    state: State, *specs: ApplicationSpec | str, merges: bool = False, **options: Any
) -> dict[str, Any]:
    """Return the plan of some applications; a string is the reason why ``shop`` cannot be built."""
    built = {"shop" if isinstance(each, str) else each.name: each for each in specs}
    apps = {name: plan.planned(state, name, each) for name, each in built.items()}
    return plan.completed(state, instance_config(*map(config, built), **options), apps, merges=merges)


def test_a_deployed_specification_is_unchanged() -> None:
    found = planned(deployed(spec()), spec())
    assert not found["has_changes"]
    assert found["applications"]["shop"]["action"] == "unchanged"
    assert {name: each["action"] for name, each in found["applications"]["shop"]["deployments"].items()} == {
        "back": "unchanged",
        "d": "unchanged",
    }


def test_of_nested_options_only_those_that_differ_are_shown() -> None:
    before, after = ({"autoscaling_config": {"min_replicas": 1, "max_replicas": most}} for most in (3, 9))
    app = planned(deployed(spec(**before)), spec(**after))["applications"]["shop"]
    (change,) = app["deployments"]["d"]["changes"]
    assert (change["old"], change["new"]) == ({"max_replicas": 3}, {"max_replicas": 9})


@each_case(
    "fields, action, changes",
    [
        ({"version": "2"}, "restarts", [{"option": "code", "effect": "restarts"}]),
        (
            {"num_replicas": 3},
            "scaled",
            [{"option": "num_replicas", "effect": "scaled", "old": 1, "new": 3}],
        ),
        (
            {"user_config": b"new"},
            "reconfigured",
            [{"option": "user_config", "effect": "reconfigured"}],
        ),
        (
            {"actor_options": {"num_cpus": 2.0}},
            "restarts",
            [{"option": "num_cpus", "effect": "restarts", "old": 0.1, "new": 2.0}],
        ),
        (
            {"max_queued_requests": 7, "isolation": "process", "env": '{"variables": {"TOKEN": "secret"}}'},
            "restarts",
            [
                {"option": "env", "effect": "restarts"},
                {"option": "max_queued_requests", "effect": "at once", "old": 1000, "new": 7},
                {"option": "isolation", "effect": "restarts", "old": "thread", "new": "process"},
            ],
        ),
    ],
)
def test_each_change_of_a_deployment_says_what_it_does_to_its_replicas(
    fields: dict[str, Any], action: str, changes: list[dict[str, Any]]
) -> None:
    app = planned(deployed(spec()), spec(**fields))["applications"]["shop"]
    assert (app["action"], app["deployments"]["back"]["action"]) == ("changed", "unchanged")
    assert app["deployments"]["d"]["action"] == action
    found = sorted(app["deployments"]["d"]["changes"], key=lambda each: each["option"])
    assert found == sorted(changes, key=lambda each: each["option"])
    assert "secret" not in str(found)


def test_applications_and_deployments_that_are_new_or_go_and_a_route_that_moves() -> None:
    state = deployed(spec("shop"), spec("mail"))
    without_back = app_spec("shop", {"d": ()}, route="/elsewhere", request_id=next(REQUESTS))
    found = planned(state, without_back, spec("news"), target_capacity=50.0)
    apps = found["applications"]
    assert {name: each["action"] for name, each in apps.items()} == {
        "shop": "changed",
        "news": "new",
        "mail": "deleted",
    }
    assert apps["shop"]["route"] == ["/shop", "/elsewhere"]
    assert apps["shop"]["deployments"]["back"]["action"] == "goes"
    assert apps["mail"]["deployments"]["d"]["action"] == "goes"
    assert found["options"] == [{"option": "target_capacity", "old": None, "new": 50.0}]
    merged = planned(state, spec("news"), merges=True)
    assert (list(merged["applications"]), merged["options"]) == (["news"], [])


def test_a_failed_build_or_deploy_is_a_fault_and_no_change() -> None:
    state = deployed(spec())
    found = planned(state, "it is broken")
    assert (found["has_changes"], found["has_faults"]) == (False, True)
    assert found["applications"]["shop"] == {"action": "failed", "message": "it is broken", "deployments": {}}


def test_the_plan_of_a_thousand_applications_takes_less_than_a_second() -> None:
    names = [f"app-{number}" for number in range(1000)]
    state = deployed(*map(spec, names))
    wanted = [spec(name, version="2") for name in names]
    began = time.process_time()
    found = planned(state, *wanted)
    assert time.process_time() - began < 1.0
    assert {each["action"] for each in found["applications"].values()} == {"changed"}
