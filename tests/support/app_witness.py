"""A witness of applications: each always matches one deploy, and never mixes two deploys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from reference_model import Wanted, endpoint_of
from witness import Call, Witness

from daskserve.common.types import ReplicaState
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    CodeRecord,
    EndpointRecord,
    GoalRecord,
    GoalState,
    Record,
    ReplicaRecord,
)
from daskserve.control.records.revisions import RevisionRecord, RevisionState

#: The route of an application, and the versions of its deployments by tag.
Signature: TypeAlias = tuple[str | None, tuple[tuple[str, str], ...]]


def asked_by(message: Mapping[str, Any]) -> dict[str, Signature]:
    """Return the requested signature of each application in a deploy."""
    return {
        app["name"]: (
            app["route"],
            tuple((each["spec"]["tag"], each["spec"]["version"]) for each in app["deployments"]),
        )
        for app in message.get("apps", ())
    }


class AppWitness(Witness):
    """See the module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: The signatures that clients have requested, and the last completed one of each application.
        self.asked: dict[str, set[Signature]] = {}
        self.settled: dict[str, Signature | None] = {}

    def is_deleting(self, goal: GoalRecord) -> bool:
        app = self.app(goal.application)
        return super().is_deleting(goal) if app is None else app.is_deleting

    def app(self, name: str) -> AppRecord | None:
        found = self.records.get(f"app/{name}")
        return found if isinstance(found, AppRecord) else None

    def signature(self, app: AppRecord) -> Signature:
        """Return the current signature of an application."""
        found = {tag: self.backend(tag) for tag in app.tags}
        for tag, backend in found.items():
            if app.is_deleting:
                continue
            if backend is None or backend.application != app.name:
                self.report(f"{app} has lost {tag}: {backend}")
            elif backend.is_deleting:
                self.report(f"{tag} is being deleted, and {app} is not")
        return app.route, tuple(
            (tag, "?" if backend is None else backend.version.partition("+")[0])
            for tag, backend in found.items()
        )

    def unsettled(self) -> Iterator[str]:
        for app in self.of(AppRecord):
            if app.goal is not None or app.is_deleting:
                yield f"{app} has not come to rest"
        for backend in self.of(BackendRecord):
            owner = self.app(backend.application)
            if owner is None or backend.tag not in owner.tags:
                yield f"{backend} is a deployment of {owner}"
        for endpoint in self.of(EndpointRecord):
            if self.backend(endpoint.name) is None:
                yield f"{endpoint} has no backend"
        yield from self._unsettled_history()

    def _unsettled_history(self) -> Iterator[str]:
        running: dict[str, list[RevisionRecord]] = {}
        for each in self.of(RevisionRecord):
            running.setdefault(each.application, [])
            if each.state is RevisionState.RUNNING:
                running[each.application].append(each)
            elif each.state is RevisionState.DEPLOYING:
                yield f"{each} has not come to rest"
        for name, found in running.items():
            app = self.app(name)
            is_up = app is not None and bool(app.deployments) and not app.is_deleting
            if len(found) != is_up:
                yield f"{app} has {found}"

    # Calls

    def begin(self, verb: str, message: Mapping[str, Any]) -> Call:
        for name, signature in asked_by(message).items():
            self.asked.setdefault(name, set()).add(signature)
        return super().begin(verb, message)

    def acknowledged(self, call: Call, answer: Mapping[str, Any]) -> None:
        call.answer = answer
        self.open_calls.remove(call)
        for goal in (answer.get("goal"), *answer.get("goals", {}).values()):
            if goal is not None and goal not in self.goals:
                self.report(f"{call} was answered with goal {goal}, which is not in the store")

    def failed(self, call: Call, error: BaseException) -> None:
        call.error = error

    # Changes

    def _check_wanted(self, records: Mapping[str, Record], changed: Mapping[str, Record | None]) -> None:
        endpoints = {each.name: endpoint_of(each) for each in self.of(EndpointRecord)}
        if endpoints != self.wanted.endpoints:
            self.history.append(Wanted(endpoints=endpoints))
        for app in self.of(AppRecord):
            before = records.get(app.key)
            signature = self.signature(app)
            if app.deployments and not app.is_deleting and signature not in self.asked[app.name]:
                self.report(f"{app.name} is {signature}, which no deploy has asked for")
            if isinstance(before, AppRecord) and before.goal is not None and app.goal is None:
                self._check_settled(app, before, self.records.get(f"goal/{before.goal}"), signature)
            if app.is_deleting:
                self.settled[app.name] = None
            elif app.goal is None and app.deployments:
                self.settled[app.name] = signature
        for key in changed:
            if key.startswith("app/") and changed[key] is None:
                name = key.removeprefix("app/")
                self.settled.pop(name, None)
                left = [each.tag for each in self.of(BackendRecord) if each.application == name]
                if left and any(each.deployments for each in [records[key]] if isinstance(each, AppRecord)):
                    self.report(f"{name} is gone, and {left} are left")
        self._check_order(records, changed)
        self._check_history()
        self._record_goals()

    def _check_history(self) -> None:
        """Check that the code of each revision that can be deployed again is kept."""
        codes = {each.name for each in self.of(CodeRecord)}
        for each in self.of(RevisionRecord):
            if each.is_complete and not codes.issuperset(each.codes.values()):
                self.report(f"{each} has lost {set(each.codes.values()) - codes}")

    def _check_settled(self, app: AppRecord, before: AppRecord, goal: Any, signature: Signature) -> None:
        """Check that a change was completed or rolled back as a whole."""
        if goal.state is GoalState.FAILED:
            fallback = self.settled.get(app.name)
            if (signature if app.deployments else None) != fallback:
                self.report(f"{app.name} failed and became {signature}, it was {fallback}")
            self._check_reason(goal, {tag for each in self.asked[app.name] for tag, _ in each[1]})
            return
        for tag in app.tags:
            backend = self.backend(tag)
            replicas = self.replicas(tag)
            if backend is None or len(replicas) != backend.num_replicas:
                self.report(f"{app.name} is up, and {tag} has {replicas}")
            elif any(self._is_old(each, backend) for each in replicas):
                self.report(f"{app.name} is up, and of {backend} run {replicas}")
            endpoint = self.records.get(f"endpoint/{tag}")
            route = app.route if tag == app.ingress else None
            if isinstance(endpoint, EndpointRecord) and endpoint.route != route:
                self.report(f"{app.name} is up, and {endpoint} has not the route {route}")

    @staticmethod
    def _is_old(replica: ReplicaRecord, backend: BackendRecord) -> bool:
        is_running = replica.state is ReplicaState.RUNNING
        return not is_running or (replica.version, replica.config_id) != (backend.version, backend.config_id)

    def _check_order(self, records: Mapping[str, Record], changed: Mapping[str, Record | None]) -> None:
        for key, record in changed.items():
            old = records.get(key)
            if not isinstance(record, ReplicaRecord):
                continue
            backend = self.backend(record.backend)
            if backend is None or not backend.application:
                continue
            former = old.state if isinstance(old, ReplicaRecord) else ReplicaState.SHOULD_START
            if (former, record.state) == (ReplicaState.SHOULD_START, ReplicaState.STARTING):
                self._check_start(backend, records)
            is_stopped = record.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING)
            if former is ReplicaState.RUNNING and is_stopped and not self.is_excused(record):
                self._check_stop(backend)

    def _check_start(self, backend: BackendRecord, before: Mapping[str, Record]) -> None:
        app = self.app(backend.application)
        if app is None or app.goal is None or backend.goal != app.goal:
            return
        for need in (self.backend(tag) for tag in backend.needs):
            if need is None or need.is_deleting:
                self.report(f"{backend.tag} starts without {need}")
                continue
            is_up = [
                sum(
                    isinstance(each, ReplicaRecord)
                    and each.backend == need.tag
                    and not self._is_old(each, need)
                    for each in known.values()
                )
                >= need.num_replicas
                for known in (before, self.records)
            ]
            if not any(is_up):
                self.report(f"{backend.tag} starts before {need.tag} is up")

    def _check_stop(self, backend: BackendRecord) -> None:
        """Check that a deletion stops no deployment that another deployment still calls."""
        if not backend.is_deleting or backend.is_forced:
            return
        for caller in self.of(BackendRecord):
            if backend.tag in caller.needs and caller.is_deleting and self.replicas(caller.tag):
                self.report(f"{backend.tag} stops before {caller.tag} is gone")
