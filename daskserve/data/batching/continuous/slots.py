"""The slots of a continuous batch: admission, budget, preemption, priorities and fairness.

The code is synchronous and independent of time. Higher priorities are admitted first. Among requests of one
priority, the user whose requests have had the fewest steps so far is next. Among the requests of one user,
the earliest is next. If the next request does not fit, later ones wait too; otherwise large requests would
never run.

A preempted request returns to its place at the front of the queue. The oldest request of the highest priority
is never preempted for another, so there is always progress.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from daskserve.common.formatting import shown
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.errors import BackPressureError, BadRequestError


@dataclass
class SlotLimits:
    """The limits of a continuous batch; they may change at any time.

    Attributes
    ----------
    max_slots : int
        Maximum number of active requests.
    max_queued : int
        Maximum number of waiting requests, without preempted ones.
    max_cost : float
        Maximum sum of the costs of active requests.
    cost_per_step : float
        The growth of the cost of each active request per step.
    """

    max_slots: int = 8
    max_queued: int = 1000
    max_cost: float = math.inf
    cost_per_step: float = 1.0


@dataclass
class _Account:
    """The requests of one user with one priority."""

    #: In order of arrival.
    waiting: list[ActiveRequest] = field(default_factory=list)
    #: The number of steps of its requests, relative to other users. Costs are not counted, because they may
    #: be bytes or estimates.
    served: int = 0
    active: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        # Requests that were just admitted have had no step yet, so their number counts as well.
        return self.served, self.active, self.waiting[0].number


class Slots:
    """The requests of a continuous batch."""

    def __init__(self, limits: SlotLimits) -> None:
        self.limits = limits
        #: The active requests, in order of arrival.
        self.active: list[ActiveRequest] = []
        self.queued = 0
        #: Number of waiting requests that were preempted.
        self._returning = 0
        self.used_cost = 0.0
        self.queued_cost = 0.0
        #: Whether memory has run out; then no request is admitted until one ends.
        self.is_tight = False
        self._users: dict[float, dict[Hashable, _Account]] = {}
        self._free: list[int] = []
        self._slots = 0
        self._numbers = 0

    def add(self, request: ActiveRequest) -> ActiveRequest | None:
        """Add a request to the queue; return the one that was ended to make room for it, if any.

        Raises
        ------
        BackPressureError Too many requests wait, and none of them has a lower priority. BadRequestError
            It does not fit even alone.
        """
        if request.cost + self.limits.cost_per_step > self.limits.max_cost:
            raise self.overgrown(request)
        evicted = None
        # Preempted requests do not count towards the limit.
        room = self.limits.max_queued + max(0, self._free_slots() - self._returning)
        if self.queued - self._returning >= room:
            evicted = self._lowest_waiting()
            if evicted is None or evicted.priority >= request.priority:
                raise self._refusal()
            # set before the request ends, because its caller may notice the end at once
            evicted.fail(self._refusal())
            self.end(evicted)
        request.number = self._numbers
        self._numbers += 1
        self._wait(request)
        return evicted

    def overgrown(self, request: ActiveRequest) -> BadRequestError:
        """Return the error for a request that exceeds the budget even alone, with its next step."""
        needed, most = request.cost + self.limits.cost_per_step, self.limits.max_cost
        return BadRequestError(
            f"The request needs {shown(needed)} with its next step, and max_cost is {shown(most)}; "
            "send a shorter one."
        )

    def all_requests(self) -> list[ActiveRequest]:
        """Return the requests that wait and those that are active."""
        accounts = [each for users in self._users.values() for each in users.values()]
        return [*self.active, *(request for each in accounts for request in each.waiting)]

    def admit(self) -> list[ActiveRequest]:
        """Give free slots to waiting requests, and return those that became active."""
        admitted: list[ActiveRequest] = []
        while self.queued and self._free_slots():
            users = self._users[max(priority for priority, each in self._users.items() if _has_waiting(each))]
            user = min((each for each in users.values() if each.waiting), key=lambda each: each.rank)
            request = user.waiting[0]
            grown = self.limits.cost_per_step * (len(self.active) + 1)
            if self.active and self.used_cost + request.cost + grown > self.limits.max_cost:
                break
            del user.waiting[0]
            self._count_queued(-1, request)
            user.active += 1
            request.account = user
            request.move("admit")
            request.slot = self._take_slot()
            self.used_cost += request.cost
            insort(self.active, request, key=lambda each: each.number)
            admitted.append(request)
        return admitted

    def fits_step(self) -> bool:
        """Return whether the budget has room for the next step."""
        limits = self.limits
        return self.used_cost + limits.cost_per_step * len(self.active) <= limits.max_cost

    def newest(self, requests: Sequence[ActiveRequest]) -> ActiveRequest:
        """Return the request to preempt first: the newest of the lowest priority."""
        return min(requests, key=lambda each: (each.priority, -each.number))

    def preempt(self, request: ActiveRequest) -> None:
        """Move an active request back to the queue."""
        self._leave(request)
        request.move("preempt")
        request.preemptions += 1
        self.is_tight = bool(self.active)
        self._wait(request)

    def grow(self, requests: list[ActiveRequest]) -> None:
        """Add the cost of a step to these active requests."""
        grown = self.limits.cost_per_step
        for request in requests:
            request.cost += grown
            request.account.served += 1
        self.used_cost += grown * len(requests)

    def end(self, request: ActiveRequest) -> bool:
        """End a request, and return whether it was active; ending it again does nothing."""
        if request.has_ended:
            return False
        was_active = request.is_active
        user = self._user(request)
        if was_active:
            self._leave(request)
            self.is_tight = False
        else:
            user.waiting.remove(request)
            self._count_queued(-1, request)
        request.move("end")
        if not user.waiting and not user.active:
            del self._users[request.priority][request.user]
            if not self._users[request.priority]:
                del self._users[request.priority]
        return was_active

    # ---- parts

    def _free_slots(self) -> int:
        return 0 if self.is_tight else max(0, self.limits.max_slots - len(self.active))

    def _lowest_waiting(self) -> ActiveRequest | None:
        """Return the newest request of the lowest priority that was never active."""
        for _, users in sorted(self._users.items()):
            new = [each for account in users.values() if (each := _newest_of(account)) is not None]
            if new:
                return max(new, key=lambda each: each.number)
        return None

    def _refusal(self) -> BackPressureError:
        most = self.limits.max_queued
        return BackPressureError(
            f"{most} requests (max_queued) already wait for a slot of the batch; retry later.",
            num_queued_requests=self.queued,
            max_queued_requests=most,
        )

    def _wait(self, request: ActiveRequest) -> None:
        insort(self._user(request).waiting, request, key=lambda each: each.number)
        self._count_queued(1, request)

    def _count_queued(self, more: int, request: ActiveRequest) -> None:
        self.queued += more
        self._returning += more if request.preemptions else 0
        self.queued_cost = self.queued_cost + more * request.cost if self.queued else 0.0

    def _leave(self, request: ActiveRequest) -> None:
        self.active.remove(request)
        self.used_cost = self.used_cost - request.cost if self.active else 0.0
        # The request keeps its slot number for `release`. No other request is admitted before that.
        heapq.heappush(self._free, request.slot)
        request.account.active -= 1

    def _take_slot(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._slots += 1
        return self._slots - 1

    def _user(self, request: ActiveRequest) -> _Account:
        users = self._users.setdefault(request.priority, {})
        user = users.get(request.user)
        if user is None:
            # A user who arrives or returns is not compensated for the steps of others in the meantime.
            served = min((each.served for each in users.values()), default=0)
            user = users[request.user] = _Account(served=served)
        return user


def _newest_of(account: _Account) -> ActiveRequest | None:
    return next((each for each in reversed(account.waiting) if not each.preemptions), None)


def _has_waiting(users: dict[Hashable, _Account]) -> bool:
    return any(each.waiting for each in users.values())
