"""What a rollout is doing, for people and programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from daskserve.common.formatting import shown
from daskserve.control.observed.observed import Observed
from daskserve.control.observed.rollout_evidence import Evidence, VersionCounts
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.rollout import RolloutPhase
from daskserve.control.records.state import State
from daskserve.control.records.two_versions import running_of, split_of
from daskserve.control.verbs.rollout_plan import findings, missing
from daskserve.errors import NotFoundError
from daskserve.options.rollout import percent_of


def rollout_text(observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> str:
    """Return how far a rollout is, and the figures of its gates."""
    rollout, plan = backend.canary, backend.config.rollout
    assert rollout is not None
    assert plan is not None
    split = split_of(backend, *running_of(backend, replicas))
    evidence = observed.rollouts.evidence(backend.tag, split.key)
    new, old = rollout.names
    found = [
        f"rollout of version '{new}' beside '{old}': step {rollout.step + 1} of {len(plan.steps)}, "
        f"{_percent(split.share)} of the traffic"
    ]
    if rollout.phase is RolloutPhase.STARTING:
        found.append(f"replicas for {plan.steps[rollout.step]} start")
    elif rollout.phase is RolloutPhase.PAUSED or plan.pause_s is None:
        found.append("paused until it is promoted or aborted")
    elif lacks := missing(plan, evidence, split.share):
        found.append(lacks)
    if evidence.new.requests:
        found += [each.text for each in findings(plan, rollout, evidence, split.share)]
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
    new, old = rollout.names
    found: dict[str, Any] = {
        "deployment": backend.tag,
        "state": rollout.phase.value,
        "version": new,
        "stable": old,
        "since": rollout.since,
        "began_at": rollout.began_at,
        "step": rollout.step + 1,
        "why": rollout.why,
    }
    if backend.canary is None or plan is None:
        return found
    running = running_of(backend, state.replicas_of(backend.tag))
    split = split_of(backend, *running)
    evidence: Evidence = observed.rollouts.evidence(backend.tag, split.key)
    shadowed = observed.rollouts.shadowed(backend.tag, rollout.rollout_id)
    return {
        **found,
        "steps": list(plan.steps),
        "share": split.share,
        "replicas": {"candidate": len(running[0]), "stable": len(running[1])},
        "wanted_replicas": backend.version_replicas,
        "requests": {"candidate": _counted(evidence.new), "stable": _counted(evidence.old)},
        "min_requests": plan.min_requests,
        "gates": [
            {"metric": gate.metric, "is_worse": each.is_worse, "text": each.text}
            for gate, each in zip(plan.gates, findings(plan, rollout, evidence, split.share), strict=True)
        ],
        "shadowed": asdict(shadowed) if percent_of(plan.shadow) else None,
        "waiting": observed.notes_of(backend.tag).waiting or "",
    }


def _counted(counts: VersionCounts) -> dict[str, int]:
    return {"ended": counts.requests, "failed": counts.failed}


def _percent(share: float) -> str:
    return f"{shown(round(100 * share, 3))} %"
