"""One backend: computes the next changes and actions from the target and the observed state. Pure.

The loop calls `step` whenever something about a backend may have changed. It reads levels, never events, so
it can run at any time and any number of times. A new controller that has observed nothing yet gets the
actions with which it observes the cluster. `step` does not change its arguments: it returns what it learnt as
`Notes`, which apply once the change is in the store.
"""

from __future__ import annotations

import hashlib
import itertools
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from daskserve.amounts import shown
from daskserve.control import endpoint_state, goals
from daskserve.control.backend_verbs import configured
from daskserve.control.observed import Notes, Observed
from daskserve.control.placement import Demand, Trial, demand_of, explain, place, room_for
from daskserve.control.records import BackendRecord, Change, GoalRecord, GoalState, ReplicaRecord, from_plain
from daskserve.control.replica_actions import Action, ReconfigureReplica, StartReplica, StopReplica
from daskserve.control.replica_lifecycle import PLACED_STATES, ReplicaEvent, move
from daskserve.control.rollout import Burdens, next_steps, replica_to_drain
from daskserve.control.scaled import autoscaling_of, bounds_of, scaled, taken_back
from daskserve.control.state import State
from daskserve.errors import DeployError, NoCapacityError, RequestTimeoutError, ServeError
from daskserve.types import ReplicaState, ReplicaTag, WorkerAddress, WorkerInfo

#: The config id of a replica that has not yet answered a reconfiguration: it may run with either config.
UNKNOWN_CONFIG = ""
#: Number of consecutive constructor failures after which a goal fails.
MAX_FAILURES = 3
#: Delay before the next replica of a backend whose replicas fail without a goal; doubles up to the maximum.
START_RETRY_S, MAX_START_RETRY_S = 0.5, 30.0
#: How long a rollout without room waits for another worker of an adaptive cluster before it drains a replica.
NEW_WORKER_S = 20.0
#: Number of replicas that a proxy or the controller counts for when workers are compared for emptying.
KEPT_WORKER = 1_000_000


@dataclass(slots=True)
class Step:
    """The change to write, the notes to apply once it is written, and the actions that follow.

    Attributes
    ----------
    wake_at : float or None
        When the next step is due even if nothing happens.
    incarnation : int
        The last incarnation number in use, including those of this step.
    """

    change: Change = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    actions: list[Action] = field(default_factory=list)
    wake_at: float | None = None
    incarnation: int = 0

    def wake(self, at: float) -> None:
        """Schedule another step at that time at the latest."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


@dataclass(frozen=True, slots=True)
class World:
    """The inputs of a step other than the backend.

    Attributes
    ----------
    seed : int
        Seed for the names of new replicas.
    incarnation : int
        The last incarnation number in use.
    wall : float
        Seconds since the epoch, for people to read.
    """

    state: State
    observed: Observed
    now: float
    seed: int
    incarnation: int
    avoid: Collection[WorkerAddress] = ()
    wall: float = 0.0


def replica_tag(backend: str, seed: int, number: int) -> str:
    """Return a new replica's tag: ``backend#`` and six letters, as the classic system names them."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=6).digest()
    letters = "".join(string.ascii_letters[byte % len(string.ascii_letters)] for byte in digest)
    return f"{backend}#{letters}"


def grace_of(backend: BackendRecord, replica: ReplicaRecord) -> float:
    """Return how long a replica may finish its requests, in seconds."""
    if backend.is_forced or replica.is_forced:
        return 0.0
    return backend.config.experimental_graceful_shutdown_timeout_s


class _Stepper:
    """Working memory of one step of one backend."""

    def __init__(self, world: World, backend: BackendRecord) -> None:
        self.world = world
        self.backend = backend
        self.notes = world.observed.notes(backend.tag)
        self.step = Step(notes=self.notes, incarnation=world.incarnation)
        self.replicas = {each.tag: each for each in world.state.replicas_of(backend.tag)}

    def set_replica(self, tag: str, record: ReplicaRecord | None) -> None:
        self.step.change[f"replica/{tag}"] = record
        if record is None:
            del self.replicas[tag]
        else:
            self.replicas[tag] = record

    @property
    def goal(self) -> GoalRecord | None:
        if self.backend.goal is None:
            return None
        changed = self.step.change.get(f"goal/{self.backend.goal}")
        if isinstance(changed, GoalRecord):
            return changed
        return self.world.state.goals.get(self.backend.goal)

    def set_backend(self, backend: BackendRecord) -> None:
        self.backend = backend
        self.step.change[backend.key] = backend

    # 1. process observations

    def take_in(self) -> None:
        observed = self.world.observed
        for replica in list(self.replicas.values()):
            event = observed.event_of(replica)
            if event is None:
                self.take_in_config(replica)
                continue
            forced = {"is_forced": True} if event is ReplicaEvent.UNWANTED else {}
            self.set_replica(replica.tag, move(replica, event, **forced))
            if event is ReplicaEvent.STARTED:
                self.note_start()
                learnt = _with_facts(self.backend, replica, observed.ready[replica.tag])
                if learnt is not self.backend:
                    self.set_backend(learnt)
            elif event is ReplicaEvent.FAILED and replica.state is ReplicaState.STARTING:
                self.note_failure(replica, observed.failed[replica.tag])

    def take_in_config(self, replica: ReplicaRecord) -> None:
        """Process the answer to a reconfiguration."""
        observed, tag = self.world.observed, replica.tag
        error = observed.reconfigure_failed.get(tag)
        if error is not None and replica.state is ReplicaState.RUNNING:
            self.notes.reconfigure_failed[tag] = error
            if not self.fail_goal(_start_error(self.backend.tag, error)):
                # No caller waits for the error, and retries would never end: replace the replica.
                self.give_up(replica)
        elif tag in observed.configured:
            config_id = self.notes.configured[tag] = observed.configured[tag]
            if config_id != replica.config_id:
                self.set_replica(tag, replace(replica, config_id=config_id))

    def note_start(self) -> None:
        goal = self.goal
        if goal is not None and goal.failures:
            self.step.change[goal.key] = replace(goal, failures=0)
        self.notes.failures, self.notes.retry_at = 0, None

    def note_failure(self, replica: ReplicaRecord, error: BaseException) -> None:
        if self.backend.is_deleting or replica.version != self.backend.version:
            return  # the failed config is not the current one
        goal, notes = self.goal, self.notes
        if goal is not None and goal.state is GoalState.PENDING:
            goal = replace(goal, failures=goal.failures + 1)
            self.step.change[goal.key] = goal
            if goal.failures >= MAX_FAILURES:
                self.fail_goal(_start_error(self.backend.tag, error))
            return
        notes.failures += 1
        pause_s = min(MAX_START_RETRY_S, START_RETRY_S * 2 ** (notes.failures - 1))
        notes.retry_at = self.world.now + pause_s
        notes.waiting = f"a replica failed to start, trying again in {shown(pause_s)} s: {error}"

    def scale(self) -> None:
        """Set the target number to the autoscaler's decision, within the current bounds."""
        decided = self.world.observed.scalings.get(self.backend.tag)
        config = autoscaling_of(self.backend)
        if decided is None or config is None or not decided.is_for(self.backend):
            return
        replicas = bounds_of(self.backend, config).nearest(decided.replicas)
        if replicas != self.backend.scaled_to:
            self.set_backend(scaled(self.backend, replicas, decided.reason, self.world.wall))

    # 2. fail a goal after too many failures or its timeout

    def fail_goal(self, error: ServeError) -> bool:
        """Roll back the pending spec; return False without one, or during a deletion, which cannot fail."""
        goal = self.goal
        if goal is None or goal.state is not GoalState.PENDING or self.backend.is_deleting:
            return False
        self.step.change[goal.key] = goals.finish(goal, error)
        if goal.previous is None:
            # The change created the backend, so remove all of it.
            endpoint = self.world.state.endpoints.get(self.backend.tag)
            if self.backend.is_deployment and endpoint is not None and not endpoint.is_legacy:
                self.step.change[endpoint.key] = None
            self.set_backend(replace(self.backend, is_deleting=True, is_forced=True, goal=None))
        else:
            previous: BackendRecord = from_plain("backend", goal.previous)
            text = f"{error}\n{getattr(error, 'user_traceback', '')}".strip()
            previous = replace(previous, goal=None, last_error=text)
            self.set_backend(taken_back(previous, self.backend, self.world.wall))
            if goal.previous_endpoint is not None:
                before = from_plain("endpoint", goal.previous_endpoint)
                self.step.change.update(endpoint_state.routed_as_before(self.world.state, before))
        return True

    def check_deadline(self) -> None:
        goal = self.goal
        if goal is None or goal.state is not GoalState.PENDING:
            return
        if goal.timeout_s is None or self.backend.is_deleting:
            return
        deadline = self.world.observed.deadlines.get(goal.goal_id)
        if deadline is None:
            deadline = self.notes.deadlines[goal.goal_id] = self.world.now + goal.timeout_s
            # A new goal starts immediately, even if the previous one failed often.
            self.notes.failures, self.notes.retry_at = 0, None
        if self.world.now < deadline:
            self.step.wake(deadline)
            return
        why, tag, wanted = self.notes.waiting, self.backend.tag, self.backend.needed_replicas
        limit = f"{shown(goal.timeout_s)} s"
        if why is not None:
            self.fail_goal(
                NoCapacityError(
                    f"Cannot scale backend '{tag}' to {wanted} replicas within {limit}: {why}. "
                    "Add workers, reduce the resources in actor_options, or delete other backends."
                )
            )
        else:
            self.fail_goal(
                RequestTimeoutError(
                    f"Backend '{tag}' did not get to {wanted} running replicas within {limit}; "
                    "its constructor may need longer: pass a larger timeout_s."
                )
            )

    # 3. close the gap

    def close_gap(self) -> None:
        surge, burdens = self.surge(), self.burdens()
        steps = next_steps(
            self.backend.num_replicas,
            self.backend.version,
            list(self.replicas.values()),
            max_surge=surge,
            leaving=self.world.observed.retiring(),
            burdens=burdens,
        )
        for replica in steps.stop:
            self.give_up(replica)
        if self.notes.retry_at is not None and self.notes.is_pausing(self.world.now):
            self.step.wake(self.notes.retry_at)
        else:
            for _ in range(steps.start):
                self.begin()
        self.place_waiting()
        self.drain_first(surge, burdens.ongoing)

    def burdens(self) -> Burdens:
        state, observed = self.world.state, self.world.observed

        def others(worker: WorkerAddress) -> int:
            # Actors that cannot move, or not without a visible effect, keep their worker in any case.
            fixed = KEPT_WORKER if worker in self.world.avoid else 0
            return fixed + state.count_on(worker) - state.count_on(worker, self.backend.tag)

        ongoing = observed.loads.ongoing(self.replicas, self.world.now)
        return Burdens(ongoing, others, empties_workers=observed.is_adaptive)

    def give_up(self, replica: ReplicaRecord) -> None:
        if replica.state is ReplicaState.SHOULD_START:
            self.set_replica(replica.tag, move(replica, ReplicaEvent.WITHDRAWN))
        else:
            self.set_replica(
                replica.tag, move(replica, ReplicaEvent.UNWANTED, is_forced=self.backend.is_forced)
            )

    def begin(self) -> None:
        tags = (replica_tag(self.backend.tag, self.world.seed, number) for number in itertools.count())
        tag = next(tag for tag in tags if tag not in self.world.state.replicas and tag not in self.replicas)
        record = ReplicaRecord(
            tag=tag,
            backend=self.backend.tag,
            version=self.backend.version,
            config_id=self.backend.config_id,
            state=ReplicaState.SHOULD_START,
            demand=self.backend.actor_options.demand(),
        )
        self.set_replica(tag, record)

    @property
    def waiting(self) -> list[ReplicaRecord]:
        """The replicas that have not been placed."""
        return [each for each in self.replicas.values() if each.state is ReplicaState.SHOULD_START]

    def surge(self) -> int:
        """Return how many additional replicas may run; 0 while a rollout has no room for one."""
        backend, notes = self.backend, self.notes
        surge = backend.config.surge(backend.num_replicas)
        if not any(each.version != backend.version for each in self.replicas.values()):
            notes.full_since = None
        elif surge and notes.full_since is not None:
            placed = sum(each.state in PLACED_STATES for each in self.replicas.values())
            more = backend.num_replicas - placed + 1
            workers = self.world.observed.cleared_workers()
            if room_for(Trial(self.world.state, self.step.change), workers, demand_of(backend), more) == more:
                notes.full_since = None
        return surge if notes.full_since is None else 0

    def drain_first(self, surge: int, ongoing: Mapping[ReplicaTag, float]) -> None:
        """Stop one old replica if no new one fits beside the old ones, or if there is no surge."""
        world, notes = self.world, self.notes
        if (surge and not self.waiting) or notes.is_pausing(world.now):
            return
        workers, demand = world.observed.cleared_workers(), demand_of(self.backend)
        found = replica_to_drain(
            self.backend,
            list(self.replicas.values()),
            Trial(self.world.state, self.step.change),
            workers,
            demand,
            ongoing,
        )
        if found is None:
            return
        if notes.full_since is None:
            notes.full_since = world.now
        may_grow = world.observed.is_adaptive and self.backend.config.surge(1) > 0
        due = notes.full_since + (NEW_WORKER_S if may_grow else 0)
        if world.now < due:
            self.step.wake(due)
        else:
            self.give_up(found)

    def place_waiting(self) -> None:
        notes, waiting = self.notes, self.waiting
        if not waiting:
            if not self.notes.is_pausing(self.world.now):
                notes.waiting = None
            return
        demand = demand_of(self.backend)
        workers = self.world.observed.cleared_workers()
        trial = Trial(self.world.state, self.step.change)
        for replica in waiting:
            if not self.place_on(workers, trial, replica, demand):
                notes.waiting = explain(trial, workers, demand)
                return
        notes.waiting = None

    def place_on(
        self, workers: list[WorkerInfo], trial: Trial, replica: ReplicaRecord, demand: Demand
    ) -> bool:
        worker = place(trial, workers, demand, self.world.avoid)
        if worker is None:
            return False
        self.step.incarnation += 1
        placed = move(
            replica,
            ReplicaEvent.PLACED,
            worker=worker,
            incarnation=self.step.incarnation,
            config_id=self.backend.config_id,
        )
        self.set_replica(replica.tag, placed)
        trial.occupy(replica.backend, worker, replica.demand)
        return True

    # 4. finish

    def finish(self) -> None:
        self.act()
        self.finish_goal()
        if self.goal is None or self.goal.state is not GoalState.PENDING:
            self.notes.deadlines.clear()
        if self.backend.is_deleting and not self.replicas:
            self.step.change[self.backend.key] = None
            self.notes.failures, self.notes.retry_at = 0, None
            self.drop_codes(keep=None)
        elif self.goal is None:
            self.drop_codes(keep=self.backend.code_key)

    def drop_codes(self, keep: str | None) -> None:
        for code in self.world.state.codes_of(self.backend.tag):
            if code.name != keep:
                self.step.change[code.key] = None

    def act(self) -> None:
        observed = self.world.observed
        unread = observed.reconfigure_failed.keys() - self.notes.reconfigure_failed.keys()
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.SHOULD_STOP:
                stopping = move(replica, ReplicaEvent.STOP_SENT)
                self.set_replica(replica.tag, stopping)
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.STOPPING:
                if replica.tag not in observed.gone:
                    self.step.actions.append(StopReplica(replica, grace_of(self.backend, replica)))
            elif replica.state is ReplicaState.STARTING:
                if replica.tag not in observed.ready:
                    # It gets the current config if it is created now, and keeps its own if it exists.
                    self.step.actions.append(StartReplica(self.in_doubt(replica)))
            elif (
                # The watch looks for a running replica that has not been observed; it is never created again.
                replica.tag in observed.ready
                and replica.tag not in unread
                and _is_outdated(self.backend, replica)
            ):
                self.step.actions.append(ReconfigureReplica(self.in_doubt(replica)))

    def in_doubt(self, replica: ReplicaRecord) -> ReplicaRecord:
        """Return the record of a replica during a reconfiguration: either config may be in force."""
        if replica.config_id not in (self.backend.config_id, UNKNOWN_CONFIG):
            replica = replace(replica, config_id=UNKNOWN_CONFIG)
            self.set_replica(replica.tag, replica)
        return replica

    def finish_goal(self) -> None:
        goal = self.goal
        if goal is None or goal.state is not GoalState.PENDING:
            return
        if not goals.is_reached(self.backend, self.replicas.values()):
            return
        self.step.change[goal.key] = goals.finish(goal)
        self.set_backend(replace(self.backend, goal=None))


def _with_facts(backend: BackendRecord, replica: ReplicaRecord, facts: Mapping[str, Any]) -> BackendRecord:
    """Return the backend with the facts about its callable that a started replica reports.

    Nothing is known of an import path before it is imported. The facts decide how many requests a replica
    runs, so a change of them reconfigures the replicas.
    """
    if replica.version != backend.version or backend.is_deleting:
        return backend
    config = backend.config.with_facts(facts)
    if config.internal_metadata == backend.config.internal_metadata:
        return backend
    return configured(backend, config, backend.user_config)


def _is_outdated(backend: BackendRecord, replica: ReplicaRecord) -> bool:
    """Return whether a replica of the right version runs with an old config."""
    return replica.version == backend.version and replica.config_id != backend.config_id


def _start_error(backend: str, error: BaseException) -> ServeError:
    if isinstance(error, ServeError):
        return error
    return DeployError(
        f"A replica of backend '{backend}' could not be created: {type(error).__name__}: {error}"
    )


def step(world: World, backend: BackendRecord) -> Step:
    """Return the next change and actions for one backend."""
    stepper = _Stepper(world, backend)
    stepper.take_in()
    stepper.scale()
    stepper.check_deadline()
    stepper.close_gap()
    stepper.finish()
    return stepper.step
