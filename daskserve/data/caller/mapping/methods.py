"""The methods of a handle for many items, and for the tasks of Dask."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Iterable
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection, PresentTask, Process
from daskserve.data.caller.blocking import TaskPlace, Wait, refuse_in_loop
from daskserve.data.caller.mapping.backlogs import batches_of
from daskserve.data.caller.mapping.results import MapResults, OneResult
from daskserve.data.caller.mapping.rules import BATCH_PRIORITY, Errors, Rules, check_max_in_flight
from daskserve.data.caller.mapping.window import Item, Window
from daskserve.errors import RequestCancelledError, StreamOptionError
from daskserve.loops.event_loop import running_loop


class MapTarget:
    """A handle as the target of a map: it calls one item after the other.

    Parameters
    ----------
    batch_id : str
        Begins the ids of the items.
    task : PresentTask, optional
        The Dask task in whose thread the results are read.
    is_limited : bool
        Whether no more tasks leave their threads than keep the replicas busy, because their inputs are large.
    """

    def __init__(
        self, handle: Any, batch_id: str, task: PresentTask | None = None, *, is_limited: bool = False
    ) -> None:
        self._handle = handle
        self._facts = dict(handle._facts or {})
        self._batch_id = batch_id
        self._process: Process = handle._process
        self._place = None if task is None else TaskPlace(task, self.room if is_limited else _no_limit)

    @property
    def connection(self) -> ClusterConnection:
        """The connection of this process."""
        return self._process.connection

    def room(self) -> int:
        """Return how many calls the replicas take at a time, with one more for each that is on its way."""
        routers: Any = self._process.shared.get("routers")
        found: int = 0 if routers is None else routers.room(self._handle._endpoint)
        return found

    def wait(self, wait: Wait, timeout_s: float | None) -> None:
        """Wait in the thread that reads the results."""
        refuse_in_loop(self.connection, "`for`", "use `async for`")
        if self._place is None:
            wait(timeout_s)
        else:
            self._place.wait(wait, timeout_s)

    def end(self) -> None:
        """Note that the last result was read."""
        if self._place is not None:
            self._place.end()

    def send(self, item: Item) -> Any:
        """Start the call of an item, whose id user code reads from its request context."""
        return self._with_id(f"{self._batch_id}/{item.index}").remote(item.value)

    def send_call(self, item: Item) -> Any:
        """Start the call of the only item, a tuple of arguments and a mapping of those with names."""
        args, kwargs = item.value
        return self._with_id(self._batch_id).remote(*args, **kwargs)

    def _with_id(self, item_id: str) -> Any:
        handle = object.__new__(type(self._handle))
        vars(handle).update(vars(self._handle))
        handle._facts = {**self._facts, "item_id": item_id}
        return handle


def _no_limit() -> None:
    return None


class BatchCalls:
    """The methods of a handle for many items at once."""

    def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int | None = None,
        ordered: bool = True,
        retries: int = 0,
        errors: Errors = "raise",
    ) -> MapResults:
        """Call each item of an iterable, lazily, and return an iterator of the results.

        The items are taken while the results are read, with ``for`` in a thread or with ``async for`` on an
        event loop. The calls have a lower priority than live requests. An item whose replica is lost is
        called again, elsewhere.

        Parameters
        ----------
        items : iterable or asynchronous iterable
            The arguments of the calls, one for each.
        max_in_flight : int, optional
            The number of calls under way at a time. Default: as many as the replicas take, which follows
            their number.
        ordered : bool
            Whether the results come in the order of the items, or as soon as they are there.
        retries : int
            How often an item whose call has failed is called again.
        errors : str
            ``"raise"`` ends the map with the error of an item that has failed, ``"return"`` yields the error
            in its place, and ``"skip"`` leaves the item out. The error has the number of the item as
            ``item_index``. Errors that all items would get, such as that of a deleted deployment, are raised.

        Examples
        --------
        >>> for score in model.score.map(texts, ordered=False, retries=2):  # doctest: +SKIP
        ...     print(score)
        """
        rules = Rules(retries, errors)
        check_max_in_flight(max_in_flight)
        handle = batch_handle(self)
        connection: ClusterConnection = handle._process.connection
        task = connection.present_task() if running_loop() is None else None
        target = MapTarget(handle, connection.request_ids.next(), task)
        window = Window(handle._endpoint, target.send, rules, ordered=ordered)
        results = MapResults(items, target, window, rules, max_in_flight)
        connection.thread_calls.post(batches_of(handle._process.shared).add, window)
        return results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in a task of Dask: ``dask.delayed(handle.method)(x)``, ``client.map(handle.method, items)``.

        The task does not hold a thread of its worker while it waits; it is called again if its replica is
        lost, and cancelled with the task. In a thread this returns the result, as ``remote(...).result()``
        does, and on an event loop what can be awaited.
        """
        handle: Any = self._plain()
        task: PresentTask | None = handle._process.connection.present_task()
        if task is None:
            response = handle.remote(*args, **kwargs)
            return response if running_loop() is not None or handle._options.stream else response.result()
        return call_in_task(batch_handle(handle), task, args, kwargs)

    # Dask awaits the result of `__call__` on the worker's event loop if a task is nothing but this call.
    __tornado_coroutine__ = True

    @property
    def __name__(self) -> str:
        """The name of tasks on Dask's dashboard."""
        handle: Any = self
        method = handle._options.method_name
        return handle.deployment_name if method == "__call__" else f"{handle.deployment_name}.{method}"

    def __dask_tokenize__(self) -> Any:
        handle: Any = self
        return (type(self).__name__, handle._instance, handle._endpoint, handle._options.differences())

    def _plain(self) -> Any:
        """Return the handle in the form whose ``remote`` returns a response."""
        return self


def call_in_task(handle: Any, task: PresentTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call in a Dask task; return the result in a thread, and an awaitable of it on the worker's loop."""
    target = MapTarget(handle, task.key, task)
    rules = Rules()
    window = Window(handle._endpoint, target.send_call, rules, ordered=True)
    results = OneResult(iter([(args, kwargs)]), target, window, rules, 1)
    if running_loop() is not None:
        return _awaited(results, window, task)
    stop = task.on_release(window.cancel_calls)
    try:
        return next(results)
    except RequestCancelledError as error:
        raise task.reschedule() if task.is_released else error  # noqa: B904
    finally:
        stop()
        results.close()


def _awaited(results: MapResults, window: Window, task: PresentTask) -> Awaitable[Any]:
    task.leave()

    async def wait() -> Any:
        stop = task.on_release(window.cancel_calls)
        try:
            return await anext(results)
        except RequestCancelledError as error:
            raise task.reschedule() if task.is_released else error  # noqa: B904
        finally:
            stop()
            task.come_back()

    return wait()


def batch_handle(handle: Any) -> Any:
    """Return a handle with the priority of batch requests, unless it has one of its own."""
    handle = handle._plain()
    if handle._options.stream:
        raise StreamOptionError("A map needs one result for each item; use a handle without stream=True.")
    return handle if handle._options.priority else handle.options(priority=BATCH_PRIORITY)
