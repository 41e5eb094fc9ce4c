"""The result of ``status()``: the parts of an instance, their states, and the reasons for failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from typing import Any

from daskserve.client.views.links import html_links
from daskserve.client.views.plain import FromPlain
from daskserve.client.views.table import Table, html_table, table
from daskserve.common.formatting import shown
from daskserve.common.types import described, short_tag
from daskserve.errors import NotFoundError
from daskserve.internals.ipython import with_cell_lines
from daskserve.payload.shown_errors import shortened

#: Maximum number of dead replicas shown for each backend; the attribute has all of them.
SHOWN_DEAD = 3
#: The states of applications and deployments that do not serve as they should.
FAILED_STATES = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})


@dataclass(frozen=True, slots=True)
class ActorStatus(FromPlain):
    """One actor: ``kind`` is controller, proxy or replica; ``pid`` is None until it is known.

    A replica has its ``rank``, and the results of the user's ``record_replica_metadata`` and
    ``record_routing_stats``. ``multiplexed`` has the ``count`` of its multiplexed models, its ``capacity``,
    and as ``models`` the states of those used last, by id; it is empty without a multiplexed function.
    """

    kind: str
    name: str
    state: str
    worker: str | None = None
    host: str | None = None
    pid: int | None = None
    message: str = ""
    rank: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    routing_stats: Mapping[str, Any] = field(default_factory=dict)
    multiplexed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeadReplicaStatus(FromPlain):
    """A replica that was lost or failed: its name, the reason, and when, in seconds since the epoch.

    ``user_traceback`` is the traceback of user code that failed in its start, and ``last_lines`` are its last
    log lines. Both are lost with its worker.
    """

    name: str
    reason: str
    at: float
    user_traceback: str = ""
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendStatus(FromPlain):
    """One backend: HEALTHY, UPDATING, UNHEALTHY or DELETING; ``message`` says what is missing or failing.

    ``dead_replicas`` are its last ten replicas that were lost or failed, oldest first. ``kind`` is
    ``"deployment"``, or ``"backend"`` in the classic system; ``application`` is the application of a
    deployment. ``models`` are the states of the versions of its models, by name and version.
    """

    status: str
    wanted: int
    running: int
    version: str = ""
    message: str = ""
    dead_replicas: tuple[DeadReplicaStatus, ...] = field(default=(), compare=False)
    kind: str = "deployment"
    application: str = ""
    models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeploymentStatus(FromPlain):
    """One deployment of an application.

    Attributes
    ----------
    status : str
        HEALTHY, UPDATING, UPSCALING, DOWNSCALING, UNHEALTHY or DEPLOY_FAILED.
    status_trigger : str
        The cause of the status: CONFIG_UPDATE_STARTED, CONFIG_UPDATE_COMPLETED, UPSCALE_COMPLETED,
        DOWNSCALE_COMPLETED, AUTOSCALING, REPLICA_STARTUP_FAILED, HEALTH_CHECK_FAILED,
        DEPLOYMENT_ACTOR_FAILED (an actor of the deployment does not run), INTERNAL_ERROR (the controller
        cannot bring it up) or DELETING.
    replica_states : dict
        Number of replicas by state: STARTING, UPDATING, RECOVERING, RUNNING, STOPPING, PENDING_MIGRATION.
    message : str
        What is missing or failing.
    dead_replicas : tuple
        The last ten replicas that were lost or failed, oldest first.
    actor_of : str
        The deployment whose actor it runs; empty for a deployment.
    """

    status: str
    status_trigger: str = "UNSPECIFIED"
    replica_states: Mapping[str, int] = field(default_factory=dict)
    message: str = ""
    dead_replicas: tuple[DeadReplicaStatus, ...] = ()
    actor_of: str = ""


@dataclass(frozen=True, slots=True)
class ApplicationStatus(FromPlain):
    """One application.

    Attributes
    ----------
    status : str
        NOT_STARTED, DEPLOYING, RUNNING, UNHEALTHY, DELETING or DEPLOY_FAILED. After a failed deploy, the
        previous version, if any, keeps serving.
    message : str
        Why the last deploy failed, or what a deployment waits for.
    last_deployed_time_s : float
        When the version that runs was deployed, in seconds since the epoch.
    route_prefix : str or None
    deployments : dict
        The `DeploymentStatus` of each deployment, by name.
    traffic : dict
        The shares of the backends that get its requests, if `set_traffic` sends some to other backends than
        its ingress; empty otherwise.
    """

    status: str
    message: str = ""
    last_deployed_time_s: float = 0.0
    route_prefix: str | None = None
    deployments: Mapping[str, DeploymentStatus] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndpointStatus(FromPlain):
    """One endpoint, with the backends that get its traffic."""

    route: str | None
    methods: tuple[str, ...]
    traffic: Mapping[str, float]
    shadows: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GoalStatus(FromPlain):
    """One requested change of a backend or an application: PENDING, DONE or FAILED.

    ``by`` is the program that requested it. ``successor`` is the later goal that superseded it.
    """

    goal_id: str
    backend: str
    state: str
    failures: int = 0
    application: str = ""
    by: str = ""
    successor: str = ""


@dataclass(frozen=True, slots=True)
class Status(FromPlain):
    """The current status of an instance; empty if none runs. Printed, it is a table.

    Attributes
    ----------
    instance : str
        The instance's name; empty if none runs.
    epoch : int
        Number of controllers that the instance has had.
    owns_store : bool
        False if another cluster has taken over the store, or this instance has not taken it over yet. The
        instance then serves and replaces lost replicas and proxies, but accepts no changes.
    applications : dict
        The `ApplicationStatus` of each application, by name.
    actors, backends, endpoints, goals
        The instance's parts; backends and endpoints by name.
    http_urls : tuple of str
        URLs at which the proxies listen.
    target_capacity : float or None
        The target percentage of each backend's replicas; None means all of them.
    target_capacity_direction : str or None
        Whether the percentage last went ``"UP"`` or ``"DOWN"``.
    unresponsive_workers : tuple of str
        Workers whose process does not answer.
    broken_routes : dict
        Workers that do not reach other workers directly: for each, the others with their route,
        ``"scheduler"`` or ``"none"``.
    refused_workers : dict
        Workers that get no actors, each with the reason and the remedy.
    problems : dict
        Stored records that could not be read, each with the reason; the key ``store`` has a problem of the
        whole store.
    links : dict
        The addresses of pages about the instance: its ``page``, its ``panels``, and ``Dask``'s dashboard;
        empty if the scheduler has no HTTP server.
    """

    instance: str = ""
    epoch: int = 0
    owns_store: bool = True
    actors: tuple[ActorStatus, ...] = ()
    backends: Mapping[str, BackendStatus] = field(default_factory=dict)
    endpoints: Mapping[str, EndpointStatus] = field(default_factory=dict)
    goals: tuple[GoalStatus, ...] = ()
    http_urls: tuple[str, ...] = ()
    unresponsive_workers: tuple[str, ...] = ()
    broken_routes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused_workers: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    target_capacity: float | None = None
    target_capacity_direction: str | None = None
    applications: Mapping[str, ApplicationStatus] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def proxies(self) -> dict[str, str]:
        """The state of each proxy, by name: STARTING, HEALTHY, UNHEALTHY or DRAINING."""
        proxies = (each for each in self.actors if each.kind == "proxy")
        return {each.name: "HEALTHY" if each.state == "RUNNING" else each.state for each in proxies}

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the applications and backends that have failed or are unhealthy."""
        parts: dict[str, BackendStatus | ApplicationStatus] = {**self.backends, **self.applications}
        return tuple(name for name, each in parts.items() if each.status in FAILED_STATES)

    def only(self, application: str) -> Status:
        """Return the status of one application and its parts.

        Raises
        ------
        NotFoundError
            There is no such application.
        """
        if application not in self.applications:
            names = ", ".join(map(repr, self.applications)) or "none"
            raise NotFoundError(f"There is no application {application!r}; there are: {names}.")
        backends = {tag: each for tag, each in self.backends.items() if each.application == application}
        return replace(
            self,
            actors=tuple(each for each in self.actors if each.name.rpartition("#")[0] in backends),
            backends=backends,
            endpoints={name: each for name, each in self.endpoints.items() if each.traffic.keys() & backends},
            goals=tuple(each for each in self.goals if each.application == application),
            applications={application: self.applications[application]},
        )

    def routes(self, backend: str) -> list[str]:
        """Return the routes whose traffic goes to a backend, sorted."""
        return sorted(
            each.route for each in self.endpoints.values() if each.route and each.traffic.get(backend)
        )

    def replicas(self, backend: str | None = None) -> tuple[ActorStatus, ...]:
        """Return the replicas of one backend, or of all."""
        return tuple(
            actor
            for actor in self.actors
            if actor.kind == "replica" and (backend is None or actor.name.rpartition("#")[0] == backend)
        )

    def __str__(self) -> str:
        return "\n\n".join(each if isinstance(each, str) else table(*each) for each in self._parts())

    def _repr_html_(self) -> str:
        """Return the same as HTML with links, for notebooks; the texts of users are escaped."""
        parts = [_html(each) if isinstance(each, str) else html_table(*each) for each in self._parts()]
        if links := html_links(self.links):
            parts.insert(1, f"<p>{links}</p>")
        return "\n".join(parts)

    def _parts(self) -> list[str | Table]:
        """Return the paragraphs and tables that are shown."""
        if not self.instance:
            return ["No instance runs."]
        urls = ", ".join(self.http_urls) or "no HTTP proxy"
        healthy = sum(each.status == "HEALTHY" for each in self.backends.values())
        kind = "backend" if {each.kind for each in self.backends.values()} == {"backend"} else "deployment"
        lines = [f"{self.instance} at {urls}: {healthy} of {len(self.backends)} {kind}s are healthy."]
        if self.target_capacity is not None:
            direction = f", {self.target_capacity_direction}" if self.target_capacity_direction else ""
            lines.append(f"The target capacity is {shown(self.target_capacity)} %{direction}.")
        parts: list[str | Table] = ["\n".join(lines)]
        if self.applications:
            app_head = ("APPLICATION", "STATUS", "ROUTE", "DEPLOYMENTS", "MESSAGE")
            parts.append((app_head, [self._app_row(name) for name in sorted(self.applications)]))
        if self.backends:
            head = (kind.upper(), "STATUS", "RUNNING", "ROUTE", "VERSION", "MESSAGE")
            parts.append((head, [self._row(name) for name in sorted(self.backends)]))
        actor_head = ("ACTOR", "NAME", "STATE", "WORKER", "PID", "MESSAGE")
        rows = [
            (
                each.kind,
                short_tag(each.name),
                each.state,
                each.worker or "",
                str(each.pid or ""),
                each.message,
            )
            for each in self.actors
        ]
        parts.append((actor_head, rows))
        if dead := self._dead():
            parts.append((("LOST REPLICA", "AT", "REASON"), dead))
        parts += [*self._tracebacks(), *self._last_lines()]
        notes = self._notes()
        return [*parts, "\n".join(notes)] if notes else parts

    def _tracebacks(self) -> list[str]:
        """Return the lines after the first line of each message, such as tracebacks, without duplicates."""
        named = [(f"Application {name!r}", each.message) for name, each in self.applications.items()]
        named += [
            (f"Deployment {part!r} of application {name!r}", each.message)
            for name, app in self.applications.items()
            for part, each in app.deployments.items()
        ]
        named += [
            (described(name, each.kind.capitalize()), each.message) for name, each in self.backends.items()
        ]
        found: dict[str, str] = {}
        for name, message in named:
            more = with_cell_lines(shortened(message.partition("\n")[2]))
            if more:
                found.setdefault(more, name)
        return [f"{name}:\n{text}" for text, name in found.items()]

    def _dead(self) -> list[tuple[str, ...]]:
        """Return the last dead replicas of each backend, as rows."""
        return [
            (
                short_tag(each.name),
                datetime.fromtimestamp(each.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
                each.reason.partition("\n")[0],
            )
            for _, backend in sorted(self.backends.items())
            for each in backend.dead_replicas[-SHOWN_DEAD:]
        ]

    def _last_lines(self) -> list[str]:
        """Return the last log lines of each backend's most recently lost replica."""
        last = (
            backend.dead_replicas[-1] for _, backend in sorted(self.backends.items()) if backend.dead_replicas
        )
        return [
            "\n".join([f"The last log lines of {short_tag(each.name)}:", *each.last_lines])
            for each in last
            if each.last_lines
        ]

    def _notes(self) -> list[str]:
        notes = [f"Worker {each} does not answer." for each in self.unresponsive_workers]
        notes += [
            f"Worker {worker} reaches {other} only through the scheduler."
            if route == "scheduler"
            else f"Worker {worker} cannot reach {other}."
            for worker, routes in sorted(self.broken_routes.items())
            for other, route in sorted(routes.items())
        ]
        notes += [f"Worker {worker} gets no actors: {why}" for worker, why in self.refused_workers.items()]
        return notes + [
            why if key == "store" else f"Record {key} could not be read: {why}"
            for key, why in self.problems.items()
        ]

    def _app_row(self, name: str) -> tuple[str, ...]:
        app = self.applications[name]
        return (
            name,
            app.status,
            app.route_prefix or "",
            ", ".join(f"{each} (actor)" if part.actor_of else each for each, part in app.deployments.items()),
            app.message.partition("\n")[0],
        )

    def _row(self, name: str) -> tuple[str, ...]:
        backend = self.backends[name]
        return (
            short_tag(name),
            backend.status,
            f"{backend.running} of {backend.wanted}",
            ", ".join(self.routes(name)),
            backend.version,
            backend.message.partition("\n")[0],
        )


def _html(text: str) -> str:
    """Return a string as HTML; several lines, such as a traceback, keep their indentation."""
    kind = "pre" if "\n" in text else "p"
    return f"<{kind}>{escape(text)}</{kind}>"
