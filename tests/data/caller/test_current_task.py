"""How calls within a Dask task free its thread for other tasks, and take a thread again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from tables import each_case

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.data.caller.blocking import ASK_S, BRIEF_S, TaskSlot, wait_in_thread
from daskserve.data.caller.calls.pending import waiter_for
from daskserve.errors import RequestCancelledError
from daskserve.loops.pending_call import PendingCall
from daskserve.loops.thread_calls import LoopQueues


class ScriptedTask:
    """A `daskserve.cluster.protocols.tasks.CurrentTask` that records its calls."""

    key = "job"

    def __init__(self, *, may_leave: bool = True) -> None:
        self.is_released = False
        self.asked: list[str] = []
        self.callbacks: list[Callable[[], object]] = []
        self._may_leave = may_leave

    def secede(self, limit: int | None = None) -> bool:
        self.asked.append("secede")
        return self._may_leave or limit is None

    def rejoin(self) -> None:
        self.asked.append("rejoin")

    def on_release(self, callback: Callable[[], object]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def reschedule(self) -> Exception:
        return RuntimeError("again")

    def release(self) -> None:
        self.is_released = True
        for each in list(self.callbacks):
            each()


def connection_of(task: ScriptedTask, loop: asyncio.AbstractEventLoop | None = None) -> ClusterConnection:
    connection = SimpleNamespace(current_task=lambda: task, loop=loop, loop_queues=LoopQueues())
    return cast(ClusterConnection, connection)


@each_case(
    ("took_s", "timeout_s", "waits", "asked"),
    [
        (BRIEF_S / 2, None, [BRIEF_S], []),
        (1.0, None, [BRIEF_S, None], ["secede", "rejoin"]),
        (1.0, 3.0, [BRIEF_S, 3.0 - BRIEF_S], ["secede", "rejoin"]),
        (1.0, BRIEF_S / 2, [BRIEF_S / 2, 0.0], ["secede", "rejoin"]),
    ],
)
def test_a_long_wait_in_a_thread_gives_its_place_away_until_it_ends(
    took_s: float, timeout_s: float | None, waits: list[float | None], asked: list[str]
) -> None:
    task, seen = ScriptedTask(), list[float | None]()

    def wait(longest_s: float | None) -> bool:
        seen.append(longest_s)
        return longest_s is None or longest_s >= took_s

    wait_in_thread(connection_of(task), wait, timeout_s, lambda: None)
    assert (seen, task.asked, task.callbacks) == (waits, asked, [])


def test_a_wait_that_raises_takes_a_place_again() -> None:
    task = ScriptedTask()

    def wait(longest_s: float | None) -> bool:
        if longest_s is None:
            raise KeyError("k")
        return False

    with pytest.raises(KeyError):
        wait_in_thread(connection_of(task), wait, None, lambda: None)
    assert (task.asked, task.callbacks) == (["secede", "rejoin"], [])


async def test_a_coroutine_leaves_while_it_waits_and_a_release_cancels_its_call() -> None:
    task, call = ScriptedTask(), PendingCall[int]()
    waiter = waiter_for(connection_of(task, asyncio.get_running_loop()), call)
    assert task.asked == ["secede"]
    task.release()
    await waiter
    await asyncio.sleep(0)
    assert (call.cancelled(), task.asked, task.callbacks) == (True, ["secede", "rejoin"], [])


@each_case(
    ("may_leave", "longest_s", "asked"),
    [
        (True, [BRIEF_S, None, None], ["secede", "rejoin"]),
        (False, [BRIEF_S, ASK_S, BRIEF_S], ["secede", "secede"]),
    ],
)
def test_a_task_that_reads_many_results_leaves_once_unless_too_many_have_left(
    may_leave: bool, longest_s: list[float | None], asked: list[str]
) -> None:
    task, seen = ScriptedTask(may_leave=may_leave), list[float | None]()
    place = TaskSlot(task, lambda: 2)
    place.on_release(lambda: None)

    def wait(longest: float | None) -> bool:
        seen.append(longest)
        return False

    place.wait(wait, None)
    place.wait(wait, None)
    place.end()
    assert (seen[:3], task.asked, task.callbacks) == (longest_s, asked, [])


def test_a_released_task_makes_no_more_calls() -> None:
    task = ScriptedTask()
    place = TaskSlot(task, lambda: None)
    place.check()
    task.release()
    with pytest.raises(RequestCancelledError, match="job"):
        place.check()
