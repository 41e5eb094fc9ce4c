"""The Dask clusters that daskserve starts if the user has none.

A `distributed.LocalCluster` spawns its workers through multiprocessing, which runs the caller's main
module again and so needs an ``if __name__ == "__main__"`` guard. Plain subprocesses need no guard, so
pasted scripts, REPLs and notebooks work. Each process gets its own session, so that Ctrl-C reaches only the
caller.

The cluster of an instance that ends with its program also ends with it: the scheduler runs in the caller's
process, and a worker exits when the caller is killed. A detached instance gets a separate scheduler process
and workers with nannies, which outlive the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import dask.config
from distributed import Client, Scheduler, SpecCluster
from distributed.deploy import ProcessInterface

from daskserve.amounts import shown
from daskserve.cluster.distributed_internals import config_variables
from daskserve.cluster.quiet_close import QuietCluster
from daskserve.errors import InstanceError
from daskserve.loops.blocking import finish, settled
from daskserve.loops.event_loop import uses_uvloop
from daskserve.settings import LocalClusterSize, process_variables

logger = logging.getLogger("daskserve.launch")

T = TypeVar("T")

#: Program of each process of the cluster. It uses the caller's import path, as a multiprocessing child does.
#: A ``-c`` program has no main module that a nanny's child would run again.
_MAIN = (
    "import json, sys; options = json.loads(sys.argv.pop()); sys.path[:] = options['path']; "
    "import dask.config; dask.config.set(options['config']); "
    "from distributed.cli.dask_spec import main; main(options['arguments'])"
)
#: Prelude for a process that must not outlive its caller, even if the caller is killed before there is a
#: scheduler: only the caller holds the other end of the pipe that is the process's standard input.
_END_WITH_CALLER = (
    "import os, threading, time; lifeline = os.dup(0); os.dup2(os.open(os.devnull, os.O_RDONLY), 0); "
    "threading.Thread(target=lambda: (os.read(lifeline, 1), time.sleep({grace_s}), os._exit(1)), "
    "daemon=True).start(); "
)
#: Time between SIGTERM and SIGKILL for a worker.
END_TIMEOUT_S = 3.0
#: Time within which a new cluster must be complete.
START_TIMEOUT_S = 30.0
#: Interval of the checks whether a process of a new cluster has exited.
CHECK_S = 0.5
#: Interval of the checks whether a new scheduler has written its address.
CHECK_FILE_S = 0.05
_LOCALHOST = "127.0.0.1"


def command(
    cls: str,
    options: dict[str, Any],
    *addresses: str,
    prelude: str = "",
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the command line of a process that runs one Dask server, after ``prelude``."""
    here = os.getcwd()
    message = {
        "path": [entry or here for entry in sys.path],
        "config": {"distributed.admin.event-loop": _event_loop(), **(config or {})},
        "arguments": [*addresses, "--spec", json.dumps({"cls": cls, "opts": options})],
    }
    return [sys.executable, "-c", prelude + _MAIN, json.dumps(message)]


def _event_loop() -> str:
    configured = str(dask.config.get("distributed.admin.event-loop"))
    # "tornado" is Dask's default, and an alias of "asyncio".
    return "uvloop" if configured == "tornado" and uses_uvloop() else configured


def _environment() -> dict[str, str]:
    """Return the variables of a process of the cluster, with the changes of `dask.config.set` in this one.

    This passes certificates and all other settings of these sections to the cluster. Other sections may hold
    objects such as thread pools, which must stay in this process.
    """
    sections = {name: dask.config.get(name, default={}) for name in ("distributed", "daskserve")}
    return {**process_variables(), **config_variables(sections)}


class WorkerProcess(ProcessInterface):
    """One Dask worker in a plain subprocess, with the interface that `distributed.SpecCluster` requires."""

    def __init__(self, scheduler: str, name: str | int, worker_options: dict[str, Any]) -> None:
        self._command = command(
            "distributed.Worker",
            {**worker_options, "name": str(name)},
            scheduler,
            prelude=_END_WITH_CALLER.format(grace_s=END_TIMEOUT_S),
            # The scheduler is in the caller's process, and does not come back.
            config={"daskserve.scheduler.grace-s": 0},
        )
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        super().__init__()

    async def start(self) -> None:
        stdin, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=stdin, env=_environment(), start_new_session=True
            )
        finally:
            os.close(stdin)
        await super().start()

    @property
    def exit_status(self) -> int | None:
        """The exit status of the process; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def close(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        await super().close()


def _dashboard(wanted: bool) -> dict[str, Any]:
    return {
        "dashboard": wanted and find_spec("bokeh") is not None,
        "dashboard_address": f"{_LOCALHOST}:0",
    }


def _worker_options(size: LocalClusterSize, has_dashboard: bool) -> dict[str, Any]:
    return {
        "nthreads": size.threads_per_worker,
        "host": _LOCALHOST,
        "silence_logs": logging.WARNING,
        "memory_limit": 1 / size.n_workers,  # as a fraction of this machine's memory
        **_dashboard(has_dashboard),
        # The scheduler's dashboard shows every worker; one in each worker takes 0.4 s to load.
        "dashboard": False,
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
    """Start something in a thread, where Ctrl-C cannot interrupt it halfway; on Ctrl-C, undo all of it.

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


async def _start_local(
    size: LocalClusterSize, has_dashboard: bool, given_up: threading.Event, *, asynchronous: bool
) -> tuple[SpecCluster, Client]:
    options = _worker_options(size, has_dashboard)
    spec = {"cls": WorkerProcess, "options": {"worker_options": options}}
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
    try:
        if asynchronous:
            await cluster
        client = Client(cluster, asynchronous=asynchronous)
        try:
            if asynchronous:
                await client
            await _wait_for_workers(
                client,
                size.n_workers,
                given_up,
                lambda: [each.exit_status for each in cluster.workers.values()],
            )
        except BaseException:
            await settled(client.close())
            raise
    except BaseException:
        await settled(cluster.close())
        raise
    return cluster, client


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

    def spawn(cls: str, options: dict[str, Any], *addresses: str) -> None:
        processes.append(
            subprocess.Popen(
                command(cls, options, *addresses),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
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
        options = _worker_options(size, has_dashboard)
        for number in range(size.n_workers):
            spawn("distributed.Nanny", {**options, "name": str(number)}, address)
        client = Client(address, asynchronous=asynchronous)
        try:
            if asynchronous:
                await client
            await _wait_for_workers(
                client, size.n_workers, given_up, lambda: [each.poll() for each in processes]
            )
        except BaseException:
            await settled(client.close())
            raise
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
