"""Calls by handle that go straight to a replica and back, without a task.

Problem: for a call that meets no obstacle the coroutine that carries it, its task and what wakes it cost more
than the connection does. Choice: where a replica elsewhere has room and a channel to it is open, the request
is sent at once, and the answer ends the call from where it arrives. As soon as anything has to be waited for,
because the replica is full after all, or was lost before it began, a coroutine goes on with the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from daskserve.clock import stopwatch
from daskserve.cluster.base import Cluster
from daskserve.data.replica_set import ReplicaSet
from daskserve.data.roster import ReplicaEntry
from daskserve.data.router_figures import CallFigures
from daskserve.errors import ActorLostError, ReplicaBusyError, ServeError
from daskserve.payload import PackedError, load_error
from daskserve.pending_call import PendingCall
from daskserve.types import Envelope, Load, Message, Payload

#: Goes on with a call that a replica has refused.
GoOn = Callable[[ReplicaBusyError | ActorLostError], None]


class StraightCall:
    """One call under way. Lives on the loop of the process's link.

    Parameters
    ----------
    go_on : callable
        Takes the call over if the replica has refused it, with the reason; it also counts how that ends.
    """

    __slots__ = ("_began", "_call", "_envelope", "_figures", "_give_up", "_go_on", "_replica", "_replicas")

    def __init__(
        self,
        replicas: ReplicaSet,
        figures: CallFigures,
        envelope: Envelope,
        call: PendingCall[Payload],
        go_on: GoOn,
    ) -> None:
        self._replicas = replicas
        self._figures = figures
        self._envelope = envelope
        self._call = call
        self._go_on = go_on
        self._began = stopwatch()
        self._replica: ReplicaEntry | None = None
        self._give_up: Callable[[], None] | None = None

    def start(self, cluster: Cluster) -> bool:
        """Send the request; False, and nothing has happened, if that cannot be done at once."""
        replica = self._replicas.take_afar()
        if replica is None:
            return False
        self._replica = replica
        self._give_up = cluster.ask(replica.address, self._envelope, self._on_answer)
        if self._give_up is None:
            self._replicas.give_back(replica, None)
            return False
        self._replicas.note_sent()
        self._figures.begun += 1
        return True

    def cancel(self) -> None:
        """Give the request up, if it has not ended."""
        give_up, self._give_up = self._give_up, None
        if give_up is not None and self._replica is not None:
            give_up()
            self._replicas.give_back(self._replica, None)
            self._end(asyncio.CancelledError())

    def _on_answer(self, message: Message | None, outcome: Load | Exception) -> None:
        assert self._replica is not None
        self._give_up = None
        self._replicas.give_back(self._replica, outcome)
        if type(outcome) is Load:
            if message is None:
                self._end(no_answer(self._envelope))
            else:
                self._figures.latency.observe(stopwatch() - self._began)
                self._call.set_result(message["payload"])
        elif isinstance(outcome, ReplicaBusyError) or (
            isinstance(outcome, ActorLostError) and not outcome.begun
        ):
            self._go_on(outcome)
        else:
            self._end(outcome)

    def _end(self, error: Any) -> None:
        error = _unpacked(error)
        self._figures.fail(error)
        self._figures.latency.observe(stopwatch() - self._began)
        if not isinstance(error, asyncio.CancelledError):
            self._call.set_error(error)


def no_answer(envelope: Envelope) -> ServeError:
    """Return the error of a call that a replica ended well, but without a result."""
    return ServeError(f"The replica ended request {envelope.head['request_id']} without an answer.")


def _unpacked(error: BaseException) -> BaseException:
    """Return what a caller is to get for an error that came back: caused by its remote traceback."""
    return load_error(error.data) if isinstance(error, PackedError) else error
