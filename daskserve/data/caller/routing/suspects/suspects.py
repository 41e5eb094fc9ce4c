"""Requests under which a process died or hung: where they are retried, and which are refused.

Problem: a request that kills or blocks its process does the same to the next replica, and the other requests
there are also lost. When a process dies, all requests on it are suspects. Nearly all of those requests are
innocent, and must not fail because they were retried next to the guilty one.

Choice: a suspect is retried at most ``max_crash_retries`` times, on a worker that runs no suspects of other
targets (a *trial*), if possible without proxies and controller, and on another host. So if a second process
dies, the target on trial there is guilty. A target is one URL of a backend: its method, path and query.
Targets are not coarser than this, because one URL must not make a whole endpoint unavailable. The requests of
a target are on trial together, and an answer to one of them clears the target. If retries of a target end two
processes within `WINDOW_S` and none is answered in between, its requests are refused for `REFUSAL_S`.

A suspect waits at most `TRIAL_WAIT_S` for its own worker: after the loss of a worker with many slow
requests, latency matters more.

Pure: time is an argument.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from daskserve.common.formatting import counted, shown
from daskserve.common.types import Reachability, WorkerAddress
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.errors import QuarantinedError, RequestTimeoutError

#: How long the loss of a process is remembered, and how often old losses are removed.
WINDOW_S = 60.0
SWEEP_S = 10.0
#: Number of processes that retries of a target end within that time before the target is refused.
MAX_KILLS = 2
#: How long the requests of a target are refused after that.
REFUSAL_S = 10.0
#: How long a suspect waits for a worker without suspects of other targets.
TRIAL_WAIT_S = 1.0
#: Losses of one worker within this time count as one, because it may have had several replicas.
SAME_LOSS_S = 0.5

#: Maximum number of characters of a URL in messages.
SHOWN_CHARS = 200

#: The name of a backend in messages, and the method, path and query of a request.
RequestTarget: TypeAlias = tuple[str, str, bytes, bytes]

logger = logging.getLogger("daskserve.router")


def target_of(backend: str, head: Mapping[str, Any]) -> RequestTarget:
    """Return the target of an HTTP request, given its ASGI scope."""
    return backend, head.get("method", ""), head.get("raw_path", b""), head.get("query_string", b"")


@dataclass(slots=True)
class Suspicion:
    """The losses of processes under one target.

    Attributes
    ----------
    since : float
        Time of the last loss of a process under it.
    kills : list
        Times and workers of the processes that retries ended.
    refused_until : float
        Time until which its requests are refused.
    """

    since: float
    kills: list[tuple[float, WorkerAddress]] = field(default_factory=list)
    refused_until: float = 0.0


class SuspectTrial:
    """One request of a suspect target, from when it waits for a replica until it ends.

    Attributes
    ----------
    retries : int
        Number of retries after the loss of a process.
    lost_hosts : set
        The hosts of the workers on which it was lost.
    isolated_until : float
        Time until which it waits for a worker without suspects of other targets.
    """

    __slots__ = ("_suspects", "isolated_until", "lost_hosts", "retries", "target", "worker")

    def __init__(self, suspects: Suspects, target: RequestTarget, now: float) -> None:
        self._suspects = suspects
        self.target = target
        self.retries = 0
        self.lost_hosts: set[str] = set()
        self.isolated_until = now + TRIAL_WAIT_S
        #: The worker that has the request.
        self.worker: WorkerAddress | None = None

    def must_keep_apart(self, now: float) -> bool:
        """Return whether only `pick` may choose the replica; otherwise any replica may be used."""
        return self.retries > 0 or now < self.isolated_until

    def pick(self, usable: Sequence[PooledReplica], now: float) -> PooledReplica | None:
        """Return the least loaded replica on the best kind of worker; None if these replicas have no room."""
        best = min(map(self._rank, usable), default=0)
        free = [
            each
            for each in usable
            if each.index >= 0
            and self._rank(each) == best
            and (now >= self.isolated_until or self._suspects.is_free(each.address.worker, self.target))
        ]
        return min(
            free,
            key=lambda each: (each.is_full, each.route is Reachability.SCHEDULER, each.score(now)),
            default=None,
        )

    def _rank(self, entry: PooledReplica) -> int:
        """Return the risk of a replica's worker: it has a proxy or the controller, or its host had losses.

        When a machine dies, its workers are lost one after the other.
        """
        worker = entry.address.worker
        return 2 * (worker in self._suspects.system_workers) + (_host_of(worker) in self.lost_hosts)

    def enter(self, worker: WorkerAddress) -> None:
        """Record that the request goes to a worker."""
        self.worker = worker
        self._suspects.enter(worker, self.target)

    def leave(self) -> None:
        """Record that the request has left its worker; idempotent."""
        worker, self.worker = self.worker, None
        if worker is not None:
            self._suspects.leave(worker, self.target)

    def passed(self) -> None:
        """Record that the request was answered."""
        self._suspects.clear(self.target)

    def failed(self, error: Exception) -> None:
        """Record that the request ended with an error; an error of user code also counts as an answer."""
        if not isinstance(error, RequestTimeoutError):
            self.passed()


class Suspects:
    """The suspect targets of one process's requests to one instance, and their trials."""

    def __init__(self) -> None:
        #: The suspect targets; empty unless a process has died.
        self.known: dict[RequestTarget, Suspicion] = {}
        #: The workers with proxies or the controller.
        self.system_workers: frozenset[WorkerAddress] = frozenset()
        #: Functions to call when a worker may have become free for trials.
        self.on_free: set[Callable[[], None]] = set()
        self._trials: dict[WorkerAddress, Counter[RequestTarget]] = {}
        #: When to remove old suspicions. Not with each request, because a worker may have thousands of them.
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"<Suspects targets={len(self.known)} trials={sum(map(len, self._trials.values()))}>"

    def update_system_workers(self, value: Any) -> None:
        """Apply the published list of workers with proxies or the controller."""
        self.system_workers = frozenset((value or {}).get("workers", ()))

    def trial_of(self, target: RequestTarget, now: float) -> SuspectTrial | None:
        """Return the trial of a new request; None if its target is not suspect.

        Raises
        ------
        QuarantinedError
            Retries of the same target have ended `MAX_KILLS` processes lately.
        """
        if now >= self._sweep_at:
            self._sweep(now)
        suspicion = self.known.get(target)
        if suspicion is None or now - suspicion.since >= WINDOW_S:
            return None
        if now < suspicion.refused_until:
            raise _refusal(target, suspicion, now)
        return SuspectTrial(self, target, now)

    def lost(
        self, target: RequestTarget, trial: SuspectTrial | None, worker: WorkerAddress, now: float
    ) -> SuspectTrial:
        """Record the loss of a process under a request; return the request's trial, if it is retried."""
        if now >= self._sweep_at:
            self._sweep(now)
        suspicion = self.known.setdefault(target, Suspicion(now))
        suspicion.since = now
        if trial is None:
            trial = SuspectTrial(self, target, now)
        elif trial.retries:
            self._note_kill(target, suspicion, worker, now)
        trial.retries += 1
        trial.lost_hosts.add(_host_of(worker))
        trial.isolated_until = now + TRIAL_WAIT_S
        return trial

    def _note_kill(
        self, target: RequestTarget, suspicion: Suspicion, worker: WorkerAddress, now: float
    ) -> None:
        if any(each == worker and now - at < SAME_LOSS_S for at, each in suspicion.kills):
            return
        recent = [(at, each) for at, each in suspicion.kills if now - at < WINDOW_S]
        suspicion.kills = [*recent, (now, worker)]
        if len(suspicion.kills) >= MAX_KILLS:
            suspicion.refused_until = now + REFUSAL_S
            logger.error(
                "Retries of %s ended %d processes within %s s; it is refused for %s s",
                _shown(target),
                len(suspicion.kills),
                shown(WINDOW_S),
                shown(REFUSAL_S),
            )

    def clear(self, target: RequestTarget) -> None:
        """Record that a request of a target was answered."""
        self.known.pop(target, None)

    # ---- trials

    def is_free(self, worker: WorkerAddress, target: RequestTarget) -> bool:
        """Return whether a worker runs no suspects of other targets."""
        on_trial = self._trials.get(worker)
        return on_trial is None or target in on_trial

    def enter(self, worker: WorkerAddress, target: RequestTarget) -> None:
        """Record that a worker has got a suspect."""
        self._trials.setdefault(worker, Counter())[target] += 1

    def leave(self, worker: WorkerAddress, target: RequestTarget) -> None:
        """Record that a suspect has ended at a worker."""
        on_trial = self._trials[worker]
        on_trial[target] -= 1
        if not on_trial[target]:
            del on_trial[target]
        if not on_trial:
            del self._trials[worker]
        for each in list(self.on_free):
            each()

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_S
        for target, suspicion in list(self.known.items()):
            if now - suspicion.since >= WINDOW_S:
                del self.known[target]


def _host_of(worker: WorkerAddress) -> str:
    return worker.rpartition(":")[0]


def _shown(target: RequestTarget) -> str:
    backend, method, path, query = target
    url = (path + b"?" + query if query else path).decode("latin-1")
    return f"{method} {url if len(url) <= SHOWN_CHARS else url[:SHOWN_CHARS] + '...'} of {backend}"


def _refusal(target: RequestTarget, suspicion: Suspicion, now: float) -> QuarantinedError:
    left_s, kills = suspicion.refused_until - now, len(suspicion.kills)
    return QuarantinedError(
        f"{_shown(target)} is refused for {shown(left_s)} s: its retries ended "
        f"{counted(kills, 'process', 'processes')} within {shown(WINDOW_S)} s. The log of the workers says "
        "what ended or blocked them.",
        is_public=True,
    )
