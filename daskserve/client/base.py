"""The life of a client: from a link and an instance's name to its end."""

from __future__ import annotations

import atexit
import weakref
from typing import Any, Self

from daskserve.client.calls import ControllerCalls, end_instance
from daskserve.cluster.link import Link
from daskserve.errors import ClosedError, ServeError
from daskserve.types import GoalId, InstanceName


class ClientBase:
    """The life of a client, and how it calls its instance's controller."""

    def __init__(self, link: Link, instance: InstanceName, *, is_owner: bool) -> None:
        self._link = link
        self._instance = instance
        self._calls = ControllerCalls(link, instance)
        self._is_closed = False
        self._finalizer = None
        if is_owner:
            self._finalizer = weakref.finalize(self, end_instance, link, instance)
            # weakref's own exit hook may run after Dask's, when the connection is closed already.
            self._finalizer.atexit = False
            atexit.register(self._finalizer)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<daskserve.Client of {self._instance!r} at {self._link.scheduler_address} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise ServeError(
            "A daskserve client cannot be serialized; call serve.connect() where you need one, or pass a "
            "handle."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    @property
    def instance_name(self) -> InstanceName:
        """The name of the instance, which its topics and actors carry."""
        return self._instance

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if the scheduler has none."""
        self._check_open()
        return self._link.dashboard_link

    @property
    def scheduler_address(self) -> str:
        """The address of the Dask scheduler; another program reaches a detached instance with it."""
        return self._link.scheduler_address

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("Client has already been shut down.")

    def _call(self, verb: str, **message: Any) -> Any:
        self._check_open()
        return self._link.sync(self._calls.call(verb, **message))

    def _change(self, verb: str, *, blocking: bool = True, **message: Any) -> GoalId | None:
        self._check_open()
        return self._link.sync(self._calls.change(verb, blocking=blocking, **message))

    def wait_for_goal(self, goal_id: GoalId, timeout_s: float | None = None) -> bool:
        """Return whether a change that was begun with ``blocking=False`` has come about in time.

        Parameters
        ----------
        goal_id : str
            What the call that began it returned.
        timeout_s : float, optional
            How long to wait; None waits for ever.

        Raises
        ------
        ServeError
            Why it failed and was taken back.
        NotFoundError
            There is no such goal; the last hundred that ended are known.
        """
        self._check_open()
        return self._link.sync(self._calls.wait_for_goal(goal_id, timeout_s))

    def _num_pending_goals(self) -> int:
        """Return how many changes are still coming about."""
        return int(self._call("view", name="num_pending_goals"))

    def shutdown(self) -> None:
        """End the instance: its replicas, proxies and controller. Idempotent.

        When this returns, nothing of the instance is left on the cluster. A Dask cluster that ``start``
        made for it ends too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._finalizer is not None:
            atexit.unregister(self._finalizer)
            self._finalizer.detach()
        end_instance(self._link, self._instance)

    def become_default(self) -> None:
        """Be the instance that `daskserve.run` uses in this process, and live as long as it."""
        self._link.default_instance = self

    def serve_until_interrupted(self) -> None:
        """Block until Ctrl-C (SIGINT) or SIGTERM, then shut down; or until the instance ends otherwise."""
        self._check_open()
        try:
            self._link.wait_until_ended(self._instance)
        finally:
            self.shutdown()
