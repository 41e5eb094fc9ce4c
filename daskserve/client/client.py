"""The client of an instance. Its methods block until the requested change is complete."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from typing import Any, Self

from daskserve.client.backends import BackendVerbs
from daskserve.client.connection import InstanceConnection
from daskserve.client.deployment_verbs import DeploymentVerbs
from daskserve.client.ending import wait_until_ended
from daskserve.client.endpoints import EndpointVerbs
from daskserve.client.explanation import Explanation
from daskserve.client.status import Status
from daskserve.cluster.base import ClientLink
from daskserve.data.caller.handle import Handle, routers_of
from daskserve.errors import NotFoundError, ServeError
from daskserve.options.bounds import checked_capacity
from daskserve.types import GoalId, InstanceName, SnapshotId


class Client(BackendVerbs, EndpointVerbs, DeploymentVerbs):
    """A client of one instance, which `daskserve.start` and `daskserve.connect` return.

    An instance that was started without ``detached=True`` ends with its client: on `shutdown`, when the
    client is garbage collected, or when the program ends.
    """

    def __init__(self, link: ClientLink, instance: InstanceName, *, is_owner: bool) -> None:
        self._connection = InstanceConnection(link, instance)
        if is_owner:
            self._connection.end_with(self)

    def __repr__(self) -> str:
        state = "closed" if self._connection.is_closed else "open"
        return f"<daskserve.Client of {self.instance_name!r} at {self.scheduler_address} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise ServeError(
            "A daskserve client cannot be serialized; call serve.connect() where you need a client, or pass "
            "a handle."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    @property
    def instance_name(self) -> InstanceName:
        """The name of the instance, which is part of the names of its topics and actors."""
        return self._connection.instance

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if the scheduler has none."""
        self._connection.check_open()
        return self._connection.link.dashboard_link

    @property
    def scheduler_address(self) -> str:
        """The address of the Dask scheduler, with which other programs reach a detached instance."""
        return self._connection.link.scheduler_address

    def wait_for_goal(self, goal_id: GoalId, timeout_s: float | None = None) -> bool:
        """Return whether a change that was started with ``blocking=False`` completed in time.

        Parameters
        ----------
        goal_id : str
            What the call that started the change returned.
        timeout_s : float, optional
            How long to wait; None means no limit.

        Raises
        ------
        ServeError
            The reason why the change failed and was rolled back.
        NotFoundError
            There is no such goal; the controller remembers the last hundred goals that ended.
        """
        return self._connection.wait_for_goal(goal_id, timeout_s)

    def shutdown(self) -> None:
        """End the instance: its replicas, proxies and controller. Idempotent.

        When this returns, no part of the instance is left on the cluster. A Dask cluster that ``start``
        created for the instance ends too.
        """
        self._connection.close()

    def become_default(self) -> None:
        """Make this the client that `daskserve.run` uses in this process; it lives as long as the process."""
        self._connection.link.default_instance = self

    def serve_until_interrupted(self) -> None:
        """Block until Ctrl-C (SIGINT), SIGTERM or the end of the instance, then shut down."""
        self._connection.check_open()
        try:
            wait_until_ended(self._connection.link, self._connection.instance)
        finally:
            self.shutdown()

    def get_handle(self, endpoint_name: str, missing_ok: bool = False, sync: bool = True) -> Handle:
        """Return a handle that calls an endpoint from Python.

        Parameters
        ----------
        missing_ok : bool
            Whether to skip the check that the endpoint exists.
        sync : bool
            Whether you will call ``.result()`` (True) or await (False). Both work on every handle; a
            mismatch with the calling context only causes a warning.

        Raises
        ------
        NotFoundError
            A `KeyError`: there is no such endpoint.
        """
        _warn_about_loop(sync)
        link, instance = self._connection.link, self._connection.instance
        try:
            facts = self._connection.call("get_endpoint", name=endpoint_name)
        except NotFoundError:
            if not missing_ok:
                raise
            facts = {"is_legacy": True, "python_methods": []}
        # Started here and not at the first call, so that the handle sees later changes by this client.
        link.sync(_start_routers(link, instance))
        return Handle(
            instance,
            endpoint_name,
            is_legacy=facts["is_legacy"],
            python_methods=tuple(facts["python_methods"]),
            cluster=link.cluster(instance),
        )

    def http_urls(self) -> list[str]:
        """Return the URLs at which the proxies listen, for example ``["http://127.0.0.1:8000"]``."""
        return list(self._connection.call("http_urls"))

    def status(self) -> Status:
        """Return the instance's status, with the reasons for what does not run; empty once it has ended."""
        if self._connection.is_closed:
            return Status()
        return Status.of(self._connection.call("status"))

    def set_target_capacity(self, percent: float | None) -> None:
        """Set the percentage of replicas that every backend runs, rounded up; None means all of them.

        The percentage applies to ``min_replicas``, ``max_replicas`` and ``initial_replicas`` of autoscaled
        backends, and to ``num_replicas`` of others. The options themselves do not change, and apply again
        when the capacity returns. At 0 there are no replicas, and requests fail with 503. While the capacity
        goes up, backends have at least their ``initial_replicas``, until it is set to None.

        Returns when routers and the controller use the new value, before all replicas have started or
        stopped. `status` shows the progress, and `explain` that of one backend. The value outlives
        controllers, as other changes do.

        Raises
        ------
        BadRequestError
            A `ValueError`: the percentage is not a number from 0 to 100.
        """
        self._connection.change("set_target_capacity", percent=checked_capacity(percent))

    def explain(self, name: str) -> Explanation:
        """Return an explanation of the number of replicas of a backend or deployment; print it to read it.

        Raises
        ------
        NotFoundError
            There is no such backend.
        """
        return Explanation.of(self._connection.call("explain", name=name))

    def view(self, name: str) -> Any:
        """Return a part of the controller's state as plain values, under the classic system's names.

        ``get_all_backends``, ``get_all_endpoints``, ``get_http_config``, ``get_http_proxies``,
        ``all_replica_handles``, ``get_router_config``, ``get_traffic_policies``, ``get_backend_configs``, ...

        Raises
        ------
        NotFoundError
            There is no such view; the message lists the views that exist.
        """
        return self._connection.call("view", name=name)

    def report_queue_lengths(self, router: str, lengths: Mapping[str, int]) -> None:
        """Report a router's queue lengths by backend to the controller; see ``view("queue_lengths")``."""
        self._connection.call("report_queue_lengths", router=router, lengths=dict(lengths))

    def listen_for_change(
        self, keys_to_snapshot_ids: Mapping[str, SnapshotId | None]
    ) -> dict[str, tuple[SnapshotId, Any]]:
        """Return the published values that are newer than the given snapshots; wait if there are none yet.

        Parameters
        ----------
        keys_to_snapshot_ids : dict
            The last snapshot id seen for each key, or None. Keys are ``routes``, ``endpoint/<name>`` and
            ``backend/<tag>``.

        Returns
        -------
        dict
            The new snapshot id and value of each key that changed; empty after 30 s without a change.
        """
        ids = {key: None if seen is None else list(seen) for key, seen in keys_to_snapshot_ids.items()}
        found = self._connection.call("listen_for_change", snapshot_ids=ids)
        return {key: ((seen[0], seen[1]), value) for key, (seen, value) in found.items()}

    def snapshot(self) -> str:
        """Return the deployments as JSON, in the format of the classic system's snapshot."""
        return json.dumps(self._connection.call("snapshot"))


async def _start_routers(link: ClientLink, instance: InstanceName) -> None:
    await routers_of(link.cluster(instance))


def _warn_about_loop(sync: bool) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not sync:
            warnings.warn(
                "You requested a handle with sync=False outside an event loop; its responses can only be "
                "awaited inside one. Use sync=True and .result() in blocking code.",
                UserWarning,
                stacklevel=3,
            )
    else:
        if sync:
            warnings.warn(
                "You requested a handle with sync=True inside an event loop; .result() would block it. "
                "Use sync=False and await the responses.",
                UserWarning,
                stacklevel=3,
            )
