"""The events of a change, derived from the records before and after it. Pure.

The writer adds them to the change, so both are in one transaction. Each kind of record has one function here.
Causes that are in no record, such as why a replica died, are passed by the key of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.differences import Difference
from daskserve.common.formatting import capitalized, counted, shown
from daskserve.common.types import ReplicaState, short_tag
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.events import Event, EventKind, EventsRecord
from daskserve.control.records.models import ModelsRecord, ModelState
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import (
    BackendRecord,
    CapacityRecord,
    Change,
    GoalRecord,
    GoalState,
    Record,
    ReplicaRecord,
)
from daskserve.control.records.revisions import RevisionRecord, RevisionState
from daskserve.control.records.rollout import RolloutPhase, RolloutState
from daskserve.control.records.state import State, display_name
from daskserve.control.records.versions import unrestarted
from daskserve.options.rollout import RolloutConfig
from daskserve.payload.model_files import newest_last
from daskserve.payload.packed_errors import load_error

#: How long events are kept, in seconds, and how many.
KEPT_S = 24 * 3600.0
KEPT_EVENTS = 10_000
#: Maximum number of old rows that one transaction removes, so that no transaction is slow.
SWEPT = 20
#: Maximum number of characters of a message, and of changes that it lists.
MAX_TEXT = 500
MAX_CHANGES = 5

K = EventKind
#: The key of the requesting program among the causes.
WHOLE = ""
_STOPPING = frozenset({ReplicaState.SHOULD_STOP, ReplicaState.STOPPING})


@dataclass(frozen=True, slots=True)
class _World:
    """The state before a change, the change, and the causes by key."""

    state: State
    change: Change
    causes: Mapping[str, str] = field(default_factory=dict)

    def backend(self, tag: str) -> BackendRecord | None:
        found = self.change.get(f"backend/{tag}") or self.state.backends.get(tag)
        return found if isinstance(found, BackendRecord) else None

    def application(self, tag: str) -> str:
        backend = self.backend(tag)
        return "" if backend is None else backend.application


def events_of(state: State, change: Change, causes: Mapping[str, str], *, wall: float, number: int) -> Change:
    """Return the row of events of a change, and the removal of old rows.

    Parameters
    ----------
    causes : dict
        The reasons for changes of records, by key, if the records themselves do not contain them.
    number : int
        The smallest possible number of the first event.
    """
    world = _World(state, change, causes)
    events: list[Event] = []
    for key, after in change.items():
        kind, _, name = key.partition("/")
        if kind in _EVENTS_BY_KIND:
            before_of, derive = _EVENTS_BY_KIND[kind]
            events += derive(world, name, before_of(state, name), after)
    return as_row(state, events, wall=wall, number=number)


def as_row(state: State, events: list[Event], *, wall: float, number: int) -> Change:
    """Return the row of some events, and the removal of old rows."""
    if not events:
        return {}
    shortened = [list(astuple(replace(each, message=_shortened(each.message)))) for each in events]
    row = EventsRecord(max(number, state.events.last + 1), wall, shortened)
    change: Change = {row.key: row}
    left = state.events.count + len(events)
    for old in state.events:
        if len(change) > SWEPT or (left - len(old.entries) < KEPT_EVENTS and old.at >= wall - KEPT_S):
            break
        change[old.key] = None
        left -= len(old.entries)
    return change


def _shortened(text: str) -> str:
    first = text.partition("\n")[0]
    return first if len(first) <= MAX_TEXT else f"{first[: MAX_TEXT - 3]}..."


# ---- applications


_OF_REVISIONS: Mapping[RevisionState, EventKind] = {
    RevisionState.RUNNING: K.DEPLOYED,
    RevisionState.FAILED: K.DEPLOY_FAILED,
    RevisionState.SUPERSEDED: K.SUPERSEDED,
    RevisionState.ROLLED_BACK: K.ROLLED_BACK,
    RevisionState.DELETED: K.DELETED,
}


def _of_revision(_: _World, __: str, before: Any, after: Record | None) -> Iterator[Event]:
    if not isinstance(after, RevisionRecord):
        return
    what = f"Revision {after.number} of application '{after.application}'"
    if before is None and after.state is RevisionState.DEPLOYING:
        found = [str(Difference(**each)) for each in after.changes]
        more = f" and {len(found) - MAX_CHANGES} more" if len(found) > MAX_CHANGES else ""
        text = ", ".join(found[:MAX_CHANGES]) + more or "nothing differs"
        kind = K.DEPLOYING
        if after.rollback_of:
            kind, text = K.ROLLING_BACK, f"back to revision {after.rollback_of}: {text}"
        yield Event(kind, f"{what} is deployed: {text}", after.application, by=after.by)
    elif before is not None and before.state is not after.state:
        if after.state is RevisionState.SUPERSEDED and after.ran_at:
            return  # the revision that replaced it has an event
        kind = _OF_REVISIONS[after.state]
        words = {
            K.DEPLOYED: "runs",
            K.DEPLOY_FAILED: f"failed: {after.reason}",
            K.SUPERSEDED: f"was replaced before it was complete: {after.reason}",
            K.ROLLED_BACK: f"was rolled back: {after.reason}",
            K.DELETED: "was deleted",
        }
        yield Event(kind, f"{what} {words[kind]}", after.application)


# ---- backends


def _of_goal(world: _World, _: str, before: Any, after: Record | None) -> Iterator[Event]:
    """Yield the events of changes without a revision: deletions, and backends without an application."""
    if not isinstance(after, GoalRecord) or (before is not None and before.state is after.state):
        return
    tag, name = after.backend, after.application or world.application(after.backend)
    target = world.change.get(f"app/{name}") if after.application else world.backend(tag)
    what = f"Application '{name}'" if after.application else capitalized(display_name(world.state, tag))
    if after.is_pending and getattr(target, "is_deleting", False):
        yield Event(K.DELETING, f"{what} is deleted", name, tag, by=after.by)
    elif not name and after.is_pending:
        version = getattr(target, "user_version", None) or getattr(target, "version", "")
        yield Event(K.DEPLOYING, f"{what} is deployed: version {version}", "", tag, by=after.by)
    elif not name and after.state is GoalState.FAILED:
        error = "" if after.error is None else load_error(after.error)
        yield Event(K.DEPLOY_FAILED, f"{what}: {error}", "", tag)
    elif not name and after.successor:
        yield Event(K.SUPERSEDED, f"{what}: the change was replaced before it was complete", "", tag)
    elif not name and world.backend(tag) is not None and not world.backend(tag).is_deleting:  # type: ignore[union-attr]
        yield Event(K.DEPLOYED, f"{what} runs", "", tag)


def _of_backend(world: _World, tag: str, before: Any, after: Record | None) -> Iterator[Event]:
    if after is None and before is not None and not before.application:
        yield Event(K.DELETED, f"{capitalized(before.display_name)} was deleted", "", tag)
    if not isinstance(after, BackendRecord):
        return
    if before is not None and before.version != after.version and _is_same_code(before, after):
        goal = world.change.get(f"goal/{after.goal}")
        by = goal.by if isinstance(goal, GoalRecord) else ""
        text = f"{capitalized(after.display_name)} is restarted"
        yield Event(K.RESTARTING, text, after.application, tag, by=by)
    if after.rollout is not None:
        yield from _of_rollout(after, None if before is None else before.rollout, after.rollout)
    if before is not None and after.scalings and after.scalings[-1:] != before.scalings[-1:]:
        _, old, new, why = after.scalings[-1]
        text = f"{capitalized(after.display_name)} was scaled from {old} to {counted(new, 'replica')}: {why}"
        yield Event(K.SCALED, text, after.application, tag)


def _is_same_code(before: BackendRecord, after: BackendRecord) -> bool:
    return unrestarted(before.version) == unrestarted(after.version)


_OF_PHASES: Mapping[RolloutPhase, EventKind] = {
    RolloutPhase.STARTING: K.ROLLOUT_STEP,
    RolloutPhase.SERVING: K.ROLLOUT_STEP,
    RolloutPhase.PAUSED: K.ROLLOUT_PAUSED,
    RolloutPhase.COMPLETED: K.ROLLOUT_COMPLETED,
    RolloutPhase.ROLLED_BACK: K.ROLLOUT_TAKEN_BACK,
    RolloutPhase.ABORTED: K.ROLLOUT_TAKEN_BACK,
}


def _of_rollout(backend: BackendRecord, before: RolloutState | None, after: RolloutState) -> Iterator[Event]:
    if before is None or before.mark != after.mark:
        text = f"Rollout of {backend.display_name}, {_phase_of(backend.config.rollout, after)}"
        yield Event(_OF_PHASES[after.phase], text, backend.application, backend.tag)


def _phase_of(plan: RolloutConfig | None, rollout: RolloutState) -> str:
    new, old = rollout.names
    steps = [] if plan is None else plan.steps
    number = f"step {rollout.step + 1} of {len(steps)}"
    words = {
        RolloutPhase.STARTING: f"{number}: the replicas of version '{new}' start",
        RolloutPhase.SERVING: f"{number}: version '{new}' has {_nth(steps, rollout.served)} of the traffic",
        RolloutPhase.PAUSED: number,
        RolloutPhase.COMPLETED: f"version '{new}' has all traffic",
        RolloutPhase.ROLLED_BACK: f"version '{old}' has all traffic",
        RolloutPhase.ABORTED: f"version '{old}' has all traffic",
    }
    return ": ".join(filter(None, (words[rollout.phase], rollout.why)))


def _nth(steps: Sequence[str], number: int) -> str:
    return str(steps[number]) if 0 <= number < len(steps) else "no part"


def _of_replica(world: _World, tag: str, before: Any, after: Record | None) -> Iterator[Event]:
    known = after if isinstance(after, ReplicaRecord) else before
    if known is None:
        return
    application, short = world.application(known.backend), short_tag(tag)
    cause = world.causes.get(f"replica/{tag}", "")

    def event(kind: EventKind, text: str) -> Event:
        return Event(kind, f"Replica {short} {text}", application, known.backend, tag)

    was = None if before is None else before.state
    now = after.state if isinstance(after, ReplicaRecord) else None
    if now is was or was in _STOPPING:
        return
    if now is ReplicaState.RUNNING:
        yield event(K.REPLICA_STARTED, f"runs on worker {known.worker}")
    elif cause and was is ReplicaState.STARTING:
        yield event(K.REPLICA_FAILED, f"did not start on worker {known.worker}: {cause}")
    elif cause:
        yield event(K.REPLICA_LOST, f"on worker {known.worker} is lost: {cause}")
    elif now in _STOPPING and was is ReplicaState.RUNNING:
        yield event(K.REPLICA_STOPPING, f"on worker {known.worker} stops: {_why(world, before)}")


def _why(world: _World, replica: ReplicaRecord) -> str:
    """Return why a replica stops, if it has not failed."""
    backend = world.backend(replica.backend)
    if backend is None or backend.is_deleting:
        return "it is deleted"
    if backend.version != replica.version:
        rollout = backend.rollout
        is_undone = rollout is not None and rollout.phase.is_undone
        return f"version {replica.named_version} is {'rolled back' if is_undone else 'replaced'}"
    if cause := world.causes.get(f"leaving/{replica.tag}"):
        return cause
    before = world.state.backends.get(replica.backend)
    if len(world.state.replicas_of(replica.backend)) > backend.num_replicas or before is not backend:
        return f"{counted(backend.num_replicas, 'replica is', 'replicas are')} wanted"
    return "it is replaced on another worker"


# ---- other records


def _of_config(_: _World, name: str, before: Any, after: Record | None) -> Iterator[Event]:
    if not isinstance(after, ConfigRecord):
        return
    if (before is None or before.generation != after.generation) and not after.is_settled:
        origin = " ".join(filter(None, (after.source, after.version))) or "a file"
        yield Event(K.CONFIG_DECLARED, f"Application '{name}' is declared by {origin}", name, by=after.by)
    elif after.error and (before is None or before.error != after.error):
        yield Event(K.BUILD_FAILED, f"Application '{name}' cannot be deployed: {after.error}", name)


def _of_proxy(_: _World, __: str, before: Any, after: Record | None) -> Iterator[Event]:
    known = after if isinstance(after, ProxyRecord) else before
    if known is None:
        return
    had = None if before is None else before.worker
    has = after.worker if isinstance(after, ProxyRecord) else None

    def event(kind: EventKind, text: str) -> Event:
        return Event(kind, f"Proxy {known.name} {text}", subject=known.tag)

    if isinstance(after, ProxyRecord) and after.is_leaving:
        if before is None or not before.is_leaving:
            yield event(K.PROXY_LEAVING, f"on worker {has} stops once its successor listens")
    elif has is not None and has != had:
        yield event(K.PROXY_STARTING, f"starts on worker {has}")
    elif has is None and had is not None and not before.is_leaving:
        yield event(K.PROXY_LOST, f"is lost: worker {had} left the cluster or may no longer have a proxy")


def _of_endpoint(world: _World, name: str, before: Any, after: Record | None) -> Iterator[Event]:
    # The endpoint of a deployment is created and removed with it.
    if not getattr(after or before, "is_legacy", True) and (before is None or after is None):
        return
    what, by = f"endpoint '{short_tag(name)}'", world.causes.get(WHOLE, "")
    fields = {"traffic": f"The traffic of {what} goes", "shadows": f"Copies for {what} go"}
    for name_of_field, text in fields.items():
        old, new = dict(getattr(before, name_of_field, {})), dict(getattr(after, name_of_field, {}))
        if old != new:
            shares = ", ".join(f"{short_tag(tag)} {share:.0%}" for tag, share in new.items()) or "none"
            yield Event(K.TRAFFIC_SET, f"{text} to {shares}", world.application(name), subject=name, by=by)


def _of_capacity(world: _World, __: str, before: Any, after: Record | None) -> Iterator[Event]:
    percent = after.percent if isinstance(after, CapacityRecord) else None
    if percent == getattr(before, "percent", None):
        return
    text = "100% of all replicas" if percent is None else f"{shown(percent)}%"
    yield Event(K.TARGET_CAPACITY_SET, f"The target capacity is {text}", by=world.causes.get(WHOLE, ""))


def _of_models(world: _World, name: str, before: Any, after: Record | None) -> Iterator[Event]:
    old = {} if before is None else before.models
    new = after.models if isinstance(after, ModelsRecord) else {}
    for model in sorted({*old, *new}):
        was, now = old.get(model, {}), new.get(model, {})
        for version in newest_last({*was, *now}):
            entry, former = now.get(version, {}), was.get(version, {}).get("state")
            state, what = entry.get("state"), f"Version {version} of model '{model}'"
            application = world.application(name)
            if state == former:
                continue
            by = entry.get("by", "")
            if state == ModelState.READY and former != ModelState.ROLLING_OUT:
                yield Event(K.MODEL_LOADED, f"{what} is loaded", application, name, by=by)
            elif state == ModelState.FAILED:
                text = f"{what} could not be loaded: {entry['reason']}"
                yield Event(K.MODEL_FAILED, text, application, name, by=by)
            elif state is None and former == ModelState.READY:
                by = world.causes.get(WHOLE, "")
                yield Event(K.MODEL_UNLOADED, f"{what} is unloaded", application, name, by=by)
    if isinstance(after, ModelsRecord) and before is not None:
        yield from _of_defaults(world, name, before, after)
    yield from _of_model_rollouts(world, name, before, after)


def _of_defaults(world: _World, name: str, before: ModelsRecord, after: ModelsRecord) -> Iterator[Event]:
    """Yield the events of versions that a call has set as default, without those that became default by
    loading."""
    for model, version in after.defaults.items():
        former = before.models.get(model, {}).get(version, {}).get("state")
        if former == ModelState.READY and before.defaults.get(model) != version:
            text = f"Version {version} is the default of model '{model}'"
            by = world.causes.get(WHOLE, "")
            yield Event(K.MODEL_DEFAULT_SET, text, world.application(name), name, by=by)


def _of_model_rollouts(world: _World, name: str, before: Any, after: Record | None) -> Iterator[Event]:
    backend = world.state.backends.get(name)
    if backend is None or not isinstance(after, ModelsRecord):
        return
    repository = backend.config.model_repository
    plan = None if repository is None else repository.rollout
    for model, plain in after.rollouts.items():
        rollout = RolloutState.from_plain(plain)
        known = None if before is None else before.rollouts.get(model)
        if rollout.phase is RolloutPhase.STARTING:
            continue  # all replicas already have the version
        if known is None or RolloutState.from_plain(known).mark != rollout.mark:
            text = f"Rollout of model '{model}' of {backend.display_name}, {_phase_of(plan, rollout)}"
            yield Event(_OF_PHASES[rollout.phase], text, backend.application, name)


EventWriter = Callable[[_World, str, Any, "Record | None"], Iterator[Event]]
#: For each kind of record: a function that finds the record before the change, and one that yields the
#: events.
_EVENTS_BY_KIND: Mapping[str, tuple[Callable[[State, str], Record | None], EventWriter]] = {
    "revision": (lambda state, name: state.revisions.get(name), _of_revision),
    "goal": (lambda state, name: state.goals.get(name), _of_goal),
    "backend": (lambda state, name: state.backends.get(name), _of_backend),
    "replica": (lambda state, name: state.replicas.get(name), _of_replica),
    "proxy": (lambda state, name: state.proxies.get(name), _of_proxy),
    "endpoint": (lambda state, name: state.endpoints.get(name), _of_endpoint),
    "config": (lambda state, name: state.declared.configs.get(name), _of_config),
    "capacity": (lambda state, _: state.capacity, _of_capacity),
    "models": (lambda state, name: state.models.get(name), _of_models),
}
