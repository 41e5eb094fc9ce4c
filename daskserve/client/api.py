"""The functions of ``import daskserve as serve``: start, find and end instances, and deploy applications.

Each has a blocking and an awaitable form, both made from one body; see `daskserve.client.forms`.
"""

from __future__ import annotations

import logging
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import dask.config

from daskserve import settings
from daskserve.client.calls import ControllerCalls, wait_for_http
from daskserve.client.client import ClientVerbs
from daskserve.client.connection import InstanceConnection
from daskserve.client.deployment_verbs import python_methods
from daskserve.client.deployments import Application, Deployment
from daskserve.client.ending import end_instance
from daskserve.client.explanation import Explanation
from daskserve.client.forms import ClientT, Form, awaitable, blocking
from daskserve.client.links import dial_link, find_link, launch
from daskserve.client.specs import check_name, check_route, make_spec
from daskserve.client.status import Status
from daskserve.client.warning import warn_caller
from daskserve.cluster.link import DaskLink
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


async def _start(
    form: Form[ClientT],
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
) -> ClientT:
    """Start an instance and return its client once every proxy listens.

    ``start`` blocks, and the methods of its `Client` do. ``await start_async(...)`` returns an `AsyncClient`.

    Without ``dask_client`` and ``address``, the instance uses Dask's default client of this process. If there
    is none, it creates a local cluster of processes, which ends with its last instance. A cluster that is
    created for a detached instance outlives this program; other programs reach it at
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
    found = await find_link(form, dask_client, address)
    link = await launch(form, detached=detached, dashboard=dashboard) if found is None else found
    instance = name or (DEFAULT_INSTANCE if detached else _new_name(link))
    owner = None if detached else link.owner_id
    owns_cluster = detached and found is None
    start_id = uuid.uuid4().hex
    message = {"owner": owner, "owns_cluster": owns_cluster, "store": store, "start_id": start_id}
    try:
        if owns_cluster:
            link.owning_instances.add(instance)
        link.instance_started(instance, is_owned=not detached)
        await form.run(link, _start_on(link, instance, options, message))
        return form.client(InstanceConnection(link, instance, is_owner=not detached))
    except BaseException as error:
        # Clean up a partial start, also on Ctrl-C, but leave an instance that was already running.
        if found is None or not isinstance(error, AlreadyRunningError):
            await _end_failed_start(form, link, instance, start_id)
        if address is not None:
            await link.disconnect(instance, asynchronous=form.asynchronous)
        raise


start = blocking(_start)
start_async = awaitable(_start)


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


async def _end_failed_start(form: Form[Any], link: DaskLink, instance: InstanceName, start_id: str) -> None:
    try:
        await end_instance(link, instance, start_id=start_id, asynchronous=form.asynchronous)
    except Exception:
        # The caller must see the error of the start.
        logger.exception("Instance %s failed to start, and its cleanup failed", instance)


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
        warn_caller(f"{names}: use http_options instead.", DeprecationWarning)
        old["middlewares"] = list(old.get("middlewares", []))
        return HTTPOptions(**{**settings.http_defaults(), **old})
    if isinstance(http_options, HTTPOptions):
        return http_options
    given = parse_options(HTTPOptions, http_options, what="http_options")
    return HTTPOptions(**{**settings.http_defaults(), **given.model_dump(exclude_unset=True)})


async def _start_on(
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


async def _connect(form: Form[ClientT], *, dask_client: Any = None, address: str | None = None) -> ClientT:
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
        return form.client(InstanceConnection(replica.cluster.link, replica.instance))
    link = await find_link(form, dask_client, address)
    if link is None:
        address = dask.config.get("scheduler-address", None)
        if address is None:
            raise NotRunningError(
                "This process is not connected to a Dask cluster; pass address=..., create a "
                "distributed.Client, or start an instance with serve.start(detached=True)."
            )
        link = await dial_link(form, address)
    try:
        return form.client(await _detached_instance(form, link))
    except BaseException:
        if address is not None:
            await link.disconnect(asynchronous=form.asynchronous)
        raise


connect = blocking(_connect)
connect_async = awaitable(_connect)


async def _detached_instance(form: Form[Any], link: DaskLink) -> InstanceConnection:
    timeouts = settings.timeouts()
    no_instance = NotRunningError(
        f"No detached instance runs on the cluster {link.scheduler_address}; start one with "
        "serve.start(detached=True)."
    )
    if not await form.run(link, link.check_scheduler(timeouts.connect_s)):
        raise no_instance
    try:
        running = await form.run(link, link.ask("instances"))
    except NotRunningError:
        raise no_instance from None
    if DEFAULT_INSTANCE not in running:
        raise no_instance
    if running[DEFAULT_INSTANCE]["owns_cluster"]:
        link.owning_instances.add(DEFAULT_INSTANCE)
    return InstanceConnection(link, DEFAULT_INSTANCE)


async def _find_default(form: Form[Any]) -> InstanceConnection | None:
    """Return a connection to the instance that module-level functions use.

    It is the instance that `run` started in this process; otherwise the latest running instance that `start`
    started here; otherwise the detached instance of this process's Dask cluster.
    """
    link = await find_link(form, None, None)
    if link is None:
        return None
    found: InstanceConnection | None = link.default_instance
    if found is not None:
        return found
    started = link.latest_started()
    if started is not None:
        return InstanceConnection(link, started)
    try:
        found = (await _connect(form))._connection
        return found
    except NotRunningError:
        return None


async def _default_verbs(form: Form[Any]) -> ClientVerbs:
    connection = await _find_default(form)
    if connection is None:
        raise NotRunningError("No instance runs here; deploy something with serve.run() first.")
    return form.verbs(connection)


async def _shutdown(form: Form[Any]) -> None:
    """End the instance that `run` uses; do nothing if there is none."""
    connection = await _find_default(form)
    if connection is not None:
        await form.verbs(connection).shutdown()


shutdown = blocking(_shutdown)
shutdown_async = awaitable(_shutdown)


async def _status(form: Form[Any]) -> Status:
    """Return the status of the instance that `run` uses; empty if no instance runs."""
    connection = await _find_default(form)
    try:
        return Status() if connection is None else await form.verbs(connection).status()
    except ClosedError:
        return Status()  # the instance ended during the call


status = blocking(_status)
status_async = awaitable(_status)


async def _explain(form: Form[Any], name: str) -> Explanation:
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
    return await (await _default_verbs(form)).explain(name)


explain = blocking(_explain)
explain_async = awaitable(_explain)


async def _scale(form: Form[Any], name: str, target_num_replicas: int) -> int:
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
    return await (await _default_verbs(form)).scale(name, target_num_replicas)


scale = blocking(_scale)
scale_async = awaitable(_scale)


async def _set_target_capacity(form: Form[Any], percent: float | None) -> None:
    """Set the percentage of replicas that run in the instance that `run` uses; None means all of them.

    See `daskserve.client.client.Client.set_target_capacity`.

    Raises
    ------
    BadRequestError
        A `ValueError`: the percentage is not a number from 0 to 100.
    NotRunningError
        No instance runs.
    """
    await (await _default_verbs(form)).set_target_capacity(percent)


set_target_capacity = blocking(_set_target_capacity)
set_target_capacity_async = awaitable(_set_target_capacity)


async def _run(
    form: Form[Any],
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
        Path prefix for HTTP requests; it may have variables, such as ``/users/{id:int}``. None makes the
        application reachable by handle only.
    blocking : bool
        Whether to serve until Ctrl-C and then end the instance. Prints the address, and a line for each
        change after that.
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
    verbs = await _default_instance(form, http_options)
    handle = await deploy(verbs, target, route_prefix=route_prefix, timeout_s=timeout_s)
    if blocking:
        await verbs.serve_until_interrupted()
    return handle


run = blocking(_run)
run_async = awaitable(_run)


async def _default_instance(
    form: Form[Any], http_options: HTTPOptions | Mapping[str, Any] | None
) -> ClientVerbs:
    """Return the verbs of the default instance, starting one if there is none; see `_find_default`."""
    connection = await _find_default(form)
    if connection is None:
        connection = (await _start(form, http_options=http_options))._connection
        connection.become_default()
    elif http_options is not None:
        warn_caller("An instance is already running; its HTTP options do not change.")
    return form.verbs(connection)


async def deploy(
    verbs: ClientVerbs, target: Application, *, route_prefix: str | None, timeout_s: float | None = None
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
    await verbs.deploy_spec(spec, route=route_prefix, methods=python_methods(deployment.definition))
    return await verbs.get_handle(deployment.name)
