"""What stands between a policy's wish and a change, so that what wavers or errs does no harm.

A wish for more or fewer must persist for its delay; a contrary or a contented one starts the wait anew. What
is given up then is no more than was idle all through the look-back period. The last replica goes only after
a time without any request, and from none there is no wait at all: whoever asks is waiting already.

All of it is plain numbers that a new controller may lose: it only waits a little longer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from daskserve.autoscaling.context import ROUNDING, AutoscalingContext
from daskserve.options.autoscaling import AutoscalingConfig

#: Delays are held to within this, or a tick that is early by a rounding error costs a whole interval.
TOLERANCE_S = 1e-6


@dataclass(frozen=True, slots=True)
class Damping:
    """How wishes are tamed.

    Attributes
    ----------
    cuts_look_back : bool
        Figures from before the last change count no more.
    settles : bool
        A step down goes no further than the most that was wanted within the look-back period.
    multiple_of : int
        A step is of so many replicas, or of a multiple.
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
        """Return what a config asks for. The classic policy is followed to the letter."""
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
class Patience:
    """For how long more, or fewer, replicas have been wanted by now."""

    up_since: float | None = None
    down_since: float | None = None
    #: What was wanted at which time, within the look-back period.
    wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def reset(self) -> None:
        """Begin all waits anew, after a change."""
        self.up_since = self.down_since = None

    def settle(
        self, context: AutoscalingContext, wanted: int, damping: Damping, *, is_urgent: bool
    ) -> tuple[int, str]:
        """Return the number to have from now on, and what is still waited for, if it is not ``wanted``."""
        now, present = context.current_time, context.target_num_replicas
        self._remember(now, wanted, damping.look_back_period_s)
        if wanted == present:
            self.reset()
            return present, ""
        if present == 0:
            return wanted, ""
        if wanted > present:
            self.down_since = None
            if self.up_since is None:
                self.up_since = now
            return self._up(now - self.up_since, present, wanted, damping, is_urgent)
        self.up_since = None
        if self.down_since is None:
            self.down_since = now
        if present == damping.multiple_of:
            return self._to_zero(context, damping)
        return self._down(now - self.down_since, present, wanted, damping)

    def _remember(self, now: float, wanted: int, period_s: float) -> None:
        # The most of them is all that is asked for: what a later and larger one hides can go.
        while self.wanted and self.wanted[-1][1] <= wanted:
            self.wanted.pop()
        self.wanted.append((now, wanted))
        while self.wanted[0][0] < now - period_s:
            self.wanted.popleft()

    def _up(
        self, waited_s: float, present: int, wanted: int, damping: Damping, is_urgent: bool
    ) -> tuple[int, str]:
        delay_s = damping.upscale_delay_s
        if not is_urgent and waited_s < delay_s - TOLERANCE_S:
            return present, f"waiting {waited_s:.0f} of {delay_s:g} s before going up from {present}"
        if damping.max_upscale_factor is not None:
            unit = damping.multiple_of
            groups = math.floor(present * damping.max_upscale_factor / unit + ROUNDING)
            most = max(present + unit, groups * unit)
            if wanted > most:
                return (
                    most,
                    f"{most} for now, at most {damping.max_upscale_factor:g} times {present} in a step",
                )
        return wanted, ""

    def _down(self, waited_s: float, present: int, wanted: int, damping: Damping) -> tuple[int, str]:
        delay_s, unit = damping.downscale_delay_s, damping.multiple_of
        if waited_s < delay_s - TOLERANCE_S:
            return present, f"waiting {waited_s:.0f} of {delay_s:g} s before going down from {present}"
        least, why = max(wanted, unit), ""
        if least > wanted:
            why = f"{unit} first"
        if damping.settles and self.wanted[0][1] > least:
            least = min(present, -(-self.wanted[0][1] // unit) * unit)
            why = f"{least} for now, as many were wanted within {damping.look_back_period_s:g} s"
        if damping.max_downscale_factor is not None:
            groups = math.ceil(present / damping.max_downscale_factor / unit - ROUNDING)
            slow = min(present - unit, groups * unit)
            if slow > least:
                least, why = slow, f"{slow} for now, at least {present} / {damping.max_downscale_factor:g}"
        return least, why

    def _to_zero(self, context: AutoscalingContext, damping: Damping) -> tuple[int, str]:
        last = damping.multiple_of
        if context.idle_since is None:
            who = "the last one stays" if last == 1 else f"the last {last} stay"
            return last, f"{who} while there are requests"
        idle_s = context.current_time - context.idle_since
        if idle_s < damping.zero_delay_s - TOLERANCE_S:
            who = "the last one goes" if last == 1 else f"the last {last} go"
            return last, f"idle for {idle_s:.0f} of {damping.zero_delay_s:g} s before {who}"
        return 0, ""
