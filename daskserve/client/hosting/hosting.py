"""Runs one application as a program, as ``daskserve run`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskserve.client.ending.leaving import leave_instance
from daskserve.client.ending.serve_forever import serve_until_ended
from daskserve.client.functions.connecting import dial_connection
from daskserve.client.functions.finding import find_default
from daskserve.client.functions.forms import Form, blocking
from daskserve.client.functions.http_differences import differences
from daskserve.client.functions.instances import checked_http, start_with
from daskserve.client.hosting.building import build_in_worker, build_path
from daskserve.client.hosting.restoring import copy_application, restore_application
from daskserve.client.instance.calls import wait_for_http
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.verbs.applications import BuiltApplication, RunTarget, check_targets
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.common import settings
from daskserve.errors import AlreadyRegisteredError, BadRequestError
from daskserve.options.specs import ApplicationSpec


@dataclass(frozen=True)
class HostingMode:
    """Whether an application stays, and whether it may replace one of its name.

    Attributes
    ----------
    is_blocking
        Whether to serve until interrupted. Otherwise the application, its instance and its cluster stay, and
        an application of this name is replaced.
    replaces
        Whether a blocking call may replace an application that it did not start. It leaves the new version.
    restores
        Whether it may do so, and gives the old version back when it ends.
    """

    is_blocking: bool = True
    replaces: bool = False
    restores: bool = False


async def _host(
    form: Form[Any],
    target: RunTarget,
    http_options: Mapping[str, Any],
    *,
    address: str | None,
    stay: HostingMode,
    report: Callable[[str], Any],
    timeout_s: float | None = None,
) -> None:
    """Run an application until Ctrl-C or SIGTERM, and end the parts that this call has started.

    That is the cluster without an ``address``; the instance, if none runs there; and the application, if none
    of its name runs there. What this call only changes keeps running. If the call fails or is interrupted
    before the change is complete, what was there keeps running as it was.

    Parameters
    ----------
    address
        The Dask scheduler to use; without one, a local cluster is started.
    report
        Is called with a line for each thing that is started.
    timeout_s
        See `daskserve.run`.
    """
    check_targets([target])
    options = checked_http(http_options)
    cluster_connection = None if address is None else await dial_connection(form, address)
    instance = ""
    try:
        running = None if cluster_connection is None else await find_default(form)
        if running is not None:
            hosting = _Hosting(form, running, target, stay, report)
            await hosting.check(http_options)
            await hosting.run(build_path(target, running.instance, timeout_s))
            return
        if cluster_connection is None:
            # Imported here, because all other programs leave the proxies to the workers.
            from daskserve.actors import check_ports

            check_ports(options)  # the proxy starts much later
        # A mistake in a module that this process imports starts nothing.
        built = None if cluster_connection is None else build_path(target, "", timeout_s)
        client = await start_with(
            form, options, detached=not stay.is_blocking, is_default=True, opens_with_route=True
        )
        instance = client.instance_name
        hosting = _Hosting(form, client._connection, target, stay, report)
        await hosting.run_first(built, timeout_s)
    finally:
        if cluster_connection is not None and cluster_connection.is_open:
            await cluster_connection.disconnect(instance, asynchronous=form.asynchronous)


class _Hosting:
    """The application of one call of `host`, on an instance that runs."""

    def __init__(
        self,
        form: Form[Any],
        connection: InstanceConnection,
        target: RunTarget,
        stay: HostingMode,
        report: Callable[[str], Any],
    ) -> None:
        self._form = form
        self._connection = connection
        self._verbs: Any = form.verbs(connection)
        self._target = target
        self._stay = stay
        self._report = report
        #: The ids of the calls whose deployments the target may replace; None: any.
        self._expected: dict[str, str] | None = None
        self._kept: ApplicationSpec | None = None

    async def check(self, http_options: Mapping[str, Any]) -> None:
        """Raise `BadRequestError` for what cannot be done on an instance that runs already."""
        name = self._target.name
        found = await differences(self._verbs, http_options)
        if found:
            raise BadRequestError(
                f"An instance runs on this cluster already, with other HTTP options: {found}. Leave them "
                "out, or end the instance first, with all its applications, by daskserve shutdown."
            )
        if not self._stay.is_blocking:
            return
        before = await self._verbs._request_of(name)
        if before and not (self._stay.replaces or self._stay.restores):
            raise AlreadyRegisteredError(
                f"Application {name!r} runs on this cluster already, and this command did not start it. "
                "Add --replace to replace it, --restore to replace it until this command ends, "
                "--non-blocking to deploy a new version and return, or --name to run beside it."
            )
        self._expected = {name: before}
        if before and self._stay.restores:
            self._kept = await copy_application(self._verbs, name)

    async def run_first(self, built: BuiltApplication | None, timeout_s: float | None) -> None:
        """Run the application on an instance that this call has started, and end that unless it stays."""
        cluster_connection: DaskConnection = self._connection.cluster_connection  # type: ignore[assignment]
        is_left = False
        try:
            if built is None:
                self._report(f"Started a Dask cluster at {cluster_connection.scheduler_address}.")
                built = await self._built(timeout_s)
            await self._deploy(built)
            await self._form.run(
                cluster_connection, wait_for_http(self._connection.calls, settings.timeouts().proxy_s)
            )
            is_left = True
            if self._stay.is_blocking:
                await self._serve(built.spec.request_id)
            else:
                await self._report_running()
        finally:
            if not is_left:
                await self._leave("" if built is None else built.spec.request_id)

    async def _built(self, timeout_s: float | None) -> BuiltApplication:
        if isinstance(self._target.target, str):
            return await build_in_worker(self._form, self._connection, self._target, timeout_s)
        return build_path(self._target, self._connection.instance, timeout_s)

    async def run(self, built: BuiltApplication) -> None:
        """Run the application on an instance of others."""
        is_left = not self._stay.is_blocking
        try:
            await self._deploy(built)
            if self._stay.is_blocking:
                is_left = True
                await self._serve(built.spec.request_id)
            else:
                await self._report_running()
        finally:
            if not is_left:
                await self._leave(built.spec.request_id)

    async def _deploy(self, built: BuiltApplication) -> None:
        try:
            await self._verbs._deploy_built([built], expected=self._expected)
        except KeyboardInterrupt:
            self._report(
                f"The change of application {self._target.name!r} was interrupted and is taken back."
            )
            raise

    async def _serve(self, request_id: str) -> None:
        await serve_until_ended(
            self._connection.cluster_connection,
            self._connection.instance,
            partial(self._leave, request_id),
            asynchronous=self._form.asynchronous,
        )

    async def _leave(self, request_id: str, signal_name: str = "") -> None:
        """End the parts that this call has started; keep or restore an application that it has replaced."""
        name = self._target.name
        is_new = not (self._expected or {}).get(name)
        if not is_new and self._connection.cluster_connection.is_open:
            is_ours = await self._verbs._request_of(name) == request_id
            if is_ours and self._kept is not None:
                self._report(f"Giving back the version of application {name!r} from before.")
                await restore_application(self._verbs, self._kept, request_id)
            elif is_ours:
                self._report(f"Application {name!r} keeps running in this version.")
        await leave_instance(self._verbs, {name: request_id} if is_new else {}, signal_name)

    async def _report_running(self) -> None:
        route = (self._target.route_prefix or "").rstrip("/")
        urls = [f"{url}{route}" for url in await self._verbs.http_urls()]
        where = f" at {', '.join(urls)}" if urls and self._target.route_prefix is not None else ""
        self._report(f"Application {self._target.name!r} runs{where}.")


host = blocking(_host)
