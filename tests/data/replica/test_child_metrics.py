"""Polling a child for its metrics: every second, whatever it answers, until it has ended."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daskserve.common.clock import LoopClock
from daskserve.data.replica.process.metrics import METRICS_S, poll_metrics
from daskserve.errors import ActorLostError
from daskserve.testing import run_virtual


def test_a_repeated_failure_is_logged_once_and_again_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    received = ["none"] * 60 + ["sound", "none", "late", "none"] + ["torn"] * 60 + ["gone"]
    asked: list[str] = []

    async def ask() -> None:
        asked.append(received[len(asked)])
        match asked[-1]:
            case "none":
                raise KeyError("samples")
            case "torn":
                raise ValueError(f"a line of {len(asked)} characters")
            case "late":
                await asyncio.sleep(100)
            case "gone":
                raise ActorLostError("gone")

    async def main() -> None:
        await poll_metrics(ask, "b#AAAAAA", LoopClock())
        assert asyncio.get_running_loop().time() == pytest.approx((len(received) + 1) * METRICS_S)

    with caplog.at_level(logging.INFO, "daskserve.replica"):
        run_virtual(main)
    assert asked == received
    assert [each.exc_info[0] for each in caplog.records if each.exc_info] == [KeyError, ValueError]
    assert {each.getMessage() for each in caplog.records} == {
        "The metrics of the process of b#AAAAAA could not be read"
    }
