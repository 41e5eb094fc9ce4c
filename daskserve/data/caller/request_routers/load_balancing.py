"""Routers whose choice depends only on the replicas, and not on the request."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from daskserve.data.caller.request_routers.interface import PendingRequest, RequestRouter, RunningReplica


class RoundRobinRouter(RequestRouter):
    """Sends requests to the replicas in turn; replicas without room are skipped."""

    _next = 0

    def initialize_state(self) -> None:
        """Begin at a random replica, so that processes do not all begin with the same one."""
        self._next = self.rng.randrange(1 << 30)

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """Return one list for each replica, beginning with the next one."""
        self._next += 1
        return _InTurn(candidate_replicas, self._next)


class _InTurn(Sequence[list[RunningReplica]]):
    """Lists of one replica each, made on demand: usually only the first list is read."""

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

    The estimate for a replica is its recent latency, times the number of its requests including this one.
    Because of the random draw, a slow replica gets a request from time to time, which shows when it is fast
    again.
    """

    _choices = 2

    def initialize_state(self, choices: int = 2, weight: float = 0.2) -> None:
        """Set the number of replicas that are drawn, and the weight of the newest request in a latency."""
        if not isinstance(choices, int) or choices < 1:
            raise ValueError(f"choices must be a whole number from 1, got {choices!r}")
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be above 0 and up to 1, got {weight!r}")
        self._choices, self.latency_weight = choices, weight

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best of the drawn replicas, then all."""
        count = len(candidate_replicas)
        best, least = None, math.inf
        for _ in range(min(self._choices, count)):
            each = candidate_replicas[int(self.rng.random() * count)]
            if each.has_room and (takes := each.latency_s * (1 + each.queue_len)) < least:
                best, least = each, takes
        return [candidate_replicas] if best is None else [[best], candidate_replicas]


class SameHostRouter(RequestRouter):
    """Sends requests to replicas on this process's host, and to others only if none of these has room."""

    _near: list[RunningReplica]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Find the replicas on this host."""
        super().update_replicas(replicas)
        self._near = [each for each in replicas if each.node_id == self._self_node_id]

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return two replicas of this host, then all replicas of this host, then all replicas."""
        near = self._near
        return [*(two_of(near, self.rng) if near else ()), *two_of(candidate_replicas, self.rng)]


def two_of(replicas: list[RunningReplica], rng: random.Random) -> list[list[RunningReplica]]:
    """Return a list of two random replicas, then a list of all."""
    count = len(replicas)
    if count < 3:
        return [replicas]
    place, other = int(rng.random() * count), int(rng.random() * (count - 1))
    return [[replicas[place], replicas[other + (other >= place)]], replicas]
