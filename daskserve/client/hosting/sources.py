"""The applications that a command serves, built in this process or in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from daskserve.client.definitions.targets import factory_application
from daskserve.client.functions.forms import Form
from daskserve.client.hosting.building import build_configured, build_path, users_errors
from daskserve.client.hosting.reloading.project import Project, changed
from daskserve.client.instance.calls import ControllerCalls
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.verbs.applications import BuiltApplication, RunTarget, check_targets
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.dask.worker_calls import call_in_all_workers, call_in_worker
from daskserve.common.types import InstanceName
from daskserve.config_file.model import ApplicationConfig
from daskserve.errors import NoCapacityError, ReplicaStartError
from daskserve.options.specs import ApplicationSpec
from daskserve.payload.importing import forget_others, import_definition

#: How long to wait for workers to forget modules; a worker that does not answer is ignored.
FORGET_S = 2.0


@dataclass(frozen=True, slots=True)
class Source:
    """Applications to build, in this process or in a worker.

    Attributes
    ----------
    targets : tuple
        Each is a `RunTarget`, or an application of a configuration.
    ingress : dict
        Options of `BackendConfig` that the ingress of each application gets.
    project : Project, optional
        The files to import again.
    is_factory : bool
        Whether each replica calls the target, which returns an ASGI application.
    capacity : float, optional
        The target capacity of the instance.
    logging : dict, optional
        How the instance logs, if it runs already.
    """

    targets: tuple[RunTarget | ApplicationConfig, ...]
    timeout_s: float | None = None
    ingress: Mapping[str, Any] = field(default_factory=dict)
    project: Project | None = None
    is_factory: bool = False
    capacity: float | None = None
    logging: Mapping[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the applications to build."""
        return [each.name for each in self.targets]

    @property
    def routes(self) -> dict[str, str | None]:
        """The route prefixes of the applications, by name."""
        return {each.name: each.route_prefix for each in self.targets}

    @property
    def has_paths(self) -> bool:
        """Whether a build imports the code; if so, a worker should build it."""
        targets = [each.target for each in self.targets if isinstance(each, RunTarget)]
        is_lazy = self.is_factory and self.project is None
        return not is_lazy and all(isinstance(each, str) for each in targets)

    def check(self) -> None:
        """Raise `TypeError` or `BadRequestError` for mistakes that can be found without an import."""
        targets = [each for each in self.targets if isinstance(each, RunTarget)]
        if targets:
            check_targets(targets)

    def build(self, instance: InstanceName) -> list[BuiltApplication]:
        """Build the applications in this process.

        See `daskserve.client.hosting.building` for its errors.
        """
        if self.project is None:
            return [self._built(each, instance) for each in self.targets]
        with self.project.imported():
            built = [self._built(each, instance) for each in self.targets]
            return [self.project.versioned(each) for each in built]

    def _built(self, target: RunTarget | ApplicationConfig, instance: InstanceName) -> BuiltApplication:
        if isinstance(target, ApplicationConfig):
            built = build_configured(target, instance, self.timeout_s)
        else:
            built = build_path(self._factory(target), instance, self.timeout_s)
        return replace(built, spec=changed(built.spec, self.ingress)) if self.ingress else built

    def _factory(self, target: RunTarget) -> RunTarget:
        """Return the target to build; each replica calls the path of a factory."""
        if not self.is_factory:
            return target
        if self.project is not None:
            with users_errors(target.name, target.target):
                import_definition(target.target)  # so that the imported modules are known
        return replace(target, target=factory_application(target.target))


async def build_on(
    form: Form[Any], connection: InstanceConnection, source: Source, *, in_worker: bool
) -> list[BuiltApplication]:
    """Build applications for an instance, in one of its workers or here.

    Other workers forget the project's modules if they have imported other versions of them.
    """
    cluster_connection: Any = connection.cluster_connection
    if in_worker:
        built, modules = await _build_in_worker(form, connection, source)
    else:
        built = source.build(connection.instance)
        modules = {} if source.project is None else source.project.modules()
    if modules:
        await form.run(
            cluster_connection,
            call_in_all_workers(cluster_connection, forget_others, modules, timeout_s=FORGET_S),
        )
    return built


async def _build_in_worker(
    form: Form[Any], connection: InstanceConnection, source: Source
) -> tuple[list[BuiltApplication], Mapping[str, str]]:
    """Build applications in the worker that gets the next replica; return them with their modules."""
    cluster_connection: Any = connection.cluster_connection
    worker = await form.run(cluster_connection, connection.calls.call("next_worker"))
    if worker is None:
        raise NoCapacityError("No worker of the cluster has room for a replica.")
    arguments = {"source": source, "instance": connection.instance}
    answer = await form.run(
        cluster_connection, call_in_worker(cluster_connection, worker, _build_here, **arguments)
    )
    if "error" in answer:
        raise ReplicaStartError(answer["error"], user_traceback=answer["user_traceback"])
    built = [BuiltApplication(ApplicationSpec.from_plain(spec), handles) for spec, handles in answer["built"]]
    return built, answer["modules"]


def _build_here(cluster_connection: DaskConnection, source: Source, instance: InstanceName) -> dict[str, Any]:
    """Build applications in a worker; return them, or an error, as plain values that need no user module."""
    try:
        built = source.build(instance)
    except ReplicaStartError as error:
        # Its cause is the user's error, whose class the caller may not have.
        return {"error": str(error), "user_traceback": error.user_traceback}
    specs = [each.spec for app in built for each in app.spec.deployments]
    cluster_connection.sync(ControllerCalls(cluster_connection, instance).send_parcels(specs))
    return {
        "built": [(each.spec.to_plain(), dict(each.handles)) for each in built],
        "modules": {} if source.project is None else source.project.modules(),
    }
