"""Routers that look at the replicas only, and not at the request."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from daskserve.data.caller.request_routers.interface import PendingRequest, RequestRouter, RunningReplica


class RoundRobinRouter(RequestRouter):
    """Sends requests to the replicas in turn; one without room is passed over."""

    _next = 0

    def initialize_state(self) -> None:
        """Begin anywhere, so that not all processes begin with the same replica."""
        self._next = self.rng.randrange(1 << 30)

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """Return each replica alone, from the next one on."""
        self._next += 1
        return _InTurn(candidate_replicas, self._next)


class _InTurn(Sequence[list[RunningReplica]]):
    """All replicas from one on. Usually only the first is looked at, however many there are."""

    def __init__(self, replicas: list[RunningReplica], first: int) -> None:
        self._replicas = replicas
        self._first = first

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self._replicas):
            raise IndexError(index)
        return [self._replicas[(self._first + index) % len(self._replicas)]]

    def __iter__(self) -> Iterator[list[RunningReplica]]:
        return (self[index] for index in range(len(self)))


class LeastLatencyRouter(RequestRouter):
    """Sends a request to the one of a few random replicas that will probably answer first.

    What a replica will take is its latency lately, times the requests that it has and this one. Replicas are
    drawn, so that a slow one is asked again now and then, and seen when it is fast again.
    """

    _choices = 2

    def initialize_state(self, choices: int = 2, weight: float = 0.2) -> None:
        """Take how many replicas are drawn, and the weight of the newest request in a latency."""
        if not isinstance(choices, int) or choices < 1:
            raise ValueError(f"choices must be a whole number from 1, got {choices!r}")
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be above 0 and up to 1, got {weight!r}")
        self._choices, self.latency_weight = choices, weight

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the drawn replicas by what they will take, then all others."""
        count = len(candidate_replicas)
        best, least = None, math.inf
        for _ in range(min(self._choices, count)):
            each = candidate_replicas[int(self.rng.random() * count)]
            if each.has_room and (takes := each.latency_s * (1 + each.queue_len)) < least:
                best, least = each, takes
        return [candidate_replicas] if best is None else [[best], candidate_replicas]


class SameHostRouter(RequestRouter):
    """Sends requests to replicas on the host of this process while one has room, and then to others."""

    _near: list[RunningReplica]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Find the replicas on this host."""
        super().update_replicas(replicas)
        self._near = [each for each in replicas if each.node_id == self._self_node_id]

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return two replicas of this host, all of it, and then any."""
        near = self._near
        return [*(two_of(near, self.rng) if near else ()), *two_of(candidate_replicas, self.rng)]


def two_of(replicas: list[RunningReplica], rng: random.Random) -> list[list[RunningReplica]]:
    """Return two random replicas, of which the less loaded one is chosen, then all."""
    count = len(replicas)
    if count < 3:
        return [replicas]
    place, other = int(rng.random() * count), int(rng.random() * (count - 1))
    return [[replicas[place], replicas[other + (other >= place)]], replicas]


def has_own(router: RequestRouter, method: str) -> bool:
    """Return whether a router's class has a method of its own, which is not the empty one of the base."""
    return getattr(type(router), method) is not getattr(RequestRouter, method)
