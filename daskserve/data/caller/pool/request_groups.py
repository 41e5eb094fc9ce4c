"""Groups of requests that arrive within a millisecond and go to the same replica of this process.

Problem: each replica has a thread for user code. A request wakes that thread, and running threads compete for
the interpreter lock. With ten replicas in a worker, a request takes 1.7 times the CPU time if each request
goes to a different replica.

Choice: the router sends a group of requests to the same replica. A group has as many requests as the replicas
of this process answer within `GROUP_S`. Requests that take longer than that are not grouped.

Pure: time is an argument.
"""

from __future__ import annotations

from daskserve.data.caller.pool.pooled_replica import PooledReplica

#: The time in which the requests of a group arrive, and are answered.
GROUP_S = 0.001
MAX_SIZE = 32
#: The weight of the newest answer in the mean time between answers.
PACE_WEIGHT = 0.02


class RequestGroups:
    """The current group, and how fast the replicas of this process answer together."""

    __slots__ = ("_answered_at", "_began_at", "_left", "_pace_s", "_replica")

    def __init__(self, now: float) -> None:
        self._replica: PooledReplica | None = None
        self._left = 0
        self._began_at = self._answered_at = now
        self._pace_s = GROUP_S

    def next(self, now: float) -> PooledReplica | None:
        """Return the replica of the current group; None if the group is complete, or the replica is full."""
        replica = self._replica
        is_open = self._left > 0 and now - self._began_at < GROUP_S
        if is_open and replica is not None and replica.index >= 0 and not replica.is_full:
            return replica
        self._left = 0
        return None

    def add(self, replica: PooledReplica, now: float) -> None:
        """Add a request to the current group, or begin one with it after `next` has returned None."""
        if self._left > 0:
            self._left -= 1
        else:
            self._replica = replica
            self._began_at = now
            self._left = min(MAX_SIZE, int(GROUP_S / max(self._pace_s, 1e-6))) - 1

    def resume(self, now: float) -> None:
        """Record that requests are in flight again; earlier idle time is not counted."""
        self._answered_at = now

    def note_answer(self, now: float) -> None:
        """Record an answer of a replica of this process."""
        self._pace_s += PACE_WEIGHT * (now - self._answered_at - self._pace_s)
        self._answered_at = now
