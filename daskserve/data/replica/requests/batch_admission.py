"""Limits how many requests of batch jobs a replica runs at a time, in favor of live requests. Pure.

Problem: a batch job fills every slot that it can get. If user code waits, as for an accelerator, one free
slot is enough for live requests. If it computes, the requests in all slots share a processor: eight full
slots make a live request eight times as slow, although the job gains nothing from more than one slot. Choice:
the replica measures how many requests of batch jobs end per second. It halves their limit as long as this
costs less than a fifth of the throughput, and doubles it as long as this gains more.

Even one request that cannot be interrupted makes a live request wait. So if the limit is 1 and there are live
requests, the first of several replicas takes no requests of batch jobs.
"""

from __future__ import annotations

import math

from daskserve.common.types import RankInfo

#: The share of the rate that a smaller limit must reach to be chosen.
ENOUGH_SHARE = 0.8
#: A measurement lasts at least for this number of answers, for twice as many answers as the limit, and for
#: this duration.
MIN_ANSWERS = 6
MIN_S = 1.0
#: The pause between two searches. It doubles after each search without an improvement.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
#: The pause is at least this many times as long as a measurement.
PAUSE_FACTOR = 20
#: How long the first replica is kept free after a live request. Then, how long it may go without a request of
#: a batch job before it takes one in any case, because the other replicas may not have started.
LIVE_S, STARVED_S = 30.0, 30.0


class RateMeter:
    """Measures how many requests end per second while others wait."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart the measurement at the next answer."""
        self._began: float | None = None
        self._answers = self._refusals = 0
        self.took_s = 0.0

    def refused(self) -> None:
        """Record that another request had to wait."""
        self._refusals += 1

    def answered(self, at_once: int, now: float) -> float | None:
        """Record an answer under the limit ``at_once``; return the rate once enough answers are measured."""
        if self._began is None:
            self._began, self._refusals = now, 0
            return None
        self._answers += 1
        rounds = max(2, math.ceil(MIN_ANSWERS / at_once))
        self.took_s = now - self._began
        # Only whole rounds count, because the requests of a round may end at the same time.
        if self._answers < rounds * at_once or self._answers % at_once or self.took_s < MIN_S:
            return None
        rate = self._answers / self.took_s
        was_full = self._refusals >= self._answers / (2 * at_once)
        if not was_full:
            self.restart()
            return None
        return rate


class BatchLimit:
    """The limit of requests of batch jobs, determined by measurements; at most ``most``."""

    def __init__(self, most: int) -> None:
        self.most = self.limit = most
        #: The result of the last search; during a search, `limit` differs.
        self.found = most
        self._meter = RateMeter()
        #: The rate of `found` in the current search, and the limit with which the search began.
        self._rate: float | None = None
        self._first = most
        self._is_measured = False
        self._pause_s = FIRST_PAUSE_S
        self._resumes_at = -math.inf

    def resize(self, most: int) -> None:
        """Change the maximum, and restart the measurement."""
        if most != self.most:
            self.found = self.limit = min(self.found, most) if self._is_measured else most
            self.most = most
            self._rate = None
            self._meter.restart()

    def refused(self) -> None:
        """Record that a request had to wait."""
        self._meter.refused()

    def ended(self, ongoing: int, now: float) -> None:
        """Record the end of one of ``ongoing`` requests; this may change the limit."""
        if self.most <= 1 or now < self._resumes_at:
            return
        if ongoing > self.limit:  # some began before the limit was lowered
            self._meter.restart()
            return
        rate = self._meter.answered(self.limit, now)
        if rate is not None:
            took_s = self._meter.took_s
            self._meter.restart()
            if not self._continue_search(rate):
                self._end_search(took_s, now)

    def paused(self) -> None:
        """Record that there are no requests; this time does not count in a measurement."""
        self._meter.restart()

    def _continue_search(self, rate: float) -> bool:
        """Choose the next limit to try; return False if the search ends."""
        if self._rate is None:
            self._rate, self._first = rate, self.found
            self.limit = self.found // 2 or 2
            return True
        if self.limit < self.found and rate < ENOUGH_SHARE * self._rate:
            can_be_more = self.found == self._first < self.most
            self.limit = min(2 * self.found, self.most) if can_be_more else self.found
            return can_be_more
        if self.limit > self.found:
            if ENOUGH_SHARE * rate <= self._rate:
                return False
            self._rate = rate
            self.found, self.limit = self.limit, min(2 * self.limit, self.most)
            return self.limit > self.found
        self.found, self.limit = self.limit, self.limit // 2
        return self.limit > 0

    def _end_search(self, took_s: float, now: float) -> None:
        is_same = self.found == self._first
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if is_same else FIRST_PAUSE_S
        self._resumes_at = now + max(self._pause_s, PAUSE_FACTOR * took_s)
        self.limit, self._rate = self.found, None
        self._is_measured = self.found < self.most


class BatchAdmission:
    """Decides whether a replica accepts requests of batch jobs.

    Parameters
    ----------
    concurrency : int
        The slots of the replica. If there are several, batch jobs leave at least one free, and at least as
        many as live requests have recently used at a time.
    """

    def __init__(self, concurrency: int) -> None:
        #: The number of requests of batch jobs that have a slot.
        self.ongoing = 0
        self._live_at = self._began_at = -math.inf
        #: The maximum number of concurrent live requests in the current period, and in the one before.
        self._most_live = self._most_live_before = 0
        self._period_began = -math.inf
        self._limit = BatchLimit(concurrency)
        self.resize(concurrency)

    def resize(self, concurrency: int) -> None:
        """Change the number of slots."""
        self._concurrency = concurrency
        self._reserved = int(concurrency > 1)
        self._fit()

    def _fit(self) -> None:
        live = max(self._most_live, self._most_live_before, self._reserved)
        self._limit.resize(max(1, self._concurrency - live))

    def has_room(self, free_slots: int, rank_info: RankInfo, now: float) -> bool:
        """Return whether a request of a batch job may take one of the free slots."""
        self._forget_live(now)
        has_room = free_slots > self._reserved and self.ongoing < self._limit.limit
        has_room = has_room and not self.is_kept_free(rank_info, now)
        if not has_room:
            self._limit.refused()
        return has_room

    def is_kept_free(self, rank_info: RankInfo, now: float) -> bool:
        """Return whether the replica takes no requests currently, so that other replicas get them."""
        rank, *_, replicas = rank_info
        is_first = rank == 0 and replicas > 1
        has_live = now < self._live_at + LIVE_S and now < self._began_at + STARVED_S
        # With two slots, one is always free, and no measurement is needed.
        return is_first and has_live and self._limit.found == 1 and self._concurrency != 2

    def note_live(self, ongoing: int, now: float) -> None:
        """Record that a live request has taken a slot; ``ongoing`` counts requests of all kinds."""
        self._live_at = now
        self._forget_live(now)
        live = ongoing - self.ongoing
        if live > self._most_live:
            self._most_live = live
            self._fit()

    def _forget_live(self, now: float) -> None:
        """Begin a new period of counting live requests if the current one is over."""
        if now >= self._period_began + LIVE_S:
            is_next = now < self._period_began + 2 * LIVE_S
            self._most_live_before = self._most_live if is_next else 0
            self._most_live, self._period_began = 0, now
            self._fit()

    def began(self, now: float) -> None:
        """Record that a request of a batch job has taken a slot."""
        self.ongoing += 1
        self._began_at = now

    def ended(self, now: float, *, are_waiting: bool) -> None:
        """Record that a request of a batch job has freed its slot, and whether others wait for one."""
        if are_waiting:
            self._limit.refused()
        self._limit.ended(self.ongoing, now)
        self.ongoing = max(0, self.ongoing - 1)
        if not self.ongoing and not are_waiting:
            self._limit.paused()
