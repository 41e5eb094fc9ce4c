"""The connection of handles and clients in a process of a `daskserve.cluster.local.cluster.LocalCluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from daskserve.cluster.local.values import LocalTransfer
from daskserve.cluster.local.world import LocalWorld
from daskserve.cluster.protocols.base import Process
from daskserve.cluster.protocols.ended import ended_error, forked_error
from daskserve.common.clock import RequestIds
from daskserve.common.types import InstanceName
from daskserve.errors import BadRequestError, BlockingCallError, NotRunningError, ServeError
from daskserve.loops.at_fork import ActsAtFork, watch_forks
from daskserve.loops.event_loop import on_loop, running_loop
from daskserve.loops.thread_calls import CallInbox, LoopQueues, ThreadCalls

T = TypeVar("T")


class LocalInstances:
    """The instances that this process started. No other program can reach them."""

    def __contains__(self, instance: object) -> bool:
        return True

    async def is_alone(self, instance: InstanceName) -> bool:
        return True


class LocalConnection(ActsAtFork):
    """The part of `daskserve.cluster.dask.connection.DaskConnection` that handles and clients use."""

    scheduler_address = "local"
    dashboard_link = None
    default_instance: Any = None
    started = LocalInstances()

    def __init__(self, world: LocalWorld, process: Process) -> None:
        self.clock = world.clock
        self.rng = world.rng
        self.request_ids = RequestIds(self.rng)
        self.loop_queues = LoopQueues()
        self.values = LocalTransfer()
        self._inbox: CallInbox | None = None
        self._world = world
        self._process = process
        self._is_forked = False
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        self._is_forked = True  # the thread of the loop is not in this process

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the whole cluster."""
        return self._world.loop

    @property
    def inbox(self) -> CallInbox:
        """The point at which calls from other threads arrive; created on first use, once there is a loop."""
        if self._inbox is None:
            self._inbox = CallInbox(self.loop)
        return self._inbox

    @property
    def thread_calls(self) -> ThreadCalls:
        """Calls to that loop from other threads."""
        return self.loop_queues.get(self.loop, self.inbox)

    def current_task(self) -> None:
        """Return None: there are no Dask tasks."""

    @property
    def is_open(self) -> bool:
        """Whether blocking calls are possible."""
        return self.loop.is_running() and not self._is_forked

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed, or in another process, so that all calls fail."""
        return self._is_forked or self.loop.is_closed()

    def closed_error(self) -> ServeError:
        """Return the error to raise if `is_closed`."""
        if self._is_forked:
            return forked_error(
                "Deploy here, with serve.run(..., local=True), and use the handle that it returns."
            )
        return ended_error()

    def runs_here(self) -> bool:
        """Return whether the caller is on the cluster's own loop."""
        return running_loop() is self.loop

    def cluster(self, instance: InstanceName) -> Process:
        """Return this process's view of the cluster's only instance; raise `NotRunningError` for others."""
        if instance != self._world.instance:
            raise NotRunningError(f"Instance {instance!r} does not run on this cluster.")
        return self._process

    async def drop_cluster(self, instance: InstanceName) -> None:
        """Stop listening to the instance."""
        await self._process.listener.stop()

    async def ask(self, verb: str, **message: Any) -> Any:
        """Call one of the supervisor's verbs that a client needs."""
        if verb == "instances":
            return {self._world.instance: {}}
        if verb == "drain_instance":
            await self._world.drain()
            return True
        if verb == "end_instance":
            await self._world.end()
            return None
        raise BadRequestError(f"A local cluster has no verb {verb!r}.")

    def sync(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine on the cluster's loop and return its result to this thread."""
        if self.runs_here():
            coroutine.close()
            raise BlockingCallError(
                "A blocking call was made on the event loop that would have to run it; await its "
                "asynchronous form, or call it from another thread."
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the cluster's loop and return its result to a coroutine on any loop."""
        return await on_loop(self.loop, coroutine)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine without waiting for it; call on the loop only."""
        self._world.spawn(coroutine)

    def release_default(self, instance: InstanceName) -> None:
        """Do nothing: a local instance is never the default."""

    async def disconnect(self, instance: InstanceName = "", *, asynchronous: bool) -> None:
        """Do nothing: the creator of a local cluster closes it."""

    async def instance_ended(self, instance: InstanceName, *, asynchronous: bool) -> None:
        """Let the creator of the local cluster close it, if it registered a callback."""
        close = self._world.network.when_ended
        if close is not None:
            await asyncio.to_thread(close) if asynchronous else close()
