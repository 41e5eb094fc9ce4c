"""Looks into replicas that end while they are looked at, or whose worker answers nothing. Fake clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from controller_harness import Stage, staged

from daskserve.cluster.local.process import LocalProcess
from daskserve.errors import ActorLostError, InspectionError


@staged(workers=2)
async def test_a_replica_that_ends_meanwhile_is_told_from_one_that_never_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.run("x")
    call = LocalProcess.call

    async def lose(process: Any, actor: Any, verb: str, **message: Any) -> Any:
        if verb == "profile" and "replica" not in message:
            raise ActorLostError("its worker was lost")
        if verb == "stacks" and "replica" not in message:
            await asyncio.Event().wait()
        return await call(process, actor, verb, **message)

    monkeypatch.setattr(LocalProcess, "call", lose)
    with pytest.raises(InspectionError, match="while its code was looked at: its worker was lost"):
        await stage.call("profile", replica="x/back", seconds=1.0)
    with pytest.raises(InspectionError, match="did not answer within 5 s"):
        await stage.call("stacks", replica="x/back")
