"""SIGTERM to a nanny: its worker retires before the nanny ends it.

Problem: a nanny that gets SIGTERM gives its worker a few seconds, and its process does not run daskserve.
Choice: the worker runs a function in its nanny's process once, which installs a handler of SIGTERM. Then the
nanny requests the retirement of the worker, waits, and ends like any nanny.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any

from distributed import Nanny, Worker

from daskserve.loops.tasks import TaskSet
from daskserve.loops.termination import begin_on, on_sigterm

logger = logging.getLogger("daskserve.host")

#: The worker's attribute that holds its open Host, and the nanny's that holds its grace period.
HOST_ATTRIBUTE = "_daskserve_host"
_GRACE_ATTRIBUTE = "_daskserve_grace_s"
#: Timeout of the nanny's answer, which normally takes milliseconds.
WATCH_S = 3.0
#: The programs in which SIGTERM is meant for nannies; a user's program may have nannies as well.
_PROGRAMS = ("distributed.cli.dask_worker", "distributed.cli.dask_spec")


async def watch_nanny(worker: Worker, grace_s: float) -> None:
    """Make this worker's nanny, if it has one, wait for the worker when the nanny gets SIGTERM."""
    if not worker.nanny:
        return
    try:
        async with asyncio.timeout(WATCH_S):
            await _run(worker, str(worker.nanny), answer_in_nanny, grace_s)
    except Exception as error:
        # The nanny's process may raise any error. The worker serves without the handler.
        logger.warning("SIGTERM to the nanny of this worker will abort running requests: %r", error)


def answer_in_nanny(grace_s: float, dask_worker: Nanny) -> None:
    """Answer SIGTERM in a nanny's process, which is ``dask_worker`` here; idempotent."""
    nanny: Any = dask_worker
    is_new = not hasattr(nanny, _GRACE_ATTRIBUTE)
    setattr(nanny, _GRACE_ATTRIBUTE, grace_s)
    if not is_new or not any(each in sys.modules for each in _PROGRAMS):
        return
    tasks = TaskSet(logger)
    ask = begin_on(asyncio.get_running_loop(), lambda: tasks.spawn(_ask_worker(nanny), "ask-to-retire"))
    on_sigterm(ask)


async def _ask_worker(nanny: Any) -> None:
    worker = nanny.worker_address
    if worker is None or nanny.status.name != "running":
        return
    # So that no new worker starts if the worker's process also got SIGTERM and ends first.
    nanny.close_gracefully(reason="daskserve-sigterm")
    try:
        async with asyncio.timeout(getattr(nanny, _GRACE_ATTRIBUTE)):
            await _run(nanny, worker, retire_in_worker)
    except Exception as error:
        # Any error of the worker's process, for example because it exits, ends the wait.
        logger.info("Worker %s did not retire: %r", worker, error)


async def retire_in_worker(dask_worker: Worker) -> None:
    """Wait until a worker may end; return at once if daskserve does not use it."""
    host = getattr(dask_worker, HOST_ATTRIBUTE, None)
    if host is not None:
        await asyncio.shield(host.retirement.begin())


async def _run(server: Worker | Nanny, address: str, function: Callable[..., Any], *arguments: Any) -> None:
    answer = await server.rpc(address).run(
        function=pickle.dumps(function), args=pickle.dumps(arguments), wait=True
    )
    if answer["status"] != "OK":
        raise answer["exception"]
