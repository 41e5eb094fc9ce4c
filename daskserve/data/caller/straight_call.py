"""Calls by handle that go straight to a replica and back, without a task.

Problem: for a call that meets no obstacle the coroutine that carries it, its task and what wakes it cost more
than the connection does. Choice: where a replica has room, and lives here or has a channel open to it, the
request is sent at once, and the answer ends the call from where it arrives. As soon as anything has to be
waited for, because the replica is full after all, or was lost before it began, a coroutine goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from daskserve.clock import stopwatch
from daskserve.cluster.base import Cluster, Link
from daskserve.data.caller.replica_set import ReplicaSet
from daskserve.data.caller.roster import ReplicaEntry
from daskserve.data.caller.router import Router
from daskserve.errors import ActorLostError, ReplicaBusyError, ServeError
from daskserve.loops.pending_call import PendingCall
from daskserve.payload import PackedError, load_error
from daskserve.types import Envelope, Load, Message, Payload, Rest


class StraightCall:
    """One call under way. Lives on the loop of the process's link.

    Parameters
    ----------
    go_on : callable
        Takes a call over that the replica has refused, with the reason; it also counts how that ends.
    """

    __slots__ = ("_give_up", "_go_on", "_replica", "began", "call", "envelope", "link", "replicas", "router")

    def __init__(
        self,
        link: Link,
        router: Router,
        replicas: ReplicaSet,
        envelope: Envelope,
        call: PendingCall[Payload],
        go_on: Callable[[StraightCall, ReplicaBusyError | ActorLostError], None],
    ) -> None:
        self.link = link
        self.router = router
        self.replicas = replicas
        self.envelope = envelope
        self.call = call
        self._go_on = go_on
        self._replica: ReplicaEntry | None = None  # while it has the request
        self._give_up: Callable[[], None] | None = None

    def start(self, cluster: Cluster) -> bool:
        """Send the request; False, and nothing has happened, if that cannot be done at once."""
        replica = self.replicas.take_now()
        if replica is None:
            return False
        self._replica = replica
        self.began = stopwatch()
        try:
            self._give_up = cluster.ask(replica.address, self.envelope, self._on_answer)
        except BaseException:
            if self._replica is not None:  # else that has been done
                self.replicas.put_back(replica)
            raise
        if self._give_up is None:
            self.replicas.put_back(replica)
            return False
        self.router.calls.begun += 1
        self.call.on_cancel(self._cancel_from_anywhere)
        return True

    def _cancel_from_anywhere(self) -> None:
        self.link.hop.post(self._cancel)

    def _cancel(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None and self._give_up is not None:
            self._give_up()
            self.replicas.give_back(replica, None)
            self._fail(asyncio.CancelledError())

    def _on_answer(self, message: Message | None, outcome: Load | Exception | Rest) -> None:
        # What cannot be sent is answered before `start` knows how to give it up.
        replica, self._replica = self._replica, None
        assert replica is not None
        assert isinstance(outcome, (Load, BaseException))  # calls are answered whole
        self.replicas.give_back(replica, outcome)
        if type(outcome) is Load:
            if message is None:
                self._fail(no_answer(self.envelope))
            else:
                self.router.calls.latency.observe(stopwatch() - self.began)
                self.call.set_result(message["payload"])
        elif isinstance(outcome, (ReplicaBusyError, ActorLostError)) and not getattr(outcome, "begun", False):
            if self.call.cancelled():
                self._fail(asyncio.CancelledError())
            else:
                self._go_on(self, outcome)
        else:
            self._fail(outcome)

    def _fail(self, error: Any) -> None:
        error = _unpacked(error)
        figures = self.router.calls
        figures.fail(error)
        figures.latency.observe(stopwatch() - self.began)
        if isinstance(error, asyncio.CancelledError):
            self.call.cancel()
        else:
            self.call.set_error(error)


def no_answer(envelope: Envelope) -> ServeError:
    """Return the error of a call that a replica ended well, but without a result."""
    return ServeError(f"The replica ended request {envelope.head['request_id']} without an answer.")


def _unpacked(error: BaseException) -> BaseException:
    """Return what a caller is to get for an error that came back: caused by its remote traceback."""
    return load_error(error.data) if isinstance(error, PackedError) else error
