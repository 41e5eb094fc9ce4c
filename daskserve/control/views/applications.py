"""The status of applications and their deployments as plain values. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from daskserve.common.formatting import shown
from daskserve.common.types import ReplicaState, short_tag
from daskserve.control.backend import application as app_state
from daskserve.control.decisions import goals
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import AppRecord, BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.views import backends as backend_views
from daskserve.control.views.messages import message_of, with_models

#: The trigger of a deployment whose actor does not run.
ACTOR_FAILED = "DEPLOYMENT_ACTOR_FAILED"

#: The status of a deployment while its number of replicas changes.
SCALING: Mapping[str, str] = {"UPSCALE": "UPSCALING", "DOWNSCALE": "DOWNSCALING"}


def application_status(state: State, observed: Observed, app: AppRecord, wall: float) -> dict[str, Any]:
    """Return the status of an application, which is that of its worst deployment.

    ``wall`` is the time in seconds since the epoch.
    """
    deployments = {
        name: deployment_status(state, observed, app, name, state.backends[tag], wall)
        for name, tag in app.deployments.items()
        if tag in state.backends
    }
    if app.failed and app.failed not in deployments:
        deployments[app.failed] = _failed_at_first(app)
    word = _word(state, app, deployments)
    traffic, message = _other_traffic(state, app), app.last_error or _message(deployments)
    return {
        "status": word,
        "message": "; ".join(filter(None, (_traffic_text(app, traffic), message))),
        "last_deployed_time_s": app.deployed_at,
        "route_prefix": app.route,
        "deployments": deployments,
        "traffic": traffic,
    }


def application_word(state: State, observed: Observed, app: AppRecord) -> str:
    """Return the status word of an application, without the rest of its status."""
    found: dict[str, dict[str, str]] = {}
    for name, tag in list(app.deployments.items()):
        if (backend := state.backends.get(tag)) is not None:
            word, trigger = _outcome(_Facts(state, observed, app, name, backend))
            found[name] = {"status": word, "status_trigger": trigger}
    return _word(state, app, found)


def _other_traffic(state: State, app: AppRecord) -> dict[str, float]:
    """Return the traffic of the ingress if `set_traffic` sends some to other backends; otherwise empty."""
    endpoint = state.endpoints.get(app.ingress)
    if endpoint is None or endpoint.is_legacy or not endpoint.traffic.keys() - {app.ingress}:
        return {}
    return dict(endpoint.traffic)


def _traffic_text(app: AppRecord, traffic: Mapping[str, float]) -> str:
    shares = (f"{shown(share * 100)} % {short_tag(tag)}" for tag, share in traffic.items())
    return (
        f"set_traffic shares the requests to {short_tag(app.ingress)}: {', '.join(shares)}" if traffic else ""
    )


def _word(state: State, app: AppRecord, deployments: Mapping[str, Mapping[str, Any]]) -> str:
    if app.is_deleting:
        return "DELETING"
    if app.goal is not None:
        has_begun = any(state.replicas_of(tag) for tag in app.tags)
        return "DEPLOYING" if has_begun else "NOT_STARTED"
    if app.last_error:
        return "DEPLOY_FAILED"
    words = {each["status"] for each in deployments.values()}
    if "UNHEALTHY" in words:
        return "UNHEALTHY"
    # A change that a user requested is a deploy; a change by the autoscaler is not.
    asked = any(each["status_trigger"] == "CONFIG_UPDATE_STARTED" for each in deployments.values())
    return "DEPLOYING" if asked else "RUNNING"


def _message(deployments: Mapping[str, Mapping[str, Any]]) -> str:
    found = (f"{name}: {each['message']}" for name, each in deployments.items() if each["message"])
    return next(found, "")


def deployment_status(
    state: State, observed: Observed, app: AppRecord, name: str, backend: BackendRecord, wall: float
) -> dict[str, Any]:
    """Return the status of one deployment of an application."""
    facts = _Facts(state, observed, app, name, backend)
    word, trigger = _outcome(facts)
    message = (
        app.last_error
        if word == "DEPLOY_FAILED"
        else with_models(state, observed, backend.tag, message_of(observed, backend, facts.replicas, wall))
        or facts.internal_error
        or (trigger == ACTOR_FAILED and facts.actor_message(wall))
    )
    awaited = app_state.awaited(state, observed, backend) if app.goal is not None else []
    return {
        "status": word,
        "status_trigger": trigger,
        "replica_states": dict(Counter(replica_word(observed, backend, each) for each in facts.replicas)),
        "actor_of": backend.actor_of[0] if backend.actor_of else "",
        "message": message or (f"waits for {', '.join(map(short_tag, awaited))}" if awaited else ""),
        "dead_replicas": backend_views.dead_replicas(observed, backend.tag),
    }


def _outcome(facts: _Facts) -> tuple[str, str]:
    return next(rule.outcome(facts) for rule in RULES if rule.applies(facts))


def _failed_at_first(app: AppRecord) -> dict[str, Any]:
    """Return the status of a deployment whose first deploy failed, so that it was removed."""
    return {
        "status": "DEPLOY_FAILED",
        "status_trigger": ACTOR_FAILED if ":" in app.failed else "REPLICA_STARTUP_FAILED",
        "replica_states": {},
        "message": app.last_error,
        "dead_replicas": [],
    }


class _Facts:
    """The facts that determine the status of one deployment."""

    def __init__(
        self, state: State, observed: Observed, app: AppRecord, name: str, backend: BackendRecord
    ) -> None:
        self._state, self._observed, self._app, self._name = state, observed, app, name
        self.backend = backend
        self.replicas = state.replicas_of(backend.tag)
        running = sum(each.state is ReplicaState.RUNNING for each in self.replicas)
        self.is_short, self.is_over = running < backend.num_replicas, running > backend.num_replicas
        self.is_changing = backend.goal is not None and not goals.is_reached(backend, self.replicas)
        self.has_failures = observed.notes_of(backend.tag).failures > 0
        self.is_replacing = backend_views.is_replacing(observed, backend)

    @property
    def has_failed(self) -> bool:
        return self._app.failed == self._name and not self.is_short and not self.is_changing

    @property
    def internal_error(self) -> str:
        """The error of the controller that keeps the deployment from coming up; empty if there is none."""
        if self.is_short and self.backend.code_key not in self._state.codes:
            return "the store has no code of its version: it is lost or damaged; deploy it again"
        return self._observed.step_failures.get(self.backend.tag, "")

    @property
    def scaling(self) -> tuple[str, str]:
        trigger = "CONFIG_UPDATE_STARTED" if self.backend.scaled_to is None else "AUTOSCALING"
        return "UPSCALING" if self.is_short else "DOWNSCALING", trigger

    @property
    def is_scaling(self) -> bool:
        """Whether the number changes without a new config: by an autoscaler or the target capacity."""
        is_asked = self.backend.scaled_to is not None or self.backend.last_change in SCALING
        return (self.is_over or (self.is_short and not self.is_replacing)) and is_asked

    def failing(self, trigger: str) -> tuple[str, str]:
        return "UNHEALTHY", ACTOR_FAILED if self.backend.actor_of else trigger

    def _ill_actors(self) -> list[tuple[str, BackendRecord]]:
        """Return the actors of the deployment that should run and do not, by name."""
        found = []
        for name, tag in self.backend.actors.items():
            actor = self._state.backends.get(tag)
            if actor is not None and actor.goal is None and not actor.is_deleting:
                facts = _Facts(self._state, self._observed, self._app, "", actor)
                if facts.is_short:
                    found.append((name, actor))
        return found

    @property
    def has_ill_actor(self) -> bool:
        return bool(self.backend.actors) and bool(self._ill_actors())

    def actor_message(self, wall: float) -> str:
        name, actor = self._ill_actors()[0]
        text = message_of(self._observed, actor, self._state.replicas_of(actor.tag), wall)
        return f"its actor {name!r} does not run{f': {text}' if text else ''}"


class Rule(NamedTuple):
    """A status of a deployment with its trigger, and the condition under which it applies."""

    applies: Callable[[_Facts], bool]
    outcome: Callable[[_Facts], tuple[str, str]]


#: The states of a deployment and their triggers; the first rule that applies decides.
RULES: tuple[Rule, ...] = (
    Rule(lambda each: each.backend.is_deleting, lambda _: ("UPDATING", "DELETING")),
    Rule(lambda each: bool(each.internal_error), lambda _: ("UNHEALTHY", "INTERNAL_ERROR")),
    Rule(
        lambda each: each.is_changing,
        lambda each: (SCALING.get(each.backend.last_change, "UPDATING"), "CONFIG_UPDATE_STARTED"),
    ),
    Rule(
        lambda each: each.is_short and each.has_failures,
        lambda each: each.failing("REPLICA_STARTUP_FAILED"),
    ),
    Rule(lambda each: each.is_scaling, lambda each: each.scaling),
    Rule(lambda each: each.is_short, lambda each: each.failing("HEALTH_CHECK_FAILED")),
    Rule(
        lambda each: each.has_failed,
        lambda each: ("DEPLOY_FAILED", ACTOR_FAILED if each.backend.actor_of else "REPLICA_STARTUP_FAILED"),
    ),
    Rule(lambda each: each.has_ill_actor, lambda _: ("UNHEALTHY", ACTOR_FAILED)),
    Rule(lambda _: True, lambda each: ("HEALTHY", f"{_last_change(each.backend)}_COMPLETED")),
)


def _last_change(backend: BackendRecord) -> str:
    """Return the kind of the last change, by a client or by the autoscaler."""
    if backend.scalings and backend.scalings[-1][0] > backend.deployed_at:
        _, before, after, _ = backend.scalings[-1]
        return "UPSCALE" if after > before else "DOWNSCALE"
    return backend.last_change


def replica_word(observed: Observed, backend: BackendRecord, replica: ReplicaRecord) -> str:
    """Return the state of a replica as users see it."""
    if replica.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING):
        return "STOPPING"
    if replica.state is not ReplicaState.RUNNING:
        return "STARTING"
    if replica.tag not in observed.ready:
        return "RECOVERING"
    if replica.tag in observed.terminating or observed.retiring_of([replica]):
        return "PENDING_MIGRATION"
    is_current = replica.version != backend.version or replica.config_id == backend.config_id
    return "RUNNING" if is_current else "UPDATING"
