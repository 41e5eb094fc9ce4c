"""Decides how a rollout begins, continues and ends, given the requests of both versions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.formatting import counted, shown
from daskserve.control.observed.rollout_evidence import (
    Evidence,
    Finding,
    carried_on,
    judge,
    least_polls,
    least_requests,
)
from daskserve.control.records.records import BackendRecord, GoalRecord
from daskserve.control.records.rollout import RolloutEvent, RolloutPhase, RolloutState
from daskserve.control.records.state import State
from daskserve.control.records.versions import unmarked
from daskserve.errors import ReplicaStartError, RequestTimeoutError, RolloutError, ServeError
from daskserve.options.rollout import RolloutConfig, percent_of

#: The name of a caller that did not give a name.
A_PROGRAM = "a program"


def begun(
    state: State, wanted: BackendRecord, before: Mapping[str, Any] | None, rollout_id: str, now: float
) -> BackendRecord:
    """Return the wanted record of a backend, with a rollout if its plan requires one.

    ``before`` is the last completed record, as plain values. There is no rollout if the version is the same,
    or if no replica of the old version runs. A change that keeps the code and the config of the new version
    continues its rollout.
    """
    current = state.backends.get(wanted.tag)
    version = None if before is None or wanted.is_deleting else before["version"]
    if wanted.config.rollout is None or version in (None, wanted.version) or before is None:
        return replace(wanted, rollout=None) if wanted.rollout is not None else wanted
    if not any(each.version == version for each in state.running(wanted.tag)):
        return replace(wanted, rollout=None)
    if current is not None and current.canary is not None:
        is_same = (current.version, current.config_id) == (wanted.version, wanted.config_id)
        if is_same and current.config.rollout == wanted.config.rollout:
            return replace(wanted, rollout=current.rollout)
    names = (wanted.user_version or unmarked(wanted.version), before.get("user_version") or unmarked(version))
    stable = {**before, "rollout": None, "goal": None}
    return replace(wanted, rollout=RolloutState(rollout_id, names, since=now, began_at=now, stable=stable))


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a rollout: its next state and the reason to wait, or why it is rolled back."""

    rollout: RolloutState
    text: str = ""
    error: RolloutError | None = None


def _probability(config: RolloutConfig) -> float:
    """Return the probability of a false alarm of one gate at one step."""
    return config.false_alarm / (max(1, len(config.gates)) * len(config.steps))


def planned_share(rollout: RolloutState, config: RolloutConfig) -> float:
    """Return the planned share of the served step; the actual one differs while a version has no replica."""
    return percent_of(config.steps[rollout.served]) / 100 if rollout.served >= 0 else 0.0


def missing(config: RolloutConfig, evidence: Evidence, share: float) -> str:
    """Return which requests, answers or comparisons a step still lacks; empty if it has enough."""
    requests, p = evidence.new.requests, _probability(config)
    if share == 0 and percent_of(config.shadow):
        # At this step, the new version answers only copies of requests.
        least = max(1, config.min_requests)
        if evidence.compared < least:
            text = f"{evidence.compared} of {counted(least, 'answer has', 'answers have')} been compared"
            return "; ".join(filter(None, (text, evidence.not_compared)))
    needed = max((least_requests(each, evidence, share, p) for each in config.gates), default=0)
    if share > 0 and requests < max(needed, config.min_requests):
        least = max(needed, config.min_requests)
        return f"{requests} of {counted(least, 'request has', 'requests have')} ended"
    if 0 < share < 1:
        least = least_polls(p)
        for number, gate in enumerate(config.gates):
            count = sum(evidence.polls.get(number, (0, 0))[:2])
            if gate.metric == "prometheus" and count < least:
                why = evidence.troubles.get(number, "")
                lately = f"; the last one failed: {why}" if why else ""
                return f"{count} of {least} comparisons of {gate.query} are done{lately}"
    return ""


def findings(
    config: RolloutConfig,
    rollout: RolloutState,
    evidence: Evidence,
    share: float,
    for_s: float | None = None,
) -> list[Finding]:
    """Return the findings of all gates. Their texts contain the duration ``for_s``, if it is given."""
    p = _probability(config)
    carried = rollout.carried or (0.0,) * len(config.gates)
    return [judge(gate, n, evidence, share, p, for_s, carried[n]) for n, gate in enumerate(config.gates)]


def decide(
    rollout: RolloutState,
    config: RolloutConfig,
    evidence: Evidence,
    *,
    share: float,
    is_ready: bool,
    for_s: float,
    wall: float,
) -> Decision:
    """Return the decision on a rollout, of a deployment or of a model.

    Parameters
    ----------
    share : float
        The share that the new version has.
    is_ready : bool
        Whether the replicas of the current step run.
    for_s : float
        How long the current phase has lasted.
    wall : float
        Seconds since the epoch, for the record.
    """
    for each in findings(config, rollout, evidence, share, for_s):
        if each.is_worse:
            new, old = rollout.names
            error = RolloutError(
                f"Version '{new}' was rolled back, and version '{old}' has all traffic, at step "
                f"{rollout.served + 1} of the rollout: {each.text}."
            )
            return Decision(rollout, error=error)
    number = f"step {rollout.step + 1} of {len(config.steps)}"
    if rollout.phase is RolloutPhase.STARTING:
        if not is_ready:
            return Decision(rollout, f"{number}: the replicas of version '{rollout.names[0]}' start")
        served = replace(
            rollout.moved(RolloutEvent.READY, wall), carried=_carried(config, rollout, evidence, share)
        )
        return Decision(served, f"{number}: {config.steps[rollout.step]} of the traffic")
    has = "no part" if rollout.served < 0 else config.steps[rollout.served]
    text = f"{number}: version '{rollout.names[0]}' has {has} of the traffic"
    if rollout.phase is RolloutPhase.PAUSED:
        return Decision(rollout, f"{text}; paused until it is promoted or aborted")
    if not is_ready:
        return Decision(rollout, f"{text}; its replicas are replaced")
    if config.pause_s is None:
        return Decision(rollout, f"{text}; it waits to be promoted or aborted")
    if for_s < config.pause_s:
        return Decision(rollout, f"{text}, for at least {shown(config.pause_s)} s")
    if lacks := missing(config, evidence, planned_share(rollout, config)):
        return Decision(rollout, f"{text}; {lacks}")
    return Decision(promoted(rollout, config, wall), text)


def _carried(
    config: RolloutConfig, rollout: RolloutState, evidence: Evidence, share: float
) -> tuple[float, ...]:
    """Return the winnings of each gate's bets, to carry from the served step to the next one."""
    if rollout.served < 0:
        return (0.0,) * len(config.gates)
    return tuple(
        carried_on(gate, n, evidence, share, rollout.carried[n]) for n, gate in enumerate(config.gates)
    )


def paused(rollout: RolloutState, wall: float, by: str = "") -> RolloutState:
    """Return the state of a paused rollout; ``by`` is the program that pauses it."""
    return rollout.moved(RolloutEvent.PAUSE, wall, f"paused by {by or A_PROGRAM}")


def promoted(
    rollout: RolloutState, config: RolloutConfig, wall: float, *, full: bool = False, by: str = ""
) -> RolloutState:
    """Return the state of a rollout that continues with the next step, or (``full``) completes.

    ``by`` is the program that promotes it; empty if the gates have passed.
    """
    if full or rollout.served + 1 >= len(config.steps):
        why = f"it was promoted to the end by {by}" if by else "all steps have passed"
        return rollout.moved(RolloutEvent.LAST, wall, why)
    if rollout.phase is RolloutPhase.STARTING:
        return rollout
    return rollout.moved(RolloutEvent.NEXT, wall, f"promoted by {by}" if by else "")


def ended_rollout(backend: BackendRecord, error: ServeError, wall: float) -> RolloutState | None:
    """Return the ended rollout of a backend whose change is rolled back; None without a rollout."""
    rollout = backend.canary
    if rollout is None:
        return None
    has_failed = isinstance(error, RolloutError | ReplicaStartError | RequestTimeoutError)
    is_abort = not has_failed or bool(getattr(error, "by", ""))
    return rollout.moved(RolloutEvent.ABORT if is_abort else RolloutEvent.FAILED, wall, str(error))


def phase_began(
    known: tuple[str, float], rollout: RolloutState, *, is_new: bool, now: float, wall: float
) -> tuple[str, float]:
    """Return the mark of a rollout's phase, and when it began on this controller's clock.

    ``known`` is the last result of this function. The phase may have begun under an earlier controller,
    unless ``is_new``.
    """
    if known[0] == rollout.mark:
        return known
    before_s = 0.0 if known[0] or is_new else max(0.0, wall - rollout.since)
    return rollout.mark, now - before_s


def serves_rollout(state: State, goal: GoalRecord) -> bool:
    """Return whether a rollout of a change has the traffic of its first step."""
    tags = [key.removeprefix("backend/") for key in goal.previous if key.startswith("backend/")]
    found = (each.canary for tag in tags if (each := state.backends.get(tag)) is not None)
    return any(each is not None and each.served >= 0 for each in found)
