"""The workers of a local cluster that ends with its program, and the nannies that replace them when they die.

Problem: Dask's nannies start their workers through multiprocessing, which needs a ``__main__`` guard, and
each nanny is an additional process. Without a nanny, a worker that dies is not replaced. Choice: the nannies
run in the program's own process, on the event loop of the cluster's scheduler, and their workers are plain
subprocesses. All features of nannies then work: ``client.restart()``, retirement, nanny plugins, and the
restart of a worker that does not answer.

A worker that dies repeatedly is restarted at increasing intervals; see `RestartPace`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import dask.config
from distributed import Nanny, Status, Worker

from daskserve.cluster.dask.server_process import command, environment
from daskserve.common.formatting import shown
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.launch")

#: Time between SIGTERM and SIGKILL for a worker.
END_TIMEOUT_S = 3.0
#: A worker that has lived for this time counts as healthy, so its end starts a new series of restarts.
SETTLED_S = 30.0
#: Number of short-lived workers in a row that are replaced without a delay.
QUICK_RESTARTS = 3
#: The longest interval between the end of a worker and the start of the next one.
MAX_DELAY_S = 10.0

#: Prelude for a process that must not outlive its caller, even if the caller is killed before there is a
#: scheduler: only the caller holds the other end of the pipe that is the process's standard input.
_END_WITH_CALLER = (
    "import os, threading, time; lifeline = os.dup(0); os.dup2(os.open(os.devnull, os.O_RDONLY), 0); "
    "threading.Thread(target=lambda: (os.read(lifeline, 1), time.sleep({grace_s}), os._exit(1)), "
    "daemon=True).start()"
)
#: The reason that `SupervisedWorker.close` gets when a signal ends the process.
_BY_SIGNAL = "worker-close"


def _ours(code: str) -> str:
    """Return code that runs under daskserve's name, because profiles show the code of the main module."""
    return f"exec({code!r}, {{'__name__': 'daskserve'}}); "


class SupervisedWorker(Worker):
    """A worker whose nanny starts another one when a signal ends it."""

    async def close(  # type: ignore[override]  # as Dask's own
        self,
        timeout: float = 30,
        executor_wait: bool = True,
        nanny: bool = True,
        reason: str = _BY_SIGNAL,
    ) -> str | None:
        return await super().close(timeout, executor_wait, nanny and reason != _BY_SIGNAL, reason)


class RestartPace:
    """When a worker that has ended is replaced. Pure: times are arguments."""

    def __init__(self) -> None:
        self._short_lives = 0

    def delay(self, lived_s: float) -> float:
        """Return the seconds until the next worker starts, given how long the last one lived."""
        self._short_lives = 1 if lived_s >= SETTLED_S else self._short_lives + 1
        excess = self._short_lives - QUICK_RESTARTS
        return 0.0 if excess <= 0 else min(MAX_DELAY_S, 2.0 ** min(excess - 1, 10))


class _Subprocess:
    """A worker in a plain subprocess, with the interface of `distributed.nanny.WorkerProcess`."""

    #: Only Dask's own processes report it; nothing here needs it.
    worker_dir: str | None = None

    def __init__(self, command: list[str], worker_name: str, on_exit: Callable[[int, float], None]) -> None:
        self._command = command
        #: The worker's name in Dask's messages.
        self.worker_address = worker_name
        self._on_exit = on_exit
        self._lifeline: int | None = None
        self._tasks = TaskSet(logger)
        self.process: asyncio.subprocess.Process | None = None
        self.status = Status.init
        #: Whether the process was ended on purpose.
        self.is_ended = False

    async def start(self, variables: Mapping[str, str]) -> Status:
        """Start the process; it registers with the scheduler later. Idempotent while it runs."""
        if self.process is not None:
            return self.status
        self.is_ended = False
        stdin, self._lifeline = os.pipe()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdin=stdin, env=dict(variables), start_new_session=True
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(stdin)
        self.status = Status.running
        self._tasks.spawn(self._watch(self.process), "worker-process")
        return self.status

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        began = asyncio.get_running_loop().time()
        status = await process.wait()
        self.process = None
        self.status = Status.stopped
        self._let_go()
        self._on_exit(status, asyncio.get_running_loop().time() - began)

    def _let_go(self) -> None:
        """Close this end of the pipe; while the pipe is open, the process knows that its caller is alive."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)

    def is_alive(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    async def kill(self, timeout: float = END_TIMEOUT_S, reason: str = "") -> None:
        """End the process, and return when it has ended."""
        process = self.process
        if process is None:
            return
        self.is_ended = True
        self._let_go()
        process.terminate()
        try:
            async with asyncio.timeout(min(timeout, END_TIMEOUT_S)):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await self._tasks.wait()


class SubprocessNanny(Nanny):
    """A nanny in this process, whose worker is a plain subprocess; for `distributed.SpecCluster`.

    Parameters
    ----------
    scheduler
        The scheduler's address.
    worker_options
        The options of `distributed.Worker`.
    config
        The configuration of Dask in the worker's process.
    """

    process: Any  # a `_Subprocess`, which Dask uses like its own

    def __init__(
        self,
        scheduler: str,
        name: str | int,
        worker_options: dict[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = worker_options
        self._config = config or {}
        with dask.config.set(self._config):  # which may have variables for the worker
            # No memory limit: a worker at its limit pauses, and keeps its loaded code.
            super().__init__(
                scheduler,
                name=str(name),
                nthreads=worker_options["nthreads"],
                host=worker_options["host"],
                memory_limit=None,
            )
        self._pace = RestartPace()
        self._restarts = TaskSet(logger)
        #: The exit status of the last worker that has ended; None if no worker has ended.
        self.last_exit: int | None = None

    async def instantiate(self) -> Status:
        """Start a worker unless one runs."""
        if self.process is None:
            options = {**self._options, "name": self.name, "nanny": self.address}
            line = command(
                f"{SupervisedWorker.__module__}.{SupervisedWorker.__qualname__}",
                options,
                self.scheduler_addr,
                prelude=_ours(_END_WITH_CALLER.format(grace_s=END_TIMEOUT_S)),
                # The scheduler is in the caller's process, and does not come back.
                config={**self._config, "daskserve.scheduler.grace-s": 0},
            )
            self.process = _Subprocess(line, str(self.name), self._note_exit)
        started: Status = await self.process.start({**environment(self._config), **self.env})
        return started

    @property
    def _keeps(self) -> bool:
        """Whether a worker that has ended is replaced. It is not replaced while this nanny starts or
        closes."""
        return self.status is Status.running

    def _note_exit(self, status: int, lived_s: float) -> None:
        self.last_exit = status
        if self.status is Status.closing_gracefully:
            self._restarts.spawn(self.close(reason="worker-retired"))
        elif self._keeps:
            self._restarts.spawn(self._replace(status, lived_s), "worker-restart")

    async def _replace(self, status: int, lived_s: float) -> None:
        is_ended = self.process is not None and self.process.is_ended
        delay_s = 0.0 if is_ended else self._pace.delay(lived_s)
        while True:
            if not is_ended:
                logger.warning(
                    "Worker %s of the local cluster ended (%s); another one starts%s",
                    self.name,
                    f"exit status {status}" if status >= 0 else f"signal {-status}",
                    f" in {shown(delay_s)} s" if delay_s else "",
                )
            await asyncio.sleep(delay_s)
            if not self._keeps:
                return
            try:
                await self.instantiate()
                return
            except OSError as error:  # this machine is out of processes, memory or descriptors
                logger.warning("Worker %s of the local cluster cannot start: %s", self.name, error)
                delay_s, is_ended = self._pace.delay(0.0), False
