"""Knative's autoscaler, for comparison, with a stable window of 60 s and a panic window of 6 s.

As its documentation says, the number of replicas is the mean of running plus queued requests over the stable
window, divided by the target. If the mean over the panic window is twice the target load of the ready
replicas, that mean is used instead. No replica stops until a stable window has passed without panic. A step
multiplies the replicas by at most 1,000 or divides them by at most 2.
"""

from __future__ import annotations

import math

from daskserve.autoscaling.autoscaler import Autoscaler
from daskserve.autoscaling.context import ROUNDING, AutoscalingContext, Decision
from daskserve.autoscaling.damping import Damping
from daskserve.common.formatting import shown
from daskserve.options.autoscaling import AutoscalingConfig

STABLE_S, PANIC_S, PANIC_THRESHOLD = 60.0, 6.0, 2.0
MAX_UP, MAX_DOWN = 1000.0, 2.0
ZERO_GRACE_S = 30.0


def knative(context: AutoscalingContext) -> Decision:
    """Return the decision that Knative would make."""
    samples, target = context.samples, context.config.target_ongoing_requests
    if not samples:
        return Decision(context.target_num_replicas, "no metrics yet")
    now, ready = context.current_time, max(1, context.current_num_replicas)
    stable = sum(each.ongoing + each.queued for each in samples) / len(samples)
    recent = [each for each in samples if each.at > now - PANIC_S] or samples[-1:]
    panic = sum(each.ongoing + each.queued for each in recent) / len(recent)
    least, most = math.floor(ready / MAX_DOWN), math.ceil(ready * MAX_UP)
    want_stable = min(most, max(least, math.ceil(stable / target - ROUNDING)))
    want_panic = min(most, max(least, math.ceil(panic / target - ROUNDING)))
    since = context.state.get("panic_since")
    if panic / target >= PANIC_THRESHOLD * ready:
        since = now
    elif since is not None and now - since >= STABLE_S:
        since = None
    if since is None:
        return Decision(want_stable, f"{stable:.1f} over {shown(STABLE_S)} s: {want_stable}")
    wanted = max(want_panic, context.target_num_replicas)
    return Decision(wanted, f"panic, {panic:.1f} over {shown(PANIC_S)} s: {wanted}", {"panic_since": since})


def knative_autoscaler(config: AutoscalingConfig) -> Autoscaler:
    """Return an autoscaler that behaves like Knative's, with the bounds and the target of ``config``."""
    own = config.model_copy(update={"look_back_period_s": STABLE_S})
    damping = Damping(
        0.0, 0.0, ZERO_GRACE_S, STABLE_S, cuts_look_back=False, settles=False, multiple_of=config.multiple_of
    )
    return Autoscaler("simulated", own, policy=knative, damping=damping)
