"""Reports of queued and in-flight requests to the controller, for the backends that are autoscaled.

A report also contains the requests of the two versions of a rollout, and the failures of users' request
routers.

While requests wait or are in flight, a process sends one message a second for all backends, and one more when
they have ended. An idle process sends nothing. Requests that find no replica are reported at once, so that a
backend with zero replicas starts as many as they need within a second.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag, EndpointTag
from daskserve.data.caller.routing.metrics import CallMetrics
from daskserve.data.caller.routing.versions import Versions, backend_of
from daskserve.errors import NotRunningError, ServeError

logger = logging.getLogger("daskserve.router")

PERIOD_S = 1.0
#: Period while requests wait without replicas: their number decides how many replicas start.
STARVING_PERIOD_S = 0.25
#: Period of the reports if only failures of a user's request router need to be reported.
ERROR_PERIOD_S = 5.0
#: Delay of an urgent report, so that the first report of a burst counts all of its requests.
GATHER_S = 0.02
#: Delay before the next report after one failed, for example because the controller is being replaced.
REPORT_RETRY_S = 0.1
#: Timeout of a report; a healthy controller answers sooner.
REPORT_TIMEOUT_S = 2.0


class BackendQueue(Protocol):
    """The queue of one backend in one process; a `ReplicaSet`."""

    is_autoscaled: bool

    @property
    def versions(self) -> Versions | None: ...
    @property
    def waiting(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def is_starving(self) -> bool:
        """Whether requests wait although there are no replicas."""


class LoadReports:
    """Reports the queues of one process and instance.

    Parameters
    ----------
    queues : mapping
        The queue of each backend; backends may be added later.
    calls : callable
        Returns the metrics of calls by endpoint and caller, which are reported while a dashboard is open.
    backlogs : callable
        Returns how many items of maps are not sent yet, by backend; they count as requests that wait.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        queues: Mapping[BackendTag, BackendQueue],
        calls: Callable[[], Mapping[EndpointTag, Mapping[BackendTag, CallMetrics]]] = dict,
        backlogs: Callable[[], Mapping[BackendTag, int]] = dict,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._queues = queues
        self._calls = calls
        self._backlogs = backlogs
        self._is_watched = False
        #: For each backend, a function that returns the error of its request router; empty if there is none.
        self._errors: dict[BackendTag, Callable[[], str]] = {}
        self._name = uuid.uuid4().hex
        self._is_urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        #: Whether the last report may have shown load, so that its end must be reported.
        self._has_reported_load = False

    def report_soon(self, *, is_urgent: bool) -> None:
        """Make sure that the queues are reported, at once if urgent."""
        if is_urgent:
            self._is_urgent.set()
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name="daskserve-load-reports")
            self._task.add_done_callback(self._note_end)

    def watch_router(self, tag: BackendTag, error: Callable[[], str] | None) -> Callable[[], None]:
        """Start or stop reporting failures of a request router; return a function that reports them now."""
        if error is None:
            self._errors.pop(tag, None)
        else:
            self._errors[tag] = error
        return partial(self.report_soon, is_urgent=True)

    def _router_errors(self) -> dict[BackendTag, str]:
        return {backend_of(tag): text for tag, error in self._errors.items() if (text := error())}

    def note_watched(self, value: Any) -> None:
        """Start or stop reporting live metrics."""
        self._is_watched = bool(value)
        if self._is_watched:
            self.report_soon(is_urgent=False)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "Reporting the load failed; the next request starts it again", exc_info=task.exception()
            )

    def close(self) -> None:
        """Stop reporting."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()

    def _reported(self) -> dict[BackendTag, BackendQueue]:
        return {
            tag: each for tag, each in self._queues.items() if each.is_autoscaled or each.versions is not None
        }

    async def _run(self) -> None:
        had_errors = False
        while not self._cluster.is_ended:
            queues, errors = self._reported(), self._router_errors()
            has_only_errors = not queues and not self._is_watched
            if has_only_errors and not errors and not had_errors:
                break
            pause_s = ERROR_PERIOD_S if has_only_errors else PERIOD_S
            if self._is_urgent.is_set():
                await self._clock.sleep(GATHER_S)
            self._is_urgent.clear()
            loads: dict[BackendTag, list[int]] = {}
            versions: dict[BackendTag, dict[str, Any]] = {}
            backlogs = self._backlogs()
            for tag, each in queues.items():
                waiting = each.waiting + backlogs.get(tag, 0)
                if each.is_autoscaled and (waiting or each.in_flight):
                    load = loads.setdefault(backend_of(tag), [0, 0])
                    load[0] += waiting
                    load[1] += each.in_flight
                if each.versions is not None and (counted := each.versions.plain()):
                    versions[tag] = counted
            is_needed = loads or versions or self._has_reported_load or self._is_watched
            if (is_needed or errors or had_errors) and not await self._send_report(loads, versions, errors):
                pause_s = REPORT_RETRY_S
            elif any(each.is_starving for each in queues.values()):
                pause_s = STARVING_PERIOD_S
            had_errors = bool(errors)
            try:
                await self._clock.wait_for(self._is_urgent.wait(), pause_s)
            except TimeoutError:
                pass

    def _live(self) -> dict[str, Any]:
        """Return the totals of the calls by caller and endpoint, and the numbers of waiting requests by
        backend."""
        calls = [
            [caller, endpoint, each.begun, each.failed]
            for endpoint, callers in self._calls().items()
            for caller, each in callers.items()
            if each.begun
        ]
        queued: dict[BackendTag, int] = {}
        for tag, each in self._queues.items():
            if each.waiting:
                queued[backend_of(tag)] = queued.get(backend_of(tag), 0) + each.waiting
        return {"calls": calls, "queued": queued}

    async def _send_report(
        self,
        loads: Mapping[BackendTag, list[int]],
        versions: Mapping[BackendTag, dict[str, Any]],
        errors: Mapping[BackendTag, str],
    ) -> bool:
        """Send a report; return whether no retry is needed."""
        self._has_reported_load = True
        try:
            controller = await self._cluster.controller()
            message = {"router": self._name, "loads": loads} | ({"versions": versions} if versions else {})
            if errors:
                message["troubles"] = errors
            if self._is_watched:
                message["live"] = self._live()
            call = self._cluster.call(controller, "report_load", **message)
            await self._clock.wait_for(call, REPORT_TIMEOUT_S)
        except NotRunningError:
            self._has_reported_load = False
            return True
        except (ServeError, OSError, TimeoutError) as error:
            logger.debug("Reporting the load to the controller failed; retrying: %r", error)
            self._cluster.forget_controller()
            return False
        self._has_reported_load = bool(loads)
        return True
