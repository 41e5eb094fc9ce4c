"""Records, specs and cluster states for the tests of the control plane."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from daskserve.common.types import ReplicaState, WorkerInfo
from daskserve.control.backend.inputs import Step, StepInputs
from daskserve.control.backend.steady_state import is_steady
from daskserve.control.backend.step import full_step, step
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions.backends import Outcome
from daskserve.control.decisions.goals import ChangeLimits
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import (
    BackendRecord,
    Change,
    EndpointRecord,
    GoalRecord,
    GoalState,
    Record,
    ReplicaRecord,
)
from daskserve.control.records.state import State
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.specs import ApplicationSpec, BackendSpec, DeploymentSpec, deployment_tag

#: The resources of a replica, unless the test sets others.
TENTH: Mapping[str, float] = {"CPU": 0.1}


def worker(number: int = 1, **fields: Any) -> WorkerInfo:
    address = f"w{number}"
    defaults: dict[str, Any] = {"host": "h1", "threads": 4, "memory_bytes": 1 << 30, "name": f"name-{number}"}
    return WorkerInfo(address, **{**defaults, **fields})


def backend(tag: str = "b", version: str = "v1", **fields: Any) -> BackendRecord:
    config = {"num_replicas": fields.pop("num_replicas", 1)}
    config = BackendConfig(**fields.pop("config", config))
    defaults: dict[str, Any] = {
        "code_key": f"{tag}@{version}",
        "config": config,
        "config_id": "c1",
        "actor_options": ActorOptions(),
    }
    return BackendRecord(tag, version, **{**defaults, **fields})


def replica(tag: str, state: ReplicaState = ReplicaState.RUNNING, **fields: Any) -> ReplicaRecord:
    defaults: dict[str, Any] = {
        "backend": tag.partition("#")[0],
        "version": "v1",
        "config_id": "c1",
        "demand": TENTH,
        "worker": None if state is ReplicaState.SHOULD_START else "w1",
        "incarnation": 0 if state is ReplicaState.SHOULD_START else 1,
    }
    return ReplicaRecord(tag, state=state, **{**defaults, **fields})


def endpoint(name: str = "e", route: str | None = "/e", **fields: Any) -> EndpointRecord:
    defaults: dict[str, Any] = {"methods": ("GET",), "traffic": {"b": 1.0}, "request_id": "made"}
    return EndpointRecord(name, route, **{**defaults, **fields})


def goal(goal_id: str = "g", **fields: Any) -> GoalRecord:
    defaults: dict[str, Any] = {"backend": "b", "state": GoalState.PENDING, "number": 1, "timeout_s": 60.0}
    return GoalRecord(goal_id, **{**defaults, **fields})


def state_of(*records: Record) -> State:
    state = State()
    state.apply({record.key: record for record in records})
    return state


def spec(tag: str = "b", **fields: Any) -> BackendSpec:
    """Return a spec as the client makes it; options such as ``num_replicas`` go into its config."""
    names = set(BackendSpec.__dataclass_fields__)
    config = {name: value for name, value in fields.items() if name not in names}
    defaults: dict[str, Any] = {
        "code": b"code",
        "config": BackendConfig(**config),
        "user_config": None,
        "version": None,
        "user_version": None,
        "prev_version": None,
        "env": None,
        "request_id": "request",
        "timeout_s": 60.0,
        "progress_timeout_s": None,
        "parts": (),
    }
    given = {name: value for name, value in fields.items() if name in names}
    given["actor_options"] = ActorOptions(**fields.get("actor_options", {}))
    return BackendSpec(tag, **{**defaults, **given})


def app_spec(
    name: str = "default",
    graph: Mapping[str, Iterable[str]] = MappingProxyType({"front": ()}),
    *,
    route: str | None = "/",
    request_id: str = "request",
    timeout_s: float | None = 60.0,
    progress_timeout_s: float | None = None,
    **specs: Mapping[str, Any],
) -> ApplicationSpec:
    """Return an application as the client makes it: its deployments, each with the names of those that it
    needs.

    Keyword arguments are the fields of each deployment's `spec`.
    """
    deployments = []
    for each, needs in graph.items():
        fields = {"request_id": request_id, "version": "1", **specs.get(each, {})}
        fields.setdefault("code", fields["version"].encode())
        tags = tuple(deployment_tag(name, need) for need in needs)
        deployments.append(DeploymentSpec(each, spec(deployment_tag(name, each), **fields), needs=tags))
    return ApplicationSpec(name, route, tuple(deployments), request_id, timeout_s, progress_timeout_s)


class Bench:
    """One backend's state machine; the test controls the observed state."""

    def __init__(self, workers: Iterable[WorkerInfo] = (worker(1), worker(2))) -> None:
        self.state = State()
        self.observed = Observed(workers={each.address: each for each in workers})
        self.now = 100.0
        self.wall = 0.0
        self.rng = random.Random(1)
        self.last = Step()
        self._goals = 0
        self._incarnation = 0

    def verb(self, outcome: Outcome) -> str:
        """Apply the change of a verb; return its goal."""
        self.state.apply(outcome.change)
        assert outcome.goal is not None
        return outcome.goal

    def new_goal(self) -> str:
        self._goals += 1
        return f"goal-{self._goals}"

    def create(self, tag: str = "b", **fields: Any) -> str:
        goal_id = self.new_goal()
        wanted = spec(tag, **{"request_id": goal_id, **fields})
        return self.verb(backend_decisions.create_backend(self.state, wanted, goal_id=goal_id, now=self.wall))

    def deploy(self, tag: str = "b", **fields: Any) -> str:
        goal_id = self.new_goal()
        wanted = spec(tag, **{"request_id": goal_id, **fields})
        return self.verb(backend_decisions.deploy(self.state, wanted, goal_id=goal_id, now=self.wall))

    def update(self, tag: str = "b", user_config: bytes | None = None, **config: Any) -> str:
        outcome = backend_decisions.update_backend_config(
            self.state,
            tag,
            BackendConfig(**config),
            user_config,
            sets_user_config=user_config is not None,
            goal_id=self.new_goal(),
            limits=ChangeLimits(timeout_s=60.0),
            now=0.0,
        )
        return self.verb(outcome)

    def delete(self, tag: str = "b", *, is_forced: bool = False) -> str:
        outcome = backend_decisions.delete_backend(
            self.state, tag, is_forced=is_forced, goal_id=self.new_goal()
        )
        return self.verb(outcome)

    def decide(self, tag: str = "b") -> Step:
        """Return the next step without applying it."""
        world = StepInputs(
            self.state,
            self.observed,
            self.now,
            self.rng.getrandbits(64),
            self._incarnation,
            wall=self.wall,
        )
        backend = self.state.backends[tag]
        if is_steady(world, backend, self.state.replicas_of(tag)):
            whole = full_step(world, backend)
            assert (whole.change, whole.actions, whole.wake_at, whole.messages) == ({}, [], None, [])
            assert whole.notes == self.observed.notes_of(tag).steady()
        return step(world, backend)

    def step(self, tag: str = "b") -> Step:
        """Apply one step: commit its change, as the reconciler does, and return the step."""
        self.last = self.decide(tag)
        self._incarnation = self.last.incarnation
        self.state.apply(self.last.change)
        for key, record in self.last.change.items():
            if record is None and key.startswith("replica/"):
                self.observed.forget_replica(key.removeprefix("replica/"))
        for key, notes in ({tag: self.last.notes} | self.last.kept).items():
            self.observed.learn(key, notes)
        return self.last

    def settle(self, tag: str = "b") -> None:
        """Step until nothing changes, while every start, stop and reconfiguration succeeds."""
        for _ in range(100):
            if tag not in self.state.backends:
                return
            taken = self.step(tag)
            for action in taken.actions:
                self.succeed(action)
            if not taken.change and not taken.actions:
                return
        raise AssertionError(f"{tag} does not settle: {self.state.replicas_of(tag)}")

    def succeed(self, action: Any) -> None:
        name, tag = type(action).__name__, action.replica.tag
        if name == "StartReplica":
            self.observed.ready[tag] = {}
        elif name == "StopReplica":
            self.observed.gone.add(tag)
        else:
            self.observed.configured[tag] = self.state.backends[action.replica.backend].config_id

    def tags(self, *states: ReplicaState, tag: str = "b") -> list[str]:
        return [each.tag for each in self.state.replicas_of(tag) if not states or each.state in states]

    def goal(self, goal_id: str) -> GoalRecord:
        return self.state.goals[goal_id]


def removed(change: Change) -> set[str]:
    return {key for key, record in change.items() if record is None}
