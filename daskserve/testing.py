"""Tools for fast tests: an event loop in virtual time, and an instance in one process without a cluster.

Problem: most parts of daskserve wait (backoffs, grace periods, ticks), and tests that wait are slow or flaky.
Choice, as in trio's autojump clock: an asyncio event loop whose clock stands still while anything can run,
and jumps to the next timer when nothing can. An hour of ticks takes milliseconds and always happens in the
same order. `daskserve.common.clock.LoopClock` reads that loop's time, so code that takes a `Clock` needs no
changes.

Virtual time covers timers only. The loop checks sockets only when nothing else is left to do. Threads, and so
the user code of real replicas, run in real time while virtual time jumps ahead. To test those, use
`local_instance`, which runs an instance on an ordinary loop in one process, or the shorter
``daskserve.run(app, local=True)``, which shares one such instance in the process, without HTTP.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from daskserve.common.formatting import shown

if TYPE_CHECKING:
    from daskserve.client.client import AsyncClient, Client
    from daskserve.client.instance.connection import InstanceConnection
    from daskserve.options.http import HTTPOptions
    from daskserve.options.logging import LoggingConfig
    from daskserve.options.tracing import TracingConfig

T = TypeVar("T")

#: Virtual time after which a test is assumed to wait for something that never happens.
LIMIT_S = 24 * 3600.0
#: Maximum number of loop iterations without time passing.
MAX_TURNS = 200_000
#: Sockets that the loop itself registers: the one with which other threads wake it.
_OWN_SOCKETS = 1


class DeadlockError(RuntimeError):
    """Nothing is scheduled on a `VirtualTimeLoop`, so the program waits for something that cannot happen."""


class LivelockError(RuntimeError):
    """A `VirtualTimeLoop` runs without end: time does not advance, or has passed the limit."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances virtual time instead of waiting."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            self.loop.count_turn()
            return ready
        if self.loop.has_work_in_threads or (timeout is None and len(self.get_map()) > _OWN_SOCKETS):
            return super().select(None)
        self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and jumps to the next timer whenever nothing is ready.

    Time passes for timers only, so ``loop.time()`` is exact: after ``asyncio.sleep(30)`` it is 30.

    Parameters
    ----------
    limit_s : float
        Raise `LivelockError` instead of going past this time.

    Raises
    ------
    DeadlockError
        Raised from the call that runs the loop: nothing is ready and no timer is set. The message lists the
        waiting tasks.
    LivelockError
        The loop ran `MAX_TURNS` iterations without time passing, or time passed ``limit_s``.
    """

    # Defined by asyncio.BaseEventLoop: the heap of timers, earliest first.
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._virtual_now = 0.0
        self._limit_s = limit_s
        self._turns = 0
        self._in_threads = 0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run a function in a thread; virtual time stands still until it returns."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._left_thread)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Wait in real time for the threads of `run_in_executor` to end."""
        self._in_threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._in_threads -= 1

    def _left_thread(self, _: asyncio.Future[Any]) -> None:
        self._in_threads -= 1

    @property
    def has_work_in_threads(self) -> bool:
        """Whether a function passed to `run_in_executor` is still running."""
        return self._in_threads > 0

    def count_turn(self) -> None:
        """Count a loop iteration that takes no time."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise LivelockError(
                f"livelock: the loop ran {MAX_TURNS} iterations while time stood still at "
                f"{shown(self._virtual_now)} s; check for a loop that never waits"
            )

    def jump(self) -> None:
        """Advance the time to the next timer."""
        self._turns = 0
        if not self._scheduled:
            raise DeadlockError(f"deadlock: nothing is scheduled; waiting: {_describe_tasks(self)}")
        # Not the current time plus the timeout: a rounding error could end before the timer.
        self._virtual_now = max(self._virtual_now, self._scheduled[0].when())
        if self._virtual_now > self._limit_s:
            raise LivelockError(
                f"livelock: virtual time is past {shown(self._limit_s)} s; waiting: {_describe_tasks(self)}"
            )


def _describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        stack = task.get_stack(limit=1)
        where = f" at {stack[0].f_code.co_filename}:{stack[0].f_lineno}" if stack else ""
        lines.append(f"{task.get_name()}{where}")
    return "; ".join(sorted(lines)) or "no task"


def run_virtual(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, limit_s: float = LIMIT_S) -> T:
    """Run a coroutine function in virtual time and return its result, as `asyncio.run` does in real time.

    Examples
    --------
    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run_virtual(nap)
    3600.0
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_s)) as runner:
        return runner.run(function(*args))


async def wait_until(condition: Callable[[], Any], *, timeout_s: float = 10.0, every_s: float = 0.005) -> Any:
    """Check a condition every ``every_s`` and return its first true value; works in virtual and real time.

    Raises
    ------
    TimeoutError
        The condition did not become true within ``timeout_s``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if loop.time() >= deadline:
            raise TimeoutError(
                f"{getattr(condition, '__name__', condition)} did not become true within {shown(timeout_s)} s"
            )
        await asyncio.sleep(every_s)


@contextmanager
def local_instance(
    *,
    workers: int = 2,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    tracing_config: TracingConfig | Mapping[str, Any] | None = None,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
) -> Iterator[Client]:
    """Yield the client of an instance that runs in this process, on an event loop in a thread, without Dask.

    The controller, the routers, the replicas and, if enabled, the HTTP proxies are the real ones. The workers
    are simulated, so there is no isolation and no speedup. The instance ends with the block. Within it, the
    functions of ``daskserve``, such as ``serve.run``, use this instance.

    Parameters
    ----------
    workers : int
        Number of simulated workers, with 4 threads each.
    http_options : HTTPOptions or dict, optional
        Options of the HTTP proxies. Default: no proxies; calls go through handles only.
    timeout_s : float
        Timeout for the proxies to listen, in seconds.
    tracing_config : TracingConfig or dict, optional
        Traces; see `daskserve.start`.
    logging_config : LoggingConfig or dict, optional
        Logs; see `daskserve.start`. With it, there is an access log. The records of replicas always have
        their fields, as attributes of `logging.LogRecord`, and handlers get them at once.

    Examples
    --------
    >>> with local_instance(http_options={"port": 0}) as client:  # doctest: +SKIP
    ...     handle = client.run(Ingress.bind(Translator.bind({"hello": "bonjour"})))
    ...     assert requests.get(client.http_urls()[0], {"word": "hello"}).text == "bonjour"
    """
    from daskserve.client.functions.local import loop_in_thread

    observing = {"tracing_config": tracing_config, "logging_config": logging_config}
    with (
        loop_in_thread() as loop,
        _instance_on(loop, workers, http_options, timeout_s, observing) as client,
    ):
        yield client


@contextmanager
def _instance_on(
    loop: asyncio.AbstractEventLoop,
    workers: int,
    http_options: HTTPOptions | Mapping[str, Any] | None,
    timeout_s: float,
    observing: Mapping[str, Any],
) -> Iterator[Client]:
    from daskserve.client.client import Client
    from daskserve.client.functions.local import in_block

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    running = _running_instance(workers, http_options, timeout_s, observing)
    connection = run(running.__aenter__())
    try:
        with Client(connection) as client, in_block(connection):
            yield client
    finally:
        run(running.__aexit__(None, None, None))


@asynccontextmanager
async def local_instance_async(
    *,
    workers: int = 2,
    http_options: HTTPOptions | Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    tracing_config: TracingConfig | Mapping[str, Any] | None = None,
    logging_config: LoggingConfig | Mapping[str, Any] | None = None,
) -> AsyncIterator[AsyncClient]:
    """Yield the client of an instance like that of `local_instance`, which runs on the caller's event loop.

    Examples
    --------
    >>> async def test_double() -> None:
    ...     async with local_instance_async() as client:
    ...         await client.create_backend("double", lambda request: 2 * request.data)
    ...         await client.create_endpoint("double", backend="double")
    ...         handle = await client.get_handle("double")
    ...         assert await handle.remote(21) == 42
    """
    from daskserve.client.client import AsyncClient
    from daskserve.client.functions.local import in_block

    observing = {"tracing_config": tracing_config, "logging_config": logging_config}
    async with _running_instance(workers, http_options, timeout_s, observing) as connection:
        async with AsyncClient(connection) as client:
            with in_block(connection):
                yield client


@asynccontextmanager
async def _running_instance(
    workers: int,
    http_options: HTTPOptions | Mapping[str, Any] | None,
    timeout_s: float,
    observing: Mapping[str, Any],
) -> AsyncIterator[InstanceConnection]:
    # Imported here, so that `run_virtual` does not load these layers.
    from daskserve.client.functions.local import running_cluster
    from daskserve.client.instance.connection import InstanceConnection

    async with running_cluster(workers, http_options, timeout_s, **observing) as cluster:
        yield InstanceConnection(cluster.program.connection, cluster.instance)
