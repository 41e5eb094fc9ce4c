"""The loop that keeps the models of replicas, on a real controller in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from controller_harness import Stage, staged

from daskserve.control.backend.model_reconciler import PERIOD_S
from daskserve.control.records.model_decisions import Folder
from daskserve.errors import NotFoundError


@staged()
async def test_a_folder_read_for_a_deleted_backend_is_not_used_for_the_next_of_its_name(stage: Stage) -> None:
    answers = asyncio.Event()
    read: list[str] = []

    async def reading(url: str, function: Any, clock: Any) -> tuple[Folder, Mapping[str, str]]:
        read.append(url)
        if url == "/old":
            await answers.wait()
        return Folder({url: ["1"]}, {f"{url}/1"}), {}

    core = stage.controller()._core
    core.observed.folders.read = reading  # type: ignore[method-assign]
    await stage.create(model_repository={"url": "/old"})
    await stage.until(lambda: read == ["/old"])
    await stage.delete()
    await stage.create(model_repository={"url": "/new"})
    (replica,) = stage.running_of()
    nothing: dict[str, Any] = {"models": {"loaded": {}, "defaults": {}, "errors": {}}}
    replica.health = lambda: nothing  # type: ignore[method-assign]
    answers.set()
    await stage.clock.sleep(3 * PERIOD_S)
    assert read == ["/old", "/new"]
    assert list(core.state.models["b"].models) == ["/new"]


@staged()
async def test_the_retry_of_an_unload_that_was_written_is_no_error(stage: Stage) -> None:
    async def reading(url: str, function: Any, clock: Any) -> dict[str, list[str]]:
        return {"m": ["1"]}

    stage.controller()._core.observed.folders.read = reading  # type: ignore[method-assign, assignment]
    await stage.create(model_repository={"url": "/models", "mode": "explicit"})
    assert await stage.call("load_model", name="b", model="m") == {"version": "1"}
    for _ in range(2):
        await stage.call("unload_model", name="b", model="m", version="1", request_id="one")
    with pytest.raises(NotFoundError, match="not loaded"):
        await stage.call("unload_model", name="b", model="m", version="1", request_id="two")
