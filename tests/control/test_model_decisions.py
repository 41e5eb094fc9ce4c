"""Decisions about a deployment's models, given its folder and the models that replicas have loaded."""

from __future__ import annotations

from typing import Any

import pytest
from tables import case, each_case

from daskserve.control.decisions.model_rollouts import followed, steered
from daskserve.control.records.model_decisions import (
    Folder,
    adopted,
    at_start,
    is_met,
    loaded,
    polled,
    settled,
    target,
    text_of,
    unloaded,
    with_default,
)
from daskserve.control.records.models import ModelReport, ModelsRecord
from daskserve.control.records.rollout import TABLE, InvalidRolloutTransition, RolloutEvent, RolloutPhase
from daskserve.control.records.rollout import RolloutState as Rollout
from daskserve.control.records.storing.encoding import decode, encode
from daskserve.errors import NotFoundError
from daskserve.options.rollout import RolloutConfig

EMPTY = ModelsRecord("b")
PLAN = RolloutConfig(steps=["10%", "100%"])


def report(
    *versions: str, default: str = "", errors: dict[str, tuple[int, str]] | None = None
) -> ModelReport:
    loaded_versions = {"m": versions} if versions else {}
    return ModelReport(loaded_versions, {"m": default} if default else {}, errors or {})


def ready(*versions: str) -> ModelsRecord:
    record = EMPTY
    for version in versions:
        record = settled(loaded(record, "m", version, is_next=True), {"r": report(*versions)}, None)
    return record


def states(record: ModelsRecord) -> dict[str, str]:
    return {version: each["state"] for version, each in record.models.get("m", {}).items()}


def folder(*versions: str, whole: tuple[str, ...] | None = None) -> Folder:
    return Folder({"m": versions}, frozenset(f"m/{each}" for each in whole or versions))


def test_a_version_is_ready_once_all_running_replicas_have_it() -> None:
    record = loaded(ready("1"), "m", "2", is_next=True)
    assert target(record) == {"m": {"versions": {"1": 1, "2": 2}, "default": "1"}}
    assert at_start(record) == {"m": {"versions": {"1": 1}, "default": "1"}}
    for reports in ({}, {"r": report("1", "2"), "s": None}, {"r": report("1", "2"), "s": report("1")}):
        assert settled(record, reports, None) is record
    done = settled(record, {"r": report("1", "2"), "s": report("1", "2")}, None)
    assert (states(done), done.defaults) == ({"1": "READY", "2": "READY"}, {"m": "2"})
    assert decode(done.key, encode(done)) == done
    kept = settled(loaded(ready("1"), "m", "2", is_next=False), {"r": report("1", "2")}, None)
    assert kept.defaults == {"m": "1"}


def test_the_first_replica_that_cannot_load_a_version_ends_the_attempt() -> None:
    record = loaded(ready("1"), "m", "2", is_next=True)
    failed = settled(record, {"r": report("1", "2"), "s": report("1", errors={"m/2": (2, "no")})}, None)
    assert (states(failed), failed.defaults) == ({"1": "READY", "2": "FAILED"}, {"m": "1"})
    assert target(failed) == target(ready("1"))
    assert text_of(failed) == "model 'm' version 2 could not be loaded: no (replica s); version 1 serves"
    again = loaded(failed, "m", "2", is_next=True)
    assert settled(again, {"s": report("1", errors={"m/2": (2, "no")})}, None) is again, "of the last attempt"
    assert text_of(again) == "model 'm' version 2 is being loaded; version 1 serves"
    later = settled(
        loaded(failed, "m", "3", is_next=False), {"s": report("1", errors={"m/3": (3, "no")})}, None
    )
    assert text_of(later).startswith("model 'm' version 3"), "the last one of those given up"
    served = settled(loaded(later, "m", "4", is_next=True), {"s": report("1", "4")}, None)
    assert (served.defaults, text_of(served)) == ({"m": "4"}, ""), "a version after them serves"
    assert text_of(None, "it cannot be read") == "it cannot be read"


def test_an_unloaded_version_passes_the_default_on() -> None:
    record = ready("9", "10")
    assert unloaded(record, "m", "10").defaults == {"m": "9"}
    assert unloaded(record, "m", "9").defaults == {"m": "10"}
    assert unloaded(record, "m", None).models == unloaded(ready("1"), "m", "1").defaults == {}
    assert with_default(record, "m", "9").defaults == {"m": "9"}
    with pytest.raises(
        NotFoundError, match=r"Version '3' of model 'm' is not loaded; there are: m/9 \(READY\)"
    ):
        with_default(record, "m", "3")


def test_the_newest_versions_of_a_folder_replace_older_ones() -> None:
    record = polled(ready("9"), folder("9", "10", "11"), 1)
    assert states(record) == {"9": "READY", "11": "LOADING"}
    done = settled(record, {"r": report("9", "11")}, 1)
    assert (states(done), done.defaults) == ({"11": "READY"}, {"m": "11"})
    assert states(settled(record, {"r": report("9", errors={"m/11": (2, "no")})}, 1)) == {
        "9": "READY",
        "11": "FAILED",
    }
    assert states(polled(ready("9"), folder("9", "10", whole=("9",)), 1)) == {"9": "READY"}, "half of it"
    assert states(polled(ready("9"), Folder({}, frozenset()), 1)) == {}
    assert set(states(polled(EMPTY, folder("1", "2", "3"), 2))) == {"2", "3"}


def test_versions_that_replicas_loaded_during_their_start_are_kept() -> None:
    reports = {"r": report("1", default="1"), "s": report("1", default="1")}
    record = settled(adopted(EMPTY, reports), reports, 1)
    assert (states(record), record.defaults) == ({"1": "READY"}, {"m": "1"})


@each_case(
    ("found", "expected"),
    [
        (report("1", default="1"), True),
        (report("1"), False),
        (report(), False),
        (report("1", "2", default="1"), False),
        (report(errors={"m/1": (1, "no")}), True),
        (report(errors={"m/1": (0, "no")}), False),
    ],
)
def test_a_replica_is_called_until_its_models_are_as_configured(found: Any, expected: bool) -> None:
    assert is_met(target(ready("1")), found) is expected


# ---- rollouts of models


def rolling(*versions: str) -> ModelsRecord:
    """Return a record whose first version is the default, with a rollout of the last version."""
    record = ready(versions[0])
    for number, version in enumerate(versions[1:], 2):
        record = loaded(record, "m", version, is_next=True, rolls_out=True)
        record = settled(record, {"r": report(*versions[:number])}, None, rolls_out=True)
        record = followed(record, PLAN, None, 5.0)
    return record


def rollout(record: ModelsRecord) -> tuple[str, str, str]:
    found = record.rollouts["m"]
    return found["phase"], "/".join(found["names"]), found["why"]


def test_a_rollout_of_a_model_begins_beside_the_default_version() -> None:
    record = rolling("1", "2")
    assert (states(record), record.defaults) == ({"1": "READY", "2": "ROLLING_OUT"}, {"m": "1"})
    assert rollout(record) == ("STARTING", "2/1", "")
    assert (record.rollouts["m"]["rollout_id"], record.rollouts["m"]["since"]) == ("m#2", 5.0)
    assert followed(record, PLAN, None, 6.0) == record
    without = loaded(ready("1"), "m", "2", is_next=True, rolls_out=True)
    without = settled(without, {"r": report("1", "2")}, None, rolls_out=True)
    assert followed(without, None, None, 6.0).rollouts == {}


def test_a_rollout_of_a_model_ends_with_what_happens_to_its_versions() -> None:
    """The cases have a change and a plan, then the states, the default version and the end of the rollout."""
    before = rolling("1", "2")
    failed = settled(before, {"r": report("1", errors={"m/2": (2, "no")})}, None, rolls_out=True)
    cases: list[tuple[ModelsRecord, RolloutConfig | None, dict[str, str], str, tuple[str, str, str]]] = [
        (
            unloaded(before, "m", "2"),
            PLAN,
            {"1": "READY"},
            "1",
            ("ABORTED", "2/1", "version '2' was unloaded, or could not be loaded"),
        ),
        (
            failed,
            PLAN,
            {"1": "READY", "2": "FAILED"},
            "1",
            ("ABORTED", "2/1", "version '2' was unloaded, or could not be loaded"),
        ),
        (
            with_default(before, "m", "2"),
            PLAN,
            {"1": "READY", "2": "READY"},
            "2",
            ("COMPLETED", "2/1", "version '2' was made the default one"),
        ),
        (
            before,
            None,
            {"1": "READY", "2": "READY"},
            "2",
            ("COMPLETED", "2/1", "its plan was removed"),
        ),
        (
            unloaded(before, "m", "1"),
            PLAN,
            {"2": "READY"},
            "2",
            ("COMPLETED", "2/1", "version '1' was unloaded"),
        ),
        (
            with_default(rolling_beside_a_third(), "m", "0"),
            PLAN,
            {"0": "READY", "1": "READY", "2": "READY"},
            "0",
            ("ABORTED", "2/1", "version '0' was made the default one"),
        ),
    ]
    for changed, plan, expected, default, end in cases:
        with case(end):
            after = followed(changed, plan, None, 7.0)
            assert (states(after), after.defaults["m"], rollout(after)) == (expected, default, end)
            assert after.rollouts["m"]["since"] == 7.0
            assert followed(after, plan, None, 8.0) == after


def rolling_beside_a_third() -> ModelsRecord:
    record = with_default(ready("0", "1"), "m", "1")
    record = loaded(record, "m", "2", is_next=True, rolls_out=True)
    record = settled(record, {"r": report("0", "1", "2")}, None, rolls_out=True)
    return followed(record, PLAN, None, 5.0)


def test_a_third_version_of_a_model_takes_the_place_of_the_new_one() -> None:
    both = rolling("1", "2", "3")
    assert states(both) == {"1": "READY", "2": "READY", "3": "ROLLING_OUT"}
    assert rollout(both)[:2] == ("STARTING", "3/1")
    record = loaded(rolling("1", "2"), "m", "3", is_next=True, rolls_out=True)
    record = settled(record, {"r": report("1", "2", "3")}, None, rolls_out=True)
    assert states(followed(record, PLAN, 1, 7.0)) == {"1": "READY", "3": "ROLLING_OUT"}
    assert followed(unloaded(record, "m", None), PLAN, None, 7.0).rollouts == {}


def test_a_repeated_load_request_loads_once() -> None:
    record = loaded(ready("1"), "m", "2", is_next=True)
    assert states(loaded(ready("1"), "m", "1", is_next=True)) == {"1": "READY"}
    assert loaded(ready("1"), "m", "1", is_next=True).attempts == 1
    both = settled(loaded(ready("1"), "m", "2", is_next=False), {"r": report("1", "2")}, None)
    assert loaded(both, "m", "2", is_next=False) is both
    assert loaded(both, "m", "2", is_next=True).defaults == {"m": "2"}
    again = loaded(record, "m", "2", is_next=False)
    assert (again.attempts, again.models["m"]["2"]["is_next"]) == (record.attempts, False)
    assert settled(again, {"r": report("1", "2")}, None).defaults == {"m": "1"}
    out = rolling("1", "2")
    assert loaded(out, "m", "2", is_next=True) is out
    asked = loaded(both, "m", "2", is_next=True, rolls_out=True, by="a program")
    assert (states(asked)["2"], asked.defaults, asked.attempts) == ("LOADING", {"m": "1"}, 3)
    assert asked.models["m"]["2"]["by"] == "a program"


def test_the_rollout_of_a_model_is_steered_once() -> None:
    before = rolling("1", "2")
    paused = steered(before, PLAN, "m", "pause", 6.0, by="ann")
    assert rollout(paused)[0] == "PAUSED"
    assert "ann" in rollout(paused)[2]
    aborted = steered(before, PLAN, "m", "abort", 6.0, by="ann")
    why = "the rollout of version '2' was aborted by ann; version '1' has all requests"
    assert (rollout(aborted), states(aborted)["2"]) == (("ABORTED", "2/1", why), "TAKEN_BACK")
    assert text_of(aborted) == f"model 'm': {why}"
    assert steered(aborted, PLAN, "m", "abort", 7.0, by="ann") is aborted
    full = steered(before, PLAN, "m", "promote", 6.0, full=True, request_id="q")
    assert (rollout(full)[0], full.defaults) == ("COMPLETED", {"m": "2"})
    assert steered(full, PLAN, "m", "promote", 7.0, full=True, request_id="q") is full
    for record, plan, verb, message in (
        (ready("1"), PLAN, "pause", "There is no rollout of model 'm' to pause.$"),
        (full, PLAN, "abort", "to abort: it is COMPLETED, "),
        (full, PLAN, "promote", "to promote: it is COMPLETED, "),
        (before, None, "pause", "to pause: it is STARTING, "),
        (aborted, PLAN, "pause", f"to pause: it is ABORTED, {why}"),
    ):
        with case(verb, message), pytest.raises(NotFoundError, match=message):
            steered(record, plan, "m", verb, 8.0, request_id="another")


def test_each_event_of_a_rollout_leads_where_the_table_says_or_is_a_bug() -> None:
    for phase in RolloutPhase:
        for event in RolloutEvent:
            before = Rollout("r", ("2", "1"), phase, step=1, served=0, why="asked", stable={"a": 1})
            with case(phase, event):
                after = TABLE.get(phase, {}).get(event)
                if after is None:
                    with pytest.raises(
                        InvalidRolloutTransition, match=f"that is {phase} cannot take {event}"
                    ):
                        before.moved(event, 3.0)
                    continue
                found = before.moved(event, 3.0, "why")
                assert (found.phase, found.since, found.why) == (after, 3.0, "why")
                assert found.served == (1 if event == "READY" else 0)
                assert found.stable == ({"a": 1} if after in TABLE else {})
                assert Rollout.from_plain(found.to_plain()) == found
    ready_again = Rollout("r", ("2", "1"), step=1, why="asked").moved(RolloutEvent.READY, 3.0)
    assert (ready_again.why, ready_again.served) == ("asked", 1)
    served = Rollout("r", ("2", "1"), RolloutPhase.SERVING, step=0, served=0, why="asked")
    assert (served.moved(RolloutEvent.NEXT, 3.0).step, served.moved(RolloutEvent.NEXT, 3.0).why) == (1, "")
