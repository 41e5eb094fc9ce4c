"""The status of a rollout, for people and programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from daskserve.common.formatting import counted, shown
from daskserve.control.decisions.model_rollouts import evidence_of
from daskserve.control.decisions.rollout_plan import findings, missing, planned_share
from daskserve.control.observed.observed import Observed
from daskserve.control.observed.rollout_evidence import Evidence, VersionCounts
from daskserve.control.records.model_decisions import rollouts_of, share_of
from daskserve.control.records.models import ModelsRecord
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.rollout import RolloutPhase, RolloutState
from daskserve.control.records.state import State
from daskserve.control.records.version_split import running_of, split_of
from daskserve.errors import NotFoundError
from daskserve.options.rollout import RolloutConfig, percent_of


def rollout_text(observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> str:
    """Return the progress of the rollout of a deployment, and the findings of its gates."""
    rollout, plan = backend.canary, backend.config.rollout
    assert rollout is not None
    assert plan is not None
    split = split_of(backend, *running_of(backend, replicas))
    text = _text(rollout, plan, split.share, observed.rollouts.evidence(backend.tag, split.key))
    answers = observed.rollouts.shadowed(backend.tag, rollout.rollout_id)
    if answers.different:
        text += f"; {answers.different} of {counted(answers.compared, 'compared answer')} differ"
    if answers.failed and answers.failed_text not in text:
        text += f"; {answers.failed_text}"
    return text


def model_texts(observed: Observed, backend: BackendRecord, record: ModelsRecord | None) -> dict[str, str]:
    """Return the progress of the rollouts of a deployment's models, by model."""
    repository, found = backend.config.model_repository, {}
    plan = None if repository is None else repository.rollout
    if record is None or plan is None:
        return {}
    for name, rollout in rollouts_of(record).items():
        share = share_of(rollout, plan)
        evidence = evidence_of(observed.rollouts, backend.tag, name, rollout, share)
        found[name] = _text(rollout, plan, share, evidence)
    return found


def _text(rollout: RolloutState, plan: RolloutConfig, share: float, evidence: Evidence) -> str:
    new, old = rollout.names
    found = [
        f"rollout of version '{new}' beside '{old}': step {rollout.step + 1} of {len(plan.steps)}, "
        f"{_percent(share)} of the traffic"
    ]
    if rollout.phase is RolloutPhase.STARTING:
        found.append(f"replicas for {plan.steps[rollout.step]} start")
    elif rollout.phase is RolloutPhase.PAUSED or plan.pause_s is None:
        found.append("paused until it is promoted or aborted")
    elif lacks := missing(plan, evidence, planned_share(rollout, plan)):
        found.append(lacks)
    if evidence.new.requests:
        for number, each in enumerate(findings(plan, rollout, evidence, share)):
            trouble = evidence.troubles.get(number)
            if number in evidence.polls or trouble is None or trouble not in found[-1]:
                found.append(each.text)
    return "; ".join(found)


def rollout_status(state: State, observed: Observed, backend: BackendRecord) -> dict[str, Any]:
    """Return the state of a rollout, or how the last one ended.

    Raises
    ------
    NotFoundError
        There has been none since the last change.
    """
    rollout, plan = backend.rollout, backend.config.rollout
    if rollout is None:
        how = "" if plan is not None else "; its option 'rollout' is not set"
        raise NotFoundError(f"There is no rollout of {backend.display_name}{how}.")
    found = {"deployment": backend.tag, **_ended(rollout)}
    if backend.canary is None or plan is None:
        return found
    running = running_of(backend, state.replicas_of(backend.tag))
    split = split_of(backend, *running)
    evidence = observed.rollouts.evidence(backend.tag, split.key)
    shadowed = observed.rollouts.shadowed(backend.tag, rollout.rollout_id)
    return {
        **found,
        **_going_on(rollout, plan, split.share, evidence),
        "replicas": {"candidate": len(running[0]), "stable": len(running[1])},
        "wanted_replicas": backend.version_replicas,
        "shadowed": asdict(shadowed) if percent_of(plan.shadow) else None,
        "waiting": observed.notes_of(backend.tag).waiting or "",
    }


def model_rollout_status(
    state: State, observed: Observed, backend: BackendRecord, model: str
) -> dict[str, Any]:
    """Return the state of a model's rollout, or how the last one ended, like `rollout_status`.

    Raises
    ------
    NotFoundError
        There has been none.
    """
    repository, record = backend.config.model_repository, state.models.get(backend.tag)
    plan, last = None if repository is None else repository.rollout, None
    if record is not None:
        last = record.rollouts.get(model)
    if record is None or last is None:
        how = "" if plan is not None else "; the option rollout of model_repository is not set"
        raise NotFoundError(f"There is no rollout of model {model!r} of {backend.display_name}{how}.")
    rollout = RolloutState.from_plain(last)
    found = {"deployment": backend.tag, "model": model, **_ended(rollout)}
    if not rollout.is_active or plan is None:
        return found
    share = share_of(rollout, plan)
    tags = [each.tag for each in state.replicas_of(backend.tag)]
    reports = [each for tag in tags if (each := observed.models.get(tag)) is not None]
    having = [sum(each.has(model, version) for each in reports) for version in rollout.names]
    return {
        **found,
        **_going_on(rollout, plan, share, evidence_of(observed.rollouts, backend.tag, model, rollout, share)),
        "replicas": dict(zip(("candidate", "stable"), having, strict=True)),
        "wanted_replicas": backend.num_replicas,
        "shadowed": None,
        "waiting": "",
    }


def _ended(rollout: RolloutState) -> dict[str, Any]:
    """Return the part of the status of a rollout that remains after its end."""
    new, old = rollout.names
    return {
        "state": rollout.phase.value,
        "version": new,
        "stable": old,
        "since": rollout.since,
        "began_at": rollout.began_at,
        "step": rollout.step + 1,
        "why": rollout.why,
    }


def _going_on(rollout: RolloutState, plan: RolloutConfig, share: float, evidence: Evidence) -> dict[str, Any]:
    found = findings(plan, rollout, evidence, share)
    return {
        "steps": list(plan.steps),
        "share": share,
        "requests": {"candidate": _counted(evidence.new), "stable": _counted(evidence.old)},
        "min_requests": plan.min_requests,
        "gates": [
            {"metric": gate.metric, "is_worse": each.is_worse, "text": each.text}
            for gate, each in zip(plan.gates, found, strict=True)
        ],
    }


def _counted(counts: VersionCounts) -> dict[str, int]:
    return {"ended": counts.requests, "failed": counts.failed}


def _percent(share: float) -> str:
    return f"{shown(round(100 * share, 3))} %"
