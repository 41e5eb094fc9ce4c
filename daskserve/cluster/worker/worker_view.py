"""Dask's current worker and client as user code gets them, in the worker's process or in a child.

Problem: Dask's locks, queues and actors ask `distributed.get_worker` or `get_client` for an event loop and a
connection to the scheduler, and keep them. They are created in one place (a constructor, a module, unpickled
arguments) and used in another, on another loop or in a thread. With the worker's own loop, ``async with
Lock()`` on a replica's loop blocks the replica's loop, gets the lock, and fails. Choice: these objects keep
the views below, which use the loop and the connection of the place where they are used.

Nothing here imports Dask, which a child process may not need.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from daskserve.errors import BlockingCallError
from daskserve.loops.event_loop import running_loop

if TYPE_CHECKING:
    from distributed import Client

#: Returns the client of the running loop; in a thread without a loop, the client for threads.
FindClient = Callable[[], "Client"]

#: Maximum number of frames between a lock's ``__enter__`` and its check whether it runs on an event loop.
_DEPTH = 10


class CurrentClient:
    """The result of `distributed.default_client`: the client of the loop or thread that uses it."""

    def __init__(self, find: FindClient) -> None:
        self._find = find
        self.loop = CurrentLoop(find)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of Dask's own object, for ``isinstance``."""
        return type(self._find())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)


class CurrentLoop:
    """The Tornado loop of the running event loop; in other threads, the loop of the client for threads."""

    def __init__(self, find: FindClient) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find().loop, name)

    @property
    def asyncio_loop(self) -> Any:
        """The running event loop; in a thread, the loop of the client for threads."""
        refuse_blocking_lock()
        current = running_loop()
        if current is not None:
            return current
        loop: Any = self._find().loop
        return loop.asyncio_loop

    def add_callback(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function on the loop; for `as_completed`, on the loop of the future's client."""
        loop: Any = self._find().loop
        _let_go(getattr(callback, "__self__", None), loop)
        owners = getattr(getattr(args[0], "client", None), "loop", None) if args else None
        if owners is not None and owners is not loop:
            if running_loop() is not None:
                raise BlockingCallError(
                    f"{args[0]!r} belongs to the Dask client of another thread: async code cannot use it in "
                    "as_completed(). Await it, use wait(), or make it on this event loop."
                )
            loop = owners
        loop.add_callback(callback, *args, **kwargs)


class CurrentScheduler:
    """The connection to the scheduler, on the loop or thread that uses it."""

    def __init__(self, address: str, find: FindClient) -> None:
        self.address = address
        self._find = find

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            client: Any = self._find()
            await client.connected()
            return await getattr(client.scheduler, name)(**arguments)

        return call


class WorkerView:
    """The result of `distributed.get_worker`.

    Parameters
    ----------
    worker : object
        The worker if it is in this process; otherwise a mapping with some of its attributes.
    scheduler : str
        The scheduler's address.
    find_connection : callable, optional
        Returns the connection of this process, if no worker in it has one.
    """

    def __init__(
        self,
        worker: Any,
        scheduler: str,
        find: FindClient,
        find_connection: Callable[[], Any] | None = None,
    ) -> None:
        self._worker = worker
        self._find = find
        self.find_connection = find_connection
        self.loop = CurrentLoop(find)
        self.scheduler = CurrentScheduler(scheduler, find)

    def __repr__(self) -> str:
        return f"<WorkerView of {self.address}>"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of Dask's own object, for ``isinstance``."""
        return WorkerView if isinstance(self._worker, Mapping) else type(self._worker)

    @property
    def client(self) -> Client:
        """The client of the running loop; in a thread, the client for threads."""
        return self._find()

    @property
    def data(self) -> Mapping[Any, Any]:
        """The values in this process, which a client searches first."""
        data: Mapping[Any, Any] = {} if isinstance(self._worker, Mapping) else self._worker.data
        return data

    @property
    def rpc(self) -> Any:
        """The connections to other workers."""
        return self._find().rpc

    def log_event(self, topic: Any, message: Any) -> None:
        """Schedule the logging of an event on the scheduler."""
        if isinstance(self._worker, Mapping):
            client: Any = self._find()
            client.loop.add_callback(client.log_event, topic, message)
        else:
            self._worker.log_event(topic, message)

    def _get_client(self, timeout: float | None = None) -> Client:
        return self._find()

    def __getattr__(self, name: str) -> Any:
        worker = self.__dict__.get("_worker")
        if not isinstance(worker, Mapping):
            return getattr(worker, name)
        if name in worker:
            return worker[name]
        raise AttributeError(
            f"This code runs in a separate process, so get_worker() has no {name!r}; it has "
            f"{', '.join(sorted(worker))}, client, loop, scheduler and log_event(). Use isolation='thread' "
            "for code that needs more of its worker."
        )


def _let_go(timer: Any, loop: Any) -> None:
    """Make the timer with which a lock renews its lease stop when the lock is deleted."""
    # Without this, Dask's locks live as long as the event loop, and a server creates one for each request.
    from tornado.ioloop import PeriodicCallback  # Dask has imported it

    if not isinstance(timer, PeriodicCallback) or not inspect.ismethod(timer.callback):
        return
    refresh: Any = weakref.WeakMethod(timer.callback)

    def refresh_if_alive() -> Any:
        found = refresh()
        return None if found is None else found()

    timer.callback = refresh_if_alive
    # A lock may be deleted in any thread, but an event loop may be used only in its own thread.
    timer.stop = partial(loop.add_callback, timer.stop)  # type: ignore[method-assign]


def refuse_blocking_lock() -> None:
    """Raise if code on an event loop enters a Dask lock without ``async``, because that would not lock.

    Raises
    ------
    BlockingCallError
        Without it, Dask only creates a coroutine, and the block runs without the lock.
    """
    if running_loop() is None:
        return
    frame = inspect.currentframe()
    for _ in range(_DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return
        if frame.f_code.co_name == "__enter__" and frame.f_globals["__name__"].startswith("distributed."):
            kind = type(frame.f_locals.get("self")).__name__
            raise BlockingCallError(
                f"Async code cannot enter a {kind} of Dask with `with`, which would block its event loop; "
                f"write `async with {kind}(...)`."
            )
