"""The two clients of an instance: one with blocking methods, and one with methods to await.

Both have the same verbs. Each verb is written once, as a coroutine of `ClientVerbs`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from functools import partial
from html import escape
from typing import Any, Self, TypeVar

from daskserve.client.classic_handles import classic_handle
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.serving.leaving import leave_instance
from daskserve.client.serving.serve_forever import serve_until_ended
from daskserve.client.verbs.applications import ApplicationVerbs
from daskserve.client.verbs.backends import BackendVerbs
from daskserve.client.verbs.blocking import method
from daskserve.client.verbs.declared import DeclaringVerbs
from daskserve.client.verbs.deployments import DeploymentVerbs
from daskserve.client.verbs.endpoints import EndpointVerbs
from daskserve.client.verbs.history import HistoryVerbs
from daskserve.client.verbs.inspecting import InspectingVerbs
from daskserve.client.verbs.models import ModelVerbs
from daskserve.client.verbs.rollouts import RolloutVerbs
from daskserve.client.views.explanation import Explanation
from daskserve.client.views.links import html_links, links_of
from daskserve.client.views.status import Status
from daskserve.common.formatting import shown
from daskserve.common.types import GoalId, InstanceName, SnapshotId
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import ServeError, UnavailableError
from daskserve.options.fields.bounds import checked_capacity
from daskserve.payload.shown_errors import shows_errors

ShownT = TypeVar("ShownT")


class InstanceClient:
    """The properties of both kinds of client."""

    _connection: InstanceConnection

    def __repr__(self) -> str:
        state = "closed" if self._connection.is_closed else "open"
        kind = type(self).__name__
        return f"<daskserve.{kind} of {self.instance_name!r} at {self.scheduler_address} {state}>"

    def _repr_html_(self) -> str:
        """Return the same as HTML for notebooks, with links to the pages of the instance."""
        links = "" if self._connection.is_closed else html_links(links_of(self.dashboard_link))
        return f"<p>{escape(repr(self))}</p>" + (f"<p>{links}</p>" if links else "")

    def __reduce__(self) -> tuple[Any, ...]:
        raise ServeError(
            "A daskserve client cannot be serialized; call serve.connect() where you need a client, or pass "
            "a handle."
        )

    @property
    def instance_name(self) -> InstanceName:
        """The name of the instance, which is part of the names of its topics and actors."""
        return self._connection.instance

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if the scheduler has none."""
        self._connection.check_open()
        return self._connection.cluster_connection.dashboard_link

    @property
    def page_link(self) -> str | None:
        """The address of the page that shows the instances; None if the scheduler has no HTTP server."""
        return links_of(self.dashboard_link).get("page")

    @property
    def scheduler_address(self) -> str:
        """The address of the Dask scheduler, with which other programs reach a detached instance."""
        return self._connection.cluster_connection.scheduler_address


class ClientVerbs(
    BackendVerbs,
    EndpointVerbs,
    DeploymentVerbs,
    ApplicationVerbs,
    DeclaringVerbs,
    HistoryVerbs,
    RolloutVerbs,
    ModelVerbs,
    InspectingVerbs,
):
    """The verbs of both kinds of client."""

    _known_links: Mapping[str, str] | None = None

    async def wait_for_goal(self, goal_id: GoalId, timeout_s: float | None = None) -> bool:
        """Return whether a change that was started with ``blocking=False`` completed in time.

        As in the classic system, a change that is superseded by a later one counts as complete; `status`
        names the later one.

        Parameters
        ----------
        goal_id : str
            The result of the call that started the change.
        timeout_s : float, optional
            How long to wait; None means no limit.

        Raises
        ------
        ServeError
            The reason why the change failed and was rolled back.
        NotFoundError
            There is no such goal; the controller remembers the last hundred goals that ended.
        """
        self._connection.check_open()
        return await self._run(self._connection.calls.wait_for_goal(goal_id, timeout_s))

    async def shutdown(self) -> None:
        """End the instance: its replicas, proxies and controller. Idempotent.

        Requests under way complete first. The proxies close, then the replicas of each ingress, then the
        replicas that these called. Each waits for at most its ``experimental_graceful_shutdown_timeout_s``.
        An idle instance ends at once. A second Ctrl-C ends it without waiting.

        When this returns, no part of the instance is left on the cluster. A Dask cluster that ``start``
        created for the instance ends too. So does a Dask client that ``start_async`` or ``connect_async``
        created.
        """
        await self._connection.shutdown(asynchronous=self._asynchronous)

    async def disconnect(self) -> None:
        """Close this client. A detached instance keeps running; an instance that this client owns ends.
        Idempotent.

        An instance on which other programs have deployed something keeps running, too. A Dask client that
        ``start`` or ``connect`` created for an ``address`` closes.
        """
        await self._connection.disconnect(asynchronous=self._asynchronous)

    async def serve_until_interrupted(self) -> None:
        """Return after Ctrl-C (SIGINT), SIGTERM or the end of the instance.

        Prints the instance's address, and a line for each change after that: deployments, replicas that
        became ready or were lost, addresses. An instance that this program started ends, unless other
        programs have deployed something on it. It lets requests in flight complete; a second signal ends the
        instance at once. An instance of another program keeps running.
        """
        await self._serve({})

    async def _serve(self, started: Mapping[str, str]) -> None:
        """Serve until interrupted, then leave the instance; see `leave_instance`."""
        connection = self._connection
        connection.check_open()
        leave = partial(leave_instance, self, started)
        await serve_until_ended(
            connection.cluster_connection, connection.instance, leave, asynchronous=self._asynchronous
        )

    async def _leave(self) -> None:
        await self._connection.leave(asynchronous=self._asynchronous)

    async def http_urls(self) -> list[str]:
        """Return the URLs at which the proxies listen, for example ``["http://127.0.0.1:8000"]``."""
        return list(await self._call("http_urls"))

    async def status(self) -> Status:
        """Return the instance's status, with the reasons why parts do not run; empty once it has ended."""
        if self._connection.is_closed:
            return Status()
        answer = await self._call("status")
        return Status.of({**answer, "links": self._links()})

    def _links(self) -> Mapping[str, str]:
        """Return the links to pages that show the instance; cached after the first call."""
        if self._known_links is None:
            try:
                self._known_links = links_of(self._connection.cluster_connection.dashboard_link)
            except (ServeError, OSError, LookupError, ValueError):
                return {}  # the status is useful without links, too
        return self._known_links

    async def next_status(self, seen: str = "", timeout_s: float = 30.0) -> tuple[str, Status | None]:
        """Return the id of the status and the status, once its id is no longer ``seen``.

        Use it to watch for changes: the first call, without an id, returns at once. The status is None if it
        has not changed within ``timeout_s``, of at most 30 seconds.
        """
        answer = await self._call("next_status", seen=seen, timeout_s=timeout_s)
        status = answer["status"]
        return answer["seen"], None if status is None else Status.of(status)

    async def instances(self) -> list[InstanceName]:
        """Return the names of the instances on the cluster: this one, and those of other programs."""
        self._connection.check_open()
        return sorted(await self._run(self._connection.cluster_connection.ask("instances")))

    async def controller_health(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return which controller answers, on which worker, and its health.

        The health is the delay of its event loop in seconds, the number and the durations of the rounds of
        its loop, its tasks, and the memory of its process.

        Raises
        ------
        UnavailableError
            The controller does not answer in time, or is being replaced.
        """

        async def ask() -> Any:
            async with asyncio.timeout(timeout_s):
                return await self._connection.calls.call("health")

        self._connection.check_open()
        try:
            return dict(await self._run(ask()))
        except TimeoutError as error:
            raise UnavailableError(
                f"The controller of instance {self._connection.instance!r} did not answer within "
                f"{shown(timeout_s)} s: it hangs, or is being replaced."
            ) from error

    async def set_target_capacity(self, percent: float | None) -> None:
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
        await self._change("set_target_capacity", percent=checked_capacity(percent))

    async def rewrite_store(self) -> int:
        """Rewrite all records of the instance to the store, and return their number.

        For a store that was lost. While its file or folder is removed, moved or replaced, the instance keeps
        serving and replaces lost replicas, but refuses changes with `StoreLostError`. The records go to the
        place that the store's URL names, and replace the instance's records there.

        Raises
        ------
        ServeError The place cannot be used, or a newer instance uses it; the message says what to do.
        """
        return int(await self._call("rewrite_store"))

    async def explain(self, name: str) -> Explanation:
        """Return an explanation of the number of replicas of a backend or deployment, to be printed.

        Raises
        ------
        NotFoundError
            There is no such backend.
        """
        return Explanation.of(await self._call("explain", name=name))

    async def view(self, name: str) -> Any:
        """Return a part of the controller's state as plain values, under the classic system's names.

        ``get_all_backends``, ``get_all_endpoints``, ``get_http_config``, ``get_http_proxies``,
        ``all_replica_handles``, ``get_router_config``, ``get_traffic_policies``, ``get_backend_configs``, ...

        Raises
        ------
        NotFoundError
            There is no such view; the message lists the views that exist.
        """
        return await self._call("view", name=name)

    async def report_queue_lengths(self, router: str, lengths: Mapping[str, int]) -> None:
        """Report a router's queue lengths by backend to the controller; see ``view("queue_lengths")``."""
        await self._call("report_queue_lengths", router=router, lengths=dict(lengths))

    async def listen_for_change(
        self, keys_to_snapshot_ids: Mapping[str, SnapshotId | None]
    ) -> dict[str, tuple[SnapshotId, Any]]:
        """Return the published values that are newer than the given snapshots; if there are none, wait for
        them.

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
        found = await self._call("listen_for_change", snapshot_ids=ids)
        return {key: ((seen[0], seen[1]), value) for key, (seen, value) in found.items()}

    async def snapshot(self) -> str:
        """Return the deployments as JSON, in the format of the classic system's snapshot."""
        return json.dumps(await self._call("snapshot"))


def _with_shown_errors(cls: type[ShownT]) -> type[ShownT]:
    """Let all coroutine methods of a client raise their errors in the same form as the functions of the
    package."""
    for name in dir(cls):
        verb = getattr(cls, name)
        if not name.startswith("_") and inspect.iscoroutinefunction(verb):
            setattr(cls, name, shows_errors(verb))
    return cls


@_with_shown_errors
class AsyncClient(ClientVerbs, InstanceClient):
    """A client of one instance whose methods are awaited; `daskserve.start_async` returns one.

    It works on every event loop, without a thread if that is the loop of the Dask client
    (``distributed.Client(asynchronous=True)``). Its handles are the same as those of `Client`: await the
    responses that ``remote`` returns.

    An instance that was started without ``detached=True`` ends with its client: on `shutdown`, when the
    client is garbage collected, or when the program ends. It stays if other programs have deployed something
    on it. At the end of an ``async with`` block, the instance ends if the block's client started it; a client
    of `daskserve.connect_async` disconnects.
    """

    def __init__(self, connection: InstanceConnection) -> None:
        super().__init__(connection, asynchronous=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._connection.leave(asynchronous=True)


class Client(InstanceClient):
    """A client of one instance, which `daskserve.start` and `daskserve.connect` return. Its methods block.

    An instance that was started without ``detached=True`` ends with its client: on `shutdown`, when the
    client is garbage collected, or when the program ends. It stays if other programs have deployed something
    on it. At the end of a ``with`` block, the instance ends if the block's client started it; a client of
    `daskserve.connect` disconnects.
    """

    def __init__(self, connection: InstanceConnection) -> None:
        self._connection = connection
        self._verbs = ClientVerbs(connection, asynchronous=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leave()

    def get_handle(self, endpoint_name: str, missing_ok: bool = False, sync: bool = True) -> Handle:
        """Return a handle that calls an endpoint from Python; it is the same object until the endpoint
        changes.

        Parameters
        ----------
        missing_ok : bool
            Whether the endpoint may be created later. An endpoint whose first deploy failed is always an
            error.
        sync : bool
            Whether ``remote`` returns a `Response` (True), or is a coroutine that returns it, as in the
            classic system: ``await (await handle.remote())`` (False). A handle that does not suit the calling
            context causes a warning.

        Raises
        ------
        NotFoundError
            A `KeyError`: there is no such endpoint.
        """
        return classic_handle(self._get_handle(endpoint_name, missing_ok), sync)

    _get_handle = method(ClientVerbs.get_handle)
    _leave = method(ClientVerbs._leave)

    create_backend = method(ClientVerbs.create_backend)
    update_backend_config = method(ClientVerbs.update_backend_config)
    get_backend_config = method(ClientVerbs.get_backend_config)
    list_backends = method(ClientVerbs.list_backends)
    delete_backend = method(ClientVerbs.delete_backend)

    create_endpoint = method(ClientVerbs.create_endpoint)
    list_endpoints = method(ClientVerbs.list_endpoints)
    set_traffic = method(ClientVerbs.set_traffic)
    shadow_traffic = method(ClientVerbs.shadow_traffic)
    delete_endpoint = method(ClientVerbs.delete_endpoint)

    deploy = method(ClientVerbs.deploy)
    deploy_spec = method(ClientVerbs.deploy_spec)
    get_deployment_info = method(ClientVerbs.get_deployment_info)
    list_deployments = method(ClientVerbs.list_deployments)
    stored_deployments = method(ClientVerbs.stored_deployments)
    delete_deployment = method(ClientVerbs.delete_deployment)

    run = method(ClientVerbs.run)
    run_many = method(ClientVerbs.run_many)
    get_app_handle = method(ClientVerbs.get_app_handle)
    get_deployment_handle = method(ClientVerbs.get_deployment_handle)
    delete_application = method(ClientVerbs.delete_application)

    deploy_config = method(ClientVerbs.deploy_config)
    plan_config = method(ClientVerbs.plan_config)
    get_config = method(ClientVerbs.get_config)
    wait_for_config = method(ClientVerbs.wait_for_config)
    restart = method(ClientVerbs.restart)
    scale_deployment = method(ClientVerbs.scale_deployment)
    history = method(ClientVerbs.history)
    rollback = method(ClientVerbs.rollback)
    events = method(ClientVerbs.events)
    _events = method(ClientVerbs._events)
    logs = method(ClientVerbs.logs)
    live_metrics = method(ClientVerbs.live_metrics)
    rollout_status = method(ClientVerbs.rollout_status)
    pause_rollout = method(ClientVerbs.pause_rollout)
    promote_rollout = method(ClientVerbs.promote_rollout)
    abort_rollout = method(ClientVerbs.abort_rollout)

    wait_for_goal = method(ClientVerbs.wait_for_goal)
    scale = method(ClientVerbs.scale)
    set_target_capacity = method(ClientVerbs.set_target_capacity)
    rewrite_store = method(ClientVerbs.rewrite_store)
    status = method(ClientVerbs.status)
    controller_health = method(ClientVerbs.controller_health)
    list_models = method(ClientVerbs.list_models)
    load_model = method(ClientVerbs.load_model)
    unload_model = method(ClientVerbs.unload_model)
    set_default_model = method(ClientVerbs.set_default_model)
    profile = method(ClientVerbs.profile)
    stacks = method(ClientVerbs.stacks)
    next_status = method(ClientVerbs.next_status)
    instances = method(ClientVerbs.instances)
    explain = method(ClientVerbs.explain)
    http_urls = method(ClientVerbs.http_urls)
    view = method(ClientVerbs.view)
    snapshot = method(ClientVerbs.snapshot)
    listen_for_change = method(ClientVerbs.listen_for_change)
    report_queue_lengths = method(ClientVerbs.report_queue_lengths)
    shutdown = method(ClientVerbs.shutdown)
    disconnect = method(ClientVerbs.disconnect)
    serve_until_interrupted = method(ClientVerbs.serve_until_interrupted)
