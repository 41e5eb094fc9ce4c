"""Instances that run in this process, on an event loop in a thread, without Dask: for tests and experiments.

`daskserve.testing.local_instance` yields one for a block of code. `daskserve.run(..., local=True)` shares one
per process, which runs until `daskserve.shutdown` or the end of the program.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from daskserve.client.definitions.specs import controller_start
from daskserve.client.instance.calls import ControllerCalls, wait_for_http
from daskserve.client.instance.connection import InstanceConnection
from daskserve.common.clock import OneLoopClock
from daskserve.common.types import InstanceName, Location
from daskserve.context import current_replica
from daskserve.options.fields.base import parse_options
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig, instance_logging
from daskserve.options.tracing import TracingConfig, checked_tracing

if TYPE_CHECKING:
    from daskserve.cluster.local.cluster import LocalCluster

#: The instance of the innermost block of `daskserve.testing.local_instance`.
current_block: ContextVar[InstanceConnection | None] = ContextVar("daskserve_block", default=None)
#: How long a local instance may take to start.
START_S = 10.0


@asynccontextmanager
async def running_cluster(
    workers: int,
    http_options: HTTPOptions | Mapping[str, Any] | None,
    timeout_s: float,
    instance: InstanceName = "local",
    tracing_config: TracingConfig | Mapping[str, Any] | None = None,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
) -> AsyncIterator[LocalCluster]:
    """Yield a local cluster whose instance runs; without ``http_options``, it has no HTTP proxies."""
    # Imported here: most programs run no actors.
    from daskserve.cluster.actors.factories import load_factories
    from daskserve.cluster.local.cluster import LocalCluster

    no_server = {"location": Location.NO_SERVER}
    options = parse_options(
        HTTPOptions, no_server if http_options is None else http_options, what="http_options"
    )
    message = controller_start(
        options,
        start_id="local",
        # A program's configuration for its clusters must not change its tests.
        logging=None if logging_config is None else instance_logging(logging_config),
        tracing=checked_tracing(tracing_config),
    )
    clock = OneLoopClock(asyncio.get_running_loop())  # programs read this clock on other threads, too
    cluster = LocalCluster(load_factories(), workers=workers, instance=instance, clock=clock)
    try:
        await cluster.start(message.encode())
        await wait_for_http(ControllerCalls(cluster.program.connection, cluster.instance), timeout_s)
        yield cluster
    finally:
        await cluster.close()


@contextmanager
def in_block(connection: InstanceConnection) -> Iterator[None]:
    """Let `daskserve.run` and the other functions of the package use an instance within a ``with`` block."""
    outer = current_block.get()
    current_block.set(connection)
    try:
        yield
    finally:
        # Not reset by a token, because a fixture may exit in another context than it was entered in.
        current_block.set(outer)


@contextmanager
def loop_in_thread(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a thread until the end of the block."""
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    stopping = asyncio.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()
        await stopping.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="daskserve-local", daemon=True)
    thread.start()
    started.wait()
    try:
        yield loops[0]
    finally:
        loops[0].call_soon_threadsafe(stopping.set)
        thread.join()


class LocalInstance(threading.Thread):
    """The instance that ``run(..., local=True)`` uses in this process, and the thread in which it runs.

    No other object refers to it: `running_instance` finds it among the threads of the process.
    """

    def __init__(self) -> None:
        super().__init__(name="daskserve-local-instance", daemon=True)
        #: Set once the instance has started or failed to start.
        self._begun = threading.Event()
        self._failure: BaseException | None = None
        self.connection: InstanceConnection | None = None

    def run(self) -> None:
        """Run the instance until it is shut down."""
        try:
            asyncio.run(self._serve())
        except Exception as error:  # the thread that starts the instance raises it
            self._failure = error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        async with running_cluster(1, None, START_S) as cluster:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            cluster.network.when_ended = lambda: self._end(loop, ended)
            self.connection = InstanceConnection(cluster.program.connection, cluster.instance, is_owner=True)
            self._begun.set()
            await ended.wait()

    def started(self) -> InstanceConnection:
        """Start the instance and return its connection once it runs."""
        self.start()
        self._begun.wait()
        if self.connection is None:
            assert self._failure is not None
            raise self._failure
        return self.connection

    def _end(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        if self.is_alive():
            loop.call_soon_threadsafe(ended.set)
            # A replica that ends its own instance cannot wait for its own end.
            if current_replica.get() is None:
                self.join()


def running_instance() -> InstanceConnection | None:
    """Return the connection to the local instance of this process; None if none runs."""
    for thread in threading.enumerate():
        if isinstance(thread, LocalInstance):
            connection = thread.connection
            if connection is not None and not connection.is_closed:
                return connection
    return None


def shared_instance() -> InstanceConnection:
    """Return the connection to the local instance of this process, starting it if none runs."""
    return running_instance() or LocalInstance().started()
