"""A client's connection to its instance: blocking calls to the controller, until the client is closed."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

from daskserve.client.calls import ControllerCalls
from daskserve.client.ending import end_instance
from daskserve.cluster.base import ClientLink
from daskserve.errors import ClosedError
from daskserve.types import GoalId, InstanceName


class InstanceConnection:
    """One client's connection to an instance on a Dask cluster. Its methods block."""

    def __init__(self, link: ClientLink, instance: InstanceName) -> None:
        self.link = link
        self.instance = instance
        self.is_closed = False
        self._calls = ControllerCalls(link, instance)
        self._finalizer: weakref.finalize[..., Any] | None = None

    def end_with(self, owner: object) -> None:
        """End the instance when its owner is garbage collected or the program ends."""
        self._finalizer = weakref.finalize(owner, end_instance, self.link, self.instance)
        # weakref's own exit hook may run after Dask's, which closes the connection.
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    def check_open(self) -> None:
        """Raise `ClosedError` if the client has been shut down."""
        if self.is_closed:
            raise ClosedError("Client has already been shut down.")

    def call(self, verb: str, **message: Any) -> Any:
        """Return the controller's answer to a verb."""
        self.check_open()
        return self.link.sync(self._calls.call(verb, **message))

    def change(self, verb: str, *, blocking: bool = True, **message: Any) -> GoalId | None:
        """Call a verb that changes something; see `ControllerCalls.change`."""
        self.check_open()
        return self.link.sync(self._calls.change(verb, blocking=blocking, **message))

    def wait_for_goal(self, goal_id: GoalId, timeout_s: float | None) -> bool:
        """Return whether a goal was reached in time; raise the goal's error if it failed."""
        self.check_open()
        return self.link.sync(self._calls.wait_for_goal(goal_id, timeout_s))

    def close(self) -> None:
        """End the instance. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._finalizer is not None:
            atexit.unregister(self._finalizer)
            self._finalizer.detach()
        end_instance(self.link, self.instance)
