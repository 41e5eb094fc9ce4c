"""The kind of event loop in each thread and process."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from contextlib import closing

import dask
import pytest
from cases import for_each

from daskserve.cluster.dask.server_process import command
from daskserve.data.replica.execution.user_loop import UserLoop
from daskserve.data.replica.execution.user_threads import UserThreads
from daskserve.loops import event_loop as loops
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.loops.threads import start_daemon

uvloop = pytest.importorskip("uvloop")


def test_uvloop_is_used_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(loops.new_event_loop()) as loop:
        assert isinstance(loop, uvloop.Loop)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with closing(loops.new_event_loop()) as loop:
        assert not isinstance(loop, uvloop.Loop)


def test_uvloop_can_be_disabled() -> None:
    with dask.config.set({"daskserve.process.uvloop": False}):
        with closing(loops.new_event_loop()) as loop:
            assert not isinstance(loop, uvloop.Loop)


async def _loop_of_user_code() -> object:
    to_worker = ThreadCalls(asyncio.get_running_loop())
    user_loop = UserLoop("test", contextvars.copy_context(), to_worker, set())
    user_loop.run_in_thread(UserThreads("test", 1, to_worker, set()), start_daemon)
    await user_loop.close(5.0)
    return user_loop.loop


def test_user_code_runs_on_uvloop() -> None:
    assert isinstance(asyncio.run(_loop_of_user_code()), uvloop.Loop)


@for_each(
    ("config", "expected"),
    [
        ({}, "uvloop"),
        ({"daskserve.process.uvloop": False}, "tornado"),
        ({"distributed.admin.event-loop": "asyncio"}, "asyncio"),
    ],
)
def test_started_workers_use_uvloop_unless_dask_is_configured_otherwise(
    config: dict[str, object], expected: str
) -> None:
    with dask.config.set(config):
        assert f'"distributed.admin.event-loop": "{expected}"' in command("distributed.Worker", {})[-1]
