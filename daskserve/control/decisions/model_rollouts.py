"""Rollouts of models: a new version beside the default one, in the same replicas. Pure.

They use the plan, the state table and the statistical tests of the rollouts of deployments. The difference:
each replica draws a version for each of its requests, and counts the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from daskserve.common.types import BackendTag
from daskserve.control.decisions.rollout_plan import A_PROGRAM, decide, paused, promoted
from daskserve.control.observed.rollout_counts import RolloutCounts
from daskserve.control.observed.rollout_evidence import Evidence
from daskserve.control.records.model_decisions import (
    changed,
    key_of,
    rollouts_of,
    share_of,
    unloaded,
    with_default,
)
from daskserve.control.records.models import ModelsRecord, ModelState, rollout_tag
from daskserve.control.records.rollout import RolloutEvent, RolloutPhase, RolloutState
from daskserve.errors import NotFoundError
from daskserve.options.rollout import RolloutConfig

#: Maximum number of transitions in one step; the versions of the next step are already loaded.
TRANSITIONS = 3


def evidence_of(
    counts: RolloutCounts, tag: BackendTag, name: str, rollout: RolloutState, share: float
) -> Evidence:
    """Return the counts that replicas have reported of a model for the current step."""
    return counts.evidence(rollout_tag(tag, name), key_of(rollout, share))


def followed(record: ModelsRecord, plan: RolloutConfig | None, keep: int | None, wall: float) -> ModelsRecord:
    """Return the record with rollouts begun or ended according to the states of versions.

    A version that is ROLLING_OUT has a rollout. The rollout ends if it or the default version is unloaded, if
    another version becomes the default, or if the plan is removed. A newer version replaces the new one.
    """
    for name, rollout in rollouts_of(record).items():
        new, old = rollout.names
        if record.models[name].get(new, {}).get("state") != ModelState.ROLLING_OUT:
            is_default = record.defaults.get(name) == new
            event = RolloutEvent.LAST if is_default else RolloutEvent.ABORT
            what = "was made the default one" if is_default else "was unloaded, or could not be loaded"
            record = _with(record, name, rollout.moved(event, wall, f"version '{new}' {what}"))
        elif name not in record.defaults or plan is None:
            why = "its plan was removed" if plan is None else f"version '{old}' was unloaded"
            record = _ended(record, name, rollout.moved(RolloutEvent.LAST, wall, why))
        elif record.defaults[name] != old:
            why = f"version '{record.defaults[name]}' was made the default one"
            record = _with(record, name, rollout.moved(RolloutEvent.ABORT, wall, why))
            record = changed(record, name, new, _entry(record, name, new, ModelState.READY))
    for name, versions in record.models.items():
        rolling = [each for each in versions if versions[each]["state"] == ModelState.ROLLING_OUT]
        going = rollouts_of(record).get(name)
        newest = max(rolling, key=lambda each: versions[each]["attempt"], default=None)
        if newest is None or plan is None or (going is not None and going.names[0] == newest):
            continue
        for older in set(rolling) - {newest}:
            # A deploy of a third version also replaces the new one.
            record = changed(record, name, older, _entry(record, name, older, ModelState.READY))
            record = record if keep is None else unloaded(record, name, older)
        default, number = record.defaults[name], versions[newest]["attempt"]
        names = (newest, default)
        record = _with(record, name, RolloutState(f"{name}#{number}", names, since=wall, began_at=wall))
    kept = {name: each for name, each in record.rollouts.items() if name in record.models}
    return record if len(kept) == len(record.rollouts) else replace(record, rollouts=kept)


def advanced(
    record: ModelsRecord,
    plan: RolloutConfig,
    counts: RolloutCounts,
    for_s: Callable[[str, RolloutState], float],
    wall: float,
) -> ModelsRecord:
    """Return the record with all rollouts advanced. ``for_s`` returns the duration of a rollout's phase."""
    for name in rollouts_of(record):
        for _ in range(TRANSITIONS):
            rollout = rollouts_of(record).get(name)
            if rollout is None:
                break
            share = share_of(rollout, plan)
            decision = decide(
                rollout,
                plan,
                evidence_of(counts, record.backend, name, rollout, share),
                share=share,
                is_ready=True,  # replicas that do not have the new version yet do not count
                for_s=for_s(name, rollout),
                wall=wall,
            )
            if decision.error is not None:
                record = _ended(record, name, rollout.moved(RolloutEvent.FAILED, wall, str(decision.error)))
            elif decision.rollout is rollout:
                break
            else:
                record = _ended(record, name, decision.rollout)
    return record


def steered(
    record: ModelsRecord, plan: RolloutConfig | None, name: str, verb: str, wall: float, **options: Any
) -> ModelsRecord:
    """Return the record with the rollout of a model paused, promoted or aborted.

    Raises
    ------
    NotFoundError
        The model has no active rollout.
    """
    last = record.rollouts.get(name)
    rollout = rollouts_of(record).get(name)
    if last is not None and rollout is None and verb == "abort" and RolloutPhase(last["phase"]).is_undone:
        return record
    request_id = options.get("request_id", "")
    if last is not None and request_id and last["promoted_by"] == request_id:
        return record  # a retry of an earlier call
    if rollout is None or plan is None:
        why = "" if last is None else f": it is {last['phase']}, {last['why'].rstrip('.')}"
        raise NotFoundError(f"There is no rollout of model {name!r} to {verb}{why}.")
    by = options.get("by") or A_PROGRAM
    if verb == "pause":
        return _with(record, name, paused(rollout, wall, by))
    if verb == "promote":
        after = promoted(rollout, plan, wall, full=options.get("full", False), by=by)
        return record if after is rollout else _ended(record, name, replace(after, promoted_by=request_id))
    new, old = rollout.names
    why = f"the rollout of version '{new}' was aborted by {by}; version '{old}' has all requests"
    return _ended(record, name, rollout.moved(RolloutEvent.ABORT, wall, why))


def _with(record: ModelsRecord, name: str, rollout: RolloutState) -> ModelsRecord:
    return replace(record, rollouts={**record.rollouts, name: rollout.to_plain()})


def _ended(record: ModelsRecord, name: str, rollout: RolloutState) -> ModelsRecord:
    """Return the record with a rollout, and with the state of the new version if the rollout has ended."""
    record, new = _with(record, name, rollout), rollout.names[0]
    if rollout.phase is RolloutPhase.COMPLETED:
        return with_default(record, name, new)
    if rollout.phase.is_undone:
        entry = {**_entry(record, name, new, ModelState.TAKEN_BACK), "reason": rollout.why}
        return changed(record, name, new, entry)
    return record


def _entry(record: ModelsRecord, name: str, version: str, state: ModelState) -> Mapping[str, Any]:
    return {**record.models[name][version], "state": state.value}
