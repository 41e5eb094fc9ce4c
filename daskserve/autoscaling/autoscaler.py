"""One backend's autoscaler: it keeps recent metrics, calls the policy and damps its decisions.

It reads no clock and does no I/O. The caller passes in samples as they arrive and calls `step` every
``metrics_interval_s``. It also calls `step` at once when requests arrive for a backend without replicas:

    scaler.observe(sample)
    step = scaler.step(now=..., wall=..., current=3, target=4)
    if step.replicas != 4: ...

The autoscaler's state may be lost with the process. A new autoscaler only waits a little longer before its
first change.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskserve.autoscaling.context import AutoscalingContext, CustomPolicy, Decision, Sample
from daskserve.autoscaling.custom import CustomMetrics, CustomViews, PerReplica
from daskserve.autoscaling.damping import Damping, Delays
from daskserve.autoscaling.policies import load_policy
from daskserve.autoscaling.results import as_decision
from daskserve.common.types import BackendTag, ReplicaTag
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.fields.bounds import Bounds

#: Maximum number of samples kept, regardless of the look-back period and the sampling rate.
MOST_SAMPLES = 4096
#: Metrics are stale when they are older than both this many intervals and this many seconds.
STALE_INTERVALS = 2
STALE_S = 10.0


@dataclass(frozen=True, slots=True)
class ScalingStep:
    """The result of one autoscaling step.

    Attributes
    ----------
    replicas : int
        The new target number of replicas; within the bounds, unless this is a dry run.
    wanted : int
        The number of replicas that the policy wants, within the bounds.
    reason : str
        A human-readable explanation.
    error : BaseException or None
        The exception of the policy, or of the check of its answer. The target then does not change.
    """

    replicas: int
    wanted: int
    reason: str
    error: BaseException | None = None


class Autoscaler:
    """Decides how many replicas one backend has.

    Parameters
    ----------
    name : str
        The backend's name, passed to policies.
    config : AutoscalingConfig
        The backend's autoscaling options.
    policy : callable, optional
        A policy to use instead of ``config.policy``: one that was unpickled, or one for a test.
    damping : Damping, optional
        The damping to use instead of the config's.

    Raises
    ------
    ValueError
        The policy does not exist, or does not accept ``config.policy_kwargs``.
    """

    def __init__(
        self,
        name: BackendTag,
        config: AutoscalingConfig,
        *,
        policy: CustomPolicy | None = None,
        damping: Damping | None = None,
        latency_bounds_s: Sequence[float] = (),
    ) -> None:
        self.name = name
        self.latency_bounds_s = latency_bounds_s
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._newest: Sample | None = None
        self._replica_ongoing: Mapping[ReplicaTag, float] = {}
        self._custom = CustomMetrics(MOST_SAMPLES)
        self._state: Mapping[str, Any] = {}
        self._target: int | None = None
        self._idle_since: float | None = None
        self._last_up: float | None = None
        self._last_down: float | None = None
        self._delays = Delays()
        #: Whether no replica has run since the target was 0.
        self._is_waking = False
        self.configure(config, policy=policy, damping=damping)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} target={self._target} samples={len(self._samples)}>"

    def configure(
        self,
        config: AutoscalingConfig,
        *,
        policy: CustomPolicy | None = None,
        damping: Damping | None = None,
    ) -> None:
        """Use new options from now on, and keep the metrics. A policy that does not load changes nothing."""
        loaded = load_policy(config, policy)
        self.config = config
        self._bounds = config.bounds()
        self._policy = loaded
        self._damping = Damping.of(config) if damping is None else damping
        self._state = {}

    def observe(
        self,
        sample: Sample,
        *,
        replica_ongoing: Mapping[ReplicaTag, float] | None = None,
        custom: PerReplica | None = None,
    ) -> None:
        """Add a sample. A sample that is not newer than the last one is ignored.

        Parameters
        ----------
        replica_ongoing : mapping
            The number of requests in flight in each running replica.
        custom : mapping
            The custom metrics of each running replica, by metric name.
        """
        if self._newest is not None and sample.at <= self._newest.at:
            return
        self._newest = sample
        self._samples.append(sample)
        self._replica_ongoing = {} if replica_ongoing is None else replica_ongoing
        self._custom.observe(sample.at, {} if custom is None else custom)
        if not sample.is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = sample.at

    def step(self, **facts: Any) -> ScalingStep:
        """Return how many replicas the backend should have from now on; see `context` for the arguments."""
        context = self.context(**facts)
        try:
            answer = self._policy(context)
            if inspect.isawaitable(answer):
                if inspect.iscoroutine(answer):
                    answer.close()
                raise TypeError("the policy is async; call step_async() instead of step()")
        except Exception as error:
            return self._failed(context, error)
        return self.answered(context, answer)

    async def step_async(self, **facts: Any) -> ScalingStep:
        """Do the same as `step`, for a policy that may be async."""
        context = self.context(**facts)
        try:
            answer = self._policy(context)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            return self._failed(context, error)
        return self.answered(context, answer)

    # ---- the parts of a step

    def context(
        self,
        *,
        now: float,
        wall: float,
        current: int,
        target: int,
        queries: Mapping[str, float] | None = None,
        bounds: Bounds | None = None,
    ) -> AutoscalingContext:
        """Return the context for a policy.

        Parameters
        ----------
        now, wall : float
            The time on the samples' clock, and in seconds since the epoch.
        current : int
            The number of running replicas.
        target : int
            The current target number of replicas, set by the autoscaler or by a user.
        queries : mapping
            Values of PromQL expressions by name.
        bounds : Bounds
            Bounds to use instead of the config's.
        """
        self._follow_target(target, now)
        self._is_waking &= current == 0 < target
        horizon = now - self._damping.look_back_period_s
        while self._samples and self._samples[0].at <= horizon:
            self._samples.popleft()
        is_stale = self._is_stale(now)
        custom = CustomViews() if is_stale else self._custom.views(horizon, self.config.aggregation_function)
        return AutoscalingContext(
            self.name,
            self.config,
            now,
            wall,
            current,
            target,
            tuple(self._samples),
            self._replica_ongoing,
            custom.overall,
            {} if queries is None else queries,
            self._state,
            self._last_up,
            self._last_down,
            None if is_stale else self._idle_since,
            self.latency_bounds_s,
            custom.newest,
            custom.aggregated,
            self._bounds if bounds is None else bounds,
            self._is_waking,
        )

    def _follow_target(self, target: int, now: float) -> None:
        """Restart the delays when the target has changed, and drop metrics from before the change."""
        before, self._target = self._target, target
        if before is None or before == target:
            return
        self._is_waking |= before == 0
        if target > before:
            self._last_up = now
        else:
            self._last_down = now
        self._delays.reset()
        if self._damping.cuts_look_back:
            self._samples.clear()
            self._custom.clear()

    def answered(self, context: AutoscalingContext, answer: Any) -> ScalingStep:
        """Return the step for a policy's answer to a context."""
        try:
            decision = as_decision(answer)
        except (TypeError, ValueError) as error:
            return self._failed(context, error)
        self._state = decision.state
        return self._settled(context, decision)

    def _settled(self, context: AutoscalingContext, decision: Decision) -> ScalingStep:
        target = context.target_num_replicas
        bounds = context.bounds or self._bounds
        wanted, why = self._bounded(context, decision, bounds)
        if not bounds.allows(target):
            self._delays.reset()
            replicas, wait = wanted, ""
        else:
            replicas, wait = self._delays.apply(context, wanted, self._damping, is_urgent=decision.is_urgent)
        reason = "; ".join(part for part in (decision.reason, why, wait) if part)
        if self.config.dry_run:
            would = (
                f"would go from {target} to {replicas}" if replicas != target else f"would stay at {target}"
            )
            return ScalingStep(target, wanted, f"dry run, {would}: {reason}")
        if replicas != target:
            self._follow_target(replicas, context.current_time)
        return ScalingStep(replicas, wanted, reason)

    def _bounded(self, context: AutoscalingContext, decision: Decision, bounds: Bounds) -> tuple[int, str]:
        wanted = decision.replicas
        if context.target_num_replicas == 0 and self._has_demand(context):
            # This overrides the policy: without a replica, the waiting requests would never be answered.
            wanted = max(wanted, math.ceil(self.config.up_factor), 1)
        if wanted < bounds.least:
            return bounds.least, f"{bounds.least} at least (min_replicas{bounds.capacity_note})"
        if wanted > bounds.most:
            return bounds.most, f"{bounds.most} at most (max_replicas{bounds.capacity_note})"
        why = f"{wanted} for the waiting requests" if wanted != decision.replicas else ""
        whole = bounds.nearest(wanted)
        if whole != wanted:
            groups = f"{whole} in whole groups of {bounds.multiple_of}"
            why = f"{why}; {groups}" if why else groups
        return whole, why

    def _has_demand(self, context: AutoscalingContext) -> bool:
        newest = self._newest
        return newest is not None and not self._is_stale(context.current_time) and newest.has_demand

    def _is_stale(self, now: float) -> bool:
        limit_s = max(STALE_INTERVALS * self.config.metrics_interval_s, STALE_S)
        return self._newest is None or now - self._newest.at > limit_s

    def _failed(self, context: AutoscalingContext, error: Exception) -> ScalingStep:
        """Return a step that keeps the target, within the bounds, after the policy failed."""
        decision = Decision(
            context.target_num_replicas,
            f"the policy failed, so nothing changes: {type(error).__name__}: {error}",
        )
        return replace(self._settled(context, decision), error=error)
