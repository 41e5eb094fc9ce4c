"""Calls to the controllers of the running instances, for requests over HTTP.

If a controller dies or hangs during the request, it is replaced, and the call is retried at the new one.
This is safe because verbs are idempotent for the same request id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from daskserve.cluster.actors.controller_calls import ControllerFinder, call_controller, calls_of
from daskserve.cluster.protocols.started import common_instance
from daskserve.cluster.scheduler.controllers import Instance, list_instances
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.common.clock import LoopClock
from daskserve.common.formatting import shown
from daskserve.common.types import ActorAddress, InstanceName
from daskserve.errors import NotFoundError, UnavailableError

#: Timeout of a request: a hanging controller is replaced after four seconds, and its successor gets four
#: more.
PATIENCE_S = 8.0
#: How often to check whether the called controller is still the current one.
CHECK_S = 0.25


class ControllerAccess:
    """Finds the instance of a request, and calls its controller."""

    def __init__(self, instances: Mapping[InstanceName, Instance], hosts: HostRegistry) -> None:
        self._instances = instances
        self._hosts = hosts

    async def call(
        self, instance: InstanceName | None, verb: str, message: Mapping[str, Any], may_take_s: float = 0.0
    ) -> Any:
        """Return the controller's answer to a verb.

        Parameters
        ----------
        instance : str or None
            None means the instance that all programs use, or the only one.
        may_take_s : float
            How long the verb itself may take.

        Raises
        ------
        NotFoundError
            The instance does not run, or an object that the verb names does not exist.
        UnavailableError
            The controller or its store could not be reached in time.
        ServeError
            The controller refused the call.
        """
        entry = await self.find(instance)
        call = calls_of(self._hosts.call, verb, message)
        try:
            async with asyncio.timeout(PATIENCE_S + may_take_s):
                return await call_controller(
                    _ApiControllerFinder(entry), call, clock=LoopClock(), check_s=CHECK_S
                )
        except TimeoutError:
            raise UnavailableError(
                f"No controller of {entry.name!r} answered within {shown(PATIENCE_S + may_take_s)} s; retry "
                "later."
            ) from None

    async def find(self, name: InstanceName | None) -> Instance:
        """Return the instance of a request; see `call`."""
        running = await list_instances(self._instances)
        found = name
        if name is None:
            found = common_instance(running) or (next(iter(running)) if len(running) == 1 else None)
        entry = self._instances.get(found or "")
        if entry is not None and not entry.is_ending:
            return entry
        known = ", ".join(sorted(each.name for each in self._instances.values() if not each.is_ending))
        if name is not None:
            raise NotFoundError(
                f"Instance {name!r} does not run on this cluster; running: {known or 'none'}."
            )
        what = (
            f"Several run; name one: /daskserve/INSTANCE/api/... Running: {known}."
            if known
            else ("Start one with `daskserve start`, or deploy with `daskserve deploy`.")
        )
        raise NotFoundError(f"This cluster has no common instance. {what}")


class _ApiControllerFinder(ControllerFinder):
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
