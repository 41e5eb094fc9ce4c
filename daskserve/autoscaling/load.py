"""Policies by the number of requests that run or wait.

Today's ``target_ongoing_requests`` differs from the classic one where a queue has built up. To count who
waits is to count how long the shortage has lasted, not how large it is: ten seconds of ten times the load
wants a hundred times the replicas, which come when the queue has gone, and leave again. Where requests have
ended we know better: what comes in per second, times how long each takes, is the load to carry; and the
queue is a load beside it, to be worked off in ``drain_period_s``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from daskserve.autoscaling.context import ROUNDING, AutoscalingContext, Decision, Policy, Sample

#: So many requests must have ended for their mean duration to mean anything.
ENOUGH_ENDED = 10.0
#: A mean may be wrong by so many of its standard deviations.
DEVIATIONS = 2.0
#: The same for bursts, which would be found by chance more often, as each look counts.
BURST_DEVIATIONS = 3.0
#: So many samples make a burst, or one late message would.
ENOUGH_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be carried, in requests at a time, and by how many replicas exactly."""

    requests: float
    replicas: float
    #: How it was found, where it is not just what runs and waits.
    flow: str = ""


def classic() -> Policy:
    """Return the policy of classic Ray Serve: what runs or waits, divided by the target, with factors."""
    return _classic


def _classic(context: AutoscalingContext) -> Decision:
    config = context.config
    if not context.samples:
        return _no_figures(context)
    combine = _COMBINE[config.aggregation_function]
    total = combine([each.ongoing + each.queued for each in context.samples])
    wanted = context.whole_replicas(total / config.target_ongoing_requests, hysteresis=0)
    return Decision(wanted, _reason(context, total, wanted))


def target_ongoing_requests() -> Policy:
    """Return the policy that keeps ``target_ongoing_requests`` running or waiting per replica."""
    return _target_ongoing


def _target_ongoing(context: AutoscalingContext) -> Decision:
    samples = context.samples
    if not samples:
        return _no_figures(context)
    if context.target_num_replicas == 0:
        samples = samples[-1:]  # what waited earlier was nobody's to answer: only the backlog counts
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
            # Of requests that come by chance, as many more or fewer run as the root of their number.
            chance = BURST_DEVIATIONS * math.sqrt(burst.requests / len(recent))
            sure = burst.replicas - chance / context.config.target_ongoing_requests
            if sure >= context.config.burst_factor * context.target_num_replicas - ROUNDING:
                most = max(wanted, context.whole_replicas(burst.replicas))
                return Decision(
                    most, _reason(context, burst.requests, most, burst.flow, burst_s), state, True
                )
    return Decision(wanted, _reason(context, load.requests, wanted, load.flow), state)


def _uncertainty(context: AutoscalingContext, samples: Sequence[Sample]) -> float:
    """Return by how many replicas the mean load may well be wrong, as what runs wavers.

    It goes by how one look differs from the next: a load that has changed for good is not one that wavers.
    """
    totals = [each.ongoing + each.queued for each in samples]
    if len(totals) < 2:
        return 0.0
    squares = sum((after - before) ** 2 for before, after in itertools.pairwise(totals))
    variance = squares / (2 * (len(totals) - 1))
    return DEVIATIONS * math.sqrt(variance / len(totals)) / context.config.target_ongoing_requests


def _may_burst(context: AutoscalingContext, recent: Sequence[Sample]) -> bool:
    """Whether the newest sample alone would do for a burst, which is cheap to tell."""
    newest, config = recent[-1], context.config
    enough = config.burst_factor * context.target_num_replicas * config.target_ongoing_requests
    return newest.ongoing + newest.queued >= enough - ROUNDING


def _load(context: AutoscalingContext, samples: Sequence[Sample], each_runs: float) -> Load:
    config = context.config
    combine = _COMBINE[config.aggregation_function]
    total = combine([each.ongoing + each.queued for each in samples])
    plain = Load(total, total / config.target_ongoing_requests)
    if each_runs <= 0 or not any(each.queued > 0 for each in samples):
        return plain
    flow = _flow(context, samples, each_runs)
    return flow if flow is not None and flow.replicas < plain.replicas else plain


def _flow(context: AutoscalingContext, samples: Sequence[Sample], each_runs: float) -> Load | None:
    """Return the load by Little's law; None if too little has ended to tell how long requests take."""
    first, last = samples[0], samples[-1]
    span_s = last.at - first.at
    duration_s = _duration_s(samples)
    if span_s <= 0 or duration_s is None:
        return None
    rate = sum(each.rate for each in samples[1:]) / (len(samples) - 1)
    growth = (last.ongoing + last.queued - first.ongoing - first.queued) / span_s
    arriving = max(0.0, rate + growth)
    requests = arriving * duration_s + last.queued * duration_s / context.config.drain_period_s
    text = f"{last.queued:.1f} queued and {arriving:.1f} more per s, of {duration_s:.3g} s each: "
    return Load(requests, requests / min(context.config.target_ongoing_requests, each_runs), text)


def _duration_s(samples: Sequence[Sample]) -> float | None:
    """Return how long requests run: what ran, by what ended; None if too few have ended.

    When replicas begin, much more runs at once, and nothing of it has ended yet. Such a second says nothing,
    so it is the middle one of all the seconds that counts, if it is less than the mean.
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
    """Return the most that one replica was seen to run while others waited; 0 if that is not known.

    Replicas that leave a queue standing cannot run more than they do, whatever the target says. Those that
    have only just begun run less, so the most there ever was is kept as the policy's state.
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


#: By the names of ``aggregation_function``.
_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "max": max, "min": min}


def _reason(
    context: AutoscalingContext, total: float, wanted: int, flow: str = "", period_s: float | None = None
) -> str:
    over_s = context.config.look_back_period_s if period_s is None else period_s
    if context.samples:
        over_s = min(over_s, context.current_time - context.samples[0].at)
    target = context.config.target_ongoing_requests
    what = "requests at a time" if flow else "requests ongoing or queued"
    return f"{flow}{total:.1f} {what} over {over_s:.0f} s, {target:g} per replica wanted: {wanted}"


def _no_figures(context: AutoscalingContext) -> Decision:
    since = (
        ""
        if context.last_scale_up_time is None and context.last_scale_down_time is None
        else (" since the last change")
    )
    return Decision(context.target_num_replicas, f"no figures yet{since}")
