"""What all adapters of task queues have in common."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

import daskserve as serve
from daskserve.data.tasks import adapter as module
from daskserve.data.tasks.adapter import TaskProcessorAdapter


def test_a_wait_for_a_task_ends_although_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count(1)

    def status(task_id: str) -> serve.tasks.TaskResult:
        assert next(asked) < 20, "the wait goes on"
        return serve.tasks.TaskResult(id=task_id, status="PENDING")

    times = count(1e9, -1.0)
    monkeypatch.setattr(module, "time_of_day", lambda: next(times), raising=False)
    queue = cast(Any, SimpleNamespace(get_task_status_sync=status))
    assert TaskProcessorAdapter.wait_for_task_sync(queue, "1", 0.01).status == "PENDING"
