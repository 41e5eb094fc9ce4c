"""One backend: computes the next changes and actions from the target and the observed state. Pure.

The loop calls `step` whenever something about a backend may have changed. It reads the current state, never
events, so it can run at any time and any number of times. In a new controller without observations, it
returns the actions that observe the cluster. `step` does not change its arguments. It returns its memory as
`Notes`, which are kept once the change is in the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from daskserve.common.copying import replace
from daskserve.common.formatting import shown
from daskserve.common.types import ReplicaState, ReplicaTag, WorkerAddress
from daskserve.control.backend import application as app_state
from daskserve.control.backend import gangs, progress, rollout_steps
from daskserve.control.backend.actions import ReconfigureReplica, StartReplica, StopReplica, grace_of
from daskserve.control.backend.deaths import keep_deaths
from daskserve.control.backend.inputs import Step, StepInputs, replica_tag, unplaced
from daskserve.control.backend.ranks import all_ranks_known, has_wrong_rank_info, ranks_to_change
from daskserve.control.backend.reconfiguring import next_to_reconfigure
from daskserve.control.backend.start_results import lost_error, start_error, with_facts
from daskserve.control.backend.steady_state import is_steady
from daskserve.control.decisions import goals
from daskserve.control.observed.lifecycle import PLACED_STATES, ReplicaEvent, move
from daskserve.control.observed.observed import DeadReplica, Notes
from daskserve.control.placement import rebalancing as spreading
from daskserve.control.placement.claims import held_by_tasks
from daskserve.control.placement.eviction_order import criteria_of
from daskserve.control.placement.placement import TentativeUsage, demand_of, explain, place, room_for
from daskserve.control.records.bundles import bundles_of
from daskserve.control.records.config_ids import in_doubt, is_outdated
from daskserve.control.records.records import AppRecord, BackendRecord, Change, GoalRecord, ReplicaRecord
from daskserve.control.scaling.recorded import autoscaling_of, bounds_of, scaled
from daskserve.errors import CodeLoadError, ReplicaStartError, RequestTimeoutError, RolloutError, ServeError

#: Delay before the next replica of a backend whose replicas fail without a goal; doubles up to the maximum.
START_RETRY_S, MAX_START_RETRY_S = 0.5, 30.0
#: How long a rollout without room waits for another worker of an adaptive cluster before it drains a replica.
NEW_WORKER_S = 20.0


class _Stepper:
    """Working memory of one step of one backend."""

    def __init__(
        self,
        inputs: StepInputs,
        backend: BackendRecord,
        replicas: Iterable[ReplicaRecord],
        kept: str = "",
    ) -> None:
        self.inputs = inputs
        self.backend = backend
        #: The key of the notes if this is the old version of a rollout, which has no goal.
        self.kept = kept
        known = inputs.observed.notes.get(kept or backend.tag)
        self.notes = Notes() if known is None else known.for_next_step()
        self.step = Step(notes=self.notes, incarnation=inputs.incarnation)
        self.replicas = {each.tag: each for each in replicas}

    def set_replica(self, tag: str, record: ReplicaRecord | None) -> None:
        before = self.replicas.get(tag)
        if record is not None and (before is None or before.state is not record.state):
            record = replace(record, moved_at=self.inputs.wall)
        self.step.change[f"replica/{tag}"] = record
        if record is None:
            del self.replicas[tag]
        else:
            self.replicas[tag] = record

    @property
    def app(self) -> AppRecord | None:
        """The application that the backend is a deployment of."""
        if self.kept:
            return None
        changed = self.step.change.get(f"app/{self.backend.application}")
        return changed if isinstance(changed, AppRecord) else self.inputs.state.apps.of(self.backend)

    @property
    def goal(self) -> GoalRecord | None:
        """The pending goal of the backend, or else that of its application."""
        if self.kept:
            return None
        goal_id = self.backend.goal
        if goal_id is None and (app := self.app) is not None:
            goal_id = app.goal
        if goal_id is None:
            return None
        goal = self.step.change.get(f"goal/{goal_id}", self.inputs.state.goals.get(goal_id))
        return goal if isinstance(goal, GoalRecord) and goal.is_pending else None

    def apply(self, change: Change) -> None:
        """Make a change, perhaps of several backends, part of this step."""
        if self.kept:
            return
        self.step.change.update(change)
        changed = change.get(self.backend.key)
        if isinstance(changed, BackendRecord):
            self.backend = changed

    # 1. process observations

    def take_in(self) -> None:
        observed, lost = self.inputs.observed, None
        for replica in list(self.replicas.values()):
            event = observed.event_of(replica)
            if event is None:
                self.take_in_config(replica)
                continue
            death = observed.death_of(replica, event, self.inputs.wall)
            if death is not None:
                self.step.note_death(replica, death)
            forced = {"is_forced": True} if event is ReplicaEvent.UNWANTED else {}
            self.set_replica(replica.tag, move(replica, event, **forced))
            if event is ReplicaEvent.STARTED:
                self.note_start()
                metadata = observed.ready[replica.tag].get("metadata")
                if metadata:
                    self.set_replica(replica.tag, replace(self.replicas[replica.tag], metadata=metadata))
                learnt = with_facts(self.backend, replica, observed.ready[replica.tag])
                if learnt is not self.backend:
                    self.apply({self.backend.key: learnt})
            elif event is ReplicaEvent.FAILED and replica.state is ReplicaState.STARTING:
                self.note_failure(replica, observed.failed[replica.tag])
            elif death is not None and self.goal is not None:
                lost = replica, lost_error(self.backend, death)

        if lost is not None:  # count one failure, because many replicas may be lost with one worker
            self.note_failure(*lost)
        for replica in gangs.broken(self.replicas):
            why = "another replica of its gang was lost"
            self.step.note_death(replica, DeadReplica(replica.tag, why, self.inputs.wall))
            self.give_up(replica, is_forced=True)

    def take_in_config(self, replica: ReplicaRecord) -> None:
        """Process the answer to a reconfiguration."""
        observed, tag = self.inputs.observed, replica.tag
        error = observed.reconfigure_failed.get(tag)
        if error is not None and replica.state is ReplicaState.RUNNING:
            self.notes.reconfigure_failed[tag] = error
            if not self.fail_goal(start_error(self.backend, error)):
                # No caller waits for the error, and retries would never end, so replace the replica.
                self.give_up(replica)
        elif tag in observed.configured:
            config_id = self.notes.configured[tag] = observed.configured[tag]
            if config_id != replica.config_id:
                self.set_replica(tag, replace(replica, config_id=config_id))

    def note_start(self) -> None:
        goal, most = self.goal, progress.running(self.backend, self.replicas.values())
        has_more = goal is None or self.notes.most[0] != goal.goal_id or most > self.notes.most[1]
        if goal is not None and has_more:
            self.notes.most = goal.goal_id, most
        if goal is not None and has_more and self.backend.tag in goal.failures:
            failures = {tag: count for tag, count in goal.failures.items() if tag != self.backend.tag}
            self.step.change[goal.key] = replace(goal, failures=failures)
        self.notes.failures, self.notes.retry_at, self.notes.unloadable = 0, None, None

    def note_failure(self, replica: ReplicaRecord, error: BaseException) -> None:
        if self.backend.is_deleting or replica.version != self.backend.version:
            return  # the failed version is not the current one
        goal, notes, tag = self.goal, self.notes, self.backend.tag
        if goal is not None:
            count = goal.failures.get(tag, 0) + 1
            self.step.change[goal.key] = replace(goal, failures={**goal.failures, tag: count})
            is_late = isinstance(error, RequestTimeoutError)
            if is_late or count >= self.backend.config.allowed_failures(self.backend.needed_replicas):
                self.fail_goal(start_error(self.backend, error))
            return
        notes.failures += 1
        notes.unloadable = str(error) if isinstance(error, CodeLoadError) else None
        pause_s = min(MAX_START_RETRY_S, START_RETRY_S * 2 ** min(notes.failures - 1, 10))
        notes.retry_at = self.inputs.now + pause_s
        notes.waiting = goals.text_of(
            error, f"a replica failed to start, trying again in {shown(pause_s)} s: "
        )

    def scale(self) -> None:
        """Set the target number to the autoscaler's decision, within the current bounds."""
        decided = self.inputs.observed.scalings.get(self.backend.tag)
        config = autoscaling_of(self.backend)
        if decided is None or config is None or not decided.is_for(self.backend):
            return
        replicas = bounds_of(self.backend, config).nearest(decided.replicas)
        if replicas != self.backend.scaled_to:
            self.apply({self.backend.key: scaled(self.backend, replicas, decided.reason, self.inputs.wall)})

    # 2. fail a goal after too many failures or its timeout

    def fail_goal(self, error: ServeError) -> bool:
        """Roll back the pending spec; return False without one, or during a deletion, which cannot fail."""
        goal = self.goal
        if goal is None or self.backend.is_deleting:
            return False
        if not isinstance(error, RolloutError):
            far = progress.progress_text(self.inputs.state, goal, self.backend, self.replicas.values())
            error = progress.with_note(error, far)
        if isinstance(error, ReplicaStartError):
            error = progress.with_note(error, goals.remedy_of_failure(goal))
        self.apply(goals.rolled_back(self.inputs.state, goal, error, self.backend, self.inputs.wall))
        return True

    def check_deadline(self) -> None:
        goal = self.goal
        before, self.notes.goal = self.notes.goal, None if goal is None else goal.goal_id
        if goal is None or self.backend.is_deleting:
            return
        inputs, notes, replicas = self.inputs, self.notes, self.replicas
        if goal.goal_id != before:
            # A new goal starts immediately, even if the previous one failed often or found no room.
            notes.failures, notes.retry_at, notes.unloadable, notes.logged_at = 0, None, None, inputs.now
            notes.full_since, notes.full_from, notes.drained_at_once = None, None, 1
        if not progress.is_overdue(inputs, self.step, goal, self.backend, replicas):
            return
        if not goal.application or app_state.is_late(
            inputs.state, inputs.observed, self.backend, replicas.values()
        ):
            self.fail_goal(progress.late_error(goal, self.backend, notes.waiting))

    # 3. close the gap

    def close_gap(self) -> None:
        if self.backend.is_deleting and not app_state.may_stop(self.inputs.state, self.backend):
            return
        surge, inputs = self.surge(), self.inputs
        criteria = criteria_of(
            inputs.state, inputs.observed, self.backend, self.replicas, inputs.avoid, inputs.now
        )
        is_busy = self.goal is not None or self.backend.is_deleting
        leaving, self.notes.stays = spreading.leaving(
            inputs.observed, self.notes, self.replicas, is_busy=is_busy
        )
        steps = gangs.next_steps(
            self.backend,
            list(self.replicas.values()),
            max_surge=surge,
            leaving=leaving,
            criteria=criteria,
        )
        for replica in steps.stop:
            if replica.tag in leaving:
                self.step.causes[f"leaving/{replica.tag}"] = "it moves to another worker"
            self.give_up(replica)
        if app_state.awaited(inputs.state, inputs.observed, self.backend, inputs.undone):
            return
        if self.notes.retry_at is not None and self.notes.is_pausing(self.inputs.now):
            self.step.wake(self.notes.retry_at)
        else:
            for _ in range(0, steps.start, self.backend.gang_size):
                self.begin(self.backend.gang_size)
        self.place_waiting()
        self.drain_first(surge, criteria.ongoing)

    def give_up(self, replica: ReplicaRecord, *, is_forced: bool = False) -> None:
        if replica.state is ReplicaState.SHOULD_START:
            self.set_replica(replica.tag, move(replica, ReplicaEvent.WITHDRAWN))
        else:
            is_forced = is_forced or self.backend.is_forced
            self.set_replica(replica.tag, move(replica, ReplicaEvent.UNWANTED, is_forced=is_forced))

    def begin(self, count: int) -> None:
        """Add replicas that start together."""
        tags = (replica_tag(self.backend.tag, self.inputs.seed, number) for number in itertools.count())
        free = (tag for tag in tags if tag not in self.inputs.state.replicas and tag not in self.replicas)
        gang = tuple(itertools.islice(free, count))
        for tag in gang:
            record = ReplicaRecord(
                tag=tag,
                backend=self.backend.tag,
                version=self.backend.version,
                config_id=self.backend.config_id,
                state=ReplicaState.SHOULD_START,
                demand=demand_of(self.backend).bundles[0],
                bundles=self.backend.bundles,
                gang=gang if count > 1 else (),
            )
            self.set_replica(tag, record)

    def trial(self) -> TentativeUsage:
        """Return the ledger after the changes so far."""
        return TentativeUsage(self.inputs.state, self.inputs.undone | self.step.change)

    def surge(self) -> int:
        """Return how many additional replicas may run; 0 if a rollout has no room for one."""
        backend, notes = self.backend, self.notes
        surge = backend.config.surge(backend.version_replicas // backend.gang_size)
        if not any(each.version != backend.version for each in self.replicas.values()):
            notes.full_since, notes.drained_at_once = None, 1
        elif surge and notes.full_since is not None:
            placed = sum(each.state in PLACED_STATES for each in self.replicas.values())
            more = -(-(backend.version_replicas - placed) // backend.gang_size) + 1
            workers = self.inputs.observed.cleared_workers()
            if room_for(self.trial(), workers, demand_of(backend), more) == more:
                notes.full_since = None
        return surge if notes.full_since is None else 0

    def drain_first(self, surge: int, ongoing: Mapping[ReplicaTag, float]) -> None:
        """Stop as few old replicas as possible, if no surge is allowed or a new one does not fit."""
        inputs, notes = self.inputs, self.notes
        if (surge and not unplaced(self.replicas.values())) or notes.is_pausing(inputs.now):
            return
        workers, demand = inputs.observed.cleared_workers(), demand_of(self.backend)
        replicas = list(self.replicas.values())
        found = gangs.to_drain(self.backend, replicas, self.trial(), workers, demand, ongoing)
        if not found:
            return
        notes.drained_at_once = len(found)
        if notes.full_since is None:
            notes.full_since = inputs.now
        may_grow = inputs.observed.is_adaptive and self.backend.config.surge(1) > 0
        due = notes.full_since + (NEW_WORKER_S if may_grow else 0)
        if inputs.now < due:
            self.step.wake(due)
        else:
            for replica in found:
                self.give_up(replica)

    def place_waiting(self) -> None:
        notes, waiting = self.notes, unplaced(self.replicas.values())
        if not waiting:
            notes.full_from = None
            if not self.notes.is_pausing(self.inputs.now):
                notes.waiting = None
            return
        workers = self.inputs.observed.cleared_workers()
        trial = self.trial()
        found: Sequence[WorkerAddress] | None = None
        for gang in gangs.by_gang(waiting):
            demand = gangs.demand_of_gang(self.backend, gang)
            was_placed = found is not None
            found = place(trial, workers, demand, self.inputs.avoid)
            if found is None:
                notes.waiting = explain(trial, workers, demand) + held_by_tasks(workers, demand)
                if was_placed or notes.full_from is None:
                    notes.full_from = progress.full_from(self.inputs, self.goal, self.replicas.values())
                return
            for worker, amounts in zip(found, demand.bundles, strict=True):
                trial.occupy(self.backend.tag, worker, amounts)
            places = iter(found)
            for replica in gang:
                self.place_on([next(places) for _ in bundles_of(replica)], replica)
        notes.waiting = notes.full_from = None

    def place_on(self, workers: Sequence[WorkerAddress], replica: ReplicaRecord) -> None:
        self.step.incarnation += 1
        placed = move(
            replica,
            ReplicaEvent.PLACED,
            worker=workers[0],
            bundle_workers=tuple(workers) if replica.bundles else (),
            incarnation=self.step.incarnation,
            config_id=self.backend.config_id,
        )
        self.set_replica(replica.tag, placed)

    # 4. finish

    def finish(self) -> None:
        self.act()
        if self.kept:
            return
        self.finish_goal()
        goal = self.goal
        if goal is None or self.backend.is_deleting:
            self.notes.deadlines.clear()
            self.notes.goal = self.notes.full_from = self.notes.logged_at = None
            self.notes.most = None, 0
        else:
            progress.note(self.inputs, self.step, goal, self.backend, self.replicas)
        if app_state.is_unused(self.inputs.state, self.backend):
            self.apply({self.backend.key: replace(self.backend, is_deleting=True)})
        if self.backend.is_deleting:
            self.finish_deletion()
        elif self.goal is None:
            self.step.change.update(app_state.old_codes(self.inputs.state, self.backend, self.step.change))

    def finish_deletion(self) -> None:
        state, backend = self.inputs.state, self.backend
        if not app_state.may_stop(state, backend):
            return
        endpoint = state.endpoints.get(backend.tag) if backend.application else None
        if endpoint is not None and not endpoint.is_legacy:
            # kept until now, because other deployments call the endpoint
            self.step.change[endpoint.key] = None
        if self.replicas:
            return
        known = state.backends.get(backend.tag)
        if known is not None and not known.is_deleting:
            self.step.wake(self.inputs.now)  # first publish to routers why the backend is deleted
            return
        self.step.change[backend.key] = None
        self.notes = self.step.notes = Notes()
        codes = state.codes.of(backend.tag)
        self.step.change.update({code.key: None for code in codes if not state.revisions.need(code.name)})
        self.step.change.update(app_state.removed(state, backend))

    def act(self) -> None:
        observed = self.inputs.observed
        for replica, rank in ranks_to_change(self.backend, self.replicas.values(), observed):
            self.set_replica(replica.tag, replace(replica, rank=rank))
        unread = observed.reconfigure_failed.keys() - self.notes.reconfigure_failed.keys()
        # The watch checks running replicas that have not been observed yet; they are never created again.
        barred = {tag for tag in self.replicas if tag not in observed.ready or tag in unread}
        updated = next_to_reconfigure(self.backend, self.replicas.values(), barred=barred)
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
                    # A new replica gets the current config; an existing one keeps its config.
                    self.step.actions.append(StartReplica(self.in_doubt(replica)))
            elif replica.tag in barred:
                continue
            elif replica.tag in updated:
                self.step.actions.append(ReconfigureReplica(self.in_doubt(replica)))
            elif not is_outdated(self.backend, replica) and has_wrong_rank_info(
                self.backend, replica, observed
            ):
                self.step.actions.append(ReconfigureReplica(replica))

    def in_doubt(self, replica: ReplicaRecord) -> ReplicaRecord:
        """Return the record of a replica during a reconfiguration: either config may be active."""
        wanted = self.backend.config_id
        unsure = in_doubt(replica.config_id, wanted)
        if replica.config_id not in (wanted, unsure):
            replica = replace(replica, config_id=unsure)
            self.set_replica(replica.tag, replica)
        return replica

    def finish_goal(self) -> None:
        goal, app, replicas = self.goal, self.app, self.replicas.values()
        if goal is not None and not goal.application:
            observed = self.inputs.observed
            if goals.is_reached(self.backend, replicas) and all_ranks_known(self.backend, replicas, observed):
                self.step.change[goal.key] = goals.finish(goal)
                self.apply({self.backend.key: replace(self.backend, goal=None)})
            return
        if app is None or app.goal is None:
            return
        if app_state.is_complete(self.inputs.state, self.inputs.observed, app, self.backend, replicas):
            done = app_state.completed(self.inputs.state, app, self.backend)
            self.apply(done)


def _go_on(stepper: _Stepper) -> None:
    """Advance a rollout, or roll it back."""
    backend, inputs = stepper.backend, stepper.inputs
    if backend.canary is None:
        return
    if stepper.goal is None:
        stepper.apply({backend.key: rollout_steps.lost(backend, inputs.wall)})
        return
    decision = rollout_steps.decided(inputs, backend, stepper.replicas.values(), stepper.step)
    if decision.error is not None:
        stepper.fail_goal(decision.error)
    elif decision.rollout is not backend.canary:
        stepper.apply({backend.key: replace(backend, rollout=decision.rollout)})


def _run(
    inputs: StepInputs, backend: BackendRecord, replicas: Iterable[ReplicaRecord], kept: str = ""
) -> tuple[Step, BackendRecord]:
    """Make all decisions of one step; return the step, and the backend's record after it."""
    stepper = _Stepper(inputs, backend, replicas, kept)
    stepper.take_in()
    stepper.scale()
    stepper.check_deadline()
    _go_on(stepper)
    # At the end of a rollout, the stepper has the replicas of one version only; the next step has all.
    if backend.canary is None or stepper.backend.canary is not None:
        stepper.close_gap()
        stepper.finish()
    return stepper.step, stepper.backend


def step(inputs: StepInputs, backend: BackendRecord) -> Step:
    """Return the next change and actions for one backend."""
    if is_steady(inputs, backend, inputs.state.replicas_of(backend.tag)):
        return Step(notes=inputs.observed.notes_of(backend.tag).steady(), incarnation=inputs.incarnation)
    return full_step(inputs, backend)


def full_step(inputs: StepInputs, backend: BackendRecord) -> Step:
    """Return the same as `step`, without the check for a steady state."""
    if backend.canary is not None:
        step = rollout_steps.step_both(inputs, backend, _run)
    else:
        step = _run(inputs, backend, inputs.state.replicas_of(backend.tag))[0]
    keep_deaths(inputs, backend, step)
    return step
