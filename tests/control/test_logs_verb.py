"""The answers of workers about their logs, merged by the controller."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from controller_harness import Stage, staged
from tables import case

from daskserve.cluster.local.process import LocalProcess
from daskserve.control.records.records import CapacityRecord
from daskserve.control.rpc.logs import Gathered, packed, unpacked
from daskserve.errors import BadRequestError


def answer(source: str, *times: int, dropped: int = 0) -> dict[str, Any]:
    rows = [{"time": each, "number": 100 + each, "message": f"{source}{each}"} for each in times]
    last = rows[-1]["number"] if rows else 0
    losses = {"queue": dropped} if dropped else {}
    return {"sources": [{"source": source, "rows": rows, "last": last}], "dropped": losses, "problems": []}


def texts(found: dict[str, Any]) -> list[str]:
    return [each["message"] for each in found["records"]]


def test_the_newest_of_all_workers_in_the_order_of_time() -> None:
    gathered = Gathered(3, None)
    gathered.add("a", answer("a", 1, 4, 6))
    gathered.add("b", answer("b", 2, 5, dropped=7))
    found = gathered.result()
    assert texts(found) == ["a4", "b5", "a6"]
    assert found["next"] == {"a": 106, "b": 105}
    assert found["dropped"] == {"b": {"queue": 7}}


def test_a_cursor_loses_nothing_and_repeats_nothing() -> None:
    times = {"a": [1, 4, 6, 7], "b": [2, 3, 5]}
    seen: list[str] = []
    cursor: dict[str, int] = {"a": 0}
    for _ in range(4):
        gathered = Gathered(2, cursor)
        for source, all_times in times.items():
            new = [each for each in all_times if 100 + each > cursor.get(source, 0)][:2]
            gathered.add(source, answer(source, *new))
        found = gathered.result()
        seen += texts(found)
        cursor = unpacked(packed(found["next"]))
    assert seen == ["a1", "b2", "b3", "a4", "b5", "a6", "a7"]


def test_a_record_that_is_numbered_late_is_not_repeated() -> None:
    # A line of the access log is older than the record before it.
    rows = [{"time": time, "number": n, "message": f"{n}"} for n, time in ((1, 10), (2, 9), (3, 11))]
    gathered = Gathered(2, {"a": 0, "gone": 7})
    source = {"source": "a", "rows": rows, "last": 3}
    gathered.add("w", {"sources": [source], "dropped": {}, "problems": []})
    found = gathered.result()
    assert texts(found) == ["2", "1"]
    assert found["next"] == {"a": 2}


@pytest.mark.parametrize("wrong", ["", "x", "é", packed([1]), packed({"a": "b"})])  # type: ignore[arg-type]
def test_a_text_that_is_no_cursor_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequestError, match="is not a cursor"):
        unpacked(wrong)


@staged(workers=2)
async def test_invalid_log_queries_are_refused(stage: Stage) -> None:
    for asked, message in (
        ({"level": "LOUD"}, "level='LOUD' is not a level of logging"),
        ({"limit": 0}, "limit=0 must be from 1 to 10000"),
        ({"limit": 10_001}, "limit=10001 must be from 1 to 10000"),
        ({"since_s": -1.0}, "since_s=-1.0 must be a number of seconds from 0"),
        ({"since_s": math.inf}, "since_s=inf must be a number of seconds from 0"),
        ({"wait_s": math.nan}, "wait_s=nan must be a number of seconds from 0"),
        ({"after": "x"}, "is not a cursor"),
    ):
        with case(asked), pytest.raises(BadRequestError, match=message):
            await stage.call("logs", **asked)
    for fine in ({"level": "info"}, {"limit": 1}, {"limit": 10_000}, {"since_s": 0.0}, {"wait_s": 0.0}):
        with case(fine):
            assert (await stage.call("logs", **fine))["missing"] == {}


@staged(workers=3)
async def test_a_worker_that_does_not_answer_hides_no_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = sorted(each.address for each in stage.cluster.workers())
    asked: list[float] = []

    async def logs(process: Any, actor: Any, verb: str, **message: Any) -> Any:
        if verb != "logs" or "query" not in message:
            return await call(process, actor, verb, **message)
        number = workers.index(actor.worker)
        asked.append(stage.clock.now())
        if number == 1:
            raise TypeError("it cannot be sent")
        if number == 2:
            await asyncio.Event().wait()
        found = answer("a", 1) if len(asked) > 6 else answer("a")
        return {**found, "problems": ["no disk"]}

    call = LocalProcess.call
    monkeypatch.setattr(LocalProcess, "call", logs)
    found = await stage.call("logs")
    assert found["missing"] == {workers[1]: "it cannot be sent", workers[2]: "it does not answer"}
    assert (list(found["records"]), found["problems"]) == ([], {workers[0]: ("no disk",)})
    began = stage.clock.now()
    found = await stage.call("logs", wait_s=60.0)
    assert texts(found) == ["a1"], "it asks again until there is a record"
    assert stage.clock.now() - began < 30.0


@staged(workers=2)
async def test_the_logging_of_a_running_instance_is_set(stage: Stage) -> None:
    await stage.call("set_logging", config={"log_level": "DEBUG"})
    (record,) = stage.stored("capacity").values()
    assert isinstance(record, CapacityRecord)
    assert record.logging is not None
    assert record.logging["log_level"] == "DEBUG"
