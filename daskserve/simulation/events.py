"""The event-based queue: exact, request by request; its run time grows with the number of requests."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque

from daskserve.simulation.queueing import QueueLimits, RequestCounts


def drawn_duration_s(mean_s: float, cv: float, rng: random.Random) -> float:
    """Draw a duration from a gamma distribution with this coefficient of variation; constant if it is 0."""
    if cv <= 0:
        return mean_s
    shape = 1 / cv**2
    return rng.gammavariate(shape, mean_s / shape)


class EventQueue:
    """Simulates single requests, which arrive at random times within each tick."""

    def __init__(self, limits: QueueLimits, rng: random.Random, *, duration_cv: float = 1.0) -> None:
        self.request_counts = RequestCounts()
        self._limits = limits
        self._rng = rng
        self._cv = duration_cv
        self._ends: list[float] = []
        self._arrived: deque[float] = deque()
        self._fraction = 0.0

    @property
    def ongoing(self) -> float:
        return float(len(self._ends))

    @property
    def queued(self) -> float:
        return float(len(self._arrived))

    def advance(self, now: float, tick_s: float, arrivals: float, slots: int, duration_s: float) -> None:
        """Simulate the tick that begins at ``now``."""
        self._fraction += arrivals
        count = math.floor(self._fraction)
        self._fraction -= count
        times = sorted(now + tick_s * self._rng.random() for _ in range(count))
        times.append(now + tick_s)
        before = self.request_counts.completed
        self._fill(now, slots, duration_s)
        for at in times:
            while self._ends and self._ends[0] <= at:
                ended = heapq.heappop(self._ends)
                self.request_counts.completed += 1
                self._fill(ended, slots, duration_s)
            if at < now + tick_s:
                self._arrive(at, slots, duration_s)
        self._expire(now + tick_s)
        if self.request_counts.completed == before and not self._arrived:
            self.request_counts.last_wait_s = 0.0

    def _arrive(self, at: float, slots: int, duration_s: float) -> None:
        if len(self._ends) >= slots and len(self._arrived) + 1 > self._limits.max_queued:
            self.request_counts.rejected += 1
            return
        self._arrived.append(at)
        self._fill(at, slots, duration_s)

    def _fill(self, now: float, slots: int, duration_s: float) -> None:
        self._expire(now)
        while self._arrived and len(self._ends) < slots:
            wait_s = now - self._arrived.popleft()
            self.request_counts.began(wait_s, 1.0)
            self.request_counts.last_wait_s = wait_s
            heapq.heappush(self._ends, now + drawn_duration_s(duration_s, self._cv, self._rng))

    def _expire(self, now: float) -> None:
        while self._arrived and now - self._arrived[0] > self._limits.deadline_s:
            self._arrived.popleft()
            self.request_counts.expired += 1
