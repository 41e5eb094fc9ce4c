"""Requests as a fluid: what waits, runs and ends in one tick, at the cost of a few sums.

Requests run in slots, as many per replica as it runs at a time, and leave a slot at the rate of one per mean
duration; who finds none waits in order. Within a tick everything flows evenly, so what chance does within it
(two at once, a long one before a short one) is put on top by Sakasegawa's approximation of the wait in an
M/G/c queue. What this leaves out: which replica a request goes to (all slots are one pool, as if the router
always found a free one), and the shape of the distribution of durations beyond its mean and spread.

`daskserve.simulation.events` does the same request by request; a test compares the two.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

#: The wait of those who wait by chance is exponential; here are the means of its fifths, by its mean.
CHANCES = (0.107, 0.360, 0.708, 1.217, 2.609)
#: Waits by chance build up over some seconds: they go by the load of so long.
CHANCE_PERIOD_S = 10.0
#: A chance below this is none.
LEAST_CHANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a queue.

    Attributes
    ----------
    max_queued : float
        More are refused, with 503.
    deadline_s : float
        Who has waited so long is given up.
    """

    max_queued: float = math.inf
    deadline_s: float = math.inf


@dataclass(slots=True)
class Tally:
    """What has become of all requests so far."""

    completed: float = 0.0
    rejected: float = 0.0
    expired: float = 0.0
    #: How many began after so many milliseconds of waiting.
    waits_ms: dict[int, float] = field(default_factory=dict)
    #: The wait of those who began in the newest tick, on average.
    last_wait_s: float = 0.0

    def began(self, wait_s: float, count: float) -> None:
        """Count requests that found a slot."""
        key = int(wait_s * 1000)
        self.waits_ms[key] = self.waits_ms.get(key, 0.0) + count


class Queue(Protocol):
    """Requests of one backend, waiting and running."""

    tally: Tally

    @property
    def ongoing(self) -> float:
        """How many run."""

    @property
    def queued(self) -> float:
        """How many wait."""

    def advance(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        """Let a tick that begins at ``now`` pass."""


class FluidQueue:
    """Requests as a fluid; see the module."""

    def __init__(self, limits: Limits, *, duration_cv: float = 1.0) -> None:
        self.tally = Tally()
        self._limits = limits
        self._spread = (1 + duration_cv**2) / 2
        self._running = 0.0
        self._waiting = 0.0
        #: The load of the last seconds, in slots; -1 before the first.
        self._level = -1.0
        #: Who waits: when they came, on average, and how many; the longest first.
        self._cohorts: deque[tuple[float, float]] = deque()

    @property
    def ongoing(self) -> float:
        return self._running

    @property
    def queued(self) -> float:
        return self._waiting

    def advance(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        """Let a tick that begins at ``now`` pass."""
        inflow = self._waiting + arrivals
        # All could run at once: towards Little's law, as fast as requests end.
        level = inflow / tick_s * duration_s
        if self._level < 0:
            self._level = level
        else:
            self._level += min(1.0, tick_s / CHANCE_PERIOD_S) * (arrivals / tick_s * duration_s - self._level)
        eased = level + (self._running - level) * math.exp(-tick_s / duration_s)
        if eased <= slots:
            ended = self._running + inflow - eased
            self._began_all(now, tick_s, arrivals, slots, duration_s)
            self._running = eased
        else:
            ended, began = self._saturated(tick_s, inflow, slots, duration_s)
            if arrivals > 0:
                self._cohorts.append((now + tick_s / 2, arrivals))
            self._waiting = inflow
            self._begin(now, tick_s, began)
            self._running += began - ended
        self.tally.completed += ended
        if self._waiting > 0:
            self._drop(now + tick_s)

    def _saturated(self, tick_s: float, inflow: float, slots: int, duration_s: float) -> tuple[float, float]:
        """Return how many end and begin while there are more than slots."""
        busy = max(self._running, float(slots))
        ended = min(self._running + inflow, busy * tick_s / duration_s)
        if self._running > slots:  # slots that were given up are still being emptied
            ended = self._running * (1 - math.exp(-tick_s / duration_s))
        began = min(inflow, max(0.0, ended + slots - self._running))
        return ended, began

    def _began_all(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        tally = self.tally
        backlog, tally.last_wait_s = self._waiting, 0.0
        if backlog > 0:
            self._begin(now, tick_s, backlog)
        if arrivals <= 0:
            return
        use = min(self._level / slots, 0.98) if slots else 0.0
        chance = use ** (math.sqrt(2 * (slots + 1)) - 1) if slots else 0.0
        if chance < LEAST_CHANCE:
            tally.waits_ms[0] = tally.waits_ms.get(0, 0.0) + arrivals
            return
        # Who waits longer than that does so behind a queue, and the fluid shows it.
        mean_s = min(self._spread * duration_s / (slots * (1 - use)), CHANCE_PERIOD_S)
        tally.began(0.0, arrivals * (1 - chance))
        for part in CHANCES:
            tally.began(part * mean_s, arrivals * chance / len(CHANCES))
        tally.last_wait_s = max(tally.last_wait_s, chance * mean_s)

    def _begin(self, now: float, tick_s: float, count: float) -> None:
        """Let so many of those who wait begin, evenly over the tick, the longest first."""
        left, place = count, 0.0
        waited = 0.0
        while left > 1e-12 and self._cohorts:
            came, size = self._cohorts[0]
            taken = min(size, left)
            middle = now + tick_s * (place + taken / 2) / count
            wait_s = max(0.0, middle - came)
            self.tally.began(wait_s, taken)
            waited += wait_s * taken
            left -= taken
            place += taken
            if taken >= size - 1e-12:
                self._cohorts.popleft()
            else:
                self._cohorts[0] = (came, size - taken)
        self.tally.last_wait_s = waited / count if count > 0 else 0.0
        self._waiting = max(0.0, self._waiting - count) if self._cohorts else 0.0

    def _drop(self, now: float) -> None:
        """Give up who waited too long, and refuse who came last to a queue that was full."""
        cohorts, limits = self._cohorts, self._limits
        while cohorts and now - cohorts[0][0] > limits.deadline_s:
            size = cohorts.popleft()[1]
            self.tally.expired += size
            self._waiting -= size
        while cohorts and self._waiting > limits.max_queued:
            came, size = cohorts.pop()
            refused = min(size, self._waiting - limits.max_queued)
            self.tally.rejected += refused
            self._waiting -= refused
            if refused < size:
                cohorts.append((came, size - refused))
        if not cohorts:
            self._waiting = 0.0
