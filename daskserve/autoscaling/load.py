"""Policies that scale on the number of running and queued requests.

``target_ongoing_requests`` differs from the classic policy when a queue has built up. The length of a queue
depends on how long a shortage has lasted, not only on how large it is. After ten seconds of ten times the
load, the classic policy would want a hundred times the replicas. They would start when the queue is empty,
and stop again. Once enough requests have ended, their arrival rate times their duration is the load (Little's
law). The queue is added as load to be worked off within ``drain_period_s``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from daskserve.autoscaling.context import ROUNDING, AutoscalingContext, Decision, Policy, Sample
from daskserve.autoscaling.custom import AGGREGATIONS
from daskserve.common.formatting import shown

#: Minimum number of ended requests for a meaningful mean duration.
ENOUGH_ENDED = 10.0
#: Assumed error of a mean load, in standard deviations.
DEVIATIONS = 2.0
#: The same for bursts. It is larger because each check may detect a burst by chance.
BURST_DEVIATIONS = 3.0
#: Number of samples that a burst needs, so that one late message does not look like a burst.
ENOUGH_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """A load in concurrent requests, and in replicas before rounding."""

    requests: float
    replicas: float
    #: How the load was computed, if it is not just the running plus queued requests.
    flow: str = ""


def classic() -> Policy:
    """Return the policy of classic Ray Serve: running plus queued requests divided by the target."""
    return _classic


def _classic(context: AutoscalingContext) -> Decision:
    config = context.config
    if not context.samples:
        return _no_metrics(context)
    aggregate = AGGREGATIONS[config.aggregation_function]
    total = aggregate(each.ongoing + each.queued for each in _counting(context))
    wanted = context.whole_replicas(total / config.target_ongoing_requests, hysteresis=0)
    return Decision(wanted, _reason(context, total, wanted))


def target_ongoing_requests() -> Policy:
    """Return the policy that keeps ``target_ongoing_requests`` running plus queued requests per replica."""
    return _target_ongoing


def _target_ongoing(context: AutoscalingContext) -> Decision:
    if not context.samples:
        return _no_metrics(context)
    if context.may_go_to_zero:  # even if the mean still contains earlier requests
        return Decision(0, f"no requests for {shown(context.config.zero_delay_s)} s: 0", context.state)
    samples = _counting(context)
    queueing = [each for each in context.samples if each.queued > 0]
    each_runs = _each_runs(context, queueing)
    state = {"each_runs": each_runs} if each_runs > 0 else {}
    load = _load(context, samples, each_runs)
    wanted = context.whole_replicas(load.replicas)
    if wanted != context.target_num_replicas and not load.flow:
        wanted = context.whole_replicas(load.replicas, uncertainty=_uncertainty(context, samples))
    burst_s = context.config.burst_s
    if burst_s > 0 and context.target_num_replicas > 0:
        recent = _since(samples, context.current_time - burst_s)
        if len(recent) >= ENOUGH_SAMPLES and _may_burst(context, recent):
            burst = _load(context, recent, each_runs)
            # With random arrivals, the standard deviation of the number in flight is the square root of its
            # mean.
            chance = BURST_DEVIATIONS * math.sqrt(burst.requests / len(recent))
            sure = burst.replicas - chance / context.config.target_ongoing_requests
            if sure >= context.config.burst_factor * context.target_num_replicas - ROUNDING:
                most = max(wanted, context.whole_replicas(burst.replicas))
                return Decision(
                    most, _reason(context, burst.requests, most, burst.flow, burst_s), state, True
                )
    return Decision(wanted, _reason(context, load.requests, wanted, load.flow), state)


def _counting(context: AutoscalingContext) -> Sequence[Sample]:
    """Return the samples to use. Without replicas, the queue only grows, so only the newest sample counts."""
    if context.target_num_replicas == 0 or context.is_waking:
        return context.samples[-1:]
    return context.samples


def _uncertainty(context: AutoscalingContext, samples: Sequence[Sample]) -> float:
    """Return the part of the load's error that noise causes, in replicas.

    The noise is estimated from differences between successive samples, so a lasting change of the load does
    not count as noise.
    """
    totals = [each.ongoing + each.queued for each in samples]
    if len(totals) < 2:
        return 0.0
    squares = sum((after - before) ** 2 for before, after in itertools.pairwise(totals))
    variance = squares / (2 * (len(totals) - 1))
    return DEVIATIONS * math.sqrt(variance / len(totals)) / context.config.target_ongoing_requests


def _may_burst(context: AutoscalingContext, recent: Sequence[Sample]) -> bool:
    """Whether the newest sample alone is large enough for a burst. This check is cheap."""
    newest, config = recent[-1], context.config
    enough = config.burst_factor * context.target_num_replicas * config.target_ongoing_requests
    return newest.ongoing + newest.queued >= enough - ROUNDING


def _load(context: AutoscalingContext, samples: Sequence[Sample], each_runs: float) -> MeasuredLoad:
    config = context.config
    total = AGGREGATIONS[config.aggregation_function](each.ongoing + each.queued for each in samples)
    plain = MeasuredLoad(total, total / config.target_ongoing_requests)
    if each_runs <= 0 or not any(each.queued > 0 for each in samples):
        return plain
    flow = _flow(context, samples, each_runs)
    return flow if flow is not None and flow.replicas < plain.replicas else plain


def _flow(context: AutoscalingContext, samples: Sequence[Sample], each_runs: float) -> MeasuredLoad | None:
    """Return the load by Little's law; None if too few requests have ended to know their duration."""
    first, last = samples[0], samples[-1]
    span_s = last.at - first.at
    duration_s = _duration_s(samples)
    if span_s <= 0 or duration_s is None:
        return None
    rate = sum(each.rate for each in samples[1:]) / (len(samples) - 1)
    growth = (last.ongoing + last.queued - first.ongoing - first.queued) / span_s
    arriving = max(0.0, rate + growth)
    requests = arriving * duration_s + last.queued * duration_s / context.config.drain_period_s
    text = f"{last.queued:.1f} queued and {arriving:.1f} more per s, of {shown(duration_s)} s each: "
    return MeasuredLoad(requests, requests / min(context.config.target_ongoing_requests, each_runs), text)


def _duration_s(samples: Sequence[Sample]) -> float | None:
    """Return the mean duration of requests: running divided by ended; None if too few have ended.

    When replicas start, many requests begin at once and none has ended yet, which inflates the mean. The
    median over the intervals is therefore used if it is smaller.
    """
    ran = ended = 0.0
    ratios = []
    for before, after in itertools.pairwise(samples):
        span_s = after.at - before.at
        ongoing = (before.ongoing + after.ongoing) / 2
        ran += ongoing * span_s
        ended += after.rate * span_s
        ratios.append(ongoing / after.rate if after.rate > 0 else math.inf)
    if ended < ENOUGH_ENDED or ran <= 0:
        return None
    ratios.sort()
    return min(ran / ended, ratios[(len(ratios) - 1) // 2]) or None


def _each_runs(context: AutoscalingContext, queueing: Sequence[Sample]) -> float:
    """Return the largest number of requests one replica ran while requests were queued; 0 if unknown.

    While requests are queued, replicas run as many requests as they can, regardless of the target. Replicas
    that have just started run fewer, so the policy's state keeps the maximum.
    """
    known: float = context.state.get("each_runs", 0.0)
    if not queueing or context.current_num_replicas <= 0:
        return known
    return max(known, max(each.ongoing for each in queueing) / context.current_num_replicas)


def _since(samples: Sequence[Sample], at: float) -> Sequence[Sample]:
    first = len(samples)
    while first and samples[first - 1].at > at:
        first -= 1
    return samples[first:]


def _reason(
    context: AutoscalingContext, total: float, wanted: int, flow: str = "", period_s: float | None = None
) -> str:
    over_s = context.config.look_back_period_s if period_s is None else period_s
    if context.samples:
        over_s = min(over_s, context.current_time - context.samples[0].at)
    target = context.config.target_ongoing_requests
    what = "concurrent requests" if flow else "requests ongoing or queued"
    return f"{flow}{total:.1f} {what} over {over_s:.0f} s, {shown(target)} per replica wanted: {wanted}"


def _no_metrics(context: AutoscalingContext) -> Decision:
    since = (
        ""
        if context.last_scale_up_time is None and context.last_scale_down_time is None
        else (" since the last change")
    )
    return Decision(context.target_num_replicas, f"no metrics yet{since}")
