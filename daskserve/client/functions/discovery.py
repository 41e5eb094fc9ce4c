"""Finds a running instance: for `daskserve.connect`, and for the functions of the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import dask.config

from daskserve.client.client import ClientVerbs
from daskserve.client.functions.connecting import dial_connection, find_connection, join_configured
from daskserve.client.functions.forms import ClientT, Form, awaitable, blocking
from daskserve.client.functions.local import current_block, running_instance
from daskserve.client.instance.connection import InstanceConnection
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.protocols.started import common_instance
from daskserve.common import settings
from daskserve.common.formatting import counted, shown
from daskserve.common.types import InstanceName
from daskserve.context import current_replica
from daskserve.errors import BadRequestError, NotRunningError, ServeError

P = ParamSpec("P")
T = TypeVar("T")

#: Number of silent workers that a message names.
SHOWN_WORKERS = 5


async def _connect(
    form: Form[ClientT],
    *,
    dask_client: Any = None,
    address: str | None = None,
    name: InstanceName | None = None,
) -> ClientT:
    """Return a client of a running instance; never starts an instance or a cluster.

    Inside a backend, this is the backend's own instance. Elsewhere, the cluster is given by ``dask_client``,
    ``address``, Dask's default client or Dask's ``scheduler-address`` configuration, in this order. The
    instance is the detached instance of this cluster; if there is none, the instance that ``serve.run``
    started there; otherwise the only instance, even if it ends with the program that started it. While
    ``serve.run(..., local=True)`` serves in this process, or in a block of
    ``daskserve.testing.local_instance``, it is that instance, unless the call names a cluster.

    Parameters
    ----------
    dask_client : distributed.Client, optional
    address : str, optional
        Address of a Dask scheduler to connect to, or of its HTTP server (``http://host:8787``).
    name : str, optional
        The name of the instance, where there are several.

    Raises
    ------
    NotRunningError
        There is no such instance.
    BadRequestError Several programs have instances of their own on the cluster, and the call does not name
    one. ClusterUnreachableError
        No Dask scheduler answers at the address.
    """
    near = _near_instance() if dask_client is None and address is None and name is None else None
    if near is not None:
        return form.client(InstanceConnection(near.cluster_connection, near.instance, is_guest=True))
    cluster_connection = await find_connection(form, dask_client, address)
    if cluster_connection is None:
        address = dask.config.get("scheduler-address", None)
        if address is None:
            raise NotRunningError(
                "This process is not connected to a Dask cluster; pass address=..., create a "
                "distributed.Client, or start an instance with serve.start(detached=True)."
            )
        cluster_connection = await dial_connection(form, address)
    try:
        found = await _find_instance(
            form, cluster_connection, lambda running: named_instance(running, name), name=name
        )
        return form.client(InstanceConnection(cluster_connection, found, is_guest=True))
    except BaseException:
        if address is not None:
            await cluster_connection.disconnect(asynchronous=form.asynchronous)
        raise


async def _instances(form: Form[Any], address: str) -> list[InstanceName]:
    """Return the names of the instances on the cluster of a Dask scheduler, sorted."""
    cluster_connection = await dial_connection(form, address)
    try:
        return sorted(await form.run(cluster_connection, cluster_connection.ask("instances")))
    finally:
        await cluster_connection.disconnect(asynchronous=form.asynchronous)


async def _unanswered(form: Form[Any], address: str, name: InstanceName, limit_s: float) -> str:
    """Return a message about a controller that does not answer within ``limit_s``."""
    cluster_connection = await dial_connection(form, address)
    try:
        silences = await form.run(cluster_connection, cluster_connection.silences())
        try:
            ask = cluster_connection.ask("controller", instance=name)
            controller = (await form.run(cluster_connection, ask))["worker"]
        except ServeError:
            controller = None  # it is being replaced
    finally:
        await cluster_connection.disconnect(asynchronous=form.asynchronous)
    silent = {each: shown(round(for_s)) for each, for_s in silences.items() if for_s >= limit_s}
    begin = f"The controller of instance {name!r} does not answer within {shown(limit_s)} s"
    if not silences:
        return f"{begin}: the cluster has no workers; add one."
    if controller in silent:
        where = f"its worker {controller} has been silent for {silent[controller]} s"
    elif controller in silences:
        where = f"it hangs, though the scheduler hears of its worker {controller}"
    else:
        where = "it is being replaced"
    of_all = f"{len(silent)} of {counted(len(silences), 'worker', 'workers')}"
    names = ", ".join(sorted(silent)[:SHOWN_WORKERS]) + ("..." if len(silent) > SHOWN_WORKERS else "")
    are = "is" if len(silent) == 1 else "are"
    return f"{begin}: {where}. {of_all} {are} silent{f': {names}' if names else ''}."


instances = blocking(_instances)
unanswered = blocking(_unanswered)

connect = blocking(_connect)
connect_async = awaitable(_connect)


def _near_instance(*, may_be_local: bool = True) -> InstanceConnection | None:
    """Return a connection to the instance of the current replica, or of the current block.

    Elsewhere, the connection is to the local instance of this process, if ``may_be_local``. Return None if
    there is no instance.
    """
    replica = current_replica.get()
    if replica is not None and replica.cluster is not None:
        return InstanceConnection(replica.cluster.connection, replica.instance)
    block = current_block.get()
    if block is not None and not block.is_closed:
        return InstanceConnection(block.cluster_connection, block.instance)
    local = running_instance() if may_be_local else None
    return None if local is None else InstanceConnection(local.cluster_connection, local.instance)


async def _find_instance(
    form: Form[Any],
    cluster_connection: DaskConnection,
    choose: Callable[[Mapping[InstanceName, Any]], InstanceName | None],
    *,
    name: InstanceName | None = None,
) -> InstanceName:
    """Return the running instance that ``choose`` returns; raise `NotRunningError` if it returns None."""
    no_instance = NotRunningError(
        f"No instance{'' if name is None else f' {name!r}'} runs on the cluster "
        f"{cluster_connection.scheduler_address}; start one with `daskserve start` or "
        "serve.start(detached=True), or run an application with serve.run()."
    )
    if not await form.run(
        cluster_connection, cluster_connection.check_scheduler(settings.timeouts().connect_s)
    ):
        raise no_instance
    try:
        running = await form.run(cluster_connection, cluster_connection.ask("instances"))
    except NotRunningError:
        raise no_instance from None
    found = choose(running)
    if found is None and name is not None and running:
        raise NotRunningError(f"{no_instance} These run: {', '.join(sorted(running))}.")
    if found is None:
        raise no_instance
    if running[found]["owns_cluster"]:
        cluster_connection.owning_instances.add(found)
    return found


def named_instance(running: Mapping[InstanceName, Any], name: InstanceName | None) -> InstanceName | None:
    """Return the instance with a name; without a name, the shared or only instance; None without any.

    Raises
    ------
    BadRequestError No name is given, and several programs have instances of their own.
    """
    if name is not None:
        return name if name in running else None
    found = common_instance(running)
    if found is None and len(running) > 1:
        raise BadRequestError(
            f"{len(running)} programs have separate instances on this cluster: {', '.join(running)}. Choose "
            "one with name=..."
        )
    return found or next(iter(running), None)


async def find_default(
    form: Form[Any],
    *,
    may_be_local: bool = True,
    joins: bool = False,
    choose: Callable[[Mapping[InstanceName, Any]], InstanceName | None] = common_instance,
) -> InstanceConnection | None:
    """Return a connection to the instance that module-level functions use; None if there is none.

    In a replica, it is the replica's own instance. Elsewhere, it is the first of these that exists: the
    instance of the current block of `daskserve.testing.local_instance`; the local instance of this process;
    the instance that `run` started in this process; the latest running instance that `start` started here;
    the instance that ``choose`` finds on this process's Dask cluster. With ``joins``, a process without a
    cluster joins the cluster of Dask's configuration.
    """
    near = _near_instance(may_be_local=may_be_local)
    if near is not None:
        return near
    cluster_connection = await find_connection(form, None, None)
    if cluster_connection is None and joins:
        cluster_connection = await join_configured(form)
    if cluster_connection is None:
        return None
    found: InstanceConnection | None = cluster_connection.default_instance
    if found is not None:
        return found
    started = cluster_connection.started.latest
    try:
        return InstanceConnection(
            cluster_connection, started or await _find_instance(form, cluster_connection, choose)
        )
    except NotRunningError:
        return None


async def find_configured(form: Form[Any]) -> InstanceConnection | None:
    """Return a new connection to the instance that `connect` finds by Dask's configuration; None if there is
    none.

    Also None for a process that is connected to a Dask cluster: it uses that cluster.
    """
    has_address = dask.config.get("scheduler-address", None) is not None
    if not has_address or await find_connection(form, None, None) is not None:
        return None
    try:
        client = await _connect(form)
    except NotRunningError:
        return None
    return cast(InstanceConnection, client._connection)


async def default_verbs(form: Form[Any]) -> ClientVerbs:
    """Return the verbs of the instance of `find_default`; raise `NotRunningError` if there is none."""
    connection = await find_default(form)
    if connection is not None:
        return form.verbs(connection)
    of_others = await find_default(form, choose=partial(named_instance, name=None))
    if of_others is not None:
        raise NotRunningError(
            f"The instance {of_others.instance!r} on this cluster belongs to another program; to use it, "
            "call the methods of the client that serve.connect() returns."
        )
    raise NotRunningError("No instance runs here; deploy something with serve.run() first.")


def of_default(
    verb: Callable[Concatenate[ClientVerbs, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Form[Any], P], Coroutine[Any, Any, T]]:
    """Return the body of a function that calls a client's verb on the instance of `default_verbs`."""

    async def body(form: Form[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await verb(await default_verbs(form), *args, **kwargs)

    body.__name__, body.__doc__ = verb.__name__, verb.__doc__
    signature = inspect.signature(verb)
    first, *others = signature.parameters.values()
    body.__dict__["__signature__"] = signature.replace(parameters=[first.replace(name="form"), *others])
    return body
