"""What is decided about the models of a deployment, from what is in its folder and what replicas have."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_case

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
from daskserve.control.records.storing.encoding import decode, encode
from daskserve.errors import NotFoundError

EMPTY = ModelsRecord("b")


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


def test_what_is_unloaded_hands_over_its_default() -> None:
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


def test_what_replicas_have_loaded_in_their_starts_is_kept() -> None:
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
def test_a_replica_is_told_until_it_has_what_it_should(found: Any, expected: bool) -> None:
    assert is_met(target(ready("1")), found) is expected
