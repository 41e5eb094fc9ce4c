"""Calls from a user program to an instance's controller."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from daskserve.cluster.actors.controller_calls import call_controller, calls_of
from daskserve.cluster.protocols.base import ClientConnection
from daskserve.common.formatting import shown
from daskserve.common.types import ActorAddress, GoalId, InstanceName
from daskserve.errors import (
    ClosedError,
    ClusterUnreachableError,
    NotRunningError,
    RequestTimeoutError,
    ServeError,
)
from daskserve.options.specs import ApplicationSpec, BackendSpec, Spec
from daskserve.payload.packed_errors import load_error
from daskserve.payload.parcels import Parcel

T = TypeVar("T")

logger = logging.getLogger("daskserve.client")

#: Maximum time that one call to the controller waits for a goal; then the client calls again.
POLL_S = 25.0
#: How long a call is retried while the controller is being replaced.
CONTROLLER_S = 30.0
#: How long after a deadline the controller's answer may arrive. It says why the change is not complete.
ANSWER_S = 1.0
#: Interval at which a running call checks whether its controller is still the current one.
CHECK_S = 1.0


async def run_on(
    cluster_connection: ClientConnection,
    coroutine: Coroutine[Any, Any, T],
    *,
    asynchronous: bool,
    timeout_s: float | None = None,
) -> T:
    """Run a coroutine on a connection's loop and return its result; see `daskserve.loops.blocking`.

    A blocking wait ends after ``timeout_s`` with `TimeoutError`.
    """
    if asynchronous:
        return await cluster_connection.wait(coroutine)
    return cluster_connection.sync(coroutine, timeout_s=timeout_s)


class ControllerCalls:
    """Calls to an instance's controller, retried while it is being replaced.

    Runs on the connection's loop. Retries are safe because every verb is idempotent.
    """

    def __init__(self, cluster_connection: ClientConnection, instance: InstanceName) -> None:
        self.cluster_connection = cluster_connection
        self.instance = instance

    async def call(self, verb: str, **message: Any) -> Any:
        """Return the controller's answer to a verb.

        The message contains plain values, and optionally a ``spec``, or several specs in ``apps``.
        """
        cluster = self.cluster_connection.cluster(self.instance)
        specs = _specs_in(message)
        message = {name: _plain(value) for name, value in message.items()}

        call = calls_of(cluster.call, verb, message)

        async def attempt(controller: ActorAddress) -> Any:
            # Sent again with each attempt: a scheduler that replaces a lost one may not have the parcels.
            await self.send_parcels(specs)
            return await call(controller)

        try:
            return await call_controller(
                cluster,
                attempt,
                clock=self.cluster_connection.clock,
                check_s=CHECK_S,
                patience_s=CONTROLLER_S,
                resumed_at=lambda: cluster.resumed_at,
            )
        except NotRunningError as error:
            raise ClosedError(f"Instance {self.instance!r} has been shut down.") from error
        except OSError as error:
            if isinstance(error, ServeError):
                raise
            raise ClusterUnreachableError(
                f"The connection to the Dask scheduler {self.cluster_connection.scheduler_address} "
                f"was lost: {error}"
            ) from error

    async def call_until(self, deadline: float | None, verb: str, **message: Any) -> Any:
        """Return the controller's answer to a verb; None if it does not arrive in time.

        The message limits how long the controller waits, but the controller itself may hang, be replaced, or
        wait for a proxy that hangs.
        """
        call = self.call(verb, **message)
        if deadline is None:
            return await call
        left_s = max(0.0, deadline - self.cluster_connection.clock.now())
        try:
            return await self.cluster_connection.clock.wait_for(call, left_s + ANSWER_S)
        except TimeoutError as error:
            if isinstance(error, ServeError):  # the error of the change
                raise
            return None

    async def send_parcels(self, specs: Sequence[BackendSpec]) -> None:
        """Send the parcels of specs to the scheduler, unless this process does not have their content."""
        for spec in specs:
            parcel = Parcel.labelled(spec.code)
            if parcel is not None and spec.parts:
                await self.cluster_connection.cluster(self.instance).send_parcel(parcel, spec.parts)

    async def complete(self, answer: Mapping[str, Any]) -> None:
        """Wait until an accepted change is complete and visible here; see `wait_until_reached`."""
        goal: GoalId | None = answer.get("goal")
        if goal is not None:
            await self.wait_until_reached(goal, None)
        else:
            await self.wait_until_applied(answer.get("snapshot"))

    async def wait_for_goal(self, goal: GoalId, timeout_s: float | None) -> bool:
        """Return whether a goal was reached or superseded in time; raise the goal's error if it failed."""
        return await self._end_of(goal, self._deadline(timeout_s)) is not None

    async def wait_until_reached(self, goal: GoalId, timeout_s: float | None) -> bool:
        """Return whether a goal was reached in time; raise its error if it failed.

        Raises
        ------
        SupersededError, DeletedError
            A later change replaced this one, which was not complete.
        """
        deadline = self._deadline(timeout_s)
        while goal:
            answer = await self._end_of(goal, deadline, until_served=True)
            if answer is None:
                return False
            if answer["error"] is not None:
                raise load_error(answer["error"])
            goal = answer["successor"]
        return True

    def _deadline(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self.cluster_connection.clock.now() + timeout_s

    async def _end_of(
        self, goal: GoalId, deadline: float | None, *, until_served: bool = False
    ) -> Mapping[str, Any] | None:
        """Return the controller's answer about a goal that has ended; None if it did not end in time.

        With ``until_served``, a rollout counts as ended once it gets the traffic of its first step.
        """
        while True:
            left_s = (
                POLL_S if deadline is None else min(POLL_S, deadline - self.cluster_connection.clock.now())
            )
            answer: Mapping[str, Any] | None = await self.call_until(
                deadline, "wait_for_goal", goal_id=goal, timeout_s=max(0.0, left_s), until_served=until_served
            )
            if answer is None:
                return None
            if answer["is_done"]:
                await self.wait_until_applied(answer.get("snapshot"), deadline)
                return answer
            if deadline is not None and self.cluster_connection.clock.now() >= deadline:
                return None

    async def wait_until_applied(self, snapshot: Sequence[int] | None, deadline: float | None = None) -> None:
        """Wait until the routers of this process, if there are any, have applied a change, or until a
        deadline."""
        cluster = self.cluster_connection.cluster(self.instance)
        if snapshot is not None and "routers" in cluster.shared:
            wait_s = POLL_S
            if deadline is not None:
                left_s = max(0.0, deadline - self.cluster_connection.clock.now())
                wait_s = min(POLL_S, left_s + ANSWER_S)
            try:
                await cluster.listener.wait_for_snapshot((snapshot[0], snapshot[1]), wait_s)
            except TimeoutError:
                logger.warning("This process received no notification of a change within %s s", shown(wait_s))


def _specs_in(message: Mapping[str, Any]) -> list[BackendSpec]:
    spec = message.get("spec")
    found = [spec] if isinstance(spec, BackendSpec) else []
    apps = [each for each in message.get("apps", ()) if isinstance(each, ApplicationSpec)]
    return found + [each.spec for app in apps for each in app.deployments]


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_plain()
    return [_plain(each) for each in value] if isinstance(value, list) else value


async def wait_for_http(calls: ControllerCalls, timeout_s: float) -> None:
    """Wait until every proxy listens; raise the error of a proxy that cannot listen."""
    try:
        await calls.call("wait_for_http", timeout_s=timeout_s)
    except RequestTimeoutError as error:
        text = f"HTTP proxies not available after {shown(timeout_s)}s: {error}"
        raise RequestTimeoutError(text) from error
