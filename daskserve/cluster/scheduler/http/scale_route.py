"""External scaling over HTTP: a route on the scheduler's HTTP server that forwards numbers to controllers.

The path ``/daskserve/<instance>/api/v1/applications/<application>/deployments/<deployment>/scale`` (POST)
ends like Ray Serve's. The controller knows the applications and their deployments. The server has no
authentication, so each deployment must enable external scaling, and pages of other sites are refused
(`daskserve.cluster.scheduler.http.site_guard`).

If a controller dies or hangs during the request, it is replaced and the call is retried at the newest one.
This is safe, because setting the same number twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from distributed import Scheduler
from tornado.web import stream_request_body

from daskserve.cluster.actors.controller_calls import FindsController, call_controller
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.cluster.scheduler.http.route import GuardedHandler, SchedulerRoute
from daskserve.cluster.scheduler.http.site_guard import BODY, SiteGuard
from daskserve.common.clock import LoopClock
from daskserve.common.formatting import shown
from daskserve.common.types import ActorAddress, InstanceName
from daskserve.errors import (
    BadRequestError,
    NotFoundError,
    ServeError,
    UnavailableError,
    http_status_of,
)
from daskserve.options.bounds import KEY, number_in

logger = logging.getLogger("daskserve.supervisor")

PATH = r"/daskserve/([^/]+)/api/v1/applications/([^/]+)/deployments/([^/]+)/scale"
#: Maximum size of a body; a valid one has less than fifty bytes.
MAX_BODY_BYTES = 4096
#: Timeout of a request: a hanging controller is replaced after four seconds, and its successor gets four
#: more.
PATIENCE_S = 8.0
#: How often to check whether the called controller is still the current one.
CHECK_S = 0.25
#: Value of the ``Retry-After`` header.
RETRY_AFTER_S = 1


class ScaleRoute:
    """Forwards numbers to the controllers of the running instances."""

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Mapping[InstanceName, Instance],
        hosts: HostRegistry,
        guard: SiteGuard,
    ) -> None:
        self._instances = instances
        self._hosts = hosts
        self.route = SchedulerRoute(scheduler, PATH, ScaleHandler, {"route": self, "guard": guard})

    async def scale(self, instance: InstanceName, application: str, deployment: str, number: int) -> int:
        """Record a deployment's target number of replicas, and return it.

        Raises
        ------
        NotFoundError
            The instance, the application or the deployment does not exist.
        ExternalScalerDisabledError, BadRequestError
            The controller refused the number.
        UnavailableError
            The controller or its store could not be reached in time.
        """
        entry = self._instances.get(instance)
        if entry is None or entry.is_ending:
            running = (name for name, each in self._instances.items() if not each.is_ending)
            known = ", ".join(sorted(running)) or "none"
            raise NotFoundError(f"Instance {instance!r} does not run on this cluster; running: {known}.")
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._persist(entry, application, deployment, number)
        except TimeoutError:
            raise UnavailableError(
                f"No controller of {instance!r} answered within {shown(PATIENCE_S)} s; retry later."
            ) from None

    async def _persist(self, entry: Instance, application: str, deployment: str, number: int) -> int:
        def call(controller: ActorAddress) -> Coroutine[Any, Any, Any]:
            return self._hosts.call(
                controller, "scale", application=application, name=deployment, number=number
            )

        return int(await call_controller(_Finder(entry), call, clock=LoopClock(), check_s=CHECK_S))


class _Finder(FindsController):
    """Waits for an instance's controller while it is being replaced."""

    def __init__(self, entry: Instance) -> None:
        self._entry = entry

    async def controller(self) -> ActorAddress:
        while not self._entry.is_ending:
            if self._entry.controller is not None:
                return self._entry.controller
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._entry.controller_up.wait()
            except TimeoutError:
                pass
        raise NotFoundError(f"Instance {self._entry.name!r} was shut down during the request.")

    def forget_controller(self) -> None:
        """Do nothing: the supervisor tracks the current controller."""


@stream_request_body
class ScaleHandler(GuardedHandler):
    """Reads a number from the body and answers in JSON."""

    def initialize(self, route: ScaleRoute, guard: SiteGuard) -> None:
        self._guard = guard
        self._route = route
        self._body = bytearray()
        self._is_too_large = False

    def data_received(self, chunk: bytes) -> None:
        # Excess bytes are read and dropped: a client that is still sending would not see the answer.
        self._is_too_large = self._is_too_large or len(self._body) + len(chunk) > MAX_BODY_BYTES
        if not self._is_too_large:
            self._body += chunk

    async def post(self, instance: str, application: str, deployment: str) -> None:
        if self.is_refused():
            return
        try:
            if self._is_too_large:
                self._guard.refusals[BODY] += 1
                raise BadRequestError(f"the body has more than {MAX_BODY_BYTES} bytes")
            wanted = number_in(bytes(self._body))
            number = await self._route.scale(instance, application, deployment, wanted)
        except ServeError as error:
            self.answer(http_status_of(error), {"message": str(error)})
        else:
            text = f"{deployment} of application {application} is to have {number} replicas."
            self.answer(200, {KEY: number, "message": text})

    def answer(self, status: int, body: Mapping[str, Any]) -> None:
        if status == UnavailableError.http_status:
            self.set_header("Retry-After", str(RETRY_AFTER_S))
        super().answer(status, body)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if status_code == 405:
            self.set_header("Allow", "POST")
        self.answer(status_code, {"message": self._reason})
