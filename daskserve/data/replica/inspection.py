"""Profiles of user code, and the stacks of a replica that may be stuck.

Separate threads do the work, so that it neither blocks the worker's loop nor waits for the replica's loop.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from daskserve.common.formatting import shown
from daskserve.common.types import ReplicaTag, short_tag
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.errors import BadRequestError, InspectionError
from daskserve.loops.threads import in_daemon
from daskserve.telemetry.profiling.memory import trace_memory
from daskserve.telemetry.profiling.sampling import THREADS, CodeThread, sample_threads
from daskserve.telemetry.profiling.stacks import stacks_of_tasks, stacks_of_threads
from daskserve.telemetry.profiling.threads import stack_frames

#: Maximum duration of a profile.
MAX_SECONDS = 60.0
#: How long a memory profile may take in addition to its duration; a large process needs a long time.
MEMORY_S = 30.0
#: Name prefixes of threads of Dask, daskserve and other replicas.
_OTHERS = ("daskserve-", "Dask-", "IO loop", "Profile", "TCP-Executor")
_NUMBER = re.compile(r"[-_ ]?\(?\d+\)?$")


class Inspection(Protocol):
    """Profiles and stacks of the user code of one replica."""

    async def profile(self, seconds: float, memory: bool = False) -> dict[str, Any]:
        """Return a profile of user code over ``seconds``.

        See `daskserve.telemetry.profiling.sampling.sample_threads`.
        """

    async def stacks(self) -> dict[str, Any]:
        """Return the stacks of the threads and tasks of user code, even if they are stuck."""


def checked_seconds(seconds: float) -> float:
    """Return the duration of a profile; raise `BadRequestError` if it is not valid."""
    if not 0 < seconds <= MAX_SECONDS:
        raise BadRequestError(
            f"seconds={shown(seconds)} must be more than 0 and at most {shown(MAX_SECONDS)}."
        )
    return seconds


class LocalInspection:
    """Profiles and stacks of user code in this process.

    Parameters
    ----------
    find_executor : callable
        Returns the executor of the replica; None before it starts and after its end.
    owns_process : bool
        Whether unknown threads belong to replicas; otherwise they may belong to the user's program.
    """

    def __init__(
        self, tag: ReplicaTag, find_executor: Callable[[], UserExecutor | None], *, owns_process: bool
    ) -> None:
        self._tag = tag
        self._find_executor = find_executor
        self._owns_process = owns_process
        self._is_profiling = False

    async def profile(self, seconds: float, memory: bool = False) -> dict[str, Any]:
        checked_seconds(seconds)
        self._executor()
        if self._is_profiling:
            raise InspectionError(
                f"A profile of replica {short_tag(self._tag)!r} is being taken already; wait until it ends."
            )
        self._is_profiling = True
        try:
            if memory:
                traced = await in_daemon("daskserve-profile", lambda stop: trace_memory(seconds, stop))
                return {"seconds": seconds, "memory": traced}
            return await in_daemon(
                "daskserve-profile", lambda stop: sample_threads(self._threads, seconds, stop)
            )
        finally:
            self._is_profiling = False

    async def stacks(self) -> dict[str, Any]:
        executor = self._executor()

        def look(_: threading.Event) -> dict[str, Any]:
            names = {each.ident or 0: each.name for each in threading.enumerate()}
            found = stacks_of_threads(self._threads(), stack_frames(), names)
            loop = executor.code_loop
            tasks, more = ([], 0) if loop is None else stacks_of_tasks(loop)
            return {"threads": found, "tasks": tasks, "more_tasks": more}

        return await in_daemon("daskserve-stacks", look)

    def _executor(self) -> UserExecutor:
        executor = self._find_executor()
        if executor is None or executor.is_closed:
            raise InspectionError(f"Replica {short_tag(self._tag)!r} runs no code now.")
        return executor

    def _threads(self) -> Mapping[int, CodeThread]:
        """Return the threads of the replica's code, and the threads that the code may have started.

        In a process with several replicas, such threads are omitted, because any replica may have started
        them.
        """
        executor = self._find_executor()
        if executor is None:
            return {}
        found, loop = executor.code_threads(), executor.code_loop
        main = threading.main_thread()
        for each in threading.enumerate():
            if each.ident is None or each.ident in found or each is main or each.name.startswith(_OTHERS):
                continue
            # The threads of AnyIO run the plain functions of FastAPI and Starlette applications.
            its_loop = getattr(each, "loop", None)
            if its_loop is None and self._owns_process:
                label = f"thread {_NUMBER.sub('', each.name)}"
            elif its_loop is not None and its_loop is loop:
                label = THREADS
            else:
                continue
            found[each.ident] = CodeThread(label, each.native_id)
        return found
