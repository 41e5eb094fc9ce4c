"""Tasks per second through each kind of queue, compared with Celery on the same Redis.

Each queue gets the same tasks, which return their argument. Measured: submitting them from one process; then
running them with consumers in two worker processes, from the first result to the last; and both at once, with
one process that submits while the consumers run. The last column is the processor time of all processes for a
task that is submitted and run.

The floor is SQLite alone, without daskserve: a task is one row, which one transaction inserts and two others
update. It submits one by one, or 100 in one transaction.

Celery runs in a separate environment: ``--celery FOLDER`` names a virtual environment with ``celery`` and
``redis``, whose worker has two processes, acknowledges late and keeps results.

Needs ``redis-server``. Run: ``python benchmarks/bench_tasks.py [--tasks N] [--celery FOLDER]``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

DEADLINE_S = 300.0
CONCURRENCY = 20

#: A program for the other environment, which creates Celery's application and submits tasks.
CELERY = """
import sys, time
from celery import Celery
app = Celery("bench", broker=sys.argv[-1], backend=sys.argv[-1])
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1)

@app.task(name="echo")
def echo(value):
    return value

if __name__ == "__main__":
    if sys.argv[1] == "worker":
        app.worker_main(["worker", "--loglevel=warning", "--concurrency=2"])
    else:
        count = int(sys.argv[2])
        began = time.perf_counter()
        results = [echo.delay(number) for number in range(count)]
        submitted = time.perf_counter()
        assert [each.get(timeout=300) for each in results] == list(range(count))
        print(submitted - began, time.perf_counter() - began)
"""


class Echo:
    """Returns its argument."""

    @serve.tasks.task_handler
    def echo(self, value: int) -> int:
        return value


@contextlib.contextmanager
def redis_server(folder: str) -> Iterator[str]:
    """Yield the URL of a Redis server that writes to its disk each second."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "yes", "--dir", folder]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        time.sleep(1)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + DEADLINE_S
    while not condition():
        if time.perf_counter() > deadline:
            raise TimeoutError("the tasks are not done")
        time.sleep(0.02)


def cpu_s() -> float:
    """Return the processor time of this process and its children so far."""
    here = psutil.Process()
    times = [each.cpu_times() for each in (here, *here.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def shown(name: str, *values: float | None) -> None:
    """Print a line: tasks per second, and microseconds per task."""
    print(f"{name:28}", *("        " if each is None else f"{each:8.0f}" for each in values), flush=True)


def measure_floor(folder: str, count: int, batch: int) -> None:
    """Print the rates of SQLite alone."""
    connection = sqlite3.connect(os.path.join(folder, f"floor{batch}.sqlite"), isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, state TEXT, payload BLOB)")

    def written(statement: str, rows: list[tuple[Any, ...]]) -> float:
        began = time.perf_counter()
        for start in range(0, count, batch):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(statement, rows[start : start + batch])
            connection.execute("COMMIT")
        return time.perf_counter() - began

    used = cpu_s()
    submitted = written("INSERT INTO tasks VALUES (?, 'PENDING', ?)", [(n, b"x" * 60) for n in range(count)])
    ran = sum(
        written("UPDATE tasks SET state = ? WHERE id = ?", [(state, n) for n in range(count)])
        for state in ("STARTED", "SUCCESS")
    )
    used = cpu_s() - used
    connection.close()
    both = count / (submitted + ran)
    shown(f"floor, by {batch}", count / submitted, count / ran, both, used / count * 1e6)


def measure(name: str, kept: Any, count: int, batch: int = 1) -> None:
    """Print the rates of one kind of queue, with tasks that are submitted one by one or in batches."""
    config = serve.tasks.TaskProcessorConfig(queue_name=f"bench{batch}", adapter_config=kept)
    tasks: Any = serve.tasks.instantiate_adapter_from_config(config)

    def done() -> int:
        return int(tasks.get_metrics_sync()["SUCCESS"])

    def submit() -> list[str]:
        made = [{"task_name": "echo", "args": [number]} for number in range(count)]
        starts = range(0, count, batch)
        return [each.id for start in starts for each in tasks.submit_many(made[start : start + batch])]

    began = time.perf_counter()
    submit()
    submitted = time.perf_counter() - began
    consumer = serve.tasks.task_consumer(task_processor_config=config)(Echo)
    app = serve.deployment(num_replicas=2, max_ongoing_requests=CONCURRENCY)(consumer).bind()
    began = time.perf_counter()
    serve.run(app, name="bench", route_prefix=None)
    wait_for(lambda: done() > 0)
    first, began = done(), time.perf_counter()
    wait_for(lambda: done() == count)
    ran = (count - first) / (time.perf_counter() - began)
    began, used = time.perf_counter(), cpu_s()
    ids = submit()
    wait_for(lambda: done() == 2 * count)
    both, used = count / (time.perf_counter() - began), cpu_s() - used
    assert tasks.get_task_status_sync(ids[7]).result == 7
    serve.delete("bench")
    tasks.shutdown()
    shown(name, count / submitted, ran, both, used / count * 1e6)


def measure_celery(folder: str, url: str, count: int, place: str) -> None:
    """Print the rates of Celery on the same server."""
    program = Path(place) / "celery_bench.py"
    program.write_text(CELERY)
    python = str(Path(folder) / "bin" / "python")
    worker = subprocess.Popen(
        [python, str(program), "worker", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(5)
        command = [python, str(program), "submit", str(count), url]
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        submitted, both = map(float, found.stdout.split())
        shown("celery + redis", count / submitted, None, count / both)
    finally:
        worker.terminate()
        worker.wait(30)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--celery", default="", help="a virtual environment with celery and redis")
    options = parser.parse_args()
    if shutil.which("redis-server") is None:
        sys.exit("needs redis-server")
    with tempfile.TemporaryDirectory() as place, redis_server(place) as url:
        cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
        try:
            with serve.start(dask_client=dask, http_options={"location": "NoServer"}):
                print(f"{'tasks per second':28} {'submit':>8} {'run':>8} {'both':>8} {'CPU us':>8}")
                for batch in (1, 100):
                    measure_floor(place, options.tasks, batch)
                    path = os.path.join(place, f"tasks{batch}.sqlite")
                    kinds = {
                        "SQLite": serve.tasks.SQLiteAdapterConfig(path=path),
                        "instance": serve.tasks.InstanceAdapterConfig(),
                        "Redis": serve.tasks.RedisAdapterConfig(url=url, prefix=f"bench{batch}"),
                    }
                    for name, kept in kinds.items():
                        measure(f"{name}, by {batch}", kept, options.tasks, batch)
                if options.celery:
                    measure_celery(options.celery, url, options.tasks, place)
        finally:
            dask.close()
            cluster.close()


if __name__ == "__main__":
    main()
