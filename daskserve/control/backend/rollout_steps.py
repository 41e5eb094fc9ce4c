"""The step of a backend during a rollout, when both versions have replicas. Pure.

Each version is stepped like a separate backend. The new one has the goal of the change, and the number of
replicas that its share of the traffic needs. The old one has no goal, and keeps its spec and number. The old
version thus has its full capacity until the rollout is complete, and its lost replicas are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from daskserve.common.copying import replace
from daskserve.common.formatting import capitalized
from daskserve.control.backend.inputs import Step, StepInputs
from daskserve.control.backend.progress import is_holding
from daskserve.control.decisions.rollout_plan import Decision, decide, phase_began
from daskserve.control.observed.observed import Notes
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.rollout import RolloutEvent, RolloutState
from daskserve.control.records.version_split import kept_tag, running_of, split_of, stable_of

#: Interval at which the requests of both versions are compared.
LOOK_S = 1.0

#: Makes a step for some of a backend's replicas; the last argument is the key of the notes about replicas of
#: the old version. Returns the step and the backend's record after it.
Run: TypeAlias = Callable[
    [StepInputs, BackendRecord, Iterable[ReplicaRecord], str], tuple[Step, BackendRecord]
]


def step_both(inputs: StepInputs, backend: BackendRecord, run: Run) -> Step:
    """Return the next change and actions for both versions of a backend."""
    stable = stable_of(backend)
    assert stable is not None
    replicas = inputs.state.replicas_of(backend.tag)
    step, after = run(inputs, backend, [each for each in replicas if each.version != stable.version], "")
    if after.canary is None:
        step.wake(inputs.now)  # the next step handles one version again
        return step
    undone = {**inputs.undone, **step.change}
    # With the same seed, replicas of both versions that start now would have the same names.
    together = replace(inputs, undone=undone, incarnation=step.incarnation, seed=inputs.seed + 1)
    old = [each for each in replicas if each.version == stable.version]
    rest, _ = run(together, stable, old, kept_tag(backend.tag))
    step.change.update(rest.change)
    step.actions += rest.actions
    step.messages += rest.messages
    step.incarnation = rest.incarnation
    step.notes.dead, rest.notes.dead = (*step.notes.dead, *rest.notes.dead), ()
    step.kept[kept_tag(backend.tag)] = rest.notes
    if rest.wake_at is not None:
        step.wake(rest.wake_at)
    return step


def decided(
    inputs: StepInputs, backend: BackendRecord, replicas: Iterable[ReplicaRecord], step: Step
) -> Decision:
    """Return the next state of a rollout, given the replicas of the new version; record it in the step."""
    rollout = backend.canary
    assert rollout is not None
    new, old = running_of(backend, inputs.state.replicas_of(backend.tag))
    split = split_of(backend, new, old)
    config = backend.config.rollout
    assert config is not None
    decision = decide(
        rollout,
        config,
        inputs.observed.rollouts.evidence(backend.tag, split.key),
        share=split.share,
        is_ready=is_holding(backend, replicas),
        for_s=_duration(inputs, rollout, step.notes),
        wall=inputs.wall,
    )
    if decision.error is not None:
        step.messages.append(f"{capitalized(backend.display_name)}: {decision.error}")
        return decision
    step.wake(inputs.now + LOOK_S)
    if decision.rollout is not rollout:
        step.messages.append(f"Rollout of {backend.display_name}: {decision.text}")
        step.notes.rollout = decision.rollout.mark, inputs.now
    return decision


def _duration(inputs: StepInputs, rollout: RolloutState, notes: Notes) -> float:
    """Return how long a rollout has been in its phase, which may have begun under an earlier controller."""
    is_new = rollout.rollout_id not in inputs.observed.inherited
    notes.rollout = phase_began(notes.rollout, rollout, is_new=is_new, now=inputs.now, wall=inputs.wall)
    return inputs.now - notes.rollout[1]


def lost(backend: BackendRecord, wall: float) -> BackendRecord:
    """Return a backend's record with its rollout completed, because the records for a rollback are lost."""
    rollout = backend.canary
    assert rollout is not None
    return replace(
        backend, rollout=rollout.moved(RolloutEvent.LAST, wall, "the record of its change was lost")
    )
