"""The client of an instance. Its methods block until what they ask for holds."""

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
    """One instance, as a user program holds it. Made by `daskserve.start` and `daskserve.connect`.

    An instance that was started without ``detached=True`` ends with its client: by `shutdown`, when the
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
        return self._connection.instance

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if the scheduler has none."""
        self._connection.check_open()
        return self._connection.link.dashboard_link

    @property
    def scheduler_address(self) -> str:
        """The address of the Dask scheduler; another program reaches a detached instance with it."""
        return self._connection.link.scheduler_address

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
        return self._connection.wait_for_goal(goal_id, timeout_s)

    def shutdown(self) -> None:
        """End the instance: its replicas, proxies and controller. Idempotent.

        When this returns, nothing of the instance is left on the cluster. A Dask cluster that ``start``
        made for it ends too.
        """
        self._connection.close()

    def become_default(self) -> None:
        """Be the instance that `daskserve.run` uses in this process, and live as long as it."""
        self._connection.link.default_instance = self

    def serve_until_interrupted(self) -> None:
        """Block until Ctrl-C (SIGINT) or SIGTERM, then shut down; or until the instance ends otherwise."""
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
            Do not look whether the endpoint exists.
        sync : bool
            Whether you will ask for ``.result()`` (True) or await (False). Both work on every handle; a
            mismatch with where you are only warns.

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
        # Begun here and not at the first call, so that later changes through this client are seen by it.
        link.sync(_start_routers(link, instance))
        return Handle(
            instance,
            endpoint_name,
            is_legacy=facts["is_legacy"],
            python_methods=tuple(facts["python_methods"]),
            cluster=link.cluster(instance),
        )

    def http_urls(self) -> list[str]:
        """Return where the proxies listen, for instance ``["http://127.0.0.1:8000"]``."""
        return list(self._connection.call("http_urls"))

    def status(self) -> Status:
        """Return what runs and what does not, with the reasons; all empty once the instance has ended."""
        if self._connection.is_closed:
            return Status()
        return Status.of(self._connection.call("status"))

    def set_target_capacity(self, percent: float | None) -> None:
        """Let every backend have this percentage of its replicas, rounded up; None: all of them.

        Of autoscaled backends that is ``min_replicas``, ``max_replicas`` and ``initial_replicas``, of others
        ``num_replicas``. The options stay as they are, and come back with the capacity. At 0 there are no
        replicas at all, and requests are refused with 503. While the capacity goes up, backends have their
        ``initial_replicas`` at least, until it is set to None.

        Returns when routers and the controller go by it, before all replicas have started or ended; `status`
        tells of both, and `explain` of one backend. It outlives controllers, as other changes do.

        Raises
        ------
        BadRequestError
            A `ValueError`: it is not a number from 0 to 100.
        """
        self._connection.change("set_target_capacity", percent=checked_capacity(percent))

    def explain(self, name: str) -> Explanation:
        """Return why a backend or deployment has as many replicas as it has; print it to read it.

        Raises
        ------
        NotFoundError
            There is no such backend.
        """
        return Explanation.of(self._connection.call("explain", name=name))

    def view(self, name: str) -> Any:
        """Return something of the controller's inside in plain values, under the classic system's names.

        ``get_all_backends``, ``get_all_endpoints``, ``get_http_config``, ``get_http_proxies``,
        ``all_replica_handles``, ``get_router_config``, ``get_traffic_policies``, ``get_backend_configs``, ...

        Raises
        ------
        NotFoundError
            There is no such view; the message names those there are.
        """
        return self._connection.call("view", name=name)

    def report_queue_lengths(self, router: str, lengths: Mapping[str, int]) -> None:
        """Tell the controller what waits in a router, by backend; ``view("queue_lengths")`` shows it."""
        self._connection.call("report_queue_lengths", router=router, lengths=dict(lengths))

    def listen_for_change(
        self, keys_to_snapshot_ids: Mapping[str, SnapshotId | None]
    ) -> dict[str, tuple[SnapshotId, Any]]:
        """Return the published values that are newer than the snapshots given, waiting for one if need be.

        Parameters
        ----------
        keys_to_snapshot_ids : dict
            The snapshot id that was seen last of each key, None for none. Keys are ``routes``,
            ``endpoint/<name>`` and ``backend/<tag>``.

        Returns
        -------
        dict
            The new snapshot id and value of each key that changed; empty after 30 s without a change.
        """
        ids = {key: None if seen is None else list(seen) for key, seen in keys_to_snapshot_ids.items()}
        found = self._connection.call("listen_for_change", snapshot_ids=ids)
        return {key: ((seen[0], seen[1]), value) for key, (seen, value) in found.items()}

    def snapshot(self) -> str:
        """Return what is deployed as JSON, in the shape of the classic system's snapshot."""
        return json.dumps(self._connection.call("snapshot"))


async def _start_routers(link: ClientLink, instance: InstanceName) -> None:
    await routers_of(link.cluster(instance))


def _warn_about_loop(sync: bool) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not sync:
            warnings.warn(
                "You asked for a handle with sync=False outside an event loop; its responses can only be "
                "awaited there. Use sync=True and .result() in blocking code.",
                UserWarning,
                stacklevel=3,
            )
    else:
        if sync:
            warnings.warn(
                "You asked for a handle with sync=True inside an event loop; .result() would block it. "
                "Use sync=False and await the responses.",
                UserWarning,
                stacklevel=3,
            )
