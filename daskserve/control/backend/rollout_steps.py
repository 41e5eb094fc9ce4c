"""The step of a backend during a rollout: both versions have replicas of their own. Pure.

Each version is stepped as if it were a backend of its own: the new one with the goal of the change and the
number of replicas that its share of the traffic needs, the old one at rest, with its own spec and number. So
the old version has all its capacity until the rollout is complete, and its lost replicas are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from daskserve.common.formatting import capitalized
from daskserve.common.types import ReplicaState, ReplicaTag
from daskserve.control.backend.inputs import Step, StepInputs
from daskserve.control.records.records import BackendRecord, Change, GoalRecord, ReplicaRecord
from daskserve.control.records.rollout import RolloutEvent, RolloutState
from daskserve.control.records.two_versions import kept_tag, running_of, split_of, stable_of
from daskserve.control.verbs.rollout_plan import decide
from daskserve.errors import RolloutError, ServeError

#: Interval at which the requests of both versions are compared.
LOOK_S = 1.0


class Stepper(Protocol):
    """The working memory of a step of `daskserve.control.backend.step`."""

    inputs: StepInputs
    backend: BackendRecord
    step: Step
    replicas: dict[ReplicaTag, ReplicaRecord]

    @property
    def goal(self) -> GoalRecord | None: ...
    def apply(self, change: Change) -> None: ...
    def fail_goal(self, error: ServeError) -> bool: ...


class Run(Protocol):
    """Makes a step for some of a backend's replicas, perhaps those of its old version."""

    def __call__(
        self,
        inputs: StepInputs,
        backend: BackendRecord,
        replicas: Sequence[ReplicaRecord],
        kept: str = "",
    ) -> Stepper: ...


def step_both(inputs: StepInputs, backend: BackendRecord, run: Run) -> Step:
    """Return the next change and actions for both versions of a backend."""
    stable = stable_of(backend)
    assert stable is not None
    replicas = inputs.state.replicas_of(backend.tag)
    new = run(inputs, backend, [each for each in replicas if each.version != stable.version])
    step = new.step
    if new.backend.canary is None:
        step.wake(inputs.now)  # the next step sees one version again
        return step
    undone = {**inputs.undone, **step.change}
    together = replace(inputs, undone=undone, incarnation=step.incarnation)
    old = [each for each in replicas if each.version == stable.version]
    rest = run(together, stable, old, kept_tag(backend.tag)).step
    step.change.update(rest.change)
    step.actions += rest.actions
    step.messages += rest.messages
    step.incarnation = rest.incarnation
    step.notes.dead, rest.notes.dead = (*step.notes.dead, *rest.notes.dead), ()
    step.notes.configured |= rest.notes.configured
    step.notes.reconfigure_failed |= rest.notes.reconfigure_failed
    step.kept[kept_tag(backend.tag)] = rest.notes
    if rest.wake_at is not None:
        step.wake(rest.wake_at)
    return step


def _duration(stepper: Stepper, rollout: RolloutState) -> float:
    """Return for how long a rollout is in its phase, which an earlier controller may have begun."""
    inputs, notes = stepper.inputs, stepper.step.notes
    if notes.rollout[0] != rollout.mark:
        is_new = bool(notes.rollout[0]) or rollout.rollout_id not in inputs.observed.inherited
        before_s = 0.0 if is_new else max(0.0, inputs.wall - rollout.since)
        notes.rollout = rollout.mark, inputs.now - before_s
    return inputs.now - notes.rollout[1]


def go_on(stepper: Stepper) -> None:
    """Decide about the rollout of a backend: its next step, its end, or that the change is taken back."""
    backend, inputs, step = stepper.backend, stepper.inputs, stepper.step
    rollout = backend.canary
    if rollout is None:
        return
    if stepper.goal is None:  # it is lost, and with it what to return to
        lost = rollout.moved(RolloutEvent.LAST, inputs.wall, "the record of the change was lost")
        stepper.apply({backend.key: replace(backend, rollout=lost)})
        return
    new, old = running_of(backend, inputs.state.replicas_of(backend.tag))
    split = split_of(backend, new, old)
    ready = sum(
        each.state is ReplicaState.RUNNING
        and (each.version, each.config_id) == (backend.version, backend.config_id)
        for each in stepper.replicas.values()
    )
    decision = decide(
        backend,
        inputs.observed.rollouts.evidence(backend.tag, split.key),
        share=split.share,
        is_ready=ready >= backend.version_replicas,
        for_s=_duration(stepper, rollout),
        wall=inputs.wall,
    )
    if decision.has_failed:
        after, before = rollout.names
        text = (
            f"Version '{after}' was taken back, and version '{before}' has all traffic, at step "
            f"{rollout.served + 1} of the rollout: {decision.text}."
        )
        step.messages.append(f"{capitalized(backend.display_name)}: {text}")
        stepper.fail_goal(RolloutError(text))
        return
    step.wake(inputs.now + LOOK_S)
    if decision.rollout is not rollout:
        step.notes.rollout = decision.rollout.mark, inputs.now
        step.messages.append(f"Rollout of {backend.display_name}: {decision.text}")
        stepper.apply({backend.key: replace(backend, rollout=decision.rollout)})
