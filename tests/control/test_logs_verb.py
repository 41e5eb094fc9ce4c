"""The answers of workers about their logs, merged by the controller."""

from __future__ import annotations

from typing import Any

import pytest

from daskserve.control.calls.logs import Gathered, packed, unpacked
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
