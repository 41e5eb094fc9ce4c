"""Tunes the sizes and waits of batches, for ``batch(latency_target_s=...)``.

It is synchronous, gets the time as an argument, and learns from the batches that have run.

Size: a batch of n items takes about ``a + c * n`` seconds; both numbers are fitted to recent batches. The
limit is the largest size that takes no longer than the target. A smaller limit would not help: under a load
that needs large batches, small ones only let the queue grow.

Wait: a batch that starts as soon as possible has the lowest latency. But if each caller sends its next item
once it has an answer, a batch that waits for all callers has up to twice the throughput: without the wait,
the callers form two groups that take turns. No model distinguishes these loads, so the wait is found by
trial: a new wait replaces the current one only if it answers more items in time. A wait that fails its trial
is tried less often, until the load changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from daskserve.data.batching.limits import BatchLimits

#: The waits to try, as shares of the target minus the duration of a batch.
WAITS: Sequence[float] = (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0)
#: The share of the target that a batch may take, which leaves room for noise.
SHARE = 0.9
#: The longest wait is at least this share of the target; callers that send at the same time wait much less.
LEAST_SLACK = 0.1
#: Weight of older batches in the fit, per batch.
DECAY = 0.97
#: A measuring period lasts until it has this many items, within these bounds in seconds.
PERIOD_ITEMS = 100
PERIOD_S, LONGEST_PERIOD_S = 0.3, 1.0
#: The relative throughput, compared with the current wait, at which a longer or a shorter wait replaces it.
BETTER, AS_GOOD = 1.03, 0.98
#: Below this share of the best throughput, a wait is clearly worse, and its next trial is much later.
CLEAR = 0.9
#: Maximum number of periods between two trials of the same wait.
LONGEST_PAUSE = 64
#: Trials become frequent again when the load changes by this share.
CHANGE = 0.3
#: If batches run for less than this share of the time, a longer wait cannot raise the throughput.
BUSY = 0.8


class ServiceTimes:
    """How long batches take, by their size: a line fitted to recent ones."""

    def __init__(self) -> None:
        self._weight = self._mean_n = self._mean_t = 0.0
        self._var = self._cov = 0.0
        #: Seconds per item, once batches of different sizes have run.
        self._slope: float | None = None
        self._noise = 0.0

    def add(self, size: int, took_s: float) -> None:
        """Add a batch to the fit."""
        if self._weight:
            error = took_s - self.predict(size)
            self._noise = DECAY * self._noise + (1 - DECAY) * error * error
        self._weight = DECAY * self._weight + 1
        step = 1 / self._weight
        off_n, off_t = size - self._mean_n, took_s - self._mean_t
        self._mean_n += step * off_n
        self._mean_t += step * off_t
        self._var = (1 - step) * (self._var + step * off_n * off_n)
        self._cov = (1 - step) * (self._cov + step * off_n * off_t)
        if self._var > 0.02 * self._mean_n:
            self._slope = max(0.0, self._cov / self._var)

    def predict(self, size: float) -> float:
        """Return how long a batch takes."""
        if self._slope is None:
            # Only one size is known; assume that the duration is proportional to the size.
            return self._mean_t * size / max(1.0, self._mean_n)
        return max(0.0, self._mean_t + self._slope * (size - self._mean_n))

    def largest(self, limit_s: float) -> float:
        """Return the size that takes ``limit_s``, or twice the time of one item if that takes longer."""
        if not self._weight:
            return 1.0
        one = self.predict(1)
        limit_s = (
            max(limit_s - 2 * math.sqrt(self._noise), min(2 * one, limit_s)) if one < limit_s else 2 * one
        )
        per_item = self.predict(2) - one
        return math.inf if per_item <= 0 else 1 + (limit_s - one) / per_item


@dataclass
class _Period:
    """The batches of a period. ``began`` is None until the last batch with earlier limits has ended."""

    began: float | None = None
    batches: int = 0
    items: int = 0
    late: int = 0
    busy_s: float = 0.0


class BatchTuner:
    """Sets the limits of one queue, given the durations of its batches.

    Parameters
    ----------
    target_s : float
        Maximum time of an item, from its call to its result.
    bounds : BatchLimits
        The largest size and wait.
    max_running : int
        Maximum number of batches that run at a time.
    """

    def __init__(self, target_s: float, bounds: BatchLimits, max_running: int = 1) -> None:
        #: The limits that the queue uses.
        self.limits = BatchLimits(1, 0.0)
        self.limits.restarts_wait = True
        self._target_s = target_s
        self._bounds = bounds
        self._max_running = max_running
        self._times = ServiceTimes()
        self._running = 0
        #: The maximum number of items that waited or ran at a time: in this period and in the previous one.
        self._peak = self._peak_before = 0
        self._wait = 0
        self._trial: int | None = None
        #: The last wait that was tried. For each wait, in periods: the pause after a trial, and when the next
        #: is due.
        self._tried = 0
        self._pauses = [1] * len(WAITS)
        self._due = [1] * len(WAITS)
        self._periods = 0
        self._score = 0.0
        self._load = (0.0, 0.0)
        self._period = _Period()

    def started(self, size: int) -> None:
        """Record that a batch starts."""
        self._running += size

    def failed(self, size: int) -> None:
        """Record that a batch was cancelled or has raised an error; its duration does not count."""
        self._running -= size

    def ended(self, now: float, waits_s: Sequence[float], took_s: float, queued: int) -> None:
        """Record that a batch has ended, how long its items had waited, and how many items wait now."""
        size = len(waits_s)
        self._peak = max(self._peak, self._running + queued)
        self._running -= size
        self._times.add(size, took_s)
        period = self._period
        if period.began is None:
            period.began = now
        else:
            period.batches += 1
            period.items += size
            period.late += sum(wait + took_s > self._target_s for wait in waits_s)
            period.busy_s += took_s
            passed = now - period.began
            is_long = passed >= PERIOD_S and period.items >= PERIOD_ITEMS
            if is_long or passed >= LONGEST_PERIOD_S or self._is_hopeless(passed):
                self._end_period(now, passed)
        self._set_limits()

    def _end_period(self, now: float, passed: float) -> None:
        period = self._period
        rate, late = period.items / passed, period.late / max(1, period.items)
        # Up to one item in a hundred may be late; beyond that, the share of late items decides.
        score = rate if late <= 0.01 else rate * (0.5 - 0.49 * late)
        busy = period.busy_s / passed / self._max_running
        load = (rate, float(max(self._peak, self._peak_before)))
        self._periods += 1
        if self._trial is None:
            self._score = score
            if _differs(load[0], self._load[0]) or _differs(load[1], self._load[1]):
                self._load = load
                self._pauses = [1] * len(WAITS)
                self._due = [self._periods] * len(WAITS)
            has_changed = self._begin_trial(busy)
        else:
            self._end_trial(self._trial, score, load)
            has_changed = True
        self._period = _Period(None if has_changed else now)
        self._peak_before, self._peak = self._peak, 0

    def _begin_trial(self, busy: float) -> bool:
        """Try the next wait that is due for a trial; return whether there is one."""
        for step in range(1, len(WAITS)):
            wait = (self._tried + step) % len(WAITS)
            if self._periods < self._due[wait] or wait == self._wait:
                continue
            if wait < self._wait or busy >= BUSY:
                self._trial = self._tried = wait
                return True
        return False

    def _end_trial(self, trial: int, score: float, load: tuple[float, float]) -> None:
        self._trial = None
        is_better = score >= (BETTER if trial > self._wait else AS_GOOD) * self._score
        lost, ratio = (trial, score / max(self._score, 1e-9))
        if is_better:
            lost, ratio = self._wait, self._score / max(score, 1e-9)
            self._wait, self._score, self._load = trial, score, load
        self._pauses[lost] = min((2 if ratio >= CLEAR else 8) * self._pauses[lost], LONGEST_PAUSE)
        self._due[lost] = self._periods + self._pauses[lost]

    def _is_hopeless(self, passed: float) -> bool:
        """Whether a trial that has just begun is clearly worse already."""
        if self._trial is None or self._period.batches < 3 or passed < PERIOD_S:
            return False
        return self._period.items / passed < (2 * CLEAR - 1) * self._score

    def _set_limits(self) -> None:
        limits, bounds = self.limits, self._bounds
        size = min(self._times.largest(SHARE * self._target_s), bounds.max_batch_size)
        limits.max_batch_size = max(1, int(size))
        current = max(self._peak, self._peak_before) / self._max_running
        limits.enough = min(limits.max_batch_size, max(1, math.ceil(current)))
        # An item may arrive while a batch runs, and also waits for the end of that batch.
        slack_s = SHARE * self._target_s - 2 * self._times.predict(limits.enough)
        slack_s = max(slack_s, LEAST_SLACK * self._target_s)
        share = WAITS[self._wait if self._trial is None else self._trial]
        limits.wait_s = max(0.0, min(share * slack_s, bounds.wait_s))


def _differs(one: float, other: float) -> bool:
    return abs(one - other) > CHANGE * max(one, other)
