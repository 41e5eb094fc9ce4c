"""How many requests of batch jobs a replica runs at a time, so that live requests find room. Pure.

Problem: a batch job fills every slot that it may have. If code waits, as for an accelerator, one free slot is
room enough for live requests. If it computes, the requests in all slots share a processor, and eight slots
that are full make a live request eight times as slow, although the job gains nothing by more than one.
Choice: the replica measures how many requests of batch jobs end in a second. It halves their number as long
as that costs less than a fifth of them, and doubles it as long as that gains more.

A single request that cannot be interrupted still makes a live request wait. So while there are live requests,
the first of several replicas takes no requests of batch jobs if its code does not run beside other code.
"""

from __future__ import annotations

import math

from daskserve.common.types import RankInfo

#: The share of the rate that fewer requests at a time must reach, to be enough.
ENOUGH_SHARE = 0.8
#: A measurement has at least this many answers, twice as many as requests at a time, and this long.
MIN_ANSWERS = 6
MIN_S = 1.0
#: The pause between two searches: twice as long after each that has found nothing better.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
#: How many times longer than a measurement the pause is.
PAUSE_FACTOR = 20
#: How long after a live request the first replica is kept free, and after how long it takes a request of a
#: batch job in any case: the other replicas may not have started.
LIVE_S, STARVED_S = 30.0, 30.0


class RateMeter:
    """Measures how many requests end in a second while there are always more of them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again with the next answer."""
        self._began: float | None = None
        self._answers = self._refusals = 0
        self.took_s = 0.0

    def refused(self) -> None:
        """Note that another request had to wait."""
        self._refusals += 1

    def answered(self, at_once: int, now: float) -> float | None:
        """Note an answer; return the rate once it is measured, with so many requests at a time."""
        if self._began is None:
            self._began, self._refusals = now, 0
            return None
        self._answers += 1
        rounds = max(2, math.ceil(MIN_ANSWERS / at_once))
        self.took_s = now - self._began
        # Whole rounds: the requests of a round may all end at the same time.
        if self._answers < rounds * at_once or self._answers % at_once or self.took_s < MIN_S:
            return None
        rate = self._answers / self.took_s
        was_full = self._refusals >= self._answers / (2 * at_once)
        if not was_full:
            self.restart()
            return None
        return rate


class BatchLimit:
    """The number of requests of batch jobs at a time, at most ``most``, as found by measurements."""

    def __init__(self, most: int) -> None:
        self.most = self.limit = most
        #: The number that the last search has found; `limit` is another one while that is tried.
        self.found = most
        self._meter = RateMeter()
        #: The rate of `found` in the present search, and with which number it began.
        self._rate: float | None = None
        self._first = most
        self._is_measured = False
        self._pause_s = FIRST_PAUSE_S
        self._resumes_at = -math.inf

    def resize(self, most: int) -> None:
        """Change the maximum; what is under way is measured again."""
        if most != self.most:
            self.found = self.limit = min(self.found, most) if self._is_measured else most
            self.most = most
            self._rate = None
            self._meter.restart()

    def refused(self) -> None:
        """Note that a request had to wait."""
        self._meter.refused()

    def ended(self, ongoing: int, now: float) -> None:
        """Note the end of one of ``ongoing`` requests; this may change the limit."""
        if self.most <= 1 or now < self._resumes_at:
            return
        if ongoing > self.limit:  # they began before the limit was lowered
            self._meter.restart()
            return
        rate = self._meter.answered(self.limit, now)
        if rate is not None:
            took_s = self._meter.took_s
            self._meter.restart()
            if not self._goes_on(rate):
                self._end_search(took_s, now)

    def _goes_on(self, rate: float) -> bool:
        """Choose the next number to try; return False if there is none."""
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


class BatchRoom:
    """The requests of batch jobs at one replica.

    Parameters
    ----------
    concurrency : int
        The slots of the replica. Batch jobs leave one free if there are several, or as many as live requests
        have lately taken at a time.
    """

    def __init__(self, concurrency: int) -> None:
        #: How many of them have a slot.
        self.ongoing = 0
        self._live_at = self._began_at = -math.inf
        #: How many live requests ran at a time, at most: in the present period, and in the one before.
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
        """Return whether a request may take one of the free slots."""
        self._forget_live(now)
        has_room = free_slots > self._reserved and self.ongoing < self._limit.limit
        has_room = has_room and not self.is_kept_free(rank_info, now)
        if not has_room:
            self._limit.refused()
        return has_room

    def is_kept_free(self, rank_info: RankInfo, now: float) -> bool:
        """Return whether the replica takes no requests at present: others should get them."""
        rank, *_, replicas = rank_info
        is_first = rank == 0 and replicas > 1
        has_live = now < self._live_at + LIVE_S and now < self._began_at + STARVED_S
        # Of two slots, one is free in any case, and nothing can be measured.
        return is_first and has_live and self._limit.found == 1 and self._concurrency != 2

    def note_live(self, ongoing: int, now: float) -> None:
        """Note that a live request has taken its slot, and how many requests of all kinds run with it."""
        self._live_at = now
        self._forget_live(now)
        live = ongoing - self.ongoing
        if live > self._most_live:
            self._most_live = live
            self._fit()

    def _forget_live(self, now: float) -> None:
        """Begin the next period if the present one is over."""
        if now >= self._period_began + LIVE_S:
            is_next = now < self._period_began + 2 * LIVE_S
            self._most_live_before = self._most_live if is_next else 0
            self._most_live, self._period_began = 0, now
            self._fit()

    def began(self, now: float) -> None:
        """Note that a request has taken its slot."""
        self.ongoing += 1
        self._began_at = now

    def ended(self, now: float, *, are_waiting: bool) -> None:
        """Note that a request gives its slot back, and whether others wait for it."""
        if are_waiting:
            self._limit.refused()
        self._limit.ended(self.ongoing, now)
        self.ongoing = max(0, self.ongoing - 1)
