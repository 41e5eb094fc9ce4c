"""Scaling over HTTP: a route on the scheduler's HTTP server that passes a number on to a controller.

``POST /daskserve/<instance>/api/v1/applications/<application>/deployments/<backend>/scale`` has the tail of
Ray Serve's. The server has no authentication of its own, so that a backend has to allow it.

A controller that dies or hangs is replaced meanwhile, and the newest one is asked again: that is safe,
because the same number twice changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from distributed import Scheduler
from tornado.web import HTTPError, RequestHandler, stream_request_body

from daskserve.clock import LoopClock
from daskserve.cluster.controller_calls import call_controller
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.cluster.scheduler.route import SchedulerRoute
from daskserve.errors import (
    BadRequestError,
    NotFoundError,
    ServeError,
    UnavailableError,
    http_status_of,
)
from daskserve.options.external_scaling import KEY, number_in
from daskserve.types import ActorAddress, InstanceName

logger = logging.getLogger("daskserve.supervisor")

PATH = r"/daskserve/([^/]+)/api/v1/applications/([^/]+)/deployments/([^/]+)/scale"
#: What stands for the application where nobody named one, as in Ray Serve.
DEFAULT_APPLICATION = "default"
#: A number and its name take less than fifty.
MOST_BYTES = 4096
#: A controller that hangs is replaced after four seconds; its successor gets as many.
PATIENCE_S = 8.0
#: How often is looked whether the controller that is asked is still the present one.
CHECK_S = 0.25
#: What a client is told to wait that could not be served.
RETRY_AFTER_S = 1


class ScaleRoute:
    """Passes numbers on to the controllers of the instances there are."""

    def __init__(
        self, scheduler: Scheduler, instances: Mapping[InstanceName, Instance], hosts: HostRegistry
    ) -> None:
        self._instances = instances
        self._hosts = hosts
        self._route = SchedulerRoute(scheduler, PATH, ScaleHandler, {"route": self})

    def install(self) -> None:
        """Add the route; idempotent."""
        self._route.install()

    def uninstall(self) -> None:
        """Take the route away; idempotent."""
        self._route.uninstall()

    async def scale(self, instance: InstanceName, backend: str, number: int) -> int:
        """Have a backend's wanted number recorded, and return it.

        Raises
        ------
        NotFoundError
            There is no such instance or backend.
        ExternalScalerDisabledError, BadRequestError
            The controller refuses.
        UnavailableError
            No controller, or not its store, could be reached in time.
        """
        entry = self._instances.get(instance)
        if entry is None or entry.is_ending:
            running = (name for name, each in self._instances.items() if not each.is_ending)
            known = ", ".join(sorted(running)) or "none"
            raise NotFoundError(f"Instance {instance!r} does not run on this cluster; there are: {known}.")
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._persist(entry, {"name": backend, "number": number})
        except TimeoutError:
            raise UnavailableError(
                f"No controller of {instance!r} has answered for {PATIENCE_S:g} s; try again."
            ) from None

    async def _persist(self, entry: Instance, message: Mapping[str, Any]) -> int:
        def call(controller: ActorAddress) -> Coroutine[Any, Any, Any]:
            fields = {
                "name": controller.name,
                "incarnation": controller.incarnation,
                "verb": "scale",
                "message": dict(message),
            }
            return self._hosts.run(controller.worker, "call", fields)

        return int(await call_controller(_Finder(entry), call, clock=LoopClock(), check_s=CHECK_S))


class _Finder:
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
        raise NotFoundError(f"Instance {self._entry.name!r} has just been shut down.")

    def forget_controller(self) -> None:
        """Nothing: the supervisor forgets it itself."""


@stream_request_body
class ScaleHandler(RequestHandler):
    """Reads a number, however it is sent, and answers in JSON."""

    def initialize(self, route: ScaleRoute) -> None:
        self._route = route
        self._body = bytearray()
        self._is_too_large = False

    def data_received(self, chunk: bytes) -> None:
        # What is too much is read and dropped: a client that still sends would not see the answer.
        self._is_too_large = self._is_too_large or len(self._body) + len(chunk) > MOST_BYTES
        if not self._is_too_large:
            self._body += chunk

    async def post(self, instance: str, application: str, backend: str) -> None:
        self._refuse_other_pages()
        try:
            if self._is_too_large:
                raise BadRequestError(f"the body has more than {MOST_BYTES} bytes")
            if application not in (DEFAULT_APPLICATION, backend):
                raise NotFoundError(
                    f"There is no application {application!r}: each deployment is one of its own, by its own "
                    f"name or that of {DEFAULT_APPLICATION!r}."
                )
            number = await self._route.scale(instance, backend, number_in(bytes(self._body)))
        except ServeError as error:
            self._answer(http_status_of(error), {"message": str(error)})
        else:
            self._answer(200, {KEY: number, "message": f"{backend} is to have {number} replicas."})

    def _refuse_other_pages(self) -> None:
        """Refuse what the pages of other sites make browsers send, which need no answer to do harm."""
        origin = self.request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.request.host:
            raise HTTPError(403, reason="Forbidden")

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        if status == UnavailableError.http_status:
            self.set_header("Retry-After", str(RETRY_AFTER_S))
        self.finish(json.dumps(body))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        if status_code == 405:
            self.set_header("Allow", "POST")
        self._answer(status_code, {"message": self._reason})
