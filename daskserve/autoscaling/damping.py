"""Damping of a policy's decisions, so that noise and mistakes do no harm.

A policy must want more, or fewer, replicas for the whole delay before anything changes. If one check
disagrees, the delay restarts. A step down removes only replicas that were unneeded throughout the look-back
period. The last replica stops only after a time without requests. If this time is shorter than the delay for
scaling down, an idle backend with several replicas goes to one, and then to zero. Scaling up from zero has no
delay, because a request is already waiting. The same holds until the first replica runs.

A new controller may lose this state. It then only waits a little longer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from daskserve.autoscaling.context import ROUNDING, TOLERANCE_S, AutoscalingContext
from daskserve.common.formatting import shown
from daskserve.options.autoscaling import AutoscalingConfig


@dataclass(frozen=True, slots=True)
class Damping:
    """The options of damping.

    Attributes
    ----------
    cuts_look_back : bool
        Whether metrics from before the last change are dropped.
    settles : bool
        Whether a step down stops at the largest number wanted within the look-back period.
    multiple_of : int
        The size of a group: a step changes the number of replicas by a multiple of it.
    """

    upscale_delay_s: float
    downscale_delay_s: float
    zero_delay_s: float
    look_back_period_s: float
    cuts_look_back: bool = True
    settles: bool = True
    max_upscale_factor: float | None = None
    max_downscale_factor: float | None = None
    multiple_of: int = 1

    @classmethod
    def of(cls, config: AutoscalingConfig) -> Damping:
        """Return the damping of a config. The classic policy gets only the damping that classic Ray Serve
        has."""
        is_classic = config.policy == "classic"
        return cls(
            config.upscale_delay_s,
            config.downscale_delay_s,
            config.zero_delay_s,
            config.look_back_period_s,
            cuts_look_back=not is_classic,
            settles=not is_classic,
            max_upscale_factor=config.max_upscale_factor,
            max_downscale_factor=config.max_downscale_factor,
            multiple_of=config.multiple_of,
        )


@dataclass(slots=True)
class Delays:
    """Tracks for how long the policy has wanted more, or fewer, replicas."""

    up_since: float | None = None
    down_since: float | None = None
    #: The numbers wanted within the look-back period, each with its time.
    wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def reset(self) -> None:
        """Restart all delays, after a change."""
        self.up_since = self.down_since = None

    def apply(
        self, context: AutoscalingContext, wanted: int, damping: Damping, *, is_urgent: bool
    ) -> tuple[int, str]:
        """Return the new target, and the reason if it is not ``wanted`` yet."""
        now, current = context.current_time, context.target_num_replicas
        self._remember(now, wanted, damping.look_back_period_s)
        if wanted == current:
            self.reset()
            return current, ""
        if current == 0 or (context.is_waking and wanted > current):
            return wanted, ""
        if wanted > current:
            self.down_since = None
            if self.up_since is None:
                self.up_since = now
            return self._up(now - self.up_since, current, wanted, damping, is_urgent)
        self.up_since = None
        if self.down_since is None:
            self.down_since = now
        if current == damping.multiple_of:
            return self._to_zero(context, damping)
        zero_delay_s = damping.zero_delay_s
        if wanted == 0 and zero_delay_s < damping.downscale_delay_s and context.is_idle_for(zero_delay_s):
            return damping.multiple_of, f"{damping.multiple_of} first"
        return self._down(now - self.down_since, current, wanted, damping)

    def _remember(self, now: float, wanted: int, period_s: float) -> None:
        # Only the maximum is read, so a new number replaces all smaller ones before it.
        while self.wanted and self.wanted[-1][1] <= wanted:
            self.wanted.pop()
        self.wanted.append((now, wanted))
        while self.wanted[0][0] < now - period_s:
            self.wanted.popleft()

    def _up(
        self, waited_s: float, current: int, wanted: int, damping: Damping, is_urgent: bool
    ) -> tuple[int, str]:
        delay_s = damping.upscale_delay_s
        if not is_urgent and waited_s < delay_s - TOLERANCE_S:
            return (
                current,
                f"waiting {waited_s:.0f} of {shown(delay_s)} s before going up from {current}",
            )
        if damping.max_upscale_factor is not None:
            unit = damping.multiple_of
            groups = math.floor(current * damping.max_upscale_factor / unit + ROUNDING)
            most = max(current + unit, groups * unit)
            if wanted > most:
                return (
                    most,
                    f"{most} for now, at most {shown(damping.max_upscale_factor)} times {current} in a step",
                )
        return wanted, ""

    def _down(self, waited_s: float, current: int, wanted: int, damping: Damping) -> tuple[int, str]:
        delay_s, unit = damping.downscale_delay_s, damping.multiple_of
        if waited_s < delay_s - TOLERANCE_S:
            return (
                current,
                f"waiting {waited_s:.0f} of {shown(delay_s)} s before going down from {current}",
            )
        least, why = max(wanted, unit), ""
        if least > wanted:
            why = f"{unit} first"
        if damping.settles and self.wanted[0][1] > least:
            least = min(current, -(-self.wanted[0][1] // unit) * unit)
            why = f"{least} for now, the most wanted in the last {shown(damping.look_back_period_s)} s"
        if damping.max_downscale_factor is not None:
            groups = math.ceil(current / damping.max_downscale_factor / unit - ROUNDING)
            slow = min(current - unit, groups * unit)
            if slow > least:
                least, why = (
                    slow,
                    f"{slow} for now, at least {current} / {shown(damping.max_downscale_factor)}",
                )
        return least, why

    def _to_zero(self, context: AutoscalingContext, damping: Damping) -> tuple[int, str]:
        last = damping.multiple_of
        if context.idle_since is None:
            kept = "the last one stays" if last == 1 else f"the last {last} stay"
            return last, f"{kept} while there are requests"
        if not context.is_idle_for(damping.zero_delay_s):
            idle_s = context.current_time - context.idle_since
            event = "the last one stops" if last == 1 else f"the last {last} stop"
            return last, f"idle for {idle_s:.0f} of {shown(damping.zero_delay_s)} s before {event}"
        return 0, ""
