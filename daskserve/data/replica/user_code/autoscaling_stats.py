"""Custom autoscaling metrics: the values that user code returns from ``record_autoscaling_stats``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from daskserve.common.clock import Clock
from daskserve.data.replica.user_code.recorded_stats import Hook, StatsRecorder

#: The name is that of Ray Serve.
HOOK = "record_autoscaling_stats"
#: A call that takes longer is late, and its values are ignored.
LIMIT_S = 2.0
#: Values older than this are not reported.
KEPT_S = 3.5
MOST_VALUES = 32
MOST_CHARACTERS = 100


def checked(answer: Any) -> tuple[dict[str, float], str]:
    """Return the valid values of a hook's result, and the problem with the others; see `Hook.checked`."""
    if not isinstance(answer, Mapping):
        if inspect.iscoroutine(answer):
            answer.close()
        return {}, f"returned {type(answer).__name__}; return a dict of numbers by name"
    answer = dict(answer)  # a copy, because user code may change it later
    if len(answer) > MOST_VALUES:
        return {}, f"returned {len(answer)} values; {MOST_VALUES} are allowed, so all are ignored"
    values, wrong = {}, ""
    for name, value in answer.items():
        number = _finite(value)
        # A name that is not printable may not be encodable either.
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MOST_CHARACTERS:
            wrong = f"returned the name {name!r:.120}; a name has 1 to {MOST_CHARACTERS} printable characters"
        elif number is None:
            wrong = f"returned {value!r:.120} for {name!r}; a value must be a finite number"
        else:
            values[name] = number
    return values, wrong


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


AUTOSCALING = Hook(HOOK, period_s=0.0, limit_s=LIMIT_S, kept_s=KEPT_S, checked=checked)


def autoscaling_metrics(recorder: StatsRecorder) -> dict[str, Any]:
    """Return the newest values as ``{"custom": ...}``; empty if there are none."""
    values = recorder.values()
    return {"custom": values} if values else {}


class ChildStats:
    """The values of a child process, read with its other metrics while the controller reads them."""

    def __init__(self, clock: Clock) -> None:
        #: The statistics for routing.
        self.routing: Mapping[str, Any] = {}
        self._clock = clock
        self._values: Mapping[str, float] = {}
        self._recorded_at = self._wanted_at = -math.inf

    @property
    def is_wanted(self) -> bool:
        """Whether the values were read recently."""
        return self._clock.now() - self._wanted_at <= KEPT_S

    def record(self, values: Mapping[str, float]) -> None:
        """Record the values of the child."""
        self._values, self._recorded_at = values, self._clock.now()

    def metrics(self) -> dict[str, Any]:
        """Return the newest values, like `StatsRecorder.metrics`."""
        now = self._wanted_at = self._clock.now()
        return {"custom": dict(self._values)} if self._values and now - self._recorded_at <= KEPT_S else {}
