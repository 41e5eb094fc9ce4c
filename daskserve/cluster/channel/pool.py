"""The channels of one process: one per other process, opened by either side on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from daskserve.cluster.channel.channel import Channel, Dispatch, DispatchNowait
from daskserve.cluster.channel.comm_transport import take_over
from daskserve.cluster.channel.dialling import READY
from daskserve.cluster.channel.kept import KeptAnswers
from daskserve.cluster.channel.segments import Segments
from daskserve.cluster.channel.transport import Traffic, Transport
from daskserve.cluster.channel.vanishing import PeerWatch
from daskserve.errors import ActorLostError
from daskserve.figures.table import MetricSample
from daskserve.loops.hops import Landing
from daskserve.loops.tasks import is_cancelling
from daskserve.types import ActorAddress, Envelope, Load, OnAnswer, Receive, Send, WorkerAddress

#: Opens a connection that a worker has taken over as a channel.
Connect = Callable[[WorkerAddress], Awaitable[Transport]]


class ChannelPool:
    """The channels of one process, one per other process, opened on first use."""

    def __init__(
        self,
        dispatch: Dispatch,
        connect: Connect,
        dispatch_nowait: DispatchNowait | None = None,
        landing: Landing | None = None,
        *,
        lost_after_s: float = 0.0,
        kept: KeptAnswers | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._dispatch_nowait = dispatch_nowait
        self._landing = landing
        self._lost_after_s = lost_after_s
        self._kept = kept
        self._connect = connect
        self._dialled: dict[WorkerAddress, asyncio.Task[Channel]] = {}
        #: The channels that were dialled and are open.
        self._open_to: dict[WorkerAddress, Channel] = {}
        self._serving: dict[Channel, asyncio.Task[None]] = {}
        self._is_closed = False
        self._segments = Segments()
        # Metrics.
        self._traffic = Traffic()
        self._opened = self._reopened = self._failed = 0
        self._reached: set[WorkerAddress] = set()

    async def accept(self, comm: Any, *, by_socket: bool = True) -> None:
        """Serve a connection that the other side opened, until it ends. See also `take_over`."""
        # After this message, neither side uses the comm; the other side sends nothing before it arrives.
        await comm.write(READY)
        if self._is_closed:
            comm.abort()  # `close` has already run and would not end it
            return
        await self.serve(take_over(comm, by_socket=by_socket))

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

    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Carry one request to an actor in another process; see `Channel.request`."""
        channel = self._open_to.get(address.worker)
        if channel is None:
            channel = await self._channel(address.worker)
        return await channel.request(address, envelope, receive, send)

    def ask(
        self, address: ActorAddress, envelope: Envelope, on_answer: OnAnswer
    ) -> Callable[[], None] | None:
        """Call `Channel.ask`; return None if there is no open channel."""
        channel = self._open_to.get(address.worker)
        if channel is None or channel.is_closed:
            return None
        return channel.ask(address, envelope, on_answer)

    def drop(self, worker: WorkerAddress) -> None:
        """Close the channel to a worker that is gone, so that its requests fail at once."""
        self._reached.discard(worker)
        self._open_to.pop(worker, None)
        dialled = self._dialled.pop(worker, None)
        if dialled is None:
            return
        channel = _channel_in(dialled)
        if channel is not None:
            channel.close()
        else:
            dialled.cancel()

    def abort(self) -> None:
        """Close every channel at once, and cancel pending dials."""
        for worker in list(self._dialled):
            self.drop(worker)
        for channel in list(self._serving):
            channel.close()
        self._segments.close()

    async def close(self) -> None:
        """Close every channel, accept no more, and wait for their tasks."""
        self._is_closed = True
        tasks = list(self._serving.values())
        self.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    async def _channel(self, worker: WorkerAddress) -> Channel:
        task = self._dialled.get(worker)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._dial(worker), name="daskserve-channel-dial")
            # Retrieve the exception even if every waiting caller was cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._dialled[worker] = task
        # Shielded: a cancelled caller must not cancel the dial for the others.
        try:
            return await asyncio.shield(task)
        except OSError as error:
            raise ActorLostError(f"Worker {worker} cannot be reached: {error}", begun=False) from error
        except asyncio.CancelledError:
            if task.cancelled() and not is_cancelling():
                raise ActorLostError(f"Worker {worker} left the cluster.", begun=False) from None
            raise

    async def _dial(self, worker: WorkerAddress) -> Channel:
        try:
            transport = await self._connect(worker)
        except Exception:
            self._failed += 1
            raise
        channel = self._open(transport, first_stream=0)
        self._reopened += worker in self._reached
        self._reached.add(worker)
        task = asyncio.create_task(self._serve_dialled(worker, channel), name="daskserve-channel")
        self._serving[channel] = task
        self._open_to[worker] = channel
        return channel

    def _open(self, transport: Transport, *, first_stream: int) -> Channel:
        self._opened += 1
        transport.traffic = self._traffic
        transport.share(self._segments, begins=first_stream == 0)
        channel = Channel(
            transport,
            self._dispatch,
            first_stream=first_stream,
            dispatch_nowait=self._dispatch_nowait,
            landing=self._landing,
            kept=self._kept,
        )
        if transport.sock is not None:
            PeerWatch(transport.sock, self._lost_after_s, channel.close)
        return channel

    def samples(self) -> list[MetricSample]:
        """Return the metrics; see `daskserve.figures.collector.Source`."""
        return [
            ("channels", (), len(self._serving)),
            ("channel_connections", (), self._opened),
            ("channel_reconnects", (), self._reopened),
            ("channel_dial_failures", (), self._failed),
            ("channel_sent_bytes", (), self._traffic.sent_bytes),
            ("channel_received_bytes", (), self._traffic.received_bytes),
        ]

    async def _serve_dialled(self, worker: WorkerAddress, channel: Channel) -> None:
        try:
            await channel.serve()
        finally:
            self._serving.pop(channel, None)
            if _channel_in(self._dialled.get(worker)) is channel:
                del self._dialled[worker]
            if self._open_to.get(worker) is channel:
                del self._open_to[worker]


def _channel_in(dialled: asyncio.Task[Channel] | None) -> Channel | None:
    """Return the channel of a finished dial; None if the dial is pending or failed."""
    if dialled is None or not dialled.done() or dialled.cancelled() or dialled.exception() is not None:
        return None
    return dialled.result()
