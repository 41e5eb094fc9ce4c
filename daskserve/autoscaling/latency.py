"""A policy that keeps latency below an objective.

The latency alone does not show how many replicas are missing: below a certain load per replica it hardly
changes, and above that load it grows without limit. The policy therefore learns this load. For an hour it
remembers the rate per replica at which the objective was met ("good") and the rate at which it was missed
("bad"). The good rate determines how far it may scale down at once; the bad rate limits the next attempt. In
a new controller, the policy starts without this state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.autoscaling.context import ROUNDING, AutoscalingContext, Decision, Policy
from daskserve.common.formatting import shown

#: Latency below this share of the objective allows fewer replicas.
COMFORT = 0.8
#: The load per replica stays below this share of the "bad" rate.
MARGIN = 0.9
#: Largest factor of one step up. The latencies of a growing queue do not show how many replicas it needs.
MOST_AT_ONCE = 2.0
#: Share of the replicas that one step down removes while the "bad" rate is unknown.
TRIED = 0.1
#: How long a learned rate is used, because code and callers change.
MEMORY_S = 3600.0


def latency_objective(objective_s: float, quantile: float = 0.95) -> Policy:
    """Return a policy that keeps the ``quantile`` of request latencies at or below ``objective_s``.

    Raises
    ------
    ValueError
        The objective is not above 0, or the quantile is not between 0 and 1.
    """
    if not 0 < objective_s < math.inf:
        raise ValueError(f"objective_s is {objective_s!r}; give seconds above 0, such as 0.2")
    if not 0 < quantile < 1:
        raise ValueError(f"quantile is {quantile!r}; give a share between 0 and 1, such as 0.95")

    def decide(context: AutoscalingContext) -> Decision:
        current = context.target_num_replicas
        if current == 0:
            waiting = context.samples[-1].queued if context.samples else 0
            return Decision(1 if waiting > 0 else 0, f"{shown(waiting)} requests wait", context.state)
        if not context.samples:
            return Decision(current, "no metrics yet since the last change", context.state)
        if context.may_go_to_zero:  # even if the mean still contains earlier requests
            return Decision(0, f"no requests for {shown(context.config.zero_delay_s)} s: 0", context.state)
        rate = sum([each.rate for each in context.samples]) / len(context.samples)
        taken_s = _latency(context, rate, quantile, objective_s)
        if taken_s is None:
            return Decision(current, "no latencies were measured, so nothing changes", context.state)
        known = {
            name: pair for name, pair in context.state.items() if pair[1] > context.current_time - MEMORY_S
        }
        text = f"p{shown(100 * quantile)} is {shown(taken_s)} s, {shown(objective_s)} s wanted"
        if context.current_num_replicas < current:
            return Decision(current, f"{text}; waiting for {current} to run", known)
        if taken_s > objective_s:
            return _more(context, rate, taken_s / objective_s, text, known)
        if taken_s > COMFORT * objective_s:
            return Decision(current, f"{text}: {current} is right", known)
        return _fewer(context, rate, text, known)

    return decide


def quantile_of(counts: Sequence[float], bounds_s: Sequence[float], quantile: float) -> float:
    """Return a quantile of bucketed values. Values are spread evenly within each bucket; in the last one, the
    result is infinity."""
    rank, below, lower = quantile * sum(counts), 0.0, 0.0
    for count, upper in zip(counts, bounds_s, strict=False):
        if count and below + count >= rank - ROUNDING:
            return lower + (upper - lower) * max(0.0, rank - below) / count
        below += count
        lower = upper
    return math.inf


def _latency(context: AutoscalingContext, rate: float, quantile: float, objective_s: float) -> float | None:
    """Return the latency, with waiting requests included; None if it is unknown."""
    samples, bounds_s = context.samples, context.latency_bounds_s
    counted = [each.latency_counts for each in samples if each.latency_counts]
    counts = list(map(sum, zip(*counted, strict=True)))
    waiting = sum([each.queued for each in samples]) / len(samples)
    if sum(counts) > 0:
        return max(quantile_of(counts, bounds_s, quantile), waiting / rate if rate > 0 else 0.0)
    if context.idle_since is not None:
        return 0.0
    was_busy = all(each.ongoing + each.queued > 0 for each in samples)
    return math.inf if was_busy and context.current_time - samples[0].at > objective_s and rate <= 0 else None


def _more(
    context: AutoscalingContext, rate: float, ratio: float, text: str, known: Mapping[str, Any]
) -> Decision:
    current, each_carried = context.target_num_replicas, rate / context.current_num_replicas
    bad = min(each_carried, known.get("bad", (math.inf,))[0])
    state = {**known, "bad": (bad, context.current_time)} if each_carried > 0 else dict(known)
    if "good" in state and state["good"][0] >= bad > 0:
        del state["good"]
    wanted = max(current + 1, math.ceil(current * min(MOST_AT_ONCE, ratio) - ROUNDING))
    is_urgent = ratio >= MOST_AT_ONCE and context.config.burst_s > 0
    return Decision(wanted, f"{text}: {wanted}", state, is_urgent)


def _fewer(context: AutoscalingContext, rate: float, text: str, known: Mapping[str, Any]) -> Decision:
    current = context.target_num_replicas
    if rate <= 0:
        return Decision(0, f"{text}, and no requests arrive: 0", known)
    carried = rate / context.current_num_replicas
    good = max(carried, known.get("good", (0.0,))[0])
    state = {**known, "good": (good, context.current_time)}
    wanted = math.ceil(rate / good - ROUNDING)
    if "bad" in known:
        # The geometric mean of the current rate and the "bad" rate.
        most = MARGIN * known["bad"][0]
        wanted = max(
            min(wanted, math.ceil(rate / math.sqrt(carried * most))), math.ceil(rate / most - ROUNDING)
        )
    elif wanted >= current:
        wanted = current - max(1, math.floor(TRIED * current))
    wanted = max(1, min(current, wanted))
    return Decision(wanted, f"{text}: {wanted}", state)
