"""The target of a map: a handle that is called with one item after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection, CurrentTask, Process
from daskserve.common.clock import stopwatch
from daskserve.common.types import EndpointTag
from daskserve.data.caller.blocking import TaskSlot, Wait, refuse_in_loop
from daskserve.data.caller.mapping.window import Item


def room_of(routers: Any, endpoint: EndpointTag, now: float) -> tuple[int, int]:
    """Return the number of replicas of an endpoint, and how many batch requests to send to them at a time.

    Each replica gets one request more than it can run, so that it never idles. Unknown numbers are 0. Any
    thread may call this.
    """
    replicas = room = 0
    for tag in () if routers is None else routers.router(endpoint).backends:
        entries = routers.replica_set(tag).pool.entries()
        room += sum(1 + each.room_for_batch(now) for each in entries.values())
        replicas += len(entries)
    return replicas, room


class MapTarget:
    """Calls a handle with the items of a map.

    Parameters
    ----------
    batch_id : str
        Begins the ids of the items.
    task : CurrentTask, optional
        The Dask task in whose thread the results are read.
    is_limited : bool
        Whether only the tasks that are needed to keep the replicas busy free their slots, because the inputs
        of tasks are large.
    """

    def __init__(
        self, handle: Any, batch_id: str, task: CurrentTask | None = None, *, is_limited: bool = False
    ) -> None:
        self._handle = handle
        self._facts = dict(handle._facts or {})
        self._batch_id = batch_id
        self._process: Process = handle._process
        self._task_slot = (
            None if task is None else TaskSlot(task, self._replicas if is_limited else _no_limit)
        )

    @property
    def endpoint(self) -> EndpointTag:
        """The endpoint that is called."""
        found: EndpointTag = self._handle._endpoint
        return found

    @property
    def shared(self) -> dict[str, Any]:
        """State of the instance that is shared in this process."""
        return self._process.shared

    @property
    def connection(self) -> ClusterConnection:
        """The connection of this process."""
        return self._process.connection

    def room(self) -> int:
        """Return how many calls to send at a time; 0 if the replicas are not known."""
        return self._known()[1]

    def _replicas(self) -> int:
        return self._known()[0]

    def _known(self) -> tuple[int, int]:
        return room_of(self._process.shared.get("routers"), self._handle._endpoint, stopwatch())

    def on_release(self, cancel: Callable[[], object]) -> None:
        """Call ``cancel`` if Dask releases the task before `end`."""
        if self._task_slot is not None:
            self._task_slot.on_release(cancel)

    def check(self) -> None:
        """Raise an error in an event loop, and in a task that was released."""
        refuse_in_loop(self.connection, "`for`", "use `async for`")
        if self._task_slot is not None:
            self._task_slot.check()

    def wait(self, wait: Wait, timeout_s: float | None) -> None:
        """Wait in the thread that reads the results."""
        if self._task_slot is None:
            wait(timeout_s)
        else:
            self._task_slot.wait(wait, timeout_s)

    def end(self) -> None:
        """Record that no more results are read."""
        if self._task_slot is not None:
            self._task_slot.end()

    def send(self, item: Item) -> Any:
        """Start the call of an item, whose id user code reads from its request context."""
        return self._with_id(f"{self._batch_id}/{item.index}").remote(item.value)

    def send_call(self, item: Item) -> Any:
        """Start the call of the only item: a tuple of positional and a mapping of keyword arguments."""
        args, kwargs = item.value
        return self._with_id(self._batch_id).remote(*args, **kwargs)

    def _with_id(self, item_id: str) -> Any:
        handle = object.__new__(type(self._handle))
        vars(handle).update(vars(self._handle))
        handle._facts = {**self._facts, "item_id": item_id}
        return handle


def _no_limit() -> None:
    return None
