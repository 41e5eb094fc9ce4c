"""The Dask clusters that daskserve starts if the user has none.

Their processes are plain subprocesses; see `daskserve.cluster.dask.server_process`. Each gets its own
session, so that Ctrl-C reaches only the caller.

The cluster of an instance that ends with its program also ends with it: the scheduler and the nannies run in
the caller's process (see `daskserve.cluster.dask.supervised_worker`), and a worker exits when the caller is
killed.
A detached instance gets a separate scheduler process and workers with nannies, which outlive the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import dask.config
from distributed import Client, Scheduler, SpecCluster

from daskserve.cluster.dask.idle_work import quiet_config
from daskserve.cluster.dask.quiet_close import QuietCluster
from daskserve.cluster.dask.server_process import command, environment
from daskserve.cluster.dask.supervised_worker import SubprocessNanny
from daskserve.cluster.distributed_internals import is_asynchronous
from daskserve.common.formatting import shown
from daskserve.common.settings import LocalClusterSize
from daskserve.errors import InstanceError
from daskserve.loops.blocking import finish, settled

logger = logging.getLogger("daskserve.launch")

T = TypeVar("T")

#: Time within which a new cluster must be complete.
START_TIMEOUT_S = 30.0
#: Interval of the checks whether a process of a new cluster has exited.
CHECK_S = 0.5
#: Interval of the checks whether a new scheduler has written its address.
CHECK_FILE_S = 0.05
_LOCALHOST = "127.0.0.1"
#: Port of the scheduler's HTTP server if it is free: Dask's default.
DASHBOARD_PORT = 8787


def _dashboard(wanted: bool) -> dict[str, Any]:
    # Dask itself would also choose another port, but log a warning.
    port = DASHBOARD_PORT if wanted and _is_free(DASHBOARD_PORT) else 0
    return {
        "dashboard": wanted and find_spec("bokeh") is not None,
        "dashboard_address": f"{_LOCALHOST}:{port}",
    }


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Set as Tornado sets it, so that closing connections of an earlier cluster do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOCALHOST, port))
        except OSError:
            return False
    return True


def _worker_options(size: LocalClusterSize) -> dict[str, Any]:
    return {
        "nthreads": size.threads_per_worker,
        "host": _LOCALHOST,
        "silence_logs": logging.WARNING,
        "memory_limit": 1 / size.n_workers,  # as a fraction of this machine's memory
        # No dashboards on workers: the scheduler's shows every worker, and loading one takes 0.4 s.
        **_dashboard(False),
    }


def start_local_cluster(size: LocalClusterSize, *, has_dashboard: bool) -> tuple[SpecCluster, Client]:
    """Start a scheduler in this process and workers as subprocesses; return them with a default client.

    On failure or interruption, everything that was started ends.
    """

    def undo(made: tuple[SpecCluster, Client]) -> None:
        cluster, client = made
        client.close()
        cluster.close()

    return _start_whole(
        lambda given_up: finish(_start_local(size, has_dashboard, given_up, asynchronous=False)), undo
    )


async def start_local_cluster_async(
    size: LocalClusterSize, *, has_dashboard: bool
) -> tuple[SpecCluster, Client]:
    """Start a cluster as `start_local_cluster` does, with its scheduler and client on the running loop."""
    return await _start_local(size, has_dashboard, threading.Event(), asynchronous=True)


def _start_whole(start: Callable[[threading.Event], T], undo: Callable[[T], None]) -> T:
    """Start something in a thread, where Ctrl-C cannot interrupt it halfway. On Ctrl-C, undo the whole start.

    ``start`` gets an event that is set when it should give up and clean up.
    """
    given_up = threading.Event()
    with ThreadPoolExecutor(1, "daskserve-launch") as threads:
        starting = threads.submit(start, given_up)
        try:
            return starting.result()
        except BaseException:
            given_up.set()
            if starting.exception() is None:
                undo(starting.result())
            raise


async def _wait_for_workers(
    client: Client, count: int, given_up: threading.Event, statuses: Callable[[], Iterable[int | None]]
) -> None:
    """Return when the workers have joined; raise if one has exited, on timeout, or if ``given_up`` is set."""
    for _ in range(int(START_TIMEOUT_S / CHECK_S)):
        try:
            waiting: Any = client.wait_for_workers  # typed as blocking only
            await settled(waiting(count, timeout=CHECK_S))
            return
        except TimeoutError:
            if given_up.is_set():
                raise
        ended = [status for status in statuses() if status is not None]
        if ended:
            raise InstanceError(
                f"A Dask worker could not be started (exit status {ended[0]}); run `dask worker` manually to "
                "see why."
            )
    raise InstanceError(
        f"{count} Dask workers could not be started within {shown(START_TIMEOUT_S)} s; run "
        "`dask worker` manually to see why."
    )


async def _complete_client(
    client: Client, count: int, given_up: threading.Event, statuses: Callable[[], Iterable[int | None]]
) -> Client:
    """Return a client once its workers have joined; close it if they do not."""
    try:
        if is_asynchronous(client):
            await client
        await _wait_for_workers(client, count, given_up, statuses)
    except BaseException:
        await settled(client.close())
        raise
    return client


async def _start_local(
    size: LocalClusterSize, has_dashboard: bool, given_up: threading.Event, *, asynchronous: bool
) -> tuple[SpecCluster, Client]:
    config = quiet_config() if size.quiet_dask else {}
    spec = {
        "cls": SubprocessNanny,
        "options": {"worker_options": _worker_options(size), "config": config},
    }
    with dask.config.set(config):  # the scheduler and the nannies read it when they start
        cluster = QuietCluster(
            workers=dict.fromkeys(range(size.n_workers), spec),
            scheduler={
                "cls": Scheduler,
                "options": {"host": _LOCALHOST, "port": 0, **_dashboard(has_dashboard)},
            },
            worker=spec,
            name="daskserve",
            silence_logs=logging.ERROR,
            asynchronous=asynchronous,
        )
        if asynchronous:
            await _opened(cluster)
    try:
        return cluster, await _complete_client(
            Client(cluster, asynchronous=asynchronous),
            size.n_workers,
            given_up,
            lambda: [each.last_exit for each in cluster.workers.values()],
        )
    except BaseException:
        await settled(cluster.close())
        raise


async def _opened(cluster: SpecCluster) -> None:
    try:
        await cluster
    except BaseException:
        await settled(cluster.close())
        raise


def start_detached_cluster(size: LocalClusterSize, *, has_dashboard: bool) -> Client:
    """Start a scheduler and workers with nannies that outlive this process; return a default client.

    Raises
    ------
    InstanceError
        A process did not start; the others have been killed.
    """
    return _start_whole(
        lambda given_up: finish(_start_detached(size, has_dashboard, given_up, asynchronous=False)),
        lambda client: client.shutdown(),
    )


async def start_detached_cluster_async(size: LocalClusterSize, *, has_dashboard: bool) -> Client:
    """Start a cluster as `start_detached_cluster` does, with its client on the running loop."""
    return await _start_detached(size, has_dashboard, threading.Event(), asynchronous=True)


async def _start_detached(
    size: LocalClusterSize, has_dashboard: bool, given_up: threading.Event, *, asynchronous: bool
) -> Client:
    processes: list[subprocess.Popen[bytes]] = []
    config = quiet_config() if size.quiet_dask else {}

    def spawn(cls: str, options: dict[str, Any], *addresses: str) -> None:
        processes.append(
            subprocess.Popen(
                command(cls, options, *addresses, config=config),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(config),
                start_new_session=True,
            )
        )

    try:
        with tempfile.TemporaryDirectory(prefix="daskserve-") as folder:
            file = Path(folder) / "scheduler.json"
            spawn(
                "distributed.Scheduler",
                {
                    "host": _LOCALHOST,
                    "port": 0,
                    "scheduler_file": str(file),
                    **_dashboard(has_dashboard),
                },
            )
            address = await _read_address(file, processes[0], asynchronous=asynchronous)
        options = _worker_options(size)
        for number in range(size.n_workers):
            spawn("distributed.Nanny", {**options, "name": str(number)}, address)
        client = await _complete_client(
            Client(address, asynchronous=asynchronous),
            size.n_workers,
            given_up,
            lambda: [each.poll() for each in processes],
        )
    except BaseException:
        for process in processes:
            # Not terminate: a worker that loses its scheduler while it shuts down may hang.
            process.kill()
        raise
    for process in processes:
        # Reap each process when it exits, or it stays a zombie.
        threading.Thread(target=process.wait, name="daskserve-reaper", daemon=True).start()
    return client


async def _read_address(file: Path, process: subprocess.Popen[bytes], *, asynchronous: bool) -> str:
    waited = threading.Event()
    for _ in range(int(START_TIMEOUT_S / CHECK_FILE_S)):
        address = _address_in(file)
        if address is not None:
            return address
        if process.poll() is not None:
            break
        if asynchronous:
            await asyncio.sleep(CHECK_FILE_S)
        else:
            waited.wait(CHECK_FILE_S)
    raise InstanceError(
        f"A Dask scheduler could not be started (exit status {process.poll()}); run `dask scheduler` "
        "manually to see why."
    )


def _address_in(file: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads(file.read_text())["address"])
    return None
