"""The functions of ``import daskserve as serve``: start, find and end instances, and deploy applications."""

from __future__ import annotations

import asyncio
import logging
import string
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import dask.config

from daskserve import settings
from daskserve.client.calls import ControllerCalls, wait_for_http
from daskserve.client.client import Client
from daskserve.client.deployment_verbs import python_methods
from daskserve.client.deployments import Application, Deployment
from daskserve.client.ending import end_instance
from daskserve.client.explanation import Explanation
from daskserve.client.specs import check_name, check_route, make_spec
from daskserve.client.status import Status
from daskserve.cluster.launch import start_detached_cluster, start_local_cluster
from daskserve.cluster.link import DaskLink, dial, link_of, present_link
from daskserve.cluster.scheduler.install import start_instance
from daskserve.context import current_replica
from daskserve.data.caller.handle import Handle
from daskserve.errors import AlreadyRunningError, ClosedError, NotRunningError
from daskserve.options.base import parse_options
from daskserve.options.http import HTTPOptions
from daskserve.payload import dump_bytes
from daskserve.starts import ControllerStart
from daskserve.types import DEFAULT_INSTANCE, InstanceName

logger = logging.getLogger("daskserve.api")

#: Distinguishes an omitted argument from one that was passed its default.
_UNSET: Any = object()


def start(
    detached: bool = False,
    http_host: str | None = _UNSET,
    http_port: int = _UNSET,
    http_middlewares: Sequence[Any] = _UNSET,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    *,
    dask_client: Any = None,
    address: str | None = None,
    store: str = "memory://",
    name: str | None = None,
    dashboard: bool = True,
) -> Client:
    """Start an instance and return its client once every proxy listens.

    Without ``dask_client`` and ``address``, the instance uses Dask's default client of this process. If there
    is none, ``start`` creates a local cluster of processes, which ends with its last instance. A cluster that
    is created for a detached instance outlives this program; other programs reach it at
    ``client.scheduler_address``.

    Parameters
    ----------
    detached : bool
        Let the instance outlive this program. A cluster has at most one detached instance, which
        `connect` finds. Otherwise the instance ends with the returned client.
    http_host, http_port, http_middlewares
        Deprecated; use ``http_options``.
    http_options : HTTPOptions or dict, optional
    dask_client : distributed.Client, optional
    address : str, optional
        Address of a Dask scheduler to connect to.
    store : str
        URL of the store for the instance's records: ``memory://``, ``sqlite:///path`` or any fsspec URL.
        Paths are on the scheduler's host. An instance that finds records under its name restores what they
        describe.
    name : str, optional
        The instance's name. Default: a random name, or, if detached, the well-known name that `connect` looks
        up. Set it to find the records in a durable store again.
    dashboard : bool
        Whether a local cluster that this call creates has Dask's dashboard (if bokeh is installed).

    Raises
    ------
    AlreadyRunningError
        A detached instance is already running.
    ClusterUnreachableError, VersionMismatchError, InstanceError
        The cluster cannot be reached, has no matching daskserve version, or has no worker.
    PortInUseError
        Another process listens on the port.
    TimeoutError
        The proxies did not start to listen in time.
    """
    options = _http_options(http_host, http_port, http_middlewares, http_options)
    _check_instance_name(name, detached, store)
    found = _find_link(dask_client, address)
    link = _make_cluster(detached, dashboard) if found is None else found
    instance = name or (DEFAULT_INSTANCE if detached else _new_name(link))
    owner = None if detached else link.owner_id
    owns_cluster = detached and found is None
    start_id = uuid.uuid4().hex
    message = {"owner": owner, "owns_cluster": owns_cluster, "store": store, "start_id": start_id}
    try:
        if owns_cluster:
            link.owning_instances.add(instance)
        link.instance_started(instance)
        link.sync(_start(link, instance, options, message))
        return Client(link, instance, is_owner=not detached)
    except BaseException as error:
        # Clean up a partial start, also on Ctrl-C, but leave an instance that was already running.
        if found is None or not isinstance(error, AlreadyRunningError):
            _end_failed_start(link, instance, start_id)
        if address is not None:
            link.disconnect()
        raise


def _check_instance_name(name: str | None, detached: bool, store: str) -> None:
    if name is not None:
        check_name(name, "name")
        if detached and name != DEFAULT_INSTANCE:
            raise ValueError(
                f"A detached instance cannot have the name {name!r}: serve.connect() looks for "
                f"{DEFAULT_INSTANCE!r}; leave name= out."
            )
    if name is None and not detached and not store.startswith("memory:"):
        raise ValueError(
            f"An instance with a random name cannot find its records in {store!r} again; pass name= or "
            "detached=True."
        )


def _end_failed_start(link: DaskLink, instance: InstanceName, start_id: str) -> None:
    try:
        end_instance(link, instance, start_id=start_id)
    except Exception:
        # The caller must see the error of the start.
        logger.exception("Instance %s failed to start, and its cleanup failed", instance)


def _make_cluster(detached: bool, dashboard: bool) -> DaskLink:
    size = settings.local_cluster_size()
    if detached:
        return link_of(start_detached_cluster(size, has_dashboard=dashboard))
    cluster, client = start_local_cluster(size, has_dashboard=dashboard)
    link = link_of(client)
    link.own_cluster = cluster
    return link


def _http_options(
    http_host: Any,
    http_port: Any,
    http_middlewares: Any,
    http_options: HTTPOptions | Mapping[str, Any] | None,
) -> HTTPOptions:
    old = {
        name: value
        for name, value in (("host", http_host), ("port", http_port), ("middlewares", http_middlewares))
        if value is not _UNSET
    }
    if old and http_options is not None:
        raise ValueError(
            f"You cannot specify both http_options and http_{next(iter(old))}; set it in http_options."
        )
    if old:
        names = ", ".join(f"http_{name}" for name in old)
        warnings.warn(f"{names}: use http_options instead.", DeprecationWarning, stacklevel=3)
        old["middlewares"] = list(old.get("middlewares", []))
        return HTTPOptions(**{**settings.http_defaults(), **old})
    if isinstance(http_options, HTTPOptions):
        return http_options
    given = parse_options(HTTPOptions, http_options, what="http_options")
    return HTTPOptions(**{**settings.http_defaults(), **given.model_dump(exclude_unset=True)})


async def _start(
    link: DaskLink, instance: InstanceName, options: HTTPOptions, message: Mapping[str, Any]
) -> None:
    timeouts = settings.timeouts()
    controller = ControllerStart(
        http=options,
        middlewares=dump_bytes(options.middlewares) if options.middlewares else None,
        start_timeout_s=timeouts.start_s,
    )
    await start_instance(
        link,
        instance,
        timeout_s=timeouts.proxy_s,
        grace_s=timeouts.grace_s,
        payload=controller.encode(),
        **message,
    )
    await wait_for_http(ControllerCalls(link, instance), timeouts.proxy_s)


def _new_name(link: DaskLink) -> InstanceName:
    return f"{DEFAULT_INSTANCE}-{''.join(link.rng.choices(string.ascii_letters, k=6))}"


def _find_link(dask_client: Any, address: str | None) -> DaskLink | None:
    if dask_client is not None and address is not None:
        raise ValueError("Give either dask_client or address, not both.")
    if dask_client is not None:
        return link_of(dask_client)
    if address is not None:
        return link_of(dial(address, settings.timeouts().connect_s))
    return present_link()


def connect(*, dask_client: Any = None, address: str | None = None) -> Client:
    """Return a client of a running instance; never starts an instance or a cluster.

    Inside a backend this is the backend's own instance. Elsewhere it is the detached instance of the
    cluster given by ``dask_client``, ``address``, Dask's default client or Dask's ``scheduler-address``
    configuration, in this order.

    Raises
    ------
    NotRunningError
        There is no such instance.
    ClusterUnreachableError
        No Dask scheduler answers at the address.
    """
    replica = current_replica.get()
    if replica is not None and replica.cluster is not None and dask_client is None and address is None:
        return Client(replica.cluster.link, replica.instance, is_owner=False)
    link = _find_link(dask_client, address)
    if link is None:
        address = dask.config.get("scheduler-address", None)
        if address is None:
            raise NotRunningError(
                "This process is not connected to a Dask cluster; pass address=..., create a "
                "distributed.Client, or start an instance with serve.start(detached=True)."
            )
        link = link_of(dial(address, settings.timeouts().connect_s))
    try:
        return _connect(link)
    except BaseException:
        if address is not None:
            link.disconnect()
        raise


def _connect(link: DaskLink) -> Client:
    timeouts = settings.timeouts()
    no_instance = NotRunningError(
        f"No detached instance runs on the cluster {link.scheduler_address}; start one with "
        "serve.start(detached=True)."
    )
    if not link.sync(link.check_scheduler(timeouts.connect_s)):
        raise no_instance
    try:
        running = link.sync(link.ask("instances"))
    except NotRunningError:
        raise no_instance from None
    if DEFAULT_INSTANCE not in running:
        raise no_instance
    if running[DEFAULT_INSTANCE]["owns_cluster"]:
        link.owning_instances.add(DEFAULT_INSTANCE)
    return Client(link, DEFAULT_INSTANCE, is_owner=False)


def _present_client() -> Client | None:
    """Return a client of the instance that module-level functions use.

    It is the instance that `run` started in this process; otherwise the latest running instance that `start`
    started here; otherwise the detached instance of this process's Dask cluster.
    """
    link = _find_link(None, None)
    if link is None:
        return None
    if link.default_instance is not None:
        found: Client = link.default_instance
        return found
    started = link.latest_started()
    if started is not None:
        return Client(link, started, is_owner=False)
    try:
        return connect()
    except NotRunningError:
        return None


def shutdown() -> None:
    """End the instance that `run` uses; do nothing if there is none."""
    client = _present_client()
    if client is not None:
        client.shutdown()


def status() -> Status:
    """Return the status of the instance that `run` uses; empty if no instance runs."""
    client = _present_client()
    try:
        return Status() if client is None else client.status()
    except ClosedError:
        return Status()  # the instance ended during the call


def explain(name: str) -> Explanation:
    """Return an explanation of a deployment's number of replicas, in the instance that `run` uses.

    Print it to read the current and target numbers, the bounds, the policy's decision, the latest metrics and
    changes, and what replicas wait for.

    Raises
    ------
    NotFoundError
        There is no such deployment.
    NotRunningError
        No instance runs.
    """
    return _running_client().explain(name)


def scale(name: str, target_num_replicas: int) -> int:
    """Set the number of replicas of an externally scaled deployment and return it.

    See `daskserve.client.client.Client.scale`.

    Raises
    ------
    ExternalScalerDisabledError
        Its config does not have ``external_scaler_enabled=True``.
    NotFoundError
        There is no such deployment.
    BadRequestError
        The number is invalid.
    NotRunningError
        No instance runs.
    """
    return _running_client().scale(name, target_num_replicas)


def _running_client() -> Client:
    client = _present_client()
    if client is None:
        raise NotRunningError("No instance runs here; deploy something with serve.run() first.")
    return client


def set_target_capacity(percent: float | None) -> None:
    """Set the percentage of replicas that run in the instance that `run` uses; None means all of them.

    See `daskserve.client.client.Client.set_target_capacity`.

    Raises
    ------
    BadRequestError
        A `ValueError`: the percentage is not a number from 0 to 100.
    NotRunningError
        No instance runs.
    """
    _running_client().set_target_capacity(percent)


def run(
    target: Any,
    *,
    route_prefix: str | None = "/",
    blocking: bool = False,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Handle:
    """Deploy an application and return its handle once it answers requests.

    Uses the default instance of this process's Dask cluster, or starts it. Without a Dask cluster, it also
    starts a local cluster of processes. Running the same application again changes nothing. A changed
    application replaces the old one: new replicas start before old ones stop.

    Parameters
    ----------
    target : Application
        What ``.bind()`` returns.
    route_prefix : str, optional
        Path prefix for HTTP requests; None makes the application reachable by handle only.
    blocking : bool
        Whether to serve until Ctrl-C and then end the instance.
    http_options : HTTPOptions or dict, optional
        HTTP options of the instance, if this call starts it.
    timeout_s : float, optional
        Time in seconds after which the deployment is rolled back and the call fails.

    Raises
    ------
    TypeError
        The target is not an application.
    ReplicaStartError, NoCapacityError
        See `daskserve.client.client.Client.create_backend`.
    """
    if not isinstance(target, Application):
        hint = " (did you forget .bind()?)" if isinstance(target, Deployment) else ""
        raise TypeError(f"serve.run() takes what .bind() returns, got {target!r}{hint}")
    check_route(route_prefix)
    client = default_instance(http_options)
    handle = deploy(client, target, route_prefix=route_prefix, timeout_s=timeout_s)
    if blocking:
        client.serve_until_interrupted()
    return handle


def default_instance(http_options: HTTPOptions | Mapping[str, Any] | None = None) -> Client:
    """Return the client of the default instance, starting one if there is none.

    See `_present_client` for how it is chosen.
    """
    present = _present_client()
    if present is not None:
        if http_options is not None:
            warnings.warn(
                "An instance is already running; its HTTP options do not change.", UserWarning, stacklevel=3
            )
        return present
    client = start(http_options=http_options)
    client.become_default()
    return client


def deploy(
    client: Client, target: Application, *, route_prefix: str | None, timeout_s: float | None = None
) -> Handle:
    """Deploy an application on an instance; see `run`."""
    deployment = target.deployment
    spec = make_spec(
        deployment.name,
        deployment.definition,
        target.args,
        target.kwargs,
        actor_options=deployment.actor_options,
        config=deployment.config,
        timeout_s=timeout_s,
        version=deployment.version,
        user_version=deployment.version,
        env=deployment.env,
    )
    client.deploy_spec(spec, route=route_prefix, methods=python_methods(deployment.definition))
    return client.get_handle(deployment.name, sync=not _in_event_loop())


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
