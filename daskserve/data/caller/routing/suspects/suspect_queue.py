"""The suspect requests to one backend that wait for a replica.

See `daskserve.data.caller.routing.suspects.suspects`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

from daskserve.common.clock import Clock
from daskserve.common.types import Envelope, EnvelopeKind, WorkerAddress
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.routing.availability import ReplicaAvailability
from daskserve.data.caller.routing.replay import Replay
from daskserve.data.caller.routing.suspects.suspects import Suspects, SuspectTrial, target_of
from daskserve.errors import ActorLostError, ReplicaBusyError

#: `serve` stops after this many consecutive requests without a replica, because thousands may wait.
MISSES = 16


class SuspectQueue:
    """Suspect requests; each takes the first replica that it may use, whatever their order.

    Parameters
    ----------
    on_free : callable
        Called when a worker may have become free for a suspect.
    """

    def __init__(
        self,
        availability: ReplicaAvailability,
        pool: ReplicaPool,
        suspects: Suspects,
        clock: Clock,
        rng: random.Random,
        on_free: Callable[[], None],
    ) -> None:
        #: The requests that wait.
        self.waiters: dict[asyncio.Future[PooledReplica], SuspectTrial] = {}
        self.suspects = suspects
        #: The backend's option ``max_crash_retries``.
        self.max_crash_retries = 0
        self._availability = availability
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._on_free = on_free

    def trial_of(self, envelope: Envelope) -> SuspectTrial | None:
        """Return the trial of a new HTTP request; None if it is not suspect."""
        return self.suspects.trial_of(target_of(self._availability.name, envelope.head), self._clock.now())

    def put(self, waiter: asyncio.Future[PooledReplica], trial: SuspectTrial) -> None:
        """Add a request."""
        self.waiters[waiter] = trial
        self.suspects.on_free.add(self._on_free)

    def remove(self, waiter: asyncio.Future[PooledReplica]) -> None:
        """Remove a request."""
        del self.waiters[waiter]
        self._listen_no_longer()

    def take(self, trial: SuspectTrial) -> PooledReplica | None:
        """Return a replica that a request may use, counting one more in flight; None if none has room."""
        now = self._clock.now()
        pick = partial(trial.pick, now=now) if trial.must_keep_apart(now) else None
        replica = self._pool.take(now, self._rng, pick)
        if replica is not None:
            trial.enter(replica.address.worker)
        return replica

    def serve(self) -> None:
        """Assign free replicas to waiting requests, until several requests in a row find none."""
        done: list[asyncio.Future[PooledReplica]] = []
        misses = 0
        for waiter, trial in self.waiters.items():
            replica = None if waiter.done() else self.take(trial)
            if replica is not None:
                waiter.set_result(replica)
            if waiter.done():
                done.append(waiter)
                misses = 0
            elif (misses := misses + 1) == MISSES:
                break
        for waiter in done:
            del self.waiters[waiter]
        self._listen_no_longer()

    def next_at(self) -> float | None:
        """Return when the first request may go to any replica; None if all requests already may."""
        if not self.waiters:  # the usual case
            return None
        now = self._clock.now()
        times = [each.isolated_until for each in self.waiters.values() if each.isolated_until > now]
        return min(times, default=None)

    def clear(self) -> list[asyncio.Future[PooledReplica]]:
        """Remove and return all requests."""
        found = list(self.waiters)
        self.waiters.clear()
        self._listen_no_longer()
        return found

    def _listen_no_longer(self) -> None:
        if not self.waiters:
            self.suspects.on_free.discard(self._on_free)

    def may_repeat(self, envelope: Envelope) -> bool:
        """Return whether a request may have a concurrent second attempt; for calls, an option says so."""
        if envelope.kind is not EnvelopeKind.HTTP:
            return True
        target = target_of(self._availability.name, envelope.head)
        return self.max_crash_retries > 0 and target not in self.suspects.known

    def note_lost(
        self, envelope: Envelope, replica: PooledReplica, error: ReplicaBusyError | ActorLostError
    ) -> None:
        """Record that a process was lost during the second attempt of a request."""
        is_loss = isinstance(error, ActorLostError) and error.begun and not error.is_planned
        if is_loss and envelope.kind is EnvelopeKind.HTTP:
            target = target_of(self._availability.name, envelope.head)
            self.suspects.lost(target, None, replica.address.worker, self._clock.now())

    def rewind(
        self,
        envelope: Envelope,
        replay: Replay,
        trial: SuspectTrial | None,
        error: Exception,
        worker: WorkerAddress,
    ) -> SuspectTrial | None:
        """Prepare a request for another replica, or raise the error if it must not be retried.

        The ``error`` is that of a replica on a worker.

        Returns the request's trial if the request may have caused the loss of a replica.
        """
        lost = error if isinstance(error, ActorLostError) and error.begun else None
        if replay.rewind(begun=lost is not None):
            if lost is None or lost.is_planned:
                return trial
            target = target_of(self._availability.name, envelope.head)
            trial = self.suspects.lost(target, trial, worker, self._clock.now())
            if trial.retries <= self.max_crash_retries:
                return trial
        raise error
