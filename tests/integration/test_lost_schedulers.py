"""The scheduler dies under load, and comes back at its address as another process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from clusters import Load, serve_pids
from dask_processes import Program, Reply, dask_command, dask_worker, fetch, poll_for
from distributed import Client
from ports import free_port

import daskserve as serve
from daskserve.cluster.dask.connection import connection_of
from daskserve.errors import UnavailableError

GRACE_S = 0.5
SHORT_GRACE = f"import dask; dask.config.set({{'daskserve.scheduler.grace-s': {GRACE_S}}})"


def start_scheduler(port: int, folder: Path, *extra: str) -> Program:
    arguments = ["--no-dashboard", "--host", "127.0.0.1", "--port", str(port), *extra]
    return Program(dask_command("scheduler", *arguments), folder, keeps_stdin=True)


def end(scheduler: Program, how: signal.Signals) -> None:
    scheduler.process.send_signal(how)
    scheduler.wait()


@contextmanager
def cluster(folder: Path, workers: int, **options: Any) -> Iterator[tuple[int, Program, list[Program]]]:
    """Yield a scheduler's port, the scheduler, and workers."""
    port = free_port()
    with ExitStack() as stack:
        scheduler = start_scheduler(port, folder)
        stack.callback(scheduler.kill)
        address = f"tcp://127.0.0.1:{port}"
        programs = [stack.enter_context(dask_worker(address, folder, **options)) for _ in range(workers)]
        yield port, scheduler, programs


def slow_stream(request: Any) -> AsyncIterator[str]:
    async def lines() -> AsyncIterator[str]:
        for number in range(15):
            yield f"{number}\n"
            await asyncio.sleep(0.1)

    return lines()


class Fetching:
    """A request in a separate thread."""

    def __init__(self, url: str) -> None:
        self.replies: list[Reply] = []
        self._thread = threading.Thread(target=lambda: self.replies.append(fetch(url)))
        self._thread.start()

    def wait(self) -> Reply:
        self._thread.join()
        return self.replies[0]


@pytest.mark.smoke
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_the_loss_of_the_scheduler_fails_no_request_and_costs_no_replica(
    how: signal.Signals, tmp_path: Path
) -> None:
    """The instance has its records in the scheduler's memory, and its owner keeps running."""
    with cluster(tmp_path, 2) as (port, scheduler, _), Client(f"tcp://127.0.0.1:{port}") as dask:
        dask.wait_for_workers(2, timeout=30)
        with serve.start(dask_client=dask, http_options={"port": 0}) as client:
            url = serve_pids(client)
            handle = client.get_handle("e")
            first = {actor.name: actor.pid for actor in client.status().actors if actor.kind != "controller"}
            with Load(url) as load:
                end(scheduler, how)
                load.more()
                assert handle.remote(None).result(5)
                scheduler = start_scheduler(port, tmp_path)
                try:
                    client.update_backend_config("b", {"num_replicas": 3})
                    load.more()
                except BaseException:
                    scheduler.kill()
                    raise
            assert load.failures == []
            found = {actor.name: actor.pid for actor in client.status().actors}
            assert first.items() <= found.items()
            # A program that starts now knows only this scheduler's secret; the workers have another one.
            with Client(f"tcp://127.0.0.1:{port}", set_as_default=False) as other:
                connection = connection_of(other)
                view = connection.cluster(client.instance_name)
                connection.sync(view.call(connection.sync(view.controller()), "ping"))
        scheduler.kill()


def test_an_instance_whose_store_is_away_at_the_schedulers_return_serves_on(tmp_path: Path) -> None:
    """It takes changes once the store is repaired; until then, they fail with the reason."""
    store, whole = tmp_path / "store", tmp_path / "whole"
    store.mkdir()
    with cluster(tmp_path, 2) as (port, scheduler, _), Client(f"tcp://127.0.0.1:{port}") as dask:
        dask.wait_for_workers(2, timeout=30)
        options = {"http_options": {"port": 0}, "store": f"sqlite:///{store}/store.db", "name": "shop"}
        with serve.start(dask_client=dask, **options) as client:
            url = serve_pids(client)
            connection = connection_of(dask)

            def obstacle() -> str:
                try:
                    connection.sync(connection.cluster("shop").controller())
                except UnavailableError as error:
                    return str(error)
                return ""

            with Load(url) as load:
                end(scheduler, signal.SIGKILL)
                shutil.copytree(store, whole)
                (store / "store.db").write_bytes(b"damaged" * 1000)
                scheduler = start_scheduler(port, tmp_path)
                try:
                    poll_for(lambda: "'shop' serves, but cannot be changed: The store" in obstacle())
                    load.more()
                    shutil.copytree(whole, store, dirs_exist_ok=True)
                    client.update_backend_config("b", {"num_replicas": 3})
                    load.more()
                except BaseException:
                    scheduler.kill()
                    raise
            assert load.failures == []
        scheduler.kill()


#: A preload of a scheduler, which retires a worker as soon as that registers.
RETIRES = """
from pathlib import Path
from distributed import SchedulerPlugin


class Retiring(SchedulerPlugin):
    async def add_worker(self, scheduler, worker):
        if worker == {worker!r}:
            scheduler.loop.add_callback(self.retire, scheduler, worker)

    async def retire(self, scheduler, worker):
        await scheduler.retire_workers([worker], close_workers=True)
        Path({note!r}).touch()


def dask_setup(scheduler):
    scheduler.add_plugin(Retiring())
"""


@pytest.mark.nightly
def test_a_scheduler_that_does_not_know_the_instance_yet_retires_a_worker_whose_requests_complete(
    tmp_path: Path,
) -> None:
    begun, released, retired = (tmp_path / name for name in ("begun", "released", "retired"))

    def held(request: Any) -> Iterator[str]:
        yield "first,"
        begun.touch()
        poll_for(released.exists)
        yield "last"

    with cluster(tmp_path, 3) as (port, scheduler, _), Client(f"tcp://127.0.0.1:{port}") as dask:
        dask.wait_for_workers(3, timeout=30)
        with serve.start(dask_client=dask, http_options={"port": 0}) as client:
            actors = {actor.kind: actor.worker for actor in client.status().actors}
            (worker,) = set(dask.scheduler_info(n_workers=-1)["workers"]) - {*actors.values()}
            client.run(serve.deployment(name="held", actor_options={"workers": [worker]})(held).bind())
            stream = Fetching(client.http_urls()[0])
            poll_for(begun.exists)
            end(scheduler, signal.SIGKILL)
            preload = tmp_path / "preload.py"
            preload.write_text(RETIRES.format(worker=worker, note=str(retired)))
            scheduler = start_scheduler(port, tmp_path, "--preload", str(preload))
            try:
                poll_for(retired.exists)
                # The instance is back, and the new scheduler would have the worker's connections closed.
                poll_for(lambda: not [each for each in client.status().actors if each.worker == worker])
                released.touch()
                assert stream.wait().text == "first,last"
            except BaseException:
                scheduler.kill()
                raise
        scheduler.kill()


@pytest.mark.nightly
def test_a_scheduler_that_stays_away_ends_its_workers_after_what_runs(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, prelude=SHORT_GRACE) as (port, scheduler, workers):
        with Client(f"tcp://127.0.0.1:{port}") as dask:
            dask.wait_for_workers(1, timeout=30)
            client = serve.start(dask_client=dask, http_options={"port": 0}, detached=True)
            client.create_backend("b", slow_stream)
            client.create_endpoint("e", backend="b", route="/e")
            stream = Fetching(f"{client.http_urls()[0]}/e")
            poll_for(lambda: client.status().backends["b"])
            end(scheduler, signal.SIGKILL)
            assert len(stream.wait().text.splitlines()) == 15
            workers[0].wait()
