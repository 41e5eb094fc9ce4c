"""Logs of errors that recur."""

from __future__ import annotations

import logging

import pytest

from daskserve.telemetry.error_log import MAX_KINDS, ErrorLog, SparseLog


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_repeated_error_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    error_log = ErrorLog(logging.getLogger("daskserve.test"))
    errors = [
        ValueError("no number: 17"),
        ValueError("no number: 18"),
        ValueError("no number: <object at 0x7f01ab>"),
        ValueError("no number: <object at 0x7f02cd>"),
        TypeError("no number: 19"),
        ValueError("no number: 20"),
        Rude(),
        Rude(),
    ]
    with caplog.at_level(logging.DEBUG, "daskserve.test"):
        for error in errors:
            error_log.log(error, "Could not read the metrics of %s", "r")
    levels = [each.levelname for each in caplog.records]
    assert levels == ["ERROR", "DEBUG", "ERROR", "DEBUG", "ERROR", "ERROR", "ERROR", "DEBUG"]
    first = caplog.records[0]
    assert first.getMessage() == "Could not read the metrics of r"
    assert first.exc_info is not None
    assert first.exc_info[1] is errors[0]


def test_of_many_events_the_first_is_logged_and_then_one_in_each_period() -> None:
    log = SparseLog(period_s=10.0)
    assert [log.take("full", now) for now in (5.0, 6.0, 14.9, 15.0, 16.0, 30.0)] == [
        0,
        None,
        None,
        2,
        None,
        1,
    ]
    assert log.take("late", 30.0) == 0


def test_a_sparse_log_forgets_kinds_without_a_recent_event() -> None:
    sparse = SparseLog(10.0)
    for number in range(5 * MAX_KINDS):
        assert sparse.take(f"kind {number}", float(number)) == 0
    assert len(sparse._kinds) <= MAX_KINDS
    assert sparse.take(f"kind {number}", float(number)) is None
