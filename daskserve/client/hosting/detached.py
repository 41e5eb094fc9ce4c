"""Starts an instance that outlives the program, as ``daskserve start`` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.client.client import Client
from daskserve.client.definitions.specs import check_name
from daskserve.client.functions.connecting import dial_connection
from daskserve.client.functions.forms import Form, blocking
from daskserve.client.functions.http_differences import differences
from daskserve.client.functions.instances import checked_http, start_with
from daskserve.client.instance.connection import InstanceConnection
from daskserve.common.types import DEFAULT_INSTANCE
from daskserve.errors import AlreadyRunningError
from daskserve.options.tracing import checked_tracing


@dataclass(frozen=True, slots=True)
class DetachedInstance:
    """A detached instance.

    Attributes
    ----------
    is_new : bool
        Whether this call has started it.
    differences : str
        The HTTP options in which an instance that ran already differs.
    """

    client: Client
    is_new: bool
    differences: str = ""


async def _start_detached(
    form: Form[Any],
    http_options: Mapping[str, Any],
    *,
    address: str | None,
    store: str,
    name: str = DEFAULT_INSTANCE,
    tracing_config: Mapping[str, Any] | None = None,
) -> DetachedInstance:
    """Start or find a detached instance on a cluster; without an address, also start a cluster."""
    options = checked_http(http_options)
    check_name(name, "name")
    more: dict[str, Any] = {"store": store, "name": name, "tracing": checked_tracing(tracing_config)}
    if address is None:
        # The caller reports the page's address together with the others.
        started = await start_with(form, options, detached=True, report=lambda line: None, **more)
        return DetachedInstance(started, True)
    # The connection is an argument instead of the address, because it must stay open if an instance already
    # runs.
    cluster_connection = await dial_connection(form, address)
    try:
        started = await start_with(
            form, options, detached=True, dask_client=cluster_connection.client, **more
        )
        return DetachedInstance(started, True)
    except AlreadyRunningError:
        found = InstanceConnection(cluster_connection, name, is_guest=True)
        different = await differences(form.verbs(found), http_options)
        return DetachedInstance(form.client(found), False, different)
    except BaseException:
        await cluster_connection.disconnect(asynchronous=form.asynchronous)
        raise


start_detached = blocking(_start_detached)
