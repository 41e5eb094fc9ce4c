"""Handle calls that go to a replica and back without a task.

Problem: if a call never waits, its coroutine, its task and their wake-ups cost more than the connection.
Choice: the request is sent at once if a replica has room and is in this process or has an open channel.
The code that receives the answer then ends the call. A coroutine continues the call if it has to
wait, because the replica is full after all, or was lost before the request began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from daskserve.cluster.protocols.base import Cluster, ClusterConnection
from daskserve.common.clock import stopwatch
from daskserve.common.types import Envelope, KeptPayload, Load, Message, Payload, RemainingResponse
from daskserve.data.caller.naming import with_called
from daskserve.data.caller.routing.replica_pool import PooledReplica
from daskserve.data.caller.routing.replica_set import ReplicaSet
from daskserve.data.caller.routing.router import Router
from daskserve.errors import ActorLostError, ReplicaBusyError, ServeError
from daskserve.loops.pending_call import PendingCall


class DirectCall:
    """One call in progress, on the loop of the process's connection.

    Parameters
    ----------
    continue_call : callable
        ``continue_call(call, error)`` continues a call that the replica has refused, and counts its end.
    """

    __slots__ = (
        "_cancel_request",
        "_continue_call",
        "_replica",
        "began",
        "call",
        "connection",
        "envelope",
        "replicas",
        "router",
    )

    def __init__(
        self,
        connection: ClusterConnection,
        router: Router,
        replicas: ReplicaSet,
        envelope: Envelope,
        call: PendingCall[Payload | KeptPayload],
        continue_call: Callable[[DirectCall, ReplicaBusyError | ActorLostError], None],
    ) -> None:
        self.connection = connection
        self.router = router
        self.replicas = replicas
        self.envelope = envelope
        self.call = call
        self._continue_call = continue_call
        self._replica: PooledReplica | None = None  # set while it has the request
        self._cancel_request: Callable[[], None] | None = None

    def start(self, cluster: Cluster) -> bool:
        """Send the request; return False, without any effect, if it cannot be sent at once."""
        replica = self.replicas.take_now()
        if replica is None:
            return False
        self._replica = replica
        self.began = stopwatch()
        try:
            self._cancel_request = cluster.ask(replica.address, self.envelope, self._on_answer)
        except BaseException:
            if self._replica is not None:  # else `_on_answer` has released it
                self.replicas.put_back(replica)
            raise
        if self._cancel_request is None:
            self.replicas.put_back(replica)
            return False
        self.router.calls.begun += 1
        self.call.on_cancel(self._cancel_from_anywhere)
        return True

    def _cancel_from_anywhere(self) -> None:
        self.connection.thread_calls.post(self._cancel)

    def _cancel(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None and self._cancel_request is not None:
            self._cancel_request()
            self.replicas.release(replica, None)
            self._fail(asyncio.CancelledError())

    def _on_answer(self, message: Message | None, outcome: Load | Exception | RemainingResponse) -> None:
        # If sending fails, this is called before `start` has set `_cancel_request`.
        replica, self._replica = self._replica, None
        assert replica is not None
        assert isinstance(outcome, (Load, BaseException))  # a call has one answer message
        self.replicas.release(replica, outcome)
        if type(outcome) is Load:
            if message is None:
                self._fail(no_answer_error(self.envelope))
            else:
                self.router.calls.latency.observe(stopwatch() - self.began)
                self.call.set_result(message["payload"])
        elif isinstance(outcome, (ReplicaBusyError, ActorLostError)) and not getattr(outcome, "begun", False):
            if self.call.cancelled():
                self._fail(asyncio.CancelledError())
            else:
                self._continue_call(self, outcome)
        else:
            self._fail(outcome)

    def _fail(self, error: Any) -> None:
        metrics = self.router.calls
        metrics.fail(error)
        metrics.latency.observe(stopwatch() - self.began)
        if isinstance(error, asyncio.CancelledError):
            self.call.cancel()
        else:
            router = self.router
            self.call.set_error(with_called(error, router.endpoint, is_legacy=router.is_legacy))


def no_answer_error(envelope: Envelope) -> ServeError:
    """Return the error for a call that a replica ended without an error and without a result."""
    return ServeError(f"The replica ended request {envelope.head['request_id']} without an answer.")
