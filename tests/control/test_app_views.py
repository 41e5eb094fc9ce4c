"""The status of applications and their deployments."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from control_harness import backend, replica, state_of, worker
from controller_harness import Stage, staged
from tables import each_case

from daskserve.client.views.status import Status
from daskserve.common.types import ReplicaState
from daskserve.control.decisions.target_capacity import set_target_capacity
from daskserve.control.observed.observed import DeadReplica, Notes, Observed
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import AppRecord, BackendRecord, CodeRecord, EndpointRecord, Record
from daskserve.control.views import actors as actor_views
from daskserve.control.views import backends as backend_views
from daskserve.control.views.applications import application_status
from daskserve.errors import ReplicaStartError

APP = AppRecord("x", "/x", {"back": "b", "front": "f"}, deployed_at=7.0)
PROXY = ProxyRecord("p", "w1", "h", 1, 8000)
CODES = tuple(CodeRecord(f"{tag}@{version}", tag, b"") for tag in "bfa" for version in ("v1", "v2"))


def member(tag: str, **fields: Any) -> BackendRecord:
    return backend(tag, application="x", is_deployment=True, **fields)


def status(*records: Record, app: AppRecord = APP, observed: Observed | None = None) -> dict[str, Any]:
    observed = observed or Observed(ready={"b#1": {}, "f#1": {}})
    return application_status(state_of(app, *CODES, *records), observed, app, 100.0)


def word(found: dict[str, Any], name: str = "back") -> tuple[str, str]:
    return found["deployments"][name]["status"], found["deployments"][name]["status_trigger"]


HEALTHY = (member("b"), member("f"), replica("b#1"), replica("f#1"))


def test_an_application_whose_deployments_are_healthy_is_running() -> None:
    found = status(*HEALTHY)
    assert (found["status"], found["message"]) == ("RUNNING", "")
    assert (found["route_prefix"], found["last_deployed_time_s"]) == ("/x", 7.0)
    assert list(found["deployments"]) == ["back", "front"]
    assert word(found) == ("HEALTHY", "CONFIG_UPDATE_COMPLETED")
    assert found["deployments"]["back"]["replica_states"] == {"RUNNING": 1}


def test_an_application_is_as_bad_as_its_worst_deployment() -> None:
    observed = Observed(
        ready={"f#1": {}}, notes={"b": Notes(failures=2, waiting="a replica failed to start")}
    )
    found = status(member("b"), member("f"), replica("f#1"), observed=observed)
    assert (found["status"], found["message"]) == ("UNHEALTHY", "back: a replica failed to start")
    assert word(found) == ("UNHEALTHY", "REPLICA_STARTUP_FAILED")
    assert word(status(member("b"), member("f"))) == ("UNHEALTHY", "HEALTH_CHECK_FAILED")


@each_case(
    ("change", "expected"),
    [("CONFIG_UPDATE", "UPDATING"), ("UPSCALE", "UPSCALING"), ("DOWNSCALE", "DOWNSCALING")],
)
def test_a_change_under_way_and_after_it(change: str, expected: str) -> None:
    wanted = member("b", num_replicas=2, goal="g", last_change=change)
    found = status(wanted, member("f"), replica("b#1"), replica("f#1"))
    assert word(found) == (expected, "CONFIG_UPDATE_STARTED")
    assert found["status"] == "DEPLOYING"
    done = replace(wanted, goal=None)
    found = status(done, member("f"), replica("b#1"), replica("b#2"), replica("f#1"))
    assert word(found) == ("HEALTHY", f"{change}_COMPLETED")


def test_the_autoscaler_does_not_make_a_deploy() -> None:
    config = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 5}}
    scaled = member("b", config=config, scaled_to=2, scalings=((9.0, 1, 2, "load"),), deployed_at=7.0)
    found = status(scaled, member("f"), replica("b#1"), replica("f#1"))
    assert (found["status"], word(found)) == ("RUNNING", ("UPSCALING", "AUTOSCALING"))
    found = status(scaled, member("f"), replica("b#1"), replica("b#2"), replica("f#1"))
    assert word(found) == ("HEALTHY", "UPSCALE_COMPLETED")


def test_lost_replicas_of_an_autoscaled_deployment_are_not_an_upscaling() -> None:
    config = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 5}}
    scaled = member("b", config=config, scaled_to=2, scalings=((9.0, 1, 2, "load"),), deployed_at=7.0)
    for at, expected in ((8.0, ("UPSCALING", "AUTOSCALING")), (10.0, ("UNHEALTHY", "HEALTH_CHECK_FAILED"))):
        observed = Observed(
            notes={"b": Notes(dead=(DeadReplica("b#2", "another replica of its gang was lost", at),))}
        )
        found = status(scaled, member("f"), replica("b#1"), replica("f#1"), observed=observed)
        assert word(found) == expected
        assert backend_views.status_word(observed, scaled, 1) == ("UPDATING" if at < 9 else "UNHEALTHY")
        complete = status(scaled, replica("b#1"), replica("b#2"), observed=observed)
        assert word(complete) == ("HEALTHY", "UPSCALE_COMPLETED")


def test_a_target_capacity_scales_without_a_deploy() -> None:
    for change, percent, word_of_it in (("UPSCALE", None, "UPSCALING"), ("DOWNSCALE", 50, "DOWNSCALING")):
        before = member("b", num_replicas=2, capacity=50 if percent is None else None)
        both = (before, member("f"), replica("b#1"), replica("f#1"))
        more = () if percent is None else (replica("b#2"),)
        change_of = set_target_capacity(state_of(APP, *both, *more), percent, 9.0)
        after = change_of["backend/b"]
        assert (after.version, after.config_id, after.last_change) == (
            before.version,
            before.config_id,
            change,
        )
        found = status(after, member("f"), replica("f#1"), replica("b#1"), *more)
        assert (found["status"], word(found)) == ("DEPLOYING", (word_of_it, "CONFIG_UPDATE_STARTED"))
        done = () if percent else (replica("b#2"),)
        found = status(after, member("f"), replica("f#1"), replica("b#1"), *done)
        assert (found["status"], word(found)) == ("RUNNING", ("HEALTHY", f"{change}_COMPLETED"))


def test_a_deployment_whose_actor_does_not_run_is_unhealthy() -> None:
    app = replace(APP, deployments={"front:memory": "a", "front": "f"})
    front = member("f", actors={"memory": "a"}, needs=("a",))
    actor = member("a", actor_of=("front", "memory"))
    found = status(front, actor, replica("f#1"), replica("a#1"), app=app)
    assert word(found, "front") == ("HEALTHY", "CONFIG_UPDATE_COMPLETED")
    notes = {"a": Notes(failures=1, waiting="a replica failed to start")}
    found = status(front, actor, replica("f#1"), app=app, observed=Observed(notes=notes))
    failed = ("UNHEALTHY", "DEPLOYMENT_ACTOR_FAILED")
    assert (word(found, "front"), word(found, "front:memory"), found["status"]) == (
        failed,
        failed,
        "UNHEALTHY",
    )
    assert found["deployments"]["front"]["message"] == (
        "its actor 'memory' does not run: a replica failed to start"
    )
    tried = replace(app, last_error="no", failed="front:memory")
    found = status(front, actor, replica("f#1"), replica("a#1"), app=tried)
    assert word(found, "front:memory") == ("DEPLOY_FAILED", "DEPLOYMENT_ACTOR_FAILED")


def test_a_failure_of_the_controller_is_no_failure_of_the_code() -> None:
    observed = Observed(step_failures={"f": "the controller fails: KeyError: 'x'"}, ready={"f#1": {}})
    found = application_status(state_of(APP, member("b"), member("f"), replica("f#1")), observed, APP, 0.0)
    assert word(found) == word(found, "front") == ("UNHEALTHY", "INTERNAL_ERROR")
    assert "no code of its version" in found["deployments"]["back"]["message"]
    assert found["deployments"]["front"]["message"] == "the controller fails: KeyError: 'x'"


@each_case(
    ("records", "message"),
    [
        (
            [
                replica(
                    "b#1", ReplicaState.SHOULD_START, moved_at=70.0, demand={"CPU": 1, "GPU": 1}, worker=None
                )
            ],
            "1 replica has waited for a worker for more than 30 s; resources required for each replica: "
            "CPU 1, GPU 1; resources of all workers: CPU 4, GPU 0",
        ),
        (
            [replica(f"b#{n}", ReplicaState.STARTING, moved_at=70.0) for n in (1, 2)],
            "2 replicas have taken more than 30 s to start, perhaps because of a slow __init__ "
            "or reconfigure()",
        ),
        ([replica("b#1", ReplicaState.STARTING, moved_at=71.0)], ""),
    ],
)
def test_steps_of_more_than_30_s_are_reported(records: list[Record], message: str) -> None:
    observed = Observed(workers={"w1": worker(1)})
    found = status(member("b", goal="g"), member("f"), *records, observed=observed)
    assert found["deployments"]["back"]["message"] == message


def test_a_restart_loop_is_named_as_one() -> None:
    dead = tuple(DeadReplica(f"b#{n}", "it is broken", 40.0 + 20 * n, version="v1") for n in range(3))
    assert status(*HEALTHY, observed=Observed(notes={"b": Notes(dead=dead[:2])}))["message"] == ""
    together = tuple(replace(each, at=40.0) for each in dead)
    assert status(*HEALTHY, observed=Observed(notes={"b": Notes(dead=together)}))["message"] == ""
    found = status(*HEALTHY, observed=Observed(notes={"b": Notes(dead=dead)}))
    assert found["message"] == "back: restart loop: restarted 3 times in 40 s, last because it is broken"
    of_another_version = tuple(replace(each, version="v0") for each in dead)
    assert status(*HEALTHY, observed=Observed(notes={"b": Notes(dead=of_another_version)}))["message"] == ""
    of_the_future = tuple(replace(each, at=each.at + 3600) for each in dead)  # the clock was set back
    assert status(*HEALTHY, observed=Observed(notes={"b": Notes(dead=of_the_future)}))["message"] == ""
    many = tuple(DeadReplica(f"b#{n}", "it is broken", 10.0 * n, version="v1") for n in range(10))
    found = status(*HEALTHY, observed=Observed(notes={"b": Notes(dead=many, failures=4, waiting="broken")}))
    assert found["message"] == "back: broken; restart loop: restarted 10 times or more in 1 min"


def test_traffic_that_others_than_the_ingress_get_is_shown() -> None:
    shared = EndpointRecord("f", "/x", ("GET",), {"f": 0.75, "other": 0.25}, is_legacy=False)
    found = status(*HEALTHY, shared)
    assert found["traffic"] == {"f": 0.75, "other": 0.25}
    assert found["message"] == "set_traffic shares the requests to f: 75 % f, 25 % other"
    alone = replace(shared, traffic={"f": 1.0})
    assert (status(*HEALTHY, alone)["traffic"], status(*HEALTHY, alone)["message"]) == ({}, "")


def test_an_application_that_deploys_and_one_that_is_deleted() -> None:
    deploying = replace(APP, goal="g")
    news = [replace(each, goal="g") for each in (member("b"), member("f", needs=("b",)))]
    found = status(*news, app=deploying)
    assert found["status"] == "NOT_STARTED"
    assert found["deployments"]["front"]["message"] == "waits for b"
    starting = replica("b#1", ReplicaState.STARTING)
    found = status(*news, starting, app=deploying)
    assert found["status"] == "DEPLOYING"
    assert found["deployments"]["back"]["replica_states"] == {"STARTING": 1}
    leaving = member("b", is_deleting=True)
    found = status(leaving, app=replace(APP, is_deleting=True))
    assert (found["status"], word(found)) == ("DELETING", ("UPDATING", "DELETING"))


def test_unchanged_deployments_stay_healthy_during_a_change() -> None:
    changing = replace(member("f", version="v2"), goal="g")
    found = status(member("b"), changing, replica("b#1"), replica("f#1"), app=replace(APP, goal="g"))
    assert word(found) == ("HEALTHY", "CONFIG_UPDATE_COMPLETED")
    assert word(found, "front") == ("UPDATING", "CONFIG_UPDATE_STARTED")


def test_a_failed_deploy_is_shown_until_the_next_one() -> None:
    found = status(*HEALTHY, app=replace(APP, last_error="no room", failed="front"))
    assert (found["status"], found["message"]) == ("DEPLOY_FAILED", "no room")
    assert word(found, "front") == ("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED")
    assert word(found) == ("HEALTHY", "CONFIG_UPDATE_COMPLETED")


def test_the_states_of_replicas() -> None:
    observed = Observed(
        ready={f"b#{n}": {} for n in range(1, 6)},
        workers={"w1": worker(1), "w2": worker(2, is_retiring=True)},
        terminating={"b#5"},
    )
    replicas = [
        replica("b#1"),
        replica("b#2", worker="w2"),
        replica("b#3", config_id="old"),
        replica("b#4", ReplicaState.STOPPING),
        replica("b#5"),
        replica("b#6"),
        replica("b#7", ReplicaState.SHOULD_START),
    ]
    found = status(member("b"), member("f"), *replicas, observed=observed)
    assert found["deployments"]["back"]["replica_states"] == {
        "RUNNING": 1,
        "PENDING_MIGRATION": 2,
        "UPDATING": 1,
        "STOPPING": 1,
        "RECOVERING": 1,
        "STARTING": 1,
    }


@each_case(
    ("proxy", "state", "message"),
    [
        (PROXY, "STARTING", ""),
        (
            replace(PROXY, is_leaving=True, worker=None),
            "DRAINING",
            "finishes its requests once another proxy listens in its place",
        ),
        (replace(PROXY, worker=None), "STARTING", "waits for a worker on host h"),
        (replace(PROXY, worker="silent"), "UNHEALTHY", "worker silent does not answer"),
        (replace(PROXY, name="failed"), "STARTING", "the port is in use"),
        (replace(PROXY, name="ready"), "RUNNING", ""),
        (replace(PROXY, name="ready", worker="silent"), "UNHEALTHY", "worker silent does not answer"),
        (replace(PROXY, name="old"), "STARTING", ""),
        (
            replace(PROXY, home="other"),
            "STARTING",
            "moved here from host other, and moves back once that has a worker for it",
        ),
        (
            replace(PROXY, worker=None, home="other"),
            "STARTING",
            "waits for a worker on host h; moved here from host other, and moves back once that has a worker "
            "for it",
        ),
    ],
)
def test_a_proxy_says_why_it_does_not_listen(proxy: ProxyRecord, state: str, message: str) -> None:
    observed = Observed(
        workers={"w1": worker(1)},
        unresponsive={"silent"},
        proxies_failed={"failed": OSError("the port is in use")},
        proxies_ready={"ready": {"incarnation": 1}, "old": {"incarnation": 0}},
    )
    assert actor_views.proxy_state(proxy, observed) == state
    assert actor_views.proxy_message(proxy, observed) == message


@staged(workers=2)
async def test_the_last_ten_replicas_that_died_are_listed_with_the_reasons(stage: Stage) -> None:
    await stage.run("x")
    for _ in range(11):
        (one,) = stage.running_of("x/front")
        stage.cluster.remove_worker(one.worker)
        stage.cluster.add_worker()
        await stage.until(lambda gone=one.tag: [e for e in stage.running_of("x/front") if e.tag != gone])
    found = Status.of(await stage.call("status"))
    dead = found.applications["x"].deployments["front"].dead_replicas
    assert len(dead) == 10
    assert all(each.name.startswith("x/front#") for each in dead)
    assert dead[-1].reason == f"worker {one.worker} left the cluster"
    assert dead == found.backends["x/front"].dead_replicas
    details = (await stage.call("details"))["details"]["applications"]["x"]["deployments"]["front"]
    assert [each["reason"] for each in details["recent_dead_replicas"]] == [each.reason for each in dead]

    async def fail(replica: Any) -> None:
        if replica.message.code == b"2":
            error = ReplicaStartError("it is broken", user_traceback=5000 * "x" + "ValueError")
            error.__dict__["last_lines"] = ("one", "two")
            raise error

    stage.start = fail
    with pytest.raises(ReplicaStartError):
        await stage.run("x", front={"version": "2"})
    dead = Status.of(await stage.call("status")).applications["x"].deployments["front"].dead_replicas
    assert [each.reason for each in dead[-3:]] == ["ReplicaStartError: it is broken"] * 3
    assert dead[-1].last_lines == ("one", "two")
    assert dead[-1].user_traceback.endswith("xValueError")
    assert len(dead[-1].user_traceback) == 4000

    await stage.crash_controller()
    later = Status.of(await stage.call("status")).applications["x"].deployments["front"].dead_replicas
    assert [(each.name, each.reason, each.at) for each in later[:10]] == [
        (each.name, each.reason, each.at) for each in dead
    ]
    assert later[-1].last_lines == ("one", "two")
    assert later[-1].user_traceback == dead[-1].user_traceback[-2000:]
    await stage.change("delete_application", name="x")
    await stage.until(lambda: not stage.stored("backend"))
    assert not stage.stored("deaths")


@staged(workers=2)
async def test_a_watcher_waits_until_the_status_changes(stage: Stage) -> None:
    await stage.run("x")
    first = await stage.call("next_status", seen="", timeout_s=0.0)
    assert Status.of(first["status"]) == Status.of(await stage.call("status"))
    began = stage.clock.now()
    nothing = await stage.call("next_status", seen=first["seen"], timeout_s=20.0)
    assert (nothing["status"], nothing["seen"]) == (None, first["seen"])
    assert 20 <= stage.clock.now() - began < 22
    later = asyncio.create_task(stage.call("next_status", seen=first["seen"], timeout_s=20.0))
    await stage.clock.sleep(5.0)
    began = stage.clock.now()
    await stage.call("set_target_capacity", percent=50)
    assert (await later)["status"]["target_capacity"] == 50
    assert stage.clock.now() - began < 1


@staged(workers=2)
async def test_many_watchers_cost_as_much_as_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[float] = []

    def counted(*given: Any) -> dict[str, Any]:
        built.append(stage.clock.now())
        return application_status(*given)

    monkeypatch.setattr("daskserve.control.views.applications.application_status", counted)
    await stage.run("x")

    async def watch(number: int) -> list[Any]:
        await stage.clock.sleep(number / 100)
        seen, found = "", []
        while (stage.clock.now() - began) < 5.0:
            answer = await stage.call("next_status", seen=seen, timeout_s=2.0)
            seen = answer["seen"]
            found += [answer["status"]["target_capacity"]] if answer["status"] is not None else []
        return found

    async def change() -> None:
        for percent in range(50, 100):
            await stage.call("set_target_capacity", percent=percent)
            await stage.clock.sleep(0.03)

    began = stage.clock.now()
    built.clear()
    *found, _ = await asyncio.gather(*map(watch, range(50)), change())
    assert {each[-1] for each in found} == {99}
    # Each client first asks for a full status at its own time; then they share one status per pause or
    # second.
    assert len(built) < 50 + 1.5 / 0.1 + 5
