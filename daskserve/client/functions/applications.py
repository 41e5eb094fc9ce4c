"""The functions of ``import daskserve as serve`` that run, find and delete applications.

Each has a blocking and an awaitable form, both made from one body; see `daskserve.client.functions.forms`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.client.client import ClientVerbs
from daskserve.client.functions.discovery import find_default, of_default
from daskserve.client.functions.forms import Form, awaitable, blocking
from daskserve.client.functions.http_differences import differences
from daskserve.client.functions.instances import checked_http, start_with
from daskserve.client.functions.local import running_instance, shared_instance
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.verbs.applications import DELETE_S, RunTarget, build
from daskserve.client.warning import warn_caller
from daskserve.common import settings
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.data.caller.calls.handle import Handle
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig


async def _run(
    form: Form[Any],
    target: Any,
    blocking: bool = False,
    name: str = DEFAULT_APPLICATION,
    route_prefix: str | None = "/",
    *,
    args: Mapping[str, Any] | None = None,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    external_scaler_enabled: bool = False,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
    local: bool = False,
    _local_testing_mode: bool = False,
    _blocking: bool = True,
) -> Handle:
    """Deploy an application and return its handle once it answers requests.

    Uses the default instance on this process's Dask cluster, or on the cluster at Dask's
    ``scheduler-address`` (``DASK_SCHEDULER_ADDRESS``). If there is no instance, starts one. Without a Dask
    cluster, it also starts a local cluster of processes. All deployments of the application are one change:
    deployments start before their callers, and if one does not start, all are rolled back. Running the same
    application again changes nothing. If an application of this name runs, it is replaced: new replicas start
    before old ones stop, and deployments that are no longer part of it end.

    Parameters
    ----------
    target : Application, function or str
        What ``.bind()`` returns; a builder, which is a function with one parameter that returns it; or the
        import path of one of them, such as ``"module:app"``.
    blocking : bool
        Whether to serve until Ctrl-C or SIGTERM. Then the instance ends, if this program started it and no
        other program has deployed something on it. Otherwise only the application ends, unless another call
        has deployed it before or since. Prints the address, and a line for each change after that.
    name : str
        The application's name. Applications of different names run side by side.
    route_prefix : str, optional
        Path prefix for HTTP requests; it may have variables, such as ``/users/{id:int}``. None makes the
        application reachable by handle only.
    args : dict, optional
        The argument of a builder, which gets it as a dict or as the pydantic model of its annotation.
    http_options : HTTPOptions or dict, optional
        HTTP options of the instance, if this call starts it. If an instance runs already, options that differ
        from its own cause a warning and have no effect.
    timeout_s : float, optional
        Timeout of the whole change, in seconds; then the change is rolled back and the call fails. Default:
        the change fails after ``daskserve.timeouts.change-s`` (60 seconds) without progress, or once a
        constructor takes longer than ``start_timeout_s`` of its deployment.
    external_scaler_enabled : bool
        Whether programs may set the number of replicas of the application's deployments; see `scale`.
    logging_config : LoggingConfig or dict, optional
        How the deployments of the application log, unless they have their own logging options.
    local : bool
        Whether to run it in this process, without a cluster, HTTP or child processes: one replica of each
        deployment, regardless of its options for replicas, resources and environments. Such an application
        starts in milliseconds. It is meant for tests. ``_local_testing_mode`` is an alias.
    _blocking : bool
        With False, return as soon as the change is accepted, as in Ray Serve; `status` shows the progress.

    Raises
    ------
    TypeError
        The target is none of these.
    BadRequestError
        A `ValueError`: a name, route or argument is wrong, another application has the route, or the
        deployments need each other in a cycle.
    ReplicaStartError, NoCapacityError
        See `daskserve.client.client.Client.create_backend`.
    SupersededError, DeletedError
        Another call deployed or deleted the application before this one was complete.
    """
    one = RunTarget(target, name, route_prefix, args, external_scaler_enabled, logging_config)
    (handle,) = await _run_many(
        form,
        [one],
        blocking,
        http_options=http_options,
        timeout_s=timeout_s,
        wait_for_applications_running=_blocking,
        local=local or _local_testing_mode,
    )
    return handle


run = blocking(_run)
run_async = awaitable(_run)


async def _run_many(
    form: Form[Any],
    targets: Sequence[RunTarget],
    blocking: bool = False,
    *,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    wait_for_ingress_deployment_creation: bool = True,
    wait_for_applications_running: bool = True,
    local: bool = False,
    _local_testing_mode: bool = False,
) -> list[Handle]:
    """Deploy several applications and return their handles, in the same order, once all answer requests.

    All arguments are checked before anything changes. See `run` for the other arguments.

    Parameters
    ----------
    targets : list of RunTarget
    wait_for_ingress_deployment_creation : bool
        Has no effect: the ingress of each application exists when this returns.
    wait_for_applications_running : bool
        With False, return as soon as the change is accepted; `status` shows the progress.

    Raises
    ------
    TypeError, BadRequestError A target is not a `RunTarget`, there are no targets, or two of them have the
    same name or route. See `run` for the rest.
    """
    is_local = local or _local_testing_mode or settings.is_local()
    # Checked first, so that a mistake starts no instance.
    connection = running_instance() if is_local else await find_default(form, may_be_local=False, joins=True)
    instance = "" if connection is None else connection.instance
    built = build(targets, instance=instance, timeout_s=timeout_s, is_local=is_local)
    if is_local and connection is None:
        connection = await asyncio.to_thread(shared_instance) if form.asynchronous else shared_instance()
    elif connection is None:
        connection = await _start_default(form, http_options)
    elif http_options is not None and not is_local:
        different = await differences(form.verbs(connection), http_options)
        if different:
            warn_caller(f"An instance is already running; its HTTP options do not change: {different}.")
    verbs = form.verbs(connection)
    started: dict[str, str] = {}
    if blocking:
        new = [each.spec for each in built if not await verbs._request_of(each.spec.name)]
        started = {spec.name: spec.request_id for spec in new}
    handles = await verbs._deploy_built(built, blocking=wait_for_applications_running)
    if blocking:
        await verbs._serve(started)
    return handles


run_many = blocking(_run_many)
run_many_async = awaitable(_run_many)


async def _start_default(
    form: Form[Any], http_options: HTTPOptions | Mapping[str, Any] | None
) -> InstanceConnection:
    """Start the instance that `run` and `connect` use from now on."""
    client = await start_with(form, checked_http(http_options), is_default=True)
    connection: InstanceConnection = client._connection
    connection.become_default()
    return connection


async def _delete(
    form: Form[Any], name: str, blocking: bool = True, *, timeout_s: float = DELETE_S, _blocking: bool = True
) -> None:
    """Stop an application and remove it; do nothing if none of this name runs.

    The ingress stops first, and its deployments after those that call them. Running requests may finish.

    Parameters
    ----------
    blocking : bool
        Whether to wait until everything has stopped. ``_blocking`` is an alias.
    timeout_s : float
        How long to wait, in seconds.

    Raises
    ------
    RequestTimeoutError
        A `TimeoutError`: it took longer; the deletion continues.
    """
    connection = await find_default(form)
    if connection is not None:
        await form.verbs(connection).delete_application(
            name, blocking=blocking and _blocking, timeout_s=timeout_s
        )


delete = blocking(_delete)
delete_async = awaitable(_delete)


get_app_handle = blocking(of_default(ClientVerbs.get_app_handle))
get_app_handle_async = awaitable(of_default(ClientVerbs.get_app_handle))
get_deployment_handle = blocking(of_default(ClientVerbs.get_deployment_handle))
get_deployment_handle_async = awaitable(of_default(ClientVerbs.get_deployment_handle))
