"""The rules that generate schedules of applications, under the same faults as `control_machine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app_witness import AppWitness
from control_machine import SECONDS, TIMEOUT_S, FaultyWorld
from schedules import Between, OneOf, Several, first, rule
from simulation import START_S, Simulation

from daskserve.control.records.records import AppRecord
from daskserve.options.specs import deployment_tag

#: The shapes of applications: deployments with the deployments that they need; the last is the ingress.
GRAPHS: dict[str, dict[str, tuple[str, ...]]] = {
    "one": {"d": ()},
    "chain": {"a": (), "b": ("a",), "d": ("b",)},
    "two": {"a": (), "d": ("a",)},
    "fan": {"a": (), "b": (), "d": ("a", "b")},
    "turned": {"d": (), "a": ("d",)},
}
NAMES = OneOf("default", "default", "x")
SHAPES = OneOf(*sorted(GRAPHS))
#: More than any worker has: such a change makes no progress until it times out.
TOO_MANY = 99
VERSIONS = Several(OneOf("1", "2"), 3, 3)
ROUTES = OneOf("/x", "/y", None)


class AppMachine(FaultyWorld):
    """See the module."""

    @first(
        seed=Between(0, 1000),
        workers=Between(1, 4),
        location=OneOf("NoServer", "NoServer", "EveryNode"),
        latency_s=OneOf(0.0, 0.004, 0.02),
        has_nannies=OneOf(False, True),
        shape=OneOf("", "two", "chain", "fan"),
    )
    def begin(
        self, seed: int, workers: int, location: str, latency_s: float, has_nannies: bool, shape: str
    ) -> None:
        """Start an instance, perhaps with an application."""
        self.simulation = Simulation(
            seed=seed,
            workers=workers,
            location=location,
            latency_s=latency_s,
            has_nannies=has_nannies,
            witness=AppWitness,
        )
        if shape:
            self.deploy("default", shape, ["1", "1", "1"], 1, "/x", 0, 2.0)

    @property
    def has_apps(self) -> bool:
        return self.simulation is not None and any(
            key.startswith("app/") for key in self.simulation.witness.records
        )

    def _app(
        self, name: str, shape: str, versions: Sequence[str], replicas: int, route: str | None, cpus: int
    ) -> dict[str, Any]:
        request_id = self.world.request_id()
        graph = GRAPHS[shape]
        # Every second change has a time limit without progress instead of a total limit.
        limits = {
            "timeout_s": TIMEOUT_S if self.world.request_count % 2 else None,
            "progress_timeout_s": TIMEOUT_S,
        }
        return {
            "name": name,
            "route": route,
            "request_id": request_id,
            **limits,
            "deployments": [
                {
                    "name": each,
                    "python_methods": [],
                    "needs": [deployment_tag(name, need) for need in needs],
                    "spec": {
                        "tag": deployment_tag(name, each),
                        "code": f"code-{version}".encode(),
                        "config": {"num_replicas": replicas, "start_timeout_s": START_S},
                        "user_config": None,
                        "actor_options": {"num_cpus": cpus} if cpus else {},
                        "version": version,
                        "user_version": version,
                        "prev_version": None,
                        "env": None,
                        "request_id": request_id,
                        **limits,
                    },
                }
                for (each, needs), version in zip(graph.items(), versions, strict=False)
            ],
        }

    @rule(
        name=NAMES,
        shape=SHAPES,
        versions=VERSIONS,
        replicas=Between(1, 2),
        route=ROUTES,
        cpus=OneOf(0, 0, 0, 2, TOO_MANY),
        seconds=SECONDS,
    )
    def deploy(
        self,
        name: str,
        shape: str,
        versions: Sequence[str],
        replicas: int,
        route: str | None,
        cpus: int,
        seconds: float,
    ) -> None:
        apps = [self._app(name, shape, versions, replicas, route, cpus)]
        self._call("deploy_applications", seconds, apps=apps)

    @rule(name=NAMES, shape=SHAPES, versions=VERSIONS, expects=OneOf("none", "last", "old"), seconds=SECONDS)
    def restore(self, name: str, shape: str, versions: Sequence[str], expects: str, seconds: float) -> None:
        """Deploy only if the last deploy of the application was the expected call."""
        app = self.world.witness.records.get(f"app/{name}")
        last = app.request_id if isinstance(app, AppRecord) and not app.is_deleting else ""
        expected = {"none": "", "last": last, "old": "request-1"}[expects]
        apps = [self._app(name, shape, versions, 1, "/x" if name == "default" else "/y", 0)]
        self._call("deploy_applications", seconds, apps=apps, expected={name: expected})

    @rule(shape=SHAPES, versions=VERSIONS, seconds=SECONDS)
    def deploy_both(self, shape: str, versions: Sequence[str], seconds: float) -> None:
        first = self._app("default", shape, versions, 1, "/x", 0)
        second = self._app("x", "two", versions, 1, "/y", 0)
        self._call("deploy_applications", seconds, apps=[first, second])

    @rule(when=lambda self: self.has_apps, name=NAMES, request=OneOf(None, None, 1, 2), seconds=SECONDS)
    def delete(self, name: str, request: int | None, seconds: float) -> None:
        """Delete an application, or only one that a certain call has deployed."""
        only = {} if request is None else {"request_id": f"request-{request}"}
        self._call("delete_application", seconds, name=name, **only)

    @rule(when=lambda self: self.has_apps, name=NAMES, number=OneOf(None, 1, 2), seconds=SECONDS)
    def roll_back(self, name: str, number: int | None, seconds: float) -> None:
        """Roll back to a revision, which may not exist."""
        limits = {"timeout_s": TIMEOUT_S, "progress_timeout_s": TIMEOUT_S}
        request_id = self.world.request_id()
        self._call("rollback", seconds, app=name, revision=number, request_id=request_id, **limits)

    @rule(when=lambda self: self.has_apps, age=Between(0, 1), seconds=SECONDS)
    def withdraw(self, age: int, seconds: float) -> None:
        """Withdraw the last deploy, or the one before."""
        deployed = [each.message["apps"] for each in self.world.calls if each.verb == "deploy_applications"]
        if deployed:
            apps = deployed[-1 - min(age, len(deployed) - 1)]
            self._call("withdraw", seconds, requests=[each["request_id"] for each in apps])

    @rule(
        when=lambda self: self.has_apps, tag=OneOf("a", "d", "x/a"), replicas=Between(1, 3), seconds=SECONDS
    )
    def scale(self, tag: str, replicas: int, seconds: float) -> None:
        self._call(
            "update_backend_config",
            seconds,
            tag=tag,
            config={"num_replicas": replicas},
            user_config=None,
            sets_user_config=False,
            timeout_s=TIMEOUT_S,
        )
