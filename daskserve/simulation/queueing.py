"""A fluid model of the queue: the requests that wait, run and end in one tick are computed with a few sums.

Requests run in slots, of which each replica has a fixed number. A slot completes one request per mean
duration, and requests without a slot wait in order. Within a tick everything flows evenly. Random variation
(two arrivals at once, a long request before a short one) is added with Sakasegawa's approximation of the wait
in an M/G/c queue. The model ignores which replica a request goes to: all slots form one pool, as if the
router always found a free one. It also ignores the shape of the distribution of durations, beyond its mean
and spread.

`daskserve.simulation.events` models the same queue request by request; a test compares the two.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

#: Random waits are exponential. These are the means of the five equal parts of this distribution, relative to
#: its mean.
CHANCES = (0.107, 0.360, 0.708, 1.217, 2.609)
#: Window of the load that determines random waits, which build up over some seconds.
CHANCE_PERIOD_S = 30.0
#: Number of parts into which the requests that begin in one tick are split.
PIECES = 4
#: A smaller number of requests counts as zero.
LEAST = 1e-12
#: A smaller probability of waiting counts as zero.
LEAST_CHANCE = 1e-3


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a queue.

    Attributes
    ----------
    max_queued : float
        Maximum length; requests beyond it are rejected with 503.
    deadline_s : float
        Maximum waiting time; requests that wait longer expire.
    """

    max_queued: float = math.inf
    deadline_s: float = math.inf


@dataclass(slots=True)
class RequestCounts:
    """Counts of all requests so far, by outcome."""

    completed: float = 0.0
    rejected: float = 0.0
    expired: float = 0.0
    #: Number of requests that began, by waiting time in milliseconds.
    waits_ms: dict[int, float] = field(default_factory=dict)
    #: Mean waiting time of the requests that began in the last tick.
    last_wait_s: float = 0.0

    def began(self, wait_s: float, count: float) -> None:
        """Count requests that began after waiting."""
        key = int(wait_s * 1000)
        self.waits_ms[key] = self.waits_ms.get(key, 0.0) + count


class SimulatedQueue(Protocol):
    """The waiting and running requests of one backend."""

    request_counts: RequestCounts

    @property
    def ongoing(self) -> float:
        """Number of running requests."""

    @property
    def queued(self) -> float:
        """Number of waiting requests."""

    def advance(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        """Simulate the tick that begins at ``now``."""


class FluidQueue:
    """Models requests as a fluid; see the module."""

    def __init__(self, limits: QueueLimits, *, duration_cv: float = 1.0) -> None:
        self.request_counts = RequestCounts()
        self._limits = limits
        self._spread = (1 + duration_cv**2) / 2
        self.ongoing = 0.0
        self.queued = 0.0
        #: The load of the last seconds, in slots; -1 before the first tick.
        self._level = -1.0
        #: Waiting requests, oldest first: start and end of their even arrival, and their number.
        self._cohorts: deque[tuple[float, float, float]] = deque()

    def advance(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        """Simulate the tick that begins at ``now``."""
        inflow = self.queued + arrivals
        # If all requests can run at once, the number in flight approaches Little's law as requests end.
        level = inflow / tick_s * duration_s
        if self._level < 0:
            self._level = level
        else:
            self._level += min(1.0, tick_s / CHANCE_PERIOD_S) * (arrivals / tick_s * duration_s - self._level)
        eased = level + (self.ongoing - level) * math.exp(-tick_s / duration_s)
        if eased <= slots:
            self.request_counts.completed += self.ongoing + inflow - eased
            self._began_all(now, tick_s, arrivals, slots, duration_s)
            self.ongoing = eased
            return
        ended, began = self._saturated(tick_s, inflow, slots, duration_s)
        if arrivals > 0:
            self._cohorts.append((now, now + tick_s, arrivals))
        self.queued = inflow
        self.ongoing += self._begin(now, tick_s, began, self._limits.deadline_s) - ended
        self.request_counts.completed += ended
        self._expire(now + tick_s - self._limits.deadline_s)
        self._refuse()

    def _saturated(self, tick_s: float, inflow: float, slots: int, duration_s: float) -> tuple[float, float]:
        """Return how many requests end, and how many may begin, while there are more requests than slots."""
        # requests in slots of stopping replicas, which are draining
        given_up = max(0.0, self.ongoing - slots)
        ended = slots * tick_s / duration_s + given_up * (1 - math.exp(-tick_s / duration_s))
        ended = min(self.ongoing + inflow, ended)
        return ended, min(inflow, max(0.0, ended + slots - self.ongoing))

    def _began_all(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        """Begin all requests: first the waiting ones, as slots become free, then the arriving ones."""
        request_counts, backlog = self.request_counts, self.queued
        request_counts.last_wait_s = 0.0
        if backlog > 0:
            pace = slots / duration_s
            self._begin(now, min(tick_s, backlog / pace), backlog, math.inf)
            rest = max(pace - arrivals / tick_s, 1e-9)
            behind = arrivals * min(1.0, backlog / rest / tick_s)
            request_counts.began(min(tick_s, backlog / pace / 2), behind)
            arrivals -= behind
        if arrivals <= 0:
            return
        use = min(self._level / slots, 0.98) if slots else 0.0
        chance = use ** (math.sqrt(2 * (slots + 1)) - 1) if slots else 0.0
        if chance < LEAST_CHANCE:
            request_counts.waits_ms[0] = request_counts.waits_ms.get(0, 0.0) + arrivals
            return
        # Longer waits are caused by a queue, which the fluid model already contains.
        mean_s = min(self._spread * duration_s / (slots * (1 - use)), CHANCE_PERIOD_S)
        request_counts.began(0.0, arrivals * (1 - chance))
        for part in CHANCES:
            request_counts.began(part * mean_s, arrivals * chance / len(CHANCES))
        request_counts.last_wait_s = max(request_counts.last_wait_s, chance * mean_s)

    def _begin(self, now: float, span_s: float, count: float, deadline_s: float) -> float:
        """Begin up to ``count`` waiting requests, oldest first, evenly over a time; return their number."""
        begun = waited = 0.0
        while count - begun > LEAST and self._cohorts:
            at = now + span_s * begun / count
            self._expire(at - deadline_s)
            if not self._cohorts:
                break
            since, until, size = self._cohorts[0]
            taken = min(size, count - begun, max(count / PIECES, LEAST))
            came = since + (until - since) * taken / size
            wait_s = max(0.0, at + span_s * taken / count / 2 - (since + came) / 2)
            self.request_counts.began(wait_s, taken)
            waited += wait_s * taken
            begun += taken
            if taken >= size - LEAST:
                self._cohorts.popleft()
            else:
                self._cohorts[0] = (came, until, size - taken)
        self.request_counts.last_wait_s = waited / begun if begun > 0 else 0.0
        self.queued = max(0.0, self.queued - begun) if self._cohorts else 0.0
        return begun

    def _expire(self, oldest: float) -> None:
        """Expire the requests that arrived before ``oldest``."""
        cohorts = self._cohorts
        while cohorts and cohorts[0][0] < oldest:
            since, until, size = cohorts.popleft()
            late = size * min(1.0, (oldest - since) / (until - since)) if until > since else size
            self.request_counts.expired += late
            self.queued = max(0.0, self.queued - late)
            if until > oldest:
                cohorts.appendleft((oldest, until, size - late))
        if not cohorts:
            self.queued = 0.0

    def _refuse(self) -> None:
        """Reject the newest requests of a queue that is too long."""
        while self._cohorts and self.queued > self._limits.max_queued:
            since, until, size = self._cohorts.pop()
            refused = min(size, self.queued - self._limits.max_queued)
            self.request_counts.rejected += refused
            self.queued -= refused
            if refused < size:
                self._cohorts.append((since, until, size - refused))
        if not self._cohorts:
            self.queued = 0.0
