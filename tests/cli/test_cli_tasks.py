"""``daskserve tasks``, on an instance in this process and on a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import daskserve as serve
from daskserve.cli.instance import InstanceAddress
from daskserve.cli.main import main
from daskserve.cli.verbs import tasks as command
from daskserve.client.functions import task_admin
from daskserve.client.functions.task_admin import TaskAdmin
from daskserve.common.clock import time_of_day
from daskserve.data.tasks.errors import TaskConflictError
from daskserve.data.tasks.queues.protocol import Change
from daskserve.data.tasks.states import RetryRules, Task, claimed, requeued, unprocessable
from daskserve.testing import local_instance


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        yield client


@pytest.fixture
def queue(client: serve.Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A queue with one task in each state that the tests use."""

    @contextmanager
    def connected(at: InstanceAddress) -> Iterator[serve.Client]:
        yield client

    monkeypatch.setattr(command, "connected", connected)
    return filled(serve.tasks.InstanceAdapterConfig(poll_interval_s=0.01), client=client)


def filled(kept: Any, **options: Any) -> Any:
    config = serve.tasks.TaskProcessorConfig(queue_name="mail", adapter_config=kept, max_retries=0)
    tasks: Any = serve.tasks.instantiate_adapter_from_config(config, **options)
    tasks.register_task_handle(lambda x: 1 // x, "divide")
    for id, value in (("good", 1), ("bad", 0)):
        if tasks.enqueue_task_sync("divide", [value], id=id).status == "PENDING":
            tasks.start_consumer()
            tasks.wait_for_task_sync(id, 10)
            tasks.stop_consumer()
    tasks.enqueue_task_sync("divide", [2], id="later", delay_s=1000)
    return tasks


def call(*arguments: str, exit_code: int = 0) -> str:
    found = CliRunner().invoke(main, ["tasks", *arguments])
    assert found.exit_code == exit_code, found.output
    return found.output


def test_queues_and_tasks_are_listed_and_shown(queue: Any) -> None:
    assert call("list").split("\n")[1].split() == ["mail", "1", "0", "0", "1", "1", "0", "0", "0"]
    (counts,) = json.loads(call("list", "--json"))
    assert (counts["queue"], counts["PENDING"], counts["FAILURE"]) == ("mail", 1, 1)
    assert [line.split()[:3] for line in call("list", "mail").splitlines()[1:]] == [
        ["later", "divide", "PENDING"],
        ["good", "divide", "SUCCESS"],
        ["bad", "divide", "FAILURE"],
    ]
    assert [each["id"] for each in json.loads(call("list", "mail", "--state", "FAILURE", "--json"))] == [
        "bad"
    ]
    assert json.loads(call("show", "mail", "good", "--json"))["result"] == 1
    assert "error: ZeroDivisionError" in call("show", "mail", "bad")
    assert "Traceback" in call("show", "mail", "bad")
    assert "no task with the id 'unknown'" in call("show", "mail", "unknown", exit_code=1)


def test_tasks_are_cancelled_and_queued_again(queue: Any) -> None:
    assert call("cancel", "mail", "later", "good", exit_code=1) == "later: cancelled\ngood: has ended\n"
    assert call("retry", "mail", "later") == "1 task is queued again.\n"
    assert json.loads(call("requeue", "mail", "--json")) == ["bad"]
    assert call("requeue", "mail") == "0 tasks are queued again.\n"
    assert queue.get_metrics_sync()["PENDING"] == 2
    assert "cannot be requeued" in call("retry", "mail", "good", exit_code=1)


def test_requeue_takes_each_task_once_that_the_queue_still_knows(
    client: serve.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = serve.tasks.TaskProcessorConfig(
        queue_name="again", adapter_config=serve.tasks.InstanceAdapterConfig()
    )
    tasks: Any = serve.tasks.instantiate_adapter_from_config(config, client=client)
    now = time_of_day()
    for number, ended_at in enumerate([now - 9.0] * 4 + [now + 900.0]):
        lives_s = 0.0 if number == 1 else 1000.0
        made = Task(f"t{number}", "again", "f", b"", created_at=now, due_at=now, result_ttl_s=lives_s)
        tasks.queue.add([made], 100, now)
        (begun,) = tasks.queue.claim("again", "me", 1, now, 30.0)
        tasks.queue.write([Change(unprocessable(begun, "error", ended_at, RetryRules()))])
    admin = TaskAdmin(tasks)
    listed = ["t0", "t2", "t3", "t4"]
    assert sorted(each["id"] for each in admin.tasks(["REJECTED"], 10)) == listed
    taken: list[str] = []

    def retry(id: str) -> None:
        """Fail again at once, in a consumer whose clock is behind; another command has already queued one."""
        assert len(taken) < 10
        taken.append(id)
        if id == "t2":
            raise TaskConflictError("is PENDING")
        again = requeued(tasks.find(id), now)
        tasks.queue.write([Change(again)])
        again = unprocessable(claimed(again, "me", now, 30.0), "error", now - 5.0, RetryRules())
        tasks.queue.write([Change(replace(again, revision=tasks.find(id).revision + 1))])

    monkeypatch.setattr(admin, "retry", retry)
    monkeypatch.setattr(task_admin, "BATCH", 1)
    assert sorted(admin.requeue()) == ["t0", "t3"]
    assert sorted(taken) == ["t0", "t1", "t2", "t3"]


def test_a_queue_in_a_file_is_found_by_the_import_path_of_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "tasks.sqlite"
    filled(serve.tasks.SQLiteAdapterConfig(path=str(path), poll_interval_s=0.01)).shutdown()
    (tmp_path / "mail_queue_of_test.py").write_text(
        "import daskserve as serve\n"
        f"kept = serve.tasks.SQLiteAdapterConfig(path={str(path)!r})\n"
        "queue = serve.tasks.TaskProcessorConfig(queue_name='mail', adapter_config=kept)\n"
    )
    folder = ("-d", str(tmp_path))
    assert len(call("list", "mail_queue_of_test:queue", *folder).splitlines()) == 4
    assert call("requeue", "mail_queue_of_test:queue", *folder) == "1 task is queued again.\n"
    assert "name a TaskProcessorConfig" in call("list", "mail_queue_of_test:kept", *folder, exit_code=1)
