"""Constructs and destructs the user's object, on a loop or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.user_code.servable import Servable


class Stage(NamedTuple):
    """A stage of a replica's start: its description, and the description of its failure."""

    doing: str
    failed: str


INSTALLING = Stage("installing its environment", "could not install its environment")
LOADING = Stage("loading its code", "could not be loaded")
CONSTRUCTING = Stage("running its constructor", "failed in its constructor")
OPENING = Stage("running its lifespan", "failed in its lifespan")
RECONFIGURING = Stage("running reconfigure()", "failed in reconfigure()")


class Construction:
    """Loads and constructs the user's object, if possible in one trip to the thread of its code.

    Each trip costs two thread switches, which take milliseconds on a busy worker.

    Parameters
    ----------
    load : callable
        Returns the servable, not constructed.
    is_async : bool
        Whether all of its methods are known to run on an event loop. With its own loop, the object is loaded
        in the thread of the loop, before the loop runs.
    enter : callable
        Called when a `Stage` begins, perhaps in a thread of user code.

    Attributes
    ----------
    servable : Servable or None
        The loaded object, constructed or not.
    turned : Event
        Set once the loop of the user's object has run the callbacks that the constructor scheduled.
    """

    def __init__(
        self,
        executor: UserExecutor,
        load: Callable[[], Servable],
        *,
        is_async: bool,
        enter: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        self._enter = enter
        self.turned = asyncio.Event()
        self._executor = executor
        self._load = load
        self._is_async = is_async and not executor.is_on_worker_loop
        self.servable: Servable | None = None
        self._error: BaseException | None = None

    async def run(self) -> Servable:
        """Return the servable with the user's object; raise the errors of user code."""
        executor = self._executor
        self._enter(LOADING)
        if self._is_async:
            executor.open_loop(self._try_to_make)
            await executor.run_async(self._make_on_loop)
        else:
            await executor.run_sync(self._make)
            if self._belongs_on_loop():
                await executor.run_async(self._make_on_loop)
        if not self._belongs_on_loop() or executor.is_on_worker_loop:
            self.turned.set()
        assert self.servable is not None
        return self.servable

    # ---- run by the executor

    def _make(self) -> None:
        servable = self.servable = self._load()
        self._enter(CONSTRUCTING)
        if not _is_made_on_loop(self._executor, servable):
            servable.construct_in_thread()
            if servable.is_ending:
                servable.close_late()

    def _try_to_make(self) -> None:
        try:
            self._make()
        except BaseException as error:  # even SystemExit, because this thread runs the loop next
            self._error = error

    def _belongs_on_loop(self) -> bool:
        servable = self.servable
        return servable is not None and (
            servable.facts.is_asgi_app or _is_made_on_loop(self._executor, servable)
        )

    async def _make_on_loop(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # otherwise the traceback refers to this frame, and this frame to the error
        servable = self.servable
        assert servable is not None
        if _is_made_on_loop(self._executor, servable):
            await servable.construct()
        if servable.facts.is_asgi_app:
            self._enter(OPENING)
            await servable.open()
        asyncio.get_running_loop().call_soon(self._executor.to_worker.post, self.turned.set)


async def destruct(executor: UserExecutor, servable: Servable) -> None:
    """Destruct the user's object, now or once it is constructed; raise the errors of its destructor."""
    servable.is_ending = True
    if servable.must_be_closed_on_loop or (servable.is_async_at_all and not executor.is_on_worker_loop):
        await executor.run_async(servable.close)
    else:
        await executor.run_sync(servable.close_in_thread)


def _is_made_on_loop(executor: UserExecutor, servable: Servable) -> bool:
    # An object with async code is constructed on its own loop, because the constructor may create tasks
    # there. On the worker's loop, this is only done if the constructor is async.
    return servable.must_be_made_on_loop or (servable.is_async_at_all and not executor.is_on_worker_loop)
