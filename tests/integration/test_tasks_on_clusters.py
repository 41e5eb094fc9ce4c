"""Tasks on real clusters whose processes are killed: no task is lost, and none ends twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from clusters import nannied_cluster
from dask_processes import Program, dask_command, dask_worker, poll_for
from distributed import Client
from ports import free_port
from redis_servers import RedisServer

import daskserve as serve
from daskserve.task_processor import TaskQueueError

COUNT = 2000
LEASE_S = 3.0


class Notes:
    """Its tasks record in a file that they ran."""

    def __init__(self, path: str) -> None:
        self.path = path

    @serve.tasks.task_handler
    def note(self, number: int) -> int:
        context = serve.tasks.get_task_context()
        with open(self.path, "a") as file:
            file.write(f"{context.id}\n")
        time.sleep(0.02)
        return 2 * number


def run(client: serve.Client, config: serve.tasks.TaskProcessorConfig, folder: Path, **options: Any) -> Path:
    notes = folder / "notes.txt"
    consumer = serve.tasks.task_consumer(task_processor_config=config)(type("Notes", (Notes,), {}))
    made = serve.deployment(max_ongoing_requests=5, **options)(consumer)
    client.run(made.bind(str(notes)), route_prefix=None)
    return notes


def submitted(config: serve.tasks.TaskProcessorConfig, count: int = COUNT, **options: Any) -> Any:
    """Submit the same tasks twice, and return their adapter."""
    tasks: Any = serve.tasks.instantiate_adapter_from_config(config, **options)
    many = [{"task_name": "note", "args": [number], "id": f"t{number}"} for number in range(count)]
    for start in range(0, count, 500):
        assert all(each.is_new for each in tasks.submit_many(many[start : start + 500]))
        assert not any(each.is_new for each in tasks.submit_many(many[start : start + 500]))
    return tasks


def done(tasks: Any) -> int:
    return int(tasks.get_metrics_sync()["SUCCESS"])


def done_again(tasks: Any) -> int | None:
    """Return the number of tasks that are done; None while the queue cannot be reached."""
    try:
        return done(tasks)
    except TaskQueueError:
        return None


def check(tasks: Any, notes: Path, count: int = COUNT) -> Counter[str]:
    """Wait for all tasks, compare their results, and return how often each ran."""
    poll_for(lambda: done(tasks) == count, 180, what=lambda: tasks.get_metrics_sync(), every_s=0.1)
    for number in range(count):
        found = tasks.get_task_status_sync(f"t{number}")
        assert (found.status, found.result) == ("SUCCESS", 2 * number)
    ran = Counter(notes.read_text().split())
    assert set(ran) == {f"t{number}" for number in range(count)}
    metrics = tasks.get_metrics_sync()
    assert {name: metrics[name] for name in ("waiting", "running", "FAILURE", "REJECTED")} == {
        "waiting": 0,
        "running": 0,
        "FAILURE": 0,
        "REJECTED": 0,
    }
    return ran


def worker_pids(dask: Client) -> list[int]:
    """Return the processes of the three workers, once the scheduler knows that a killed one was replaced."""

    def found() -> list[int] | None:
        pids = list(dask.run(os.getpid, on_error="ignore").values())
        return pids if len(pids) == 3 else None

    pids: list[int] = poll_for(found, 150, every_s=0.1)
    return pids


@pytest.mark.nightly
@pytest.mark.limit_s(600)
@pytest.mark.parametrize("kind", ["sqlite", "redis", "instance"])
def test_killed_and_frozen_workers_and_servers_lose_no_task(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        quick = {"lease_s": LEASE_S, "poll_interval_s": 0.05, "max_losses": 1000}
        server: RedisServer | None = None
        kept: Any = serve.tasks.SQLiteAdapterConfig(path=str(tmp_path / "tasks.sqlite"), **quick)
        if kind == "redis":
            server = RedisServer(tmp_path)
            stack.callback(lambda: server and server.kill())
            kept = serve.tasks.RedisAdapterConfig(url=server.url, **quick)
        elif kind == "instance":
            kept = serve.tasks.InstanceAdapterConfig(**quick)
        config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=kept)
        dask = stack.enter_context(nannied_cluster(3))
        client = stack.enter_context(serve.start(dask_client=dask, http_options={"port": 0}))
        tasks = submitted(config, client=client)
        notes = run(client, config, tmp_path, num_replicas=3)
        for round in range(4):
            before = done(tasks)
            poll_for(lambda before=before: done(tasks) >= before + 100, 150, every_s=0.05)
            # The controller is in one of them.
            os.kill(worker_pids(dask)[round % 3], signal.SIGKILL)
            if server is not None and round == 1:
                server.kill()
                server.start()
            dask.wait_for_workers(3, timeout=150)
        before = done(tasks)
        poll_for(lambda: done(tasks) >= before + 50, 150, every_s=0.05)
        frozen = worker_pids(dask)[0]
        os.kill(frozen, signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        os.kill(frozen, signal.SIGCONT)
        ran = check(tasks, notes)
        # Only tasks that were running when a process was killed have run again.
        assert sum(ran.values()) - COUNT <= 5 * 5 * 3
        tasks.shutdown()


@pytest.mark.nightly
@pytest.mark.limit_s(600)
@pytest.mark.parametrize("kind", ["sqlite", "instance", "instance in memory"])
def test_tasks_run_on_after_the_scheduler_was_killed(kind: str, tmp_path: Path) -> None:
    kept: Any = serve.tasks.InstanceAdapterConfig(lease_s=LEASE_S)
    if kind == "sqlite":
        kept = serve.tasks.SQLiteAdapterConfig(path=str(tmp_path / "tasks.sqlite"), lease_s=LEASE_S)
    store = f"sqlite:///{tmp_path}/serve.db" if kind == "instance" else "memory://"
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=kept)
    port = free_port()
    arguments = ["--no-dashboard", "--host", "127.0.0.1", "--port", str(port)]
    address = f"tcp://127.0.0.1:{port}"
    with ExitStack() as stack:
        scheduler = Program(dask_command("scheduler", *arguments), tmp_path, keeps_stdin=True)
        stack.callback(scheduler.kill)
        for _ in range(2):
            stack.enter_context(dask_worker(address, tmp_path))
        dask = stack.enter_context(Client(address))
        dask.wait_for_workers(2, timeout=30)
        client = stack.enter_context(
            serve.start(dask_client=dask, http_options={"port": 0}, store=store, name="shop")
        )
        tasks = submitted(config, 400)
        notes = run(client, config, tmp_path, num_replicas=2)
        scheduler.process.send_signal(signal.SIGKILL)
        scheduler.wait()
        if kind == "sqlite":  # it is still there
            before = done(tasks)
            poll_for(lambda: done(tasks) >= before + 100, 150, every_s=0.05)
        else:
            with pytest.raises(TaskQueueError, match="cannot be reached"):
                tasks.enqueue_task_sync("note", [1])
        again = Program(dask_command("scheduler", *arguments), tmp_path, keeps_stdin=True)
        stack.callback(again.kill)
        poll_for(lambda: done_again(tasks) is not None, 60, every_s=0.1)
        assert set(check(tasks, notes, 400).values()) == {1}
        tasks.shutdown()
        client.shutdown()  # while there is a scheduler


@pytest.mark.nightly
@pytest.mark.limit_s(600)
def test_an_isolated_replica_whose_process_dies_loses_no_task(tmp_path: Path) -> None:
    kept = serve.tasks.SQLiteAdapterConfig(path=str(tmp_path / "tasks.sqlite"), lease_s=LEASE_S)
    config = serve.tasks.TaskProcessorConfig(queue_name="q", adapter_config=kept)
    with nannied_cluster(2) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        tasks = submitted(config, 300)
        notes = run(client, config, tmp_path, num_replicas=1, isolation="process")
        poll_for(lambda: done(tasks) >= 50, every_s=0.05)
        pids = [actor.pid for actor in client.status().actors if actor.kind == "replica"]
        children = [each for pid in pids for each in _children(pid)]
        for child in children:
            os.kill(child, signal.SIGKILL)
        check(tasks, notes, 300)
        tasks.shutdown()


def _children(pid: int) -> list[int]:
    import psutil

    return [each.pid for each in psutil.Process(pid).children() if "child_main" in " ".join(each.cmdline())]
