"""The events of an instance: their texts, their order, and how many are kept."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from control_harness import backend, goal, replica, state_of
from controller_harness import ScriptedReplica, Stage, staged
from tables import each_case

from daskserve.common.types import ReplicaState
from daskserve.control.decisions.history import events as history_events
from daskserve.control.decisions.history.events import KEPT_EVENTS, KEPT_S, SWEPT, as_row, events_of
from daskserve.control.decisions.history.views import events_after
from daskserve.control.observed.lifecycle import ReplicaEvent, move
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.events import Event, EventKind, EventsRecord
from daskserve.control.records.records import CapacityRecord, Change, EndpointRecord
from daskserve.control.records.state import State
from daskserve.errors import ReplicaStartError


def tell(state: State, change: Change, **causes: str) -> list[Event]:
    by_key = {key.replace("_", "/", 1): why for key, why in causes.items()}
    found = events_of(state, change, by_key, wall=1.0, number=1)
    rows = [each for each in found.values() if isinstance(each, EventsRecord)]
    return [Event(*entry) for row in rows for entry in row.entries]


def kinds(found: list[Event]) -> list[str]:
    return [each.kind for each in found]


async def events(stage: Stage, **asked: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stage.call("events", **asked))["events"]
    return found


@staged()
async def test_the_life_of_an_application_is_reported(stage: Stage) -> None:
    await stage.run("shop", {"front": ()}, front={"version": "1"})
    await stage.run("shop", {"front": ()}, front={"version": "2"})
    await stage.change("delete_application", name="shop", by="prog.py")
    found = await events(stage, application="shop")
    assert [each["kind"] for each in found] == [
        *("DEPLOYING", "REPLICA_STARTED", "DEPLOYED"),
        *("DEPLOYING", "REPLICA_STARTED", "REPLICA_STOPPING", "DEPLOYED"),
        *("DELETING", "REPLICA_STOPPING", "DELETED"),
    ]
    assert found[3]["message"] == "Revision 2 of application 'shop' is deployed: front: code 1 -> 2"
    assert found[5]["message"].endswith("stops: version 1 is replaced")
    assert (found[7]["by"], found[8]["deployment"]) == ("prog.py", "shop/front")
    assert [each["number"] for each in found] == sorted(each["number"] for each in found)


@staged()
async def test_a_failed_deploy_is_reported_with_its_reason(stage: Stage) -> None:
    async def fail(_: ScriptedReplica) -> None:
        raise ReplicaStartError("the constructor raised", user_traceback="Traceback ...")

    stage.start = fail
    with pytest.raises(ReplicaStartError):
        await stage.run("shop", {"front": ()})
    found = await events(stage)
    (failed,) = [each for each in found if each["kind"] == "DEPLOY_FAILED"]
    assert "the constructor raised" in failed["message"]
    assert "\n" not in failed["message"]
    starts = [each for each in found if each["kind"] == "REPLICA_FAILED"]
    assert len(starts) == 3
    assert "did not start on worker" in starts[0]["message"]


@staged(workers=3)
async def test_a_lost_worker_and_the_next_controller_are_reported(stage: Stage) -> None:
    await stage.run("shop", {"front": ()}, front={"num_replicas": 3})
    controller = await stage.crash_controller()
    await stage.until(lambda: len(stage.running) == 3)
    await stage.clock.sleep(1)
    found = await events(stage)
    lost = [each["message"] for each in found if each["kind"] == "REPLICA_LOST"]
    assert len(lost) == 1
    assert lost[0].endswith("left the cluster")
    starts = [each["message"] for each in found if each["kind"] == "CONTROLLER_STARTED"]
    assert starts[0].startswith("Controller 1 starts the instance")
    assert starts[1] == f"Controller 2 takes over on worker {controller.worker}"


@staged()
async def test_a_caller_waits_for_the_next_event(stage: Stage) -> None:
    first = await stage.call("events")
    waiting = asyncio.create_task(stage.call("events", after=first["next"], wait_s=20.0))
    await stage.clock.sleep(1)
    assert not waiting.done()
    await stage.run("shop", {"front": ()})
    assert [each["kind"] for each in (await waiting)["events"]] == ["DEPLOYING"]
    last = await stage.call("events")
    nothing = await stage.call("events", after=last["next"], wait_s=0.5)
    assert (list(nothing["events"]), nothing["next"]) == ([], last["next"])


def test_a_scaled_deployment_is_reported_with_the_reason() -> None:
    before = backend(application="shop", scaled_to=1, scalings=((1.0, 0, 1, "first"),))
    after = backend(application="shop", scaled_to=4, scalings=((1.0, 0, 1, "first"), (2.0, 1, 4, "load")))
    (found,) = tell(state_of(before), {after.key: after})
    assert (found.kind, found.application) == ("SCALED", "shop")
    assert found.message.endswith("was scaled from 1 to 4 replicas: load")


@each_case(
    "state, event, cause, kind",
    [
        (ReplicaState.STARTING, ReplicaEvent.STARTED, "", EventKind.REPLICA_STARTED),
        (ReplicaState.STARTING, ReplicaEvent.FAILED, "it raised", EventKind.REPLICA_FAILED),
        (ReplicaState.STARTING, ReplicaEvent.UNWANTED, "", None),
        (ReplicaState.RUNNING, ReplicaEvent.LOST, "the worker left", EventKind.REPLICA_LOST),
        (ReplicaState.RUNNING, ReplicaEvent.UNWANTED, "no answer", EventKind.REPLICA_LOST),
        (ReplicaState.RUNNING, ReplicaEvent.UNWANTED, "", EventKind.REPLICA_STOPPING),
        (ReplicaState.SHOULD_STOP, ReplicaEvent.STOP_SENT, "", None),
        (ReplicaState.STOPPING, ReplicaEvent.GONE, "", None),
    ],
)
def test_each_turn_of_a_replica_is_reported_once(
    state: ReplicaState, event: ReplicaEvent, cause: str, kind: EventKind | None
) -> None:
    before = replica("b#A", state)
    change: Change = {before.key: move(before, event)}
    causes = {"replica_b#A": cause} if cause else {}
    if kind is EventKind.REPLICA_STOPPING:
        (moved,) = tell(state_of(backend(), before), change, **{"leaving_b#A": "it moves to another worker"})
        assert moved.message.endswith("stops: it moves to another worker")
    found = tell(state_of(backend(), before), change, **causes)
    assert kinds(found) == ([] if kind is None else [kind])
    assert all(cause in each.message for each in found)


def test_a_declared_application_that_cannot_be_deployed_is_reported_once_for_each_error() -> None:
    known = ConfigRecord("shop", {}, generation=1, settled=1, error="no such module")
    state = State()
    state.apply({known.key: known})
    assert tell(state, {known.key: replace(known, goal="g")}) == []
    (found,) = tell(state, {known.key: replace(known, error="no such name")})
    assert (found.kind, found.application) == ("BUILD_FAILED", "shop")
    assert found.message == "Application 'shop' cannot be deployed: no such name"


def test_traffic_and_capacity_are_reported() -> None:
    before = EndpointRecord("e", "/e", ("GET",), {"b": 1.0})
    after = EndpointRecord("e", "/e", ("GET",), {"b": 0.5, "c": 0.5})
    state = state_of(backend(), before)
    (traffic,) = tell(state, {after.key: after}, **{"": "prog.py"})
    assert traffic.by == "prog.py"
    assert traffic.message == "The traffic of endpoint 'e' goes to b 50%, c 50%"
    (copied,) = tell(state, {before.key: replace(before, shadows={"c": 0.1})})
    assert copied.message == "Copies for endpoint 'e' go to c 10%"
    (capacity,) = tell(state, {"capacity/target": CapacityRecord(50.0, "DOWN")})
    assert capacity.message == "The target capacity is 50%"


def test_backends_of_the_classic_system_have_events_of_their_own() -> None:
    pending = goal("g", by="prog.py")
    (opened,) = tell(State(), {pending.key: pending, "backend/b": backend(goal="g")})
    assert (opened.kind, opened.deployment, opened.by) == ("DEPLOYING", "b", "prog.py")


def test_no_more_than_ten_thousand_are_kept_and_each_change_removes_few() -> None:
    state = State()
    for number in range(0, KEPT_EVENTS + 200, 2):
        change = as_row(state, [Event("A", f"{number}"), Event("B", "")], wall=1.0, number=1)
        assert len(change) <= 2 + SWEPT
        state.apply(change)
    assert KEPT_EVENTS - 2 <= state.events.count <= KEPT_EVENTS
    assert len(state.records()) == len(state.events)


def test_events_of_yesterday_are_neither_kept_nor_shown() -> None:
    state = State()
    for number in range(50):
        state.apply(as_row(state, [Event("A", f"{number}")], wall=100.0, number=1))
    late = 101.0 + KEPT_S
    assert events_after(state, None, wall=late)["events"] == []
    state.apply(as_row(state, [Event("B", "")], wall=late, number=1))
    assert state.events.count == 50 - SWEPT + 1
    for _ in range(2):
        state.apply(as_row(state, [Event("B", "")], wall=late, number=1))
    assert state.events.count == 3


def test_events_are_read_page_by_page() -> None:
    state = State()
    for number in range(10):
        both = [Event("A", f"{number}", "one"), Event("A", f"{number}", "two")]
        state.apply(as_row(state, both, wall=1.0, number=1))
    seen, after = [], 0
    while True:
        page = events_after(state, after, application="two", limit=3, wall=1.0)
        if not page["events"]:
            break
        seen += [each["message"] for each in page["events"]]
        after = page["next"]
    assert seen == [str(number) for number in range(10)]
    newest = events_after(state, None, limit=3, wall=1.0)
    assert [each["number"] for each in newest["events"]] == [18, 19, 20]
    assert newest["next"] == 20


@staged()
async def test_a_mistake_in_the_history_holds_up_no_change(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(history_events, "_OF_REVISIONS", {}):
        await stage.run("shop", {"front": ()})
    assert len(stage.running) == 1
    assert "The history of a change could not be written" in caplog.text


def test_the_guide_names_every_kind() -> None:
    text = (Path(__file__).parents[2] / "docs/history.md").read_text(encoding="utf-8")
    table = text.partition("| kind |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == {each.value for each in EventKind}
