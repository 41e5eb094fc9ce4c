"""The replicas of one backend, as one process sends requests to them, with a bounded queue in between."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from daskserve.clock import Clock, stopwatch
from daskserve.cluster.base import Cluster
from daskserve.data.caller.load_reports import LoadReports
from daskserve.data.caller.place import Place
from daskserve.data.caller.replay import Replay
from daskserve.data.caller.roster import ReplicaEntry, Roster
from daskserve.data.caller.router_figures import SetFigures
from daskserve.errors import ActorLostError, BackPressureError, ReplicaBusyError, UnavailableError
from daskserve.figures.table import MetricSample
from daskserve.types import BackendTag, Envelope, EnvelopeKind, Load, Receive, Send

#: A replica that could not be reached is left alone for this long, unless it is published anew.
EJECTED_S = 1.0
#: One whose connection broke is left alone until the scheduler has told of its end, if that is why.
BROKEN_S = 0.05


class ReplicaSet:
    """The running replicas of one backend, and the requests of this process that wait for one."""

    def __init__(
        self,
        tag: BackendTag,
        cluster: Cluster,
        clock: Clock,
        rng: random.Random,
        *,
        reports: LoadReports | None = None,
    ) -> None:
        self.tag = tag
        #: Whether the controller wants to know what waits here.
        self.is_autoscaled = False
        self._reports = reports
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._roster = Roster(cluster.is_local)
        # Ordered, because whoever gives up leaves from anywhere in the line.
        self._waiting: OrderedDict[asyncio.Future[ReplicaEntry], None] = OrderedDict()
        self._max_queued = 1000
        self._is_known = False
        self._is_deleted = False
        #: Whether the instance is to have none of its replicas, so that there is nothing to wait for.
        self._is_off = False
        self._timer: asyncio.TimerHandle | None = None
        self._figures = SetFigures()

    def __repr__(self) -> str:
        return f"<ReplicaSet {self.tag} waiting={self.waiting} {self._roster!r}>"

    @property
    def waiting(self) -> int:
        """How many requests wait for a replica with room: here, or in line at one that is full."""
        return len(self._waiting) + self._roster.in_line

    @property
    def in_flight(self) -> int:
        """How many requests of this process its replicas have, but for those that wait in line."""
        return self._roster.in_flight - self._roster.in_line

    def samples(self) -> list[MetricSample]:
        """Return the figures as metrics; nothing once the backend is deleted."""
        if self._is_deleted and not (self.waiting or self.in_flight):
            return []
        return self._figures.samples(
            self._cluster.instance, self.tag, waiting=self.waiting, in_flight=self.in_flight
        )

    @property
    def is_starving(self) -> bool:
        """Whether requests wait, and there is no replica that they could wait for."""
        return bool(self._waiting) and self._roster.is_empty

    def update(self, value: Any) -> None:
        """Take over what the controller published of the backend."""
        self._is_known = True
        self._is_deleted = value is None
        if value is None:
            self._roster.update({}, 1, self._name_of)
            self._fail_waiting()
            return
        published = {tag: (worker, incarnation) for tag, worker, incarnation in value["replicas"]}
        self._roster.update(published, value["concurrency"], self._name_of)
        self._max_queued = value["max_queued"]
        self.is_autoscaled = value.get("autoscaled", False)
        self._is_off = value.get("off", False)
        if self._is_off and self._roster.is_empty:
            self._fail_waiting()
        self._serve_waiting()
        self._report_load()

    def _report_load(self) -> None:
        if self.is_autoscaled and self._reports is not None:
            self._reports.poke(is_urgent=self.is_starving)

    def _name_of(self, tag: str) -> str:
        return f"{self._cluster.instance}/replica/{tag}"

    def forget_worker(self, worker: str) -> None:
        """Stop using the replicas of a worker that left the cluster."""
        self._roster.forget_worker(worker)

    def take_now(self) -> ReplicaEntry | None:
        """Return a replica that has room, with one more request in flight; None if there is none yet."""
        if self._waiting:
            return None
        replica = self._roster.take(self._clock.now(), self._rng)
        if replica is None or replica.is_in_line:
            if replica is not None:
                self._return(replica)
            return None
        self._figures.sent += 1
        return replica

    def put_back(self, replica: ReplicaEntry) -> None:
        """Have the next request sent to a replica that was taken, as this one was not."""
        self._figures.sent -= 1
        self._roster.put_first(replica)
        self.give_back(replica, None)

    def give_back(self, replica: ReplicaEntry, outcome: Load | Exception | None) -> None:
        """Note that a request has ended that was sent there, and how, as far as that tells of the replica."""
        if type(outcome) is Load:
            self._roster.report(replica, outcome, self._clock.now())
        elif isinstance(outcome, (ReplicaBusyError, ActorLostError)):
            self._note_refusal(replica, outcome, was_in_line=False)
        self._roster.give_back(replica)
        if self._waiting:
            self._serve_waiting()

    def _note_refusal(
        self, replica: ReplicaEntry, error: ReplicaBusyError | ActorLostError, *, was_in_line: bool
    ) -> None:
        now = self._clock.now()
        if isinstance(error, ReplicaBusyError):
            self._roster.note_busy(replica, error.ongoing, now, was_in_line=was_in_line)
        else:
            self._roster.set_aside(replica, now + (BROKEN_S if error.is_disconnected else EJECTED_S))

    async def send(
        self,
        envelope: Envelope,
        receive: Receive,
        send: Send,
        *,
        refused: ReplicaBusyError | ActorLostError | None = None,
    ) -> None:
        """Carry a request to a replica, waiting for one with room if need be.

        One that a replica has ``refused`` already has had its turn among those that wait.

        Raises
        ------
        BackPressureError
            More requests than ``max_queued_requests`` wait already.
        UnavailableError
            The backend was deleted, or is to have no replica, as the target capacity is 0.
        ActorLostError
            The replica was lost after the request had begun, and it may not be repeated.
        """
        replay = None
        if envelope.kind is EnvelopeKind.HTTP:  # calls have no messages to repeat
            replay = Replay(envelope, receive, send)
            receive, send = replay.receive, replay.send
        roster = self._roster
        figures = self._figures
        is_rejected = refused is not None
        if refused is None:
            figures.sent += 1
        else:
            figures.note_retry(refused)
        in_line_since: float | None = None
        while True:
            replica = None
            if is_rejected or not self._waiting:  # else those that wait already go first
                replica = roster.take(self._clock.now(), self._rng)
            if replica is None:
                replica = await self._wait(is_rejected)
            is_in_line = replica.is_in_line
            try:
                if is_in_line:
                    if in_line_since is None:
                        in_line_since = self._clock.now()
                    load = await self._stand_in_line(replica, in_line_since, envelope, receive, send)
                else:
                    load = await self._cluster.request(replica.address, envelope, receive, send)
            except (ReplicaBusyError, ActorLostError) as error:
                self._note_refusal(replica, error, was_in_line=is_in_line)
                _rewind(replay, error)
                figures.note_retry(error)
                is_rejected = True
            else:
                roster.report(replica, load, self._clock.now())
                return
            finally:
                roster.give_back(replica)
                if self._waiting:
                    self._serve_waiting()

    async def _stand_in_line(
        self, replica: ReplicaEntry, since: float, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        """Carry a request to a replica that is full; the next may go there as soon as this one has a slot."""
        place = Place(self._roster, replica, self._clock, send, self._figures.waits, self._serve_waiting)
        envelope = replace(envelope, patience=place.patience(since))
        try:
            return await self._cluster.request(replica.address, envelope, receive, place.send)
        finally:
            place.leave()

    async def _wait(self, is_rejected: bool) -> ReplicaEntry:
        """Return a replica with one more request in flight, when it is this one's turn."""
        if self._is_deleted or (self._is_off and self._roster.is_empty):
            raise self._gone()
        # One that a replica has just refused has had its turn in the queue already.
        if not is_rejected and 0 <= self._max_queued <= self.waiting and self._is_known:
            self._figures.rejected += 1
            raise BackPressureError(
                f"{self.waiting} requests wait for backend '{self.tag}' already, as many as "
                "max_queued_requests allows; try again later.",
                num_queued_requests=self.waiting,
                max_queued_requests=self._max_queued,
            )
        waiter: asyncio.Future[ReplicaEntry] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        if is_rejected:
            self._waiting.move_to_end(waiter, last=False)
        if len(self._waiting) == 1 and self._roster.is_empty:
            self._report_load()
        self._arm_timer()
        began = stopwatch()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                del self._waiting[waiter]
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._return(waiter.result())
                self._serve_waiting()  # the turn that came to us goes to the next
            raise
        finally:
            self._figures.waits.observe(stopwatch() - began)

    def _serve_waiting(self) -> None:
        """Give those that wait whatever is free, in their order."""
        now = self._clock.now()
        while self._waiting:
            replica = self._roster.take(now, self._rng)
            if replica is None:
                self._arm_timer()
                return
            waiter, _ = self._waiting.popitem(last=False)
            if waiter.done():
                self._return(replica)
            else:
                waiter.set_result(replica)

    def _return(self, replica: ReplicaEntry) -> None:
        """Let others have a replica to which nothing was sent after all."""
        self._roster.leave_line(replica)
        self._roster.give_back(replica)

    def _fail_waiting(self) -> None:
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(self._gone())

    def _gone(self) -> UnavailableError:
        if self._is_deleted:
            return UnavailableError(f"Backend '{self.tag}' was deleted.")
        return UnavailableError(
            f"Backend '{self.tag}' has no replicas, as the target capacity of its instance is 0 %."
        )

    def _arm_timer(self) -> None:
        """Look again when the first replica that is only set aside may be used again."""
        at = self._roster.next_return()
        if at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._serve_waiting()

    def close(self) -> None:
        """Fail whatever still waits."""
        self._is_deleted = True
        self._roster.update({}, 1, self._name_of)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fail_waiting()


def _rewind(replay: Replay | None, error: ReplicaBusyError | ActorLostError) -> None:
    """Let the request be sent to another replica, or raise what became of it at this one."""
    begun = isinstance(error, ActorLostError) and error.begun
    may_go_on = not begun if replay is None else replay.rewind(begun=begun)
    if not may_go_on:
        raise error
