"""The methods of a handle for many items, and for the tasks of Dask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from daskserve.cluster.protocols.base import ClusterConnection, PresentTask, Process
from daskserve.common.clock import stopwatch
from daskserve.common.types import EndpointTag
from daskserve.data.caller.backlogs import batches_of
from daskserve.data.caller.blocking import TaskPlace, Wait, refuse_in_loop
from daskserve.data.caller.mapping.results import MapResults, OneResult
from daskserve.data.caller.mapping.rules import Errors, Rules, check_collection, check_max_in_flight
from daskserve.data.caller.mapping.window import Item, Window
from daskserve.data.caller.routing.pool.replica_pool import ROOM_S
from daskserve.errors import InstanceError, RequestCancelledError, StreamOptionError
from daskserve.loops.event_loop import running_loop
from daskserve.options.fields.priority import BATCH_PRIORITY

T = TypeVar("T")


def room_of(routers: Any, endpoint: EndpointTag, now: float) -> tuple[int, int]:
    """Return how many replicas an endpoint has, and how many requests of a batch job they take at a time.

    One slot of each is for live requests, if it has several, and one request is on its way to each. A replica
    that has refused some lately, although it had free slots, takes as many as it had then. May be called from
    any thread; both are 0 while they are not known.
    """
    replicas = room = 0
    for tag in () if routers is None else routers.router(endpoint).backends:
        entries = routers.replica_set(tag).pool.entries()
        for each in entries.values():
            found_at, found = each.batch_room
            room += 1 + (found if now - found_at < ROOM_S else max(1, each.concurrency - 1))
        replicas += len(entries)
    return replicas, room


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
        self._place = None if task is None else TaskPlace(task, self._replicas if is_limited else _no_limit)

    @property
    def endpoint(self) -> EndpointTag:
        """The endpoint that is called."""
        found: EndpointTag = self._handle._endpoint
        return found

    @property
    def shared(self) -> dict[str, Any]:
        """What the parts of the instance share in this process."""
        return self._process.shared

    @property
    def connection(self) -> ClusterConnection:
        """The connection of this process."""
        return self._process.connection

    def room(self) -> int:
        """Return how many calls the replicas take at a time; 0 if they are not known."""
        return self._known()[1]

    def _replicas(self) -> int:
        return self._known()[0]

    def _known(self) -> tuple[int, int]:
        return room_of(self._process.shared.get("routers"), self._handle._endpoint, stopwatch())

    def on_release(self, cancel: Callable[[], object]) -> None:
        """Call back, until `end`, if Dask releases the task."""
        if self._place is not None:
            self._place.on_release(cancel)

    def check(self) -> None:
        """Raise an error in an event loop, and in a task that was released."""
        refuse_in_loop(self.connection, "`for`", "use `async for`")
        if self._place is not None:
            self._place.check()

    def wait(self, wait: Wait, timeout_s: float | None) -> None:
        """Wait in the thread that reads the results."""
        if self._place is None:
            wait(timeout_s)
        else:
            self._place.wait(wait, timeout_s)

    def end(self) -> None:
        """Note that no more results are read."""
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
        check_max_in_flight(max_in_flight)
        handle = batch_handle(self)
        connection: ClusterConnection = handle._process.connection
        task = connection.present_task() if running_loop() is None else None
        target = MapTarget(handle, connection.request_ids.next(), task)
        return start_map(target, items, Rules(retries, errors), max_in_flight, ordered=ordered)

    def map_bag(
        self, bag: Any, *, max_in_flight: int | None = None, retries: int = 0, errors: Errors = "raise"
    ) -> Any:
        """Return a `dask.bag.Bag` of the results of the calls of each item of a bag; see `map`.

        A partition is a task of Dask, which calls its items like `map`.
        """
        check_max_in_flight(max_in_flight)
        check_collection("map_bag", bag, "map_partitions", "a bag of Dask, as dask.bag.from_sequence makes")
        return bag.map_partitions(MappedItems(batch_handle(self), Rules(retries, errors), max_in_flight))

    def map_partitions(
        self, frame: Any, *args: Any, meta: Any = None, retries: int = 0, **kwargs: Any
    ) -> Any:
        """Return a collection of the results of a call for each partition of a dataframe or series of Dask.

        Parameters
        ----------
        args, kwargs
            Further arguments of the calls.
        meta : pandas object, type or mapping, optional
            What the results look like, as in ``dask.dataframe.DataFrame.map_partitions``. Default: what the
            deployment returns for an empty partition.
        retries : int
            How often a call that has failed is repeated.
        """
        made = "a dataframe or series of Dask, as dask.dataframe.from_pandas makes"
        check_collection("map_partitions", frame, "map_partitions", made)
        call = MappedPart(batch_handle(self), Rules(retries))
        options = {} if meta is None else {"meta": meta}
        return frame.map_partitions(call, *args, **kwargs, **options)

    def map_blocks(self, array: Any, *args: Any, retries: int = 0, **kwargs: Any) -> Any:
        """Return a Dask array of the results of a call for each block of an array.

        The further arguments are those of ``dask.array.Array.map_blocks``, such as ``dtype``, ``meta`` and
        ``chunks``. With ``dtype`` and without ``meta``, the blocks are taken to be arrays of NumPy. Without
        both, the deployment is called with an empty block.
        """
        check_collection(
            "map_blocks", array, "map_blocks", "an array of Dask, as dask.array.from_array makes"
        )
        if kwargs.get("dtype") is not None and kwargs.get("meta") is None:
            import numpy

            kwargs["meta"] = numpy.empty((0,) * array.ndim, kwargs["dtype"])
        return array.map_blocks(MappedPart(batch_handle(self), Rules(retries)), *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in a task of Dask: ``dask.delayed(handle.method)(x)``, ``client.map(handle.method, items)``.

        The task does not hold a thread of its worker while it waits; it is called again if its replica is
        lost, and cancelled with the task. In a thread this returns the result, as ``remote(...).result()``
        does, and on an event loop what can be awaited.
        """
        handle: Any = self._plain()
        try:
            task: PresentTask | None = handle._process.connection.present_task()
        except InstanceError:
            if running_loop() is None:
                raise
            return _call_when_connected(handle, args, kwargs)
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


def start_map(
    target: MapTarget, items: Any, rules: Rules, max_in_flight: int | None, *, ordered: bool
) -> MapResults:
    """Return the results of a map, whose items autoscaling sees from now on."""
    window = Window(target.endpoint, target.send, rules, ordered=ordered)
    results = MapResults(items, target, window, rules, max_in_flight)
    target.connection.thread_calls.post(batches_of(target.shared).add, window)
    return results


def call_in_task(
    handle: Any,
    task: PresentTask,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rules: Rules = Rules(),  # noqa: B008 - it is immutable
    *,
    is_limited: bool = False,
) -> Any:
    """Call in a Dask task; return the result in a thread, and an awaitable of it on the worker's loop."""
    target = MapTarget(handle, task.key, task, is_limited=is_limited)
    window = Window(target.endpoint, target.send_call, rules, ordered=True)
    results = OneResult(iter([(args, kwargs)]), target, window, rules, 1)
    if running_loop() is not None:
        return _await_in_task(results, task)
    return read_in_task(results, task, next)


async def _call_when_connected(handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call on the event loop of a worker that has just joined; its client is connected in a thread."""
    await asyncio.to_thread(getattr, handle, "_process")
    return await handle(*args, **kwargs)


def read_in_task(results: MapResults, task: PresentTask, read: Callable[[MapResults], T]) -> T:
    """Read results in the thread of a Dask task; if Dask releases it, the calls are cancelled."""
    try:
        return read(results)
    except RequestCancelledError as error:
        raise task.reschedule() if task.is_released else error  # noqa: B904
    finally:
        results.close()


def _await_in_task(results: MapResults, task: PresentTask) -> Awaitable[Any]:
    task.leave()

    async def wait() -> Any:
        try:
            return await anext(results)
        except RequestCancelledError as error:
            raise task.reschedule() if task.is_released else error  # noqa: B904
        finally:
            results.close()
            task.come_back()

    return wait()


class MappedPart:
    """The function that Dask calls with each partition or block; one call of the handle."""

    def __init__(self, handle: Any, rules: Rules) -> None:
        self._handle = handle
        self._rules = rules
        self.__name__ = handle.__name__
        #: What a deployment answers may change, so each collection has results of its own.
        self._token = handle._process.connection.request_ids.next()

    def __dask_tokenize__(self) -> Any:
        return (type(self).__name__, self._token)

    def _task(self) -> PresentTask | None:
        found: PresentTask | None = self._handle._process.connection.present_task()
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task = self._task()
        if task is None:  # for the metadata, or with another scheduler than that of the cluster
            return self._handle.remote(*args, **kwargs).result()
        return call_in_task(self._handle, task, args, kwargs, self._rules, is_limited=True)


class MappedItems(MappedPart):
    """The function that Dask calls with each partition of a bag; one call of the handle for each item."""

    def __init__(self, handle: Any, rules: Rules, max_in_flight: int | None) -> None:
        super().__init__(handle, rules)
        self._max_in_flight = max_in_flight

    def __call__(self, items: Iterable[Any]) -> list[Any]:
        """Return the results of the items of a partition, in order."""
        task = self._task()
        batch_id = self._handle._process.connection.request_ids.next() if task is None else task.key
        target = MapTarget(self._handle, batch_id, task, is_limited=True)
        results = start_map(target, items, self._rules, self._max_in_flight, ordered=True)
        return list(results) if task is None else read_in_task(results, task, list)


def batch_handle(handle: Any) -> Any:
    """Return a handle with the priority of batch requests, unless it has one of its own."""
    handle = handle._plain()
    if handle._options.stream:
        raise StreamOptionError("A map needs one result for each item; use a handle without stream=True.")
    return handle if handle._options.priority else handle.options(priority=BATCH_PRIORITY)
