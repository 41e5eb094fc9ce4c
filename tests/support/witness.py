"""A witness that checks every change in the store at the time of its commit.

A `Witness` keeps the records and the wanted state that they describe. It compares each change with the calls
in progress: a change of the wanted state needs one of them, and the verbs of `reference_model` must lead
there. It compares each answer with the changes: acknowledged changes must be in the store. It collects
errors in `violations`, because it is called from inside the code that it checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reference_model import Wanted, after, backend_of, capacity_of, endpoint_of
from simulated_cluster import BEGAN_AT

from daskserve.common.types import ReplicaState
from daskserve.control.observed.lifecycle import PLACED_STATES, WANTED_STATES
from daskserve.control.placement.placement import demand_of
from daskserve.control.records.bundles import places_of
from daskserve.control.records.config_ids import UNKNOWN_CONFIG, is_pausing
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    CapacityRecord,
    CodeRecord,
    EndpointRecord,
    GoalRecord,
    GoalState,
    Record,
    ReplicaRecord,
)
from daskserve.control.records.storing.encoding import decode
from daskserve.control.scaling.recorded import autoscaling_of, bounds_of
from daskserve.errors import BadRequestError, NotFoundError
from daskserve.payload.packed_errors import load_error

#: The states of a replica, in the only allowed order.
ORDER = (
    ReplicaState.SHOULD_START,
    ReplicaState.STARTING,
    ReplicaState.RUNNING,
    ReplicaState.SHOULD_STOP,
    ReplicaState.STOPPING,
)
#: Errors that guarantee that a call changed nothing.
REFUSALS = (BadRequestError, NotFoundError)


@dataclass(eq=False)
class Call:
    """One call of a changing verb; ``begun`` is the index in the history at that time."""

    verb: str
    message: Mapping[str, Any]
    begun: int
    begun_at: float
    effects: int = 0
    #: Index in the history of the first effect, or of the start of the call.
    effect_at: int = 0
    #: Whether the call goes to a controller that may have been replaced.
    is_to_old: bool = False
    answer: Mapping[str, Any] | None = None
    error: BaseException | None = None
    task: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"{self.verb}({', '.join(f'{name}={value!r}' for name, value in self.message.items())})"


@dataclass
class _Goal:
    limit_s: float | None
    opened_at: float


@dataclass
class Witness:
    """See the module.

    Attributes
    ----------
    now
        Reads the time.
    is_excused
        Whether a wanted replica may leave service because of a fault.
    is_serving
        Whether a replica that is recorded as running does run.
    blamed_at
        Time of the last scripted fault of a backend's replicas; None if there was none.
    has_at
        Returns the amounts of a worker's resources.
    """

    now: Callable[[], float]
    is_excused: Callable[[ReplicaRecord], bool]
    is_serving: Callable[[ReplicaRecord], bool]
    blamed_at: Callable[[str], float | None]
    has_at: Callable[[str], Mapping[str, float]]
    violations: list[str] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)
    history: list[Wanted] = field(default_factory=lambda: [Wanted()])
    #: Calls that may still have an effect, including failed ones.
    open_calls: list[Call] = field(default_factory=list)
    #: The state to which each backend with a pending goal rolls back; None if it is deleted.
    fallbacks: dict[str, Any] = field(default_factory=dict)
    goals: dict[str, _Goal] = field(default_factory=dict)
    #: When a replica of each backend last moved.
    moved_at: dict[str, float] = field(default_factory=dict)
    ever_running: set[str] = field(default_factory=set)
    incarnations: dict[int, str] = field(default_factory=dict)
    epoch: int = 0
    #: When an autoscaler last changed a number, or had a reason to.
    scaled_at: float = float("-inf")
    #: The ids of the calls that clients have withdrawn.
    withdrawn: set[str] = field(default_factory=set)
    _pending: set[str] = field(default_factory=set)

    @property
    def wanted(self) -> Wanted:
        """The wanted state in the store."""
        return self.history[-1]

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the records of a kind."""
        return [each for each in self.records.values() if isinstance(each, kind)]

    def unsettled(self) -> Iterator[str]:
        """Yield the problems at rest, other than those of replicas, actors and updates."""
        yield from ()

    def is_deleting(self, goal: GoalRecord) -> bool:
        """Return whether a goal belongs to a deletion, which has no deadline."""
        return self.wanted.live(goal.backend) is None

    def backend(self, tag: str) -> BackendRecord | None:
        found = self.records.get(f"backend/{tag}")
        return found if isinstance(found, BackendRecord) else None

    def replicas(self, tag: str) -> list[ReplicaRecord]:
        return [each for each in self.of(ReplicaRecord) if each.backend == tag]

    def report(self, text: str) -> None:
        self.violations.append(f"at {self.now():.3f} s: {text}")

    # Calls

    def begin(self, verb: str, message: Mapping[str, Any]) -> Call:
        begun = len(self.history) - 1
        call = Call(verb, message, begun, self.now(), effect_at=begun)
        self.open_calls.append(call)
        self.withdrawn.update(message.get("requests", ()))
        return call

    def acknowledged(self, call: Call, answer: Mapping[str, Any]) -> None:
        """Check that the requested change is, or already was, in the store."""
        call.answer = answer
        self.open_calls.remove(call)
        seen = self.history[call.begun :]
        if not call.effects and not any(after(call.verb, call.message, each) == each for each in seen):
            self.report(f"{call} was acknowledged, but is not in the store: {self.wanted}")
        goal = answer.get("goal")
        if goal is not None and goal not in self.goals:
            self.report(f"{call} was answered with goal {goal}, which is not in the store")
        if goal is None and call.verb in ("delete_backend", "delete_deployment"):
            tag = call.message.get("tag", call.message.get("name"))
            if all(tag in each.backends for each in seen):
                self.report(f"{call} returned without a goal, but the backend still exists")

    def failed(self, call: Call, error: BaseException) -> None:
        """Check a failed call; it may still have an effect, unless the request was refused."""
        call.error = error
        if not isinstance(error, REFUSALS):
            return
        self.open_calls.remove(call)
        seen = self.history[call.begun :]
        if not any(after(call.verb, call.message, each) is None for each in seen):
            self.report(f"{call} was refused without a reason ({error!r}): {self.wanted}")

    # Changes

    def committed(self, epoch: int, newest_epoch: int, change: Mapping[str, bytes | None]) -> None:
        if epoch < newest_epoch or epoch < self.epoch:
            self.report(f"the store accepted a change of epoch {epoch}, the newest is {newest_epoch}")
        if epoch != self.epoch and any(each.scaled_to is not None for each in self.of(BackendRecord)):
            self.scaled_at = self.now()  # a new controller restarts all delays
        self.epoch = epoch
        before = dict(self.records)
        changed = {key: None if data is None else decode(key, data) for key, data in change.items()}
        for key, record in changed.items():
            if record is None:
                self.records.pop(key, None)
            else:
                self.records[key] = record
        for key, record in changed.items():
            old = before.get(key)
            if isinstance(record, BackendRecord):
                self._check_scaling(old, record)
            if isinstance(old, ReplicaRecord) or isinstance(record, ReplicaRecord):
                self.moved_at[key.removeprefix("replica/").partition("#")[0]] = self.now()
                self._check_replica(old, record)
            elif isinstance(old, GoalRecord) or isinstance(record, GoalRecord):
                self._check_goal(old, record)
        self._check_wanted(before, changed)
        self._check_availability(before, changed)
        self._check_pauses(before, changed)
        self._check_references(changed)
        self._check_ranks(changed)
        self._check_gangs(changed)
        self._check_room(before, changed)

    def _check_scaling(self, old: Any, new: BackendRecord) -> None:
        """Check that the autoscaler respects its bounds, loses nothing, and records its reasons."""
        config = autoscaling_of(new)
        if config is None:
            return
        if new.scaled_to is None or not bounds_of(new, config).allows(new.scaled_to):
            self.report(f"{new} is out of its bounds")
        if old is None or _scaling(old) != _scaling(new):
            self.scaled_at = self.now()
        if old is None or old.scaled_to is None or old.is_deleting:
            return
        if new.scaled_to != old.scaled_to:
            last = new.scalings[-1] if new.scalings else (0.0, -1, -1, "")
            if last[1:3] != (old.scaled_to, new.scaled_to) or not last[3]:
                self.report(f"{new.tag} went from {old.scaled_to} to {new.scaled_to}, and says {last}")
        elif new.scalings != old.scalings:
            self.report(f"{new.tag} stays at {new.scaled_to}, and says {new.scalings}, it was {old.scalings}")

    def _check_replica(self, old: Any, new: Any) -> None:
        if new is None:
            return
        assert isinstance(new, ReplicaRecord)
        if new.state is ReplicaState.RUNNING:
            self.ever_running.add(new.tag)
            if (old is None or old.state is not ReplicaState.RUNNING) and not self.is_serving(new):
                self.report(f"{new} is recorded as running, but does not run")
        if old is not None and ORDER.index(new.state) < ORDER.index(old.state):
            self.report(f"replica {new.tag} went back from {old.state} to {new.state}")
        if old is not None and old.worker is not None:
            if (old.worker, old.incarnation) != (new.worker, new.incarnation):
                self.report(f"replica {new.tag} moved from {old} to {new}")
        elif new.worker is not None:
            owner = self.incarnations.setdefault(new.incarnation, new.tag)
            if owner != new.tag:
                self.report(f"{new.tag} and {owner} have one incarnation, {new.incarnation}")
        if (old is None or old.state is ReplicaState.SHOULD_START) and new.state not in ORDER[:2]:
            self.report(f"replica {new.tag} began as {new.state}: its start was not written ahead")

    def _check_goal(self, old: Any, new: Any) -> None:
        if new is None:
            if old is not None and old.state is GoalState.PENDING:
                self.report(f"the pending {old} was dropped")
            return
        if old is None:
            # A controller that takes a change over counts from the request, which came before this commit.
            requested_at = new.opened_at - BEGAN_AT if new.opened_at else self.now()
            self.goals[new.goal_id] = _Goal(new.limit_s, requested_at)
        elif old.state is not GoalState.PENDING and new.state is not old.state:
            self.report(f"{old} had ended and became {new.state}")
        if new.state is GoalState.DONE and (old is None or old.state is GoalState.PENDING):
            self._check_done(new)

    def _check_done(self, goal: GoalRecord) -> None:
        backend = self.backend(goal.backend)
        if goal.error is not None or (backend is not None and backend.goal is not None):
            return  # superseded
        replicas = self.replicas(goal.backend)
        if backend is None:
            if replicas:
                self.report(f"{goal.backend} is gone and has {replicas}")
            return
        wanted = [each for each in replicas if each.version == backend.version]
        running = [
            each
            for each in wanted
            if each.state is ReplicaState.RUNNING and each.config_id == backend.config_id
        ]
        if backend.scaled_to is None:
            is_there = len(running) == len(replicas) == backend.num_replicas
        else:
            # It may be scaling up or down.
            is_there = len(wanted) == len(replicas) and len(running) >= backend.needed_replicas
        if not is_there:
            self.report(f"goal {goal.goal_id} of {goal.backend} is done, and it has {replicas}")

    def _check_wanted(self, records: Mapping[str, Record], changed: Mapping[str, Record | None]) -> None:
        """Check that a call requested this change of the wanted state."""
        before = new = self.wanted
        for key, record in changed.items():
            kind, _, name = key.partition("/")
            if kind == "backend":
                new = new.with_backend(
                    name, backend_of(record) if isinstance(record, BackendRecord) else None
                )
            elif kind == "capacity":
                new = replace(
                    new, capacity=capacity_of(record if isinstance(record, CapacityRecord) else None)
                )
            elif kind == "endpoint":
                new = new.with_endpoint(
                    name, endpoint_of(record) if isinstance(record, EndpointRecord) else None
                )
        failed = [
            each.backend
            for each in changed.values()
            if isinstance(each, GoalRecord) and each.state is GoalState.FAILED
        ]
        opened = [
            each
            for key, each in changed.items()
            if isinstance(each, GoalRecord) and each.state is GoalState.PENDING and key not in records
        ]
        if new != before:
            self.history.append(new)
        if failed:
            self._check_withdrawn(failed[0], before, new)
            return
        if new == before:
            if opened:
                self.report(f"nothing changed, and a goal was opened: {opened}")
            self._record_goals()
            return
        for call in self.open_calls:
            if after(call.verb, call.message, before) == new:
                if not call.effects:
                    call.effect_at = len(self.history) - 1
                call.effects += 1
                self._record_fallback(before, new)
                self._record_goals()
                return
        gone = [tag for tag in before.backends if tag not in new.backends]
        if len(gone) == 1 and before.with_backend(gone[0], None) == new and before.live(gone[0]) is None:
            self._record_goals()
            return
        self.report(f"no call requested {changed}; open are {self.open_calls}, wanted was {before}")

    def _record_goals(self) -> None:
        self._pending = {each.goal_id for each in self.of(GoalRecord) if each.state is GoalState.PENDING}
        busy = {each.backend for each in self.of(GoalRecord) if each.state is GoalState.PENDING}
        for tag in set(self.fallbacks) - busy:
            del self.fallbacks[tag]

    def _record_fallback(self, before: Wanted, new: Wanted) -> None:
        for tag, backend in new.backends.items():
            current = before.backends.get(tag)
            if backend == current:
                continue
            fallback = self.fallbacks.get(tag, (current, before.endpoints.get(tag)))
            is_leaving = current is not None and current.is_deleting
            self.fallbacks[tag] = (None, None) if is_leaving else fallback

    def _check_withdrawn(self, tag: str, before: Wanted, new: Wanted) -> None:
        """Check that a failed goal was rolled back to the last completed state, and failed for a reason."""
        fallback, old_endpoint = self.fallbacks.get(tag, (None, None))
        backend, endpoint = before.backends[tag], before.endpoints.get(tag)
        if fallback is not None:
            expected = before.with_backend(tag, fallback)
            if backend.is_deployment and _may_return(before, tag, endpoint, old_endpoint):
                expected = expected.with_endpoint(tag, replace(endpoint, route=old_endpoint.route))
            allowed = [expected]
        else:
            expected = before
            if backend.is_deployment and endpoint is not None and not endpoint.is_legacy:
                expected = expected.with_endpoint(tag, None)
            leaving = replace(backend, is_deleting=True, is_forced=True)
            allowed = [expected.with_backend(tag, leaving), expected.with_backend(tag, None)]
        if new not in allowed:
            self.report(f"the goal of {tag} failed and left {new}; it should be one of {allowed}")
        for goal in self.of(GoalRecord):
            if goal.goal_id in self._pending and goal.state is not GoalState.PENDING:
                self._check_reason(goal, [tag])
        self._record_goals()

    def _check_reason(self, goal: GoalRecord, tags: Iterable[str]) -> None:
        """Check that a change that failed was late, or that its replicas failed or were lost."""
        opened = self.goals[goal.goal_id]
        age_s = self.now() - opened.opened_at
        if goal.request_id in self.withdrawn:
            return
        is_late = opened.limit_s is not None and age_s >= opened.limit_s - 0.001
        has_lost = goal.error is not None and "was lost before" in str(load_error(goal.error))
        if not is_late and not has_lost and all(self.blamed_at(each) is None for each in tags):
            self.report(f"{goal} failed after {age_s:g} s for no reason")

    def _check_pauses(self, before: Mapping[str, Record], changed: Mapping[str, Record | None]) -> None:
        """Check that no more replicas are reconfigured at a time than may be missing, or one."""
        begun = {
            record.backend
            for key, record in changed.items()
            if isinstance(record, ReplicaRecord)
            and record.state is ReplicaState.RUNNING
            and record.config_id == UNKNOWN_CONFIG
            and isinstance(old := before.get(key), ReplicaRecord)
            and old.state is ReplicaState.RUNNING
            and old.config_id != UNKNOWN_CONFIG
        }
        for tag in begun:
            backend = self.backend(tag)
            if backend is None:
                continue
            pausing = [
                each
                for each in self.replicas(tag)
                if each.state is ReplicaState.RUNNING and is_pausing(backend, each)
            ]
            limit = max(1, backend.config.unavailable(backend.num_replicas // backend.gang_size))
            if len(pausing) > limit * backend.gang_size:
                self.report(f"of {tag}, {pausing} are reconfigured at a time, {limit} may be")

    def _check_availability(self, before: Mapping[str, Record], changed: Mapping[str, Record | None]) -> None:
        """Check that replicas left service only if others replace them, make room for others, or failed."""
        leaving: dict[str, list[ReplicaRecord]] = {}
        others: set[str] = set()
        for key, record in changed.items():
            old = before.get(key)
            if not isinstance(old, ReplicaRecord) or old.state not in WANTED_STATES:
                continue
            new = record if isinstance(record, ReplicaRecord) else None
            if new is not None and new.state in WANTED_STATES:
                continue
            if old.state is not ReplicaState.RUNNING:
                if new is not None and "started" in new.events:
                    others.add(old.tag)  # it has just started, and is stopped at once
            elif self._is_excused(old, before):
                others.add(old.tag)
            else:
                leaving.setdefault(old.backend, []).append(old)
        for tag, replicas in leaving.items():
            backend = self.backend(tag)
            if backend is None or backend.is_deleting:
                continue
            serving = [each for each in self.replicas(tag) if each.state is ReplicaState.RUNNING]
            needed = backend.num_replicas
            if all(each.version != backend.version for each in replicas):
                needed -= backend.config.unavailable(needed // backend.gang_size) * backend.gang_size
            if len(serving) < needed and not self._makes_room(backend, replicas, others):
                self.report(
                    f"{replicas} left for no reason; {backend.num_replicas} are wanted, {serving} stay"
                )

    def _is_excused(self, replica: ReplicaRecord, before: Mapping[str, Record]) -> bool:
        """Return whether a replica, or another one of its gang, may leave service because of a fault."""
        gang = [before.get(f"replica/{tag}") for tag in replica.gang]
        return self.is_excused(replica) or any(
            isinstance(each, ReplicaRecord) and self.is_excused(each) for each in gang
        )

    def _check_gangs(self, changed: Mapping[str, Record | None]) -> None:
        """Check that gangs are complete: all of their replicas have workers, or none has."""
        for tag in {each.backend for each in changed.values() if isinstance(each, ReplicaRecord)}:
            live = {each.tag: each for each in self.replicas(tag) if each.state in WANTED_STATES}
            for each in live.values():
                mates = [live.get(mate) for mate in each.gang]
                if None in mates or len({mate.worker is None for mate in mates if mate}) > 1:
                    self.report(f"the gang of {each} is not whole: {mates}")

    def _check_room(self, before: Mapping[str, Record], changed: Mapping[str, Record | None]) -> None:
        """Check that replicas are placed with all of their bundles, and only where these have room."""
        placed = [
            each
            for key, each in changed.items()
            if isinstance(each, ReplicaRecord)
            and each.worker is not None
            and getattr(before.get(key), "worker", None) is None
        ]
        for each in placed:
            backend = self.backend(each.backend)
            if backend is not None and each.version == backend.version and each.bundles != backend.bundles:
                self.report(f"{each} does not have the bundles of {backend}")
        used: dict[str, dict[str, float]] = {worker: {} for each in placed for worker, _ in places_of(each)}
        for each in self.of(ReplicaRecord):
            for worker, amounts in places_of(each):
                for name, amount in amounts.items() if worker in used else ():
                    used[worker][name] = used[worker].get(name, 0) + amount
        for worker, amounts in used.items():
            has = self.has_at(worker)
            # A worker that has just left has nothing.
            if has and any(amount > has.get(name, 0) + 1e-6 for name, amount in amounts.items()):
                self.report(f"worker {worker} has {has}, and {amounts} are taken by {placed} and others")

    def _makes_room(self, backend: BackendRecord, leaving: list[ReplicaRecord], together: set[str]) -> bool:
        """Return whether old replicas leave to make room for a new one, and no others are missing.

        Several may leave only on one worker, if a new one needs the room of all of them, or for a gang or a
        placement group. The replicas in ``together`` leave in the same change, for other reasons.
        """
        tags = together.union(tag for each in leaving for tag in (each.tag, *each.gang))
        others = [each for each in self.replicas(backend.tag) if each.tag not in tags]
        news = [each for each in others if each.version == backend.version]
        return (
            all(each.version != backend.version for each in leaving)
            and (
                any(
                    len(each) > 1
                    for each in (demand_of(backend).bundles, leaving[0].gang, leaving[0].bundles)
                )
                or self._are_needed(backend, leaving)
            )
            and (bool(news) or backend.config.max_surge == 0)
            and all(each.state in (ReplicaState.SHOULD_START, ReplicaState.RUNNING) for each in others)
        )

    @staticmethod
    def _are_needed(backend: BackendRecord, leaving: list[ReplicaRecord]) -> bool:
        rests = [[other for other in leaving if other is not each] for each in leaving]
        return len({each.worker for each in leaving}) == 1 and all(
            _needs_more(backend, rest) for rest in rests
        )

    def _check_ranks(self, changed: Mapping[str, Record | None]) -> None:
        """Check that the replicas that serve, or will serve, have different ranks."""
        for tag in {each.backend for each in changed.values() if isinstance(each, ReplicaRecord)}:
            placed = [each for each in self.replicas(tag) if each.state in PLACED_STATES]
            ranks = [each.rank[:1] for each in placed]
            if len(set(ranks)) != len(ranks) or () in ranks:
                self.report(f"ranks are missing or taken twice: {placed}")

    def _check_references(self, changed: Mapping[str, Record | None]) -> None:
        goals = {each.goal_id: each for each in self.of(GoalRecord)}
        backends = {each.tag: each for each in self.of(BackendRecord)}
        capacity = self.wanted.capacity
        for backend in backends.values():
            if (backend.capacity, backend.capacity_direction) != (capacity.percent, capacity.direction):
                self.report(f"{backend} does not have the capacity of the instance, {capacity}")
        apps = {each.name: each for each in self.of(AppRecord)}
        for goal in goals.values():
            owner = apps.get(goal.application) if goal.application else backends.get(goal.backend)
            if goal.state is GoalState.PENDING and (owner is None or owner.goal != goal.goal_id):
                self.report(f"nothing works on goal {goal}")
        codes = {each.name for each in self.of(CodeRecord)}
        for backend in backends.values():
            if backend.goal is not None and (
                backend.goal not in goals or goals[backend.goal].state is not GoalState.PENDING
            ):
                self.report(f"backend {backend.tag} waits for goal {backend.goal}, which ended")
            if backend.code_key not in codes:
                self.report(f"backend {backend.tag} has no code {backend.code_key}")
        routes = [each.route for each in self.of(EndpointRecord) if each.route is not None]
        if len(routes) != len(set(routes)):
            self.report(f"a route is taken twice: {routes}")
        for replica in self.of(ReplicaRecord):
            if replica.backend not in backends:
                self.report(f"{replica} belongs to nothing")


def _may_return(wanted: Wanted, tag: str, endpoint: Any, old: Any) -> bool:
    """Return whether a deployment's endpoint can return to its former route."""
    if endpoint is None or old is None or endpoint.is_legacy or old.is_legacy:
        return False
    others = [each.route for name, each in wanted.endpoints.items() if name != tag]
    return old.route is None or old.route not in others


def _scaling(backend: BackendRecord) -> tuple[Any, ...]:
    """Return the fields that determine an autoscaled number."""
    return backend.scaled_to, backend.autoscaling, backend.capacity, backend.capacity_direction


def listing(items: Iterable[Any]) -> str:
    """Return the items as lines of an error message."""
    return "".join(f"\n  {each}" for each in items)


def _needs_more(backend: BackendRecord, replicas: list[ReplicaRecord]) -> bool:
    """Return whether a new replica of a backend needs more than these replicas occupy."""
    return any(
        amount > sum(each.demand.get(name, 0.0) for each in replicas)
        for name, amount in backend.actor_options.demand().items()
        if amount
    )
