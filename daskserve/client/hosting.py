"""Running one application as a program of its own, as ``daskserve run`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskserve.client.api import checked_http, find_default, start_with
from daskserve.client.application_verbs import RunTarget, build
from daskserve.client.client import ClientVerbs
from daskserve.client.connection import InstanceConnection
from daskserve.client.forms import Form, blocking
from daskserve.client.links import dial_link
from daskserve.client.serving import serve_until_ended


async def _host(
    form: Form[Any],
    target: RunTarget,
    http_options: Mapping[str, Any],
    *,
    address: str | None,
    is_blocking: bool,
    report: Callable[[str], Any],
) -> None:
    """Run an application until Ctrl-C or SIGTERM, and end what this call has started.

    That is the cluster without an ``address``; the instance, if none runs there; and the application.

    Parameters
    ----------
    address
        The Dask scheduler to use; without one, a local cluster is started.
    is_blocking
        Whether to wait. Otherwise the application, its instance and its cluster stay.
    report
        Is called with a line for each thing that is started.
    """
    link = None if address is None else await dial_link(form, address)
    try:
        running = None if link is None else await find_default(form)
        # A mistake starts nothing.
        built = build([target], instance="" if running is None else running.instance)
        connection = running or await _started(form, http_options, detached=not is_blocking)
        if link is None:
            report(f"Started a Dask cluster at {connection.link.scheduler_address}.")
        elif running is not None and http_options:
            report("An instance is already running there; its HTTP options do not change.")
        verbs = form.verbs(connection)
        is_kept = False
        try:
            await verbs._deploy_built(built)
            if is_blocking:
                await serve_until_ended(connection.link, connection.instance, asynchronous=form.asynchronous)
            else:
                report(f"Application {target.name!r} runs at {', '.join(await verbs.http_urls())}.")
                is_kept = True
        finally:
            if not is_kept:
                await _end(verbs, connection, target.name, is_own=running is None)
    finally:
        if link is not None and link.is_open:
            await link.disconnect(asynchronous=form.asynchronous)


async def _started(form: Form[Any], options: Mapping[str, Any], *, detached: bool) -> InstanceConnection:
    client = await start_with(form, checked_http(options), detached=detached, is_default=True)
    connection: InstanceConnection = client._connection
    return connection


async def _end(verbs: ClientVerbs, connection: InstanceConnection, name: str, *, is_own: bool) -> None:
    if is_own:
        await verbs.shutdown()
    elif connection.link.is_open:
        await verbs.delete_application(name)


host = blocking(_host)
