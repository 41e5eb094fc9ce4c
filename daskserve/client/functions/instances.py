"""The functions of ``import daskserve as serve``: start, find and end instances, and deploy applications.

Each has a blocking and an awaitable form, both made from one body; see `daskserve.client.functions.forms`.
"""

from __future__ import annotations

import logging
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from daskserve.client.client import ClientVerbs
from daskserve.client.definitions.specs import check_name, controller_start
from daskserve.client.functions.connecting import find_connection, join_configured, launch
from daskserve.client.functions.discovery import (
    find_configured,
    find_default,
    named_instance,
    of_default,
)
from daskserve.client.functions.forms import ClientT, Form, awaitable, blocking
from daskserve.client.functions.local import running_instance
from daskserve.client.functions.ray_options import check_ray_options
from daskserve.client.instance.calls import ControllerCalls, wait_for_http
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.instance.shutdown import end_instance
from daskserve.client.views.links import links_of
from daskserve.client.views.progress import announce
from daskserve.client.views.status import Status
from daskserve.client.warning import warn_caller
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.scheduler.install import start_instance
from daskserve.common import settings
from daskserve.common.types import DEFAULT_INSTANCE, InstanceName
from daskserve.context import current_replica
from daskserve.errors import AlreadyRunningError, ClosedError
from daskserve.options.fields.base import parse_options
from daskserve.options.fields.secrets import masked
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig, instance_logging
from daskserve.options.start_messages import ControllerStart
from daskserve.options.tracing import TracingConfig, checked_tracing

logger = logging.getLogger("daskserve.api")

#: Distinguishes an omitted argument from one that was passed with the value of its default.
_UNSET: Any = object()


async def _start(
    form: Form[ClientT],
    detached: bool = False,
    http_host: str | None = _UNSET,
    http_port: int = _UNSET,
    http_middlewares: Sequence[Any] = _UNSET,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    *,
    proxy_location: str | None = None,
    dask_client: Any = None,
    address: str | None = None,
    store: str = "memory://",
    name: str | None = None,
    dashboard: bool = True,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
    grpc_options: Any = None,
    tracing_config: TracingConfig | Mapping[str, Any] | None = None,
    controller_options: Any = None,
) -> ClientT:
    """Start an instance and return its client once every proxy listens.

    ``start`` blocks, and the methods of its `Client` do. ``await start_async(...)`` returns an `AsyncClient`.

    Without ``dask_client`` and ``address``, the instance uses Dask's default client of this process, or the
    scheduler of Dask's ``scheduler-address``. If there is none, it creates a local cluster of processes,
    which ends with its last instance. A cluster that is created for a detached instance outlives this
    program; other programs reach it at ``client.scheduler_address``.

    Parameters
    ----------
    detached : bool
        Whether the instance outlives this program; otherwise it ends with the returned client. `connect`
        finds a detached instance without a name, unless this one has a ``name``.
    http_host, http_port, http_middlewares
        Deprecated; use ``http_options``.
    http_options : HTTPOptions or dict, optional
    proxy_location : str, optional
        Ray Serve's name of ``location`` in ``http_options``.
    dask_client : distributed.Client, optional
    address : str, optional
        Address of a Dask scheduler to connect to, or of its HTTP server (``http://host:8787``).
    store : str
        URL of the store for the instance's records: ``memory://``, ``sqlite:///path`` or any fsspec URL.
        Paths are on the scheduler's host. An instance that finds records under its name restores them.
    name : str, optional
        The instance's name. Default: a random name, or, if detached, the well-known name that `connect` looks
        up. Set it to find the records in a durable store again, or to have several detached instances, which
        ``connect(name=...)`` finds.
    dashboard : bool
        Whether a local cluster that this call creates has Dask's dashboard (if bokeh is installed).
    logging_config : LoggingConfig or dict, optional
        The logging options of the instance, which override ``daskserve.logging`` in Dask's configuration.
        Without any, Python's ``logging`` applies as configured in the workers, without an access log.
    tracing_config : TracingConfig or dict, optional
        Traces by OpenTelemetry. Default: none.
    grpc_options, controller_options
        Accepted for compatibility with Ray Serve. Options without any effect cause a warning; others raise
        `TypeError`.

    Raises
    ------
    AlreadyRunningError
        A detached instance, or one of this name, is already running.
    ClusterUnreachableError, VersionMismatchError, InstanceError
        The cluster cannot be reached, has no matching daskserve version, or has no worker.
    PortInUseError
        Another process listens on the port.
    TimeoutError
        The proxies did not start to listen in time.
    """
    options = given_http_options(http_host, http_port, http_middlewares, http_options, proxy_location)
    _check_instance_name(name, detached, store)
    check_ray_options(
        "serve.start()",
        grpc_options=grpc_options,
        controller_options=controller_options,
    )
    return await start_with(
        form,
        options,
        tracing=checked_tracing(tracing_config),
        detached=detached,
        dask_client=dask_client,
        address=address,
        store=store,
        name=name,
        dashboard=dashboard,
        logging_config=logging_config,
    )


start = blocking(_start)
start_async = awaitable(_start)


async def start_with(
    form: Form[ClientT],
    options: HTTPOptions,
    *,
    detached: bool = False,
    dask_client: Any = None,
    address: str | None = None,
    store: str = "memory://",
    name: str | None = None,
    dashboard: bool = True,
    is_default: bool = False,
    opens_with_route: bool = False,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
    report: Callable[[str], Any] = announce,
    tracing: Mapping[str, Any] | None = None,
) -> ClientT:
    """Start an instance with checked arguments; see `start`.

    Parameters
    ----------
    is_default : bool
        Whether `connect` finds the instance, and `run` uses it in other programs.
    opens_with_route : bool
        Whether the proxies start only once there is a route, so that this call does not wait for them.
    report
        Called with the address of the page of a cluster that this call starts.
    """
    start = controller_start(
        options,
        start_id=uuid.uuid4().hex,
        opens_with_route=opens_with_route,
        logging=instance_logging(logging_config),
        tracing=tracing or {},
    )
    for risk in options.risks():
        warn_caller(risk)
    found = await find_connection(form, dask_client, address)
    is_joining = found is None
    if is_joining:
        found = await join_configured(form)
    cluster_connection = (
        await launch(form, detached=detached, dashboard=dashboard) if found is None else found
    )
    instance = name or (DEFAULT_INSTANCE if detached else _new_name(cluster_connection))
    owner = None if detached else cluster_connection.owner_id
    owns_cluster = detached and found is None
    message = {"owner": owner, "owns_cluster": owns_cluster, "store": store, "is_default": is_default}
    was_started = instance in cluster_connection.started
    try:
        if owns_cluster:
            cluster_connection.owning_instances.add(instance)
        cluster_connection.started.add(instance, is_owned=not detached)
        await form.run(cluster_connection, _start_on(cluster_connection, instance, options, start, message))
        if found is None and (page := links_of(cluster_connection.dashboard_link).get("page")):
            report(f"Watch it at {page}")
        return form.client(InstanceConnection(cluster_connection, instance, is_owner=not detached))
    except BaseException as error:
        # Clean up a partial start, also on Ctrl-C, but leave an instance that was already running.
        if found is None or not isinstance(error, AlreadyRunningError):
            await _end_failed_start(form, cluster_connection, instance, start.start_id)
        elif not was_started:
            cluster_connection.started.forget(instance)  # another program started it
        if address is not None or (is_joining and found is not None):
            await cluster_connection.disconnect(instance, asynchronous=form.asynchronous)
        raise


def _check_instance_name(name: str | None, detached: bool, store: str) -> None:
    if name is not None:
        check_name(name, "name")
    if name is None and not detached and not store.startswith("memory:"):
        raise ValueError(
            f"An instance with a random name cannot find its records in {masked(store)!r} again; pass name= "
            "or detached=True."
        )


async def _end_failed_start(
    form: Form[Any], cluster_connection: DaskConnection, instance: InstanceName, start_id: str
) -> None:
    try:
        await end_instance(cluster_connection, instance, start_id=start_id, asynchronous=form.asynchronous)
    except Exception:
        # The caller must see the error of the start.
        logger.exception("Instance %s failed to start, and its cleanup failed", instance)


def checked_http(http_options: HTTPOptions | Mapping[str, Any] | None) -> HTTPOptions:
    """Return HTTP options as the model, with the defaults of Dask's configuration for a dict."""
    if isinstance(http_options, HTTPOptions):
        return http_options
    given = parse_options(HTTPOptions, http_options, what="http_options")
    return HTTPOptions(**{**settings.http_defaults(), **given.model_dump(exclude_unset=True)})


def given_http_options(
    http_host: Any = _UNSET,
    http_port: Any = _UNSET,
    http_middlewares: Any = _UNSET,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    proxy_location: str | None = None,
) -> HTTPOptions:
    """Return the HTTP options of `start`, which accepts them in several forms."""
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
        http_options = old
    found = checked_http(http_options)
    if proxy_location is None:
        return found
    given = http_options.model_fields_set if isinstance(http_options, HTTPOptions) else http_options or ()
    if "location" in given:
        raise ValueError(
            "proxy_location is another spelling of location in http_options; give only one of them"
        )
    return HTTPOptions(**{**found.model_dump(exclude_unset=True), "location": proxy_location})


async def _start_on(
    cluster_connection: DaskConnection,
    instance: InstanceName,
    options: HTTPOptions,
    start: ControllerStart,
    message: Mapping[str, Any],
) -> None:
    timeouts = settings.timeouts()
    await start_instance(
        cluster_connection,
        instance,
        timeout_s=timeouts.proxy_s,
        grace_s=timeouts.grace_s,
        payload=start.encode(),
        start_id=start.start_id,
        system_workers=options.system_workers,
        **message,
    )
    if not start.opens_with_route:
        await wait_for_http(ControllerCalls(cluster_connection, instance), timeouts.proxy_s)


def _new_name(cluster_connection: DaskConnection) -> InstanceName:
    return f"{DEFAULT_INSTANCE}-{''.join(cluster_connection.rng.choices(string.ascii_letters, k=6))}"


async def _shutdown(form: Form[Any]) -> None:
    """End the instance that `run` uses, and this process's local instance; do nothing if none runs."""
    local = running_instance()
    if local is not None and current_replica.get() is None:
        await local.shutdown(asynchronous=form.asynchronous)
    connection = await find_default(form)
    if connection is not None:
        await form.verbs(connection).shutdown()


shutdown = blocking(_shutdown)
shutdown_async = awaitable(_shutdown)


async def _status(form: Form[Any]) -> Status:
    """Return the status of the instance that `run` uses or that `connect` finds; empty if none runs."""
    connection = await find_default(form, choose=partial(named_instance, name=None))
    try:
        if connection is not None:
            return await form.verbs(connection).status()
        guest = await find_configured(form)
        if guest is None:
            return Status()
        try:
            return await form.verbs(guest).status()
        finally:
            await guest.disconnect(asynchronous=form.asynchronous)
    except ClosedError:
        return Status()  # the instance ended during the call


status = blocking(_status)
status_async = awaitable(_status)


explain = blocking(of_default(ClientVerbs.explain))
explain_async = awaitable(of_default(ClientVerbs.explain))
scale = blocking(of_default(ClientVerbs.scale))
scale_async = awaitable(of_default(ClientVerbs.scale))
set_target_capacity = blocking(of_default(ClientVerbs.set_target_capacity))
set_target_capacity_async = awaitable(of_default(ClientVerbs.set_target_capacity))
