"""Runs applications as a program, as ``daskserve run`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from daskserve.client.functions.connecting import dial_connection
from daskserve.client.functions.discovery import find_default
from daskserve.client.functions.forms import Form, blocking
from daskserve.client.functions.http_differences import differences
from daskserve.client.functions.instances import checked_http, start_with
from daskserve.client.hosting.reloading.files import Patterns
from daskserve.client.hosting.reloading.project import Project, digest_of_files
from daskserve.client.hosting.reloading.reloader import Reloader
from daskserve.client.hosting.restoring import copy_application, restore_application
from daskserve.client.hosting.sources import Source, build_on
from daskserve.client.instance.calls import wait_for_http
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.serving.leaving import leave_instance
from daskserve.client.serving.serve_forever import print_line, serve_until_ended
from daskserve.client.verbs.applications import BuiltApplication
from daskserve.common import settings
from daskserve.errors import (
    AlreadyRegisteredError,
    BadRequestError,
    ClosedError,
    DeployError,
    NotRunningError,
)
from daskserve.loops.blocking import finish
from daskserve.options.specs import ApplicationSpec
from daskserve.options.tracing import checked_tracing


@dataclass(frozen=True)
class HostingMode:
    """How applications are run: until when, whether they replace others, and whether they follow files.

    Attributes
    ----------
    is_blocking
        Whether to serve until interrupted. Otherwise the applications, their instance and its cluster stay,
        and applications of these names are replaced.
    replaces
        Whether a blocking call may replace applications that it did not start. It leaves the new versions.
    restores
        Whether a blocking call may replace such applications, and restores the old versions when it ends.
    reload
        The files whose changes deploy the applications again; None: it does not follow them.
    recreates
        Whether old replicas end before new ones start, when files have changed.
    """

    is_blocking: bool = True
    replaces: bool = False
    restores: bool = False
    reload: Patterns | None = None
    recreates: bool = False


async def _host(
    form: Form[Any],
    source: Source,
    http_options: Mapping[str, Any],
    *,
    address: str | None,
    stay: HostingMode,
    report: Callable[[str], Any],
    reread: Callable[[], Source] | None = None,
    tracing_config: Mapping[str, Any] | None = None,
) -> None:
    """Run applications until Ctrl-C or SIGTERM, and end the parts that this call has started.

    These parts are the cluster, if there is no ``address``; the instance, if none ran before; and the
    applications that did not run before. Applications and instances that this call only changes keep running.
    If the call fails or is interrupted before the change is complete, everything keeps running as before.

    Parameters
    ----------
    address
        The Dask scheduler to use; without one, a local cluster is started.
    report
        Called with a line for each part that is started.
    reread
        Returns the source again, once a file has changed.
    tracing_config
        The options of traces of an instance that is started.
    """
    source.check()
    reread = reread or partial(replace, source)
    source = _followed(source, stay)
    options = checked_http(http_options)
    tracing = checked_tracing(tracing_config)
    cluster_connection = None if address is None else await dial_connection(form, address)
    instance = ""
    try:
        running = None if cluster_connection is None else await find_default(form)
        if running is not None:
            hosting = _Hosting(form, running, source, stay, report, reread, False)
            await hosting.check(http_options)
            await hosting.run()
            return
        if cluster_connection is None:
            # Imported here, because all other programs leave the proxies to the workers.
            from daskserve.actors import check_ports

            check_ports(options)  # fails early: the proxy starts much later
        # Built before the instance starts, so that a mistake in the module starts nothing.
        built = None if cluster_connection is None else source.build("")
        lines: list[str] = []
        client = await start_with(
            form,
            options,
            detached=not stay.is_blocking,
            is_default=True,
            opens_with_route=True,
            report=lines.append,
            tracing=tracing,
        )
        instance = client.instance_name
        in_worker = cluster_connection is None and source.has_paths
        hosting = _Hosting(form, client._connection, source, stay, report, reread, in_worker)
        if cluster_connection is None:
            report(f"Started a Dask cluster at {client.scheduler_address}.")
        for line in lines:
            report(line)
        await hosting.run_first(built)
    finally:
        if cluster_connection is not None and cluster_connection.is_open:
            await cluster_connection.disconnect(instance, asynchronous=form.asynchronous)


def _followed(source: Source, stay: HostingMode) -> Source:
    """Return a source with a snapshot of its files, if changes are followed."""
    if stay.reload is None:
        return source
    digest = digest_of_files(stay.reload.other_files())
    project = Project(stay.reload.folders, digest, stay.recreates)
    return replace(source, project=project)


@dataclass
class _Hosting:
    """The applications of one call of `host`, on an instance that runs."""

    _form: Form[Any]
    _connection: InstanceConnection
    _source: Source
    _stay: HostingMode
    _report: Callable[[str], Any]
    _reread: Callable[[], Source]
    _in_worker: bool

    def __post_init__(self) -> None:
        self._verbs: Any = self._form.verbs(self._connection)
        #: The ids of the calls whose deployments may be replaced, by application; None allows all.
        self._expected: dict[str, str] | None = None
        self._kept: dict[str, ApplicationSpec] = {}
        #: The ids of this program's deployments, by application, and the ids of its changes in progress.
        self._deployed: dict[str, str] = {}
        self._changing: set[str] = set()
        reload = self._stay.reload
        self._reloader = None if reload is None else Reloader(reload, self._rebuild, self._log)

    async def check(self, http_options: Mapping[str, Any]) -> None:
        """Raise `BadRequestError` for options that have no effect on an instance that already runs."""
        found = await differences(self._verbs, http_options)
        if found:
            raise BadRequestError(
                f"An instance runs on this cluster already, with other HTTP options: {found}. Leave them "
                "out, or first end the instance and all its applications with daskserve shutdown."
            )
        if not self._stay.is_blocking:
            return
        before = {name: await self._verbs._request_of(name) for name in self._source.names}
        running = [name for name, request_id in before.items() if request_id]
        if running and not (self._stay.replaces or self._stay.restores):
            verb = "runs" if len(running) == 1 else "run"
            raise AlreadyRegisteredError(
                f"Application {', '.join(map(repr, running))} {verb} on this cluster already, and this "
                "command did not start it. "
                "Add --replace to replace it, --restore to replace it until this command ends, "
                "--non-blocking to deploy a new version and return, or --name to run beside it."
            )
        self._expected = before
        if self._stay.restores:
            self._kept = {name: await copy_application(self._verbs, name) for name in running}

    async def run_first(self, built: Sequence[BuiltApplication] | None) -> None:
        """Run the applications on an instance that this call has started; end the instance if no other
        program uses it."""
        is_left = False
        try:
            await self._deploy(await self._built() if built is None else built)
            await self._form.run(
                self._connection.cluster_connection,
                wait_for_http(self._connection.calls, settings.timeouts().proxy_s),
            )
            is_left = True
            await self._serve_or_report()
        finally:
            if not is_left:
                await self._leave()

    async def run(self) -> None:
        """Run the applications on an instance that another program started."""
        built = await self._built()
        is_left = not self._stay.is_blocking
        try:
            if self._source.logging is not None:
                await self._verbs._change("set_logging", config=self._source.logging)
            await self._deploy(built)
            is_left = True
            await self._serve_or_report()
        finally:
            if not is_left:
                await self._leave()

    async def _built(self) -> list[BuiltApplication]:
        return await build_on(self._form, self._connection, self._source, in_worker=self._in_worker)

    async def _deploy(self, built: Sequence[BuiltApplication]) -> None:
        self._deployed = _requests(built)
        try:
            if self._source.capacity is not None:
                await self._verbs.set_target_capacity(self._source.capacity)
            await self._verbs._deploy_built(built, expected=self._expected)
        except KeyboardInterrupt:
            names = ", ".join(map(repr, self._source.names))
            self._report(f"The change of application {names} was interrupted and is undone.")
            raise

    async def _serve_or_report(self) -> None:
        if not self._stay.is_blocking:
            await self._report_running()
            return
        if self._reloader is not None:
            self._reloader.start()
        await serve_until_ended(
            self._connection.cluster_connection,
            self._connection.instance,
            self._leave,
            asynchronous=self._form.asynchronous,
        )

    def _rebuild(self) -> Callable[[], Any]:
        """Build the applications again after files have changed, in the reloader's thread."""
        self._source = _followed(self._reread(), self._stay)
        built = finish(self._built())
        return lambda: finish(self._redeploy(built))

    async def _redeploy(self, built: Sequence[BuiltApplication]) -> None:
        """Deploy new versions of this program's applications."""
        expected = {}
        for name in _requests(built):
            expected[name], is_own = await self._found(name)
            if expected[name] and not is_own:
                raise AlreadyRegisteredError(
                    f"Another program has deployed application {name!r}, and its version keeps running."
                )
        self._changing.update(_requests(built).values())
        try:
            await self._verbs._deploy_built(built, expected=expected)
            gone = {name: found for name, found in self._deployed.items() if name not in expected}
            self._deployed = _requests(built)
            for name, request_id in gone.items():
                await self._verbs._delete_application(name, request_id)
        finally:
            self._changing.difference_update(_requests(built).values())

    async def _found(self, name: str) -> tuple[str, bool]:
        """Return the id of the call that has deployed an application, and whether it is this program's."""
        found = await self._verbs._request_of(name)
        return found, found in self._changing or found == self._deployed.get(name)

    async def _leave(self, signal_name: str = "") -> None:
        """End what this call has started; keep or restore the applications that it has replaced."""
        if self._reloader is not None:
            self._reloader.stop()
        started: dict[str, str] = {}
        failure: DeployError | None = None
        for name, request_id in self._deployed.items():
            is_new = not (self._expected or {}).get(name)
            found, is_ours = request_id, True
            if self._connection.cluster_connection.is_open and (self._reloader is not None or not is_new):
                with suppress(ClosedError, NotRunningError):
                    found, is_ours = await self._found(name)
            if is_new:
                started[name] = found if is_ours else request_id
            elif is_ours and name in self._kept:
                self._report(f"Giving back the version of application {name!r} from before.")
                try:
                    await restore_application(self._verbs, self._kept[name], found)
                except DeployError as error:
                    failure = error  # still restore the other applications, and leave the instance
            elif is_ours:
                self._report(f"Application {name!r} keeps running in this version.")
        await leave_instance(self._verbs, started, signal_name)
        if failure is not None:
            raise failure

    def _log(self, line: str) -> None:
        print_line(self._connection.cluster_connection, line)

    async def _report_running(self) -> None:
        urls = await self._verbs.http_urls()
        for name, prefix in self._source.routes.items():
            places = [f"{url}{(prefix or '').rstrip('/')}" for url in urls]
            where = f" at {', '.join(places)}" if urls and prefix is not None else ""
            self._report(f"Application {name!r} runs{where}.")


def _requests(built: Sequence[BuiltApplication]) -> dict[str, str]:
    """Return the ids of the calls that deploy applications, by application."""
    return {each.spec.name: each.spec.request_id for each in built}


host = blocking(_host)
