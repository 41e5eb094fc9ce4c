"""Waiting for a scheduler that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from daskserve.cluster.dask import reconnect
from daskserve.cluster.dask.reconnect import PERIOD_S, wait_for_scheduler
from daskserve.common.clock import LoopClock
from daskserve.testing import run_virtual

ADDRESS = "tcp://scheduler:8786"


def wait(monkeypatch: pytest.MonkeyPatch, *, away_s: float, grace_s: float, awaited_s: float = 1e9) -> Any:
    """Return the answer, and its duration in virtual time."""

    async def identify(address: str, connection_args: Mapping[str, Any]) -> str:
        assert address == ADDRESS
        if asyncio.get_running_loop().time() < away_s:
            raise OSError("refused")
        return "next"

    async def main() -> tuple[str, float]:
        clock = LoopClock()
        found = await wait_for_scheduler(
            ADDRESS, {}, grace_s, clock=clock, is_awaited=lambda: clock.now() < awaited_s
        )
        return found, clock.now()

    monkeypatch.setattr(reconnect, "_id_of", identify)
    return run_virtual(main)


def test_a_scheduler_is_found_soon_after_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    found, took_s = wait(monkeypatch, away_s=42.1, grace_s=60)
    assert found == "next"
    assert took_s - 42.1 <= PERIOD_S


def test_a_scheduler_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="did not come back within 60 s"):
        wait(monkeypatch, away_s=100, grace_s=60)


def test_a_wait_that_is_not_wanted_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="refused"):
        wait(monkeypatch, away_s=100, grace_s=60, awaited_s=3)
