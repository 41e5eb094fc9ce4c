"""The kind of event loop in each thread and process."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from contextlib import closing
from typing import cast

import dask
import pytest
from tables import each_case

from daskserve.cluster.dask.server_process import command
from daskserve.common.types import OpenSocket
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


class Guest:
    """A connection that ends after some time."""

    def __init__(self, user_loop: UserLoop, ends_after_s: float) -> None:
        self.is_aborted = False
        user_loop.admit(cast("OpenSocket", self))
        user_loop.loop.call_later(ends_after_s, user_loop.dismiss, self)

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_loop_that_closes_waits_for_all_its_connections() -> None:
    to_worker, guests = ThreadCalls(asyncio.get_running_loop()), list[Guest]()
    user_loop = UserLoop("test", contextvars.copy_context(), to_worker, set())
    user_loop.run_in_thread(UserThreads("test", 1, to_worker, set()), start_daemon)
    for after_s in (0.1, 0.3):
        user_loop.thread_calls.post(lambda after_s=after_s: guests.append(Guest(user_loop, after_s)))
    await user_loop.close(20.0)
    assert [each.is_aborted for each in guests] == [False, False]


@each_case(
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
