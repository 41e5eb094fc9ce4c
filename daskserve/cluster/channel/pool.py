"""The channels of one process: one per other process, opened by either side on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Any

from daskserve.cluster.channel.channel import Channel, Dispatch
from daskserve.cluster.channel.connect.comm_transport import take_over, wire_of
from daskserve.cluster.channel.connect.dead_peers import PeerWatch
from daskserve.cluster.channel.connect.dialling import READY
from daskserve.cluster.channel.connect.handshake import Admission
from daskserve.cluster.channel.connect.keyring import ChannelSecret, Keyring
from daskserve.cluster.channel.connect.relayed import RelayedWorkers
from daskserve.cluster.channel.kept_results import KeptResults
from daskserve.cluster.channel.wire.segments import Segments
from daskserve.cluster.channel.wire.transport import Traffic, Transport
from daskserve.cluster.protocols.base import TaskRequest
from daskserve.common.formatting import shown
from daskserve.common.types import (
    ActorAddress,
    ActorRequest,
    Envelope,
    Load,
    Reachability,
    Receive,
    Send,
    WorkerAddress,
)
from daskserve.errors import ActorLostError, InstanceError
from daskserve.loops.tasks import is_cancelling
from daskserve.loops.thread_calls import CallInbox
from daskserve.telemetry.table import MetricSample

#: Dials a worker and returns the connection, which the worker uses as a channel.
Connect = Callable[[WorkerAddress], Awaitable[Transport]]

#: Interval at which a replaced channel is checked for requests in flight.
RETIRED_S = 1.0


def refuse_requests(name: str, incarnation: int, envelope: Envelope) -> ActorRequest:
    """Raise: the `Dispatch` of a process without actors."""
    raise InstanceError("This process is a client and holds no actors.")


class ChannelPool:
    """The channels of one process, one per other process, opened on first use.

    Parameters
    ----------
    connect
        Opens a connection to a worker.
    keyring : Keyring, optional
        The secrets of which the other end of an accepted connection must know one.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        connect: Connect,
        inbox: CallInbox | None = None,
        *,
        keyring: Keyring | None = None,
        lost_after_s: float = 0.0,
        kept: KeptResults | None = None,
        connect_directly: Connect | None = None,
        retry_direct_s: float = 0.0,
        on_silent: Callable[[WorkerAddress], object] = lambda _: None,
    ) -> None:
        self._dispatch = dispatch
        self._inbox = inbox
        self._admission = Admission(keyring or Keyring())
        self._lost_after_s = lost_after_s
        self._kept = kept
        #: Called with a worker when the connection to it is lost because its machine was silent.
        self._on_silent = on_silent
        self._connect = connect
        self._dialling: dict[WorkerAddress, asyncio.Task[Channel]] = {}
        #: The channels that were dialled and are open.
        self._open_to: dict[WorkerAddress, Channel] = {}
        self._relayed = RelayedWorkers(connect_directly, retry_direct_s)
        #: Called with a worker and its route each time the worker is dialled or its connection is lost.
        self.watchers: list[Callable[[WorkerAddress, Reachability], object]] = []
        self._serving: dict[Channel, asyncio.Task[None]] = {}
        self._is_closed = False
        self._segments = Segments()
        # For the metrics: the traffic of closed channels, and counts of connections.
        self._traffic = Traffic()
        self._opened = self._reopened = self._failed = 0
        self._reached: set[WorkerAddress] = set()

    def learn(self, secret: ChannelSecret) -> None:
        """Accept connections whose other end knows this secret."""
        self._admission.keyring.add(secret)

    async def accept(self, comm: Any, *, by_socket: bool = True) -> None:
        """Serve a connection that the other side opened, until it ends. See also `take_over`."""
        await comm.write(READY)
        # If `close` has run during an await, it does not end this connection.
        if not self._is_closed and await self._admission.admit(wire_of(comm)) and not self._is_closed:
            # Safe now: neither side uses the comm any more, and the other side sends nothing before the
            # handshake ends.
            await self.serve(take_over(comm, by_socket=by_socket))
        else:
            comm.abort()

    async def serve(self, transport: Transport) -> None:
        """Serve the other end of a connection that was dialled; returns when it ends."""
        channel = self._open(transport, first_stream=1)
        task = asyncio.current_task()
        assert task is not None
        self._serving[channel] = task
        try:
            await channel.serve()
        finally:
            self._serving.pop(channel, None)

    def request(self, address: ActorAddress, envelope: Envelope) -> ActorRequest:
        """Return a request to an actor in another process; it needs a task if there is no open channel."""
        channel = self._open_to.get(address.worker)
        if channel is None or channel.is_closed:
            return TaskRequest(partial(self._dial_and_respond, address, envelope))
        return channel.request(address, envelope)

    def handler_of(self, address: ActorAddress) -> Callable[[Envelope], ActorRequest]:
        """Return the function that sends requests to an actor; it is valid until the route changes."""
        channel = self._open_to.get(address.worker)
        return partial(self.request if channel is None else channel.request, address)

    async def _dial_and_respond(
        self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        channel = self._open_to.get(address.worker) or await self._channel(address.worker)
        return await channel.request(address, envelope).respond(receive, send)

    async def connect(self, worker: WorkerAddress, patience_s: float | None = None) -> None:
        """Open the channel to a worker unless it is open.

        Raises
        ------
        ActorLostError
            The worker cannot be reached, or not within ``patience_s``; the dial then continues.
        """
        if worker in self._open_to:
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._channel(worker)
        except TimeoutError:
            if worker in self._dialling:
                self._notify(worker, Reachability.NONE)
            raise _unreached(worker, f"it did not answer within {shown(patience_s or 0.0)} s") from None

    def route_to(self, worker: WorkerAddress) -> Reachability | None:
        """Return the route of the open channel to a worker; None if there is none."""
        if worker not in self._open_to:
            return None
        return Reachability.SCHEDULER if worker in self._relayed else Reachability.DIRECT

    @property
    def relayed(self) -> Iterable[WorkerAddress]:
        """The workers that are reached through the scheduler."""
        return self._relayed.workers

    @property
    def peers(self) -> Collection[WorkerAddress]:
        """The workers to which this process has opened channels."""
        return self._open_to.keys()

    def drop(self, worker: WorkerAddress) -> None:
        """Close the channel to a worker that has left, so that its requests fail at once."""
        self._reached.discard(worker)
        self._relayed.end(worker)
        channel = self._open_to.pop(worker, None)
        if channel is not None:
            channel.close()
        dialling = self._dialling.pop(worker, None)
        if dialling is not None:
            dialling.cancel()

    def break_off(self, worker: WorkerAddress) -> None:
        """Close the channel to a worker that does not answer, so that its requests fail at once."""
        self.drop(worker)
        self._notify(worker, Reachability.NONE)

    def _notify(self, worker: WorkerAddress, route: Reachability) -> None:
        if not self._is_closed:
            for watcher in list(self.watchers):
                watcher(worker, route)

    def abort(self) -> None:
        """Close every channel at once, and cancel pending dials."""
        for worker in [*self._dialling, *self._open_to]:
            self.drop(worker)
        for channel in list(self._serving):
            channel.close()
        self._admission.close()
        self._segments.close()

    async def close(self) -> None:
        """Close every channel, accept no more, and wait for their tasks."""
        self._is_closed = True
        tasks = list(self._serving.values())
        self.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    async def _channel(self, worker: WorkerAddress) -> Channel:
        task = self._dialling.get(worker)
        if task is None:
            task = asyncio.create_task(self._dial(worker), name="daskserve-channel-dial")
            # Retrieve the exception even if every waiting caller was cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._dialling[worker] = task
        # Shielded: a cancelled caller must not cancel the dial for the others.
        try:
            return await asyncio.shield(task)
        except (OSError, ValueError) as error:
            # A ValueError means that the address is not valid in this process.
            raise _unreached(worker, str(error)) from error
        except asyncio.CancelledError:
            if task.cancelled() and not is_cancelling():
                raise ActorLostError(f"Worker {worker} left the cluster.", begun=False) from None
            raise

    async def _dial(self, worker: WorkerAddress) -> Channel:
        task = asyncio.current_task()
        try:
            transport = await self._connect(worker)
        except Exception:
            self._failed += 1
            self._end_dial(worker, task)
            self._notify(worker, Reachability.NONE)
            raise
        self._end_dial(worker, task)
        return self._adopt(worker, transport)

    def _end_dial(self, worker: WorkerAddress, task: object) -> None:
        if self._dialling.get(worker) is task:
            del self._dialling[worker]

    def _adopt(self, worker: WorkerAddress, transport: Transport) -> Channel:
        """Use a new connection to a worker from now on."""
        channel = self._open(transport, first_stream=0, worker=worker)
        self._reopened += worker in self._reached
        self._reached.add(worker)
        task = asyncio.create_task(self._serve_dialled(worker, channel), name="daskserve-channel")
        self._serving[channel] = task
        before = self._open_to.get(worker)
        self._open_to[worker] = channel
        if before is not None:
            self._retire(before)
        if transport.is_relayed:
            self._relayed.begin(worker, lambda direct: self._adopt(worker, direct))
        self._notify(worker, Reachability.SCHEDULER if transport.is_relayed else Reachability.DIRECT)
        return channel

    def _retire(self, channel: Channel) -> None:
        """Close a channel that was replaced, once it has no requests in flight."""
        if channel.is_idle:
            channel.close()
        elif not channel.is_closed:
            asyncio.get_running_loop().call_later(RETIRED_S, self._retire, channel)

    def _open(self, transport: Transport, *, first_stream: int, worker: WorkerAddress = "") -> Channel:
        self._opened += 1
        transport.traffic = self._traffic
        transport.share(self._segments, begins=first_stream == 0)
        channel = Channel(
            transport,
            self._dispatch,
            first_stream=first_stream,
            inbox=self._inbox,
            kept=self._kept,
        )

        def on_lost() -> None:
            if worker and not transport.is_relayed:
                self._on_silent(worker)
            channel.close()

        if transport.sock is not None:
            PeerWatch(transport.sock, self._lost_after_s, on_lost)
        return channel

    def samples(self) -> list[MetricSample]:
        """Return the metrics; see `daskserve.telemetry.table.Source`."""
        return [
            ("channels", (), len(self._serving)),
            ("channel_connections", (), self._opened),
            ("channel_reconnects", (), self._reopened),
            ("channel_dial_failures", (), self._failed),
            *(("channel_refusals", (cause,), count) for cause, count in self._admission.refused.items()),
            ("channel_refusals", ("invalid",), self._traffic.invalid),
            ("channel_sent_bytes", (), self._traffic.sent_bytes),
            ("channel_received_bytes", (), self._traffic.received_bytes),
        ]

    async def _serve_dialled(self, worker: WorkerAddress, channel: Channel) -> None:
        try:
            await channel.serve()
        finally:
            self._serving.pop(channel, None)
            if self._open_to.get(worker) is channel:
                del self._open_to[worker]
                self._relayed.end(worker)
                self._notify(worker, Reachability.NONE)


def _unreached(worker: WorkerAddress, why: str) -> ActorLostError:
    return ActorLostError(f"Worker {worker} cannot be reached: {why}", begun=False, is_disconnected=True)
