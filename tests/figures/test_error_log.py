"""The error log: a repeated error is logged once, and again when the error changes."""

from __future__ import annotations

import logging

import pytest

from daskserve.figures.error_log import ErrorLog


def test_a_repeated_error_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    error_log = ErrorLog(logging.getLogger("daskserve.test"))
    errors = [
        ValueError("no number: 17"),
        ValueError("no number: 18"),
        ValueError("no number: <object at 0x7f01ab>"),
        ValueError("no number: <object at 0x7f02cd>"),
        TypeError("no number: 19"),
        ValueError("no number: 20"),
    ]
    with caplog.at_level(logging.DEBUG, "daskserve.test"):
        for error in errors:
            error_log.log(error, "The figures of %s cannot be had", "r")
    levels = [each.levelname for each in caplog.records]
    assert levels == ["ERROR", "DEBUG", "ERROR", "DEBUG", "ERROR", "ERROR"]
    first = caplog.records[0]
    assert first.getMessage() == "The figures of r cannot be had"
    assert first.exc_info is not None
    assert first.exc_info[1] is errors[0]
