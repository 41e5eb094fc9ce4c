"""The methods of a handle for many items, and for the tasks of Dask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from daskserve.cluster.protocols.base import ClusterConnection, CurrentTask
from daskserve.data.caller.mapping.backlogs import batches_of
from daskserve.data.caller.mapping.results import MapResults, OneResult
from daskserve.data.caller.mapping.rules import Errors, Rules, check_collection, check_max_in_flight
from daskserve.data.caller.mapping.target import MapTarget
from daskserve.data.caller.mapping.window import Window
from daskserve.errors import InstanceError, RequestCancelledError, StreamOptionError
from daskserve.loops.event_loop import running_loop
from daskserve.options.fields.priority import BATCH_PRIORITY

T = TypeVar("T")


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

        Items are taken from the iterable while the results are read, with ``for`` in a thread or with ``async
        for`` on an event loop. The calls have a lower priority than live requests. An item whose replica is
        lost is called again, elsewhere.

        Parameters
        ----------
        items : iterable or asynchronous iterable
            The arguments of the calls, one for each.
        max_in_flight : int, optional
            Maximum number of calls in flight. Default: as many as the current replicas run.
        ordered : bool
            Whether the results are in the order of the items, or in the order in which the calls end.
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
        task = connection.current_task() if running_loop() is None else None
        target = MapTarget(handle, connection.request_ids.next(), task)
        return start_map(target, items, Rules(retries, errors), max_in_flight, ordered=ordered)

    def map_bag(
        self, bag: Any, *, max_in_flight: int | None = None, retries: int = 0, errors: Errors = "raise"
    ) -> Any:
        """Return a `dask.bag.Bag` of the results of the calls of each item of a bag; see `map`.

        A partition is one task of Dask, which calls the items of the partition like `map`.
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
            An example of the results, as in ``dask.dataframe.DataFrame.map_partitions``. Default: the
            deployment's result for an empty partition.
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
        ``chunks``. With ``dtype`` and without ``meta``, the blocks are assumed to be NumPy arrays. With
        neither, the deployment is called with an empty block to find out.
        """
        check_collection(
            "map_blocks", array, "map_blocks", "an array of Dask, as dask.array.from_array makes"
        )
        if kwargs.get("dtype") is not None and kwargs.get("meta") is None:
            import numpy

            kwargs["meta"] = numpy.empty((0,) * array.ndim, kwargs["dtype"])
        return array.map_blocks(MappedPart(batch_handle(self), Rules(retries)), *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in a Dask task: ``dask.delayed(handle.method)(x)``, ``client.map(handle.method, items)``.

        While the task waits, other tasks can use its thread. The call is repeated if its replica is lost, and
        cancelled with the task. In a thread this returns the result, like ``remote(...).result()``; on an
        event loop it returns an awaitable.
        """
        handle: Any = self._plain()
        try:
            task: CurrentTask | None = handle._process.connection.current_task()
        except InstanceError:
            if running_loop() is None:
                raise
            return _call_when_connected(handle, args, kwargs)
        if task is None:
            response = handle.remote(*args, **kwargs)
            return response if running_loop() is not None or handle._options.stream else response.result()
        return call_in_task(batch_handle(handle), task, args, kwargs)

    # Dask awaits the result of `__call__` on the worker's event loop if a task consists only of this call.
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
    """Start a map, so that autoscaling sees its items; return its results."""
    window = Window(target.endpoint, target.send, rules, ordered=ordered)
    results = MapResults(items, target, window, rules, max_in_flight)
    target.connection.thread_calls.post(batches_of(target.shared).add, window)
    return results


def call_in_task(
    handle: Any,
    task: CurrentTask,
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
    """Call on the event loop of a worker that has just joined; the worker's client connects in a thread."""
    await asyncio.to_thread(getattr, handle, "_process")
    return await handle(*args, **kwargs)


def read_in_task(results: MapResults, task: CurrentTask, read: Callable[[MapResults], T]) -> T:
    """Read results in the thread of a Dask task; if Dask releases it, the calls are cancelled."""
    try:
        return read(results)
    except RequestCancelledError as error:
        raise task.reschedule() if task.is_released else error  # noqa: B904
    finally:
        results.close()


def _await_in_task(results: MapResults, task: CurrentTask) -> Awaitable[Any]:
    task.secede()

    async def wait() -> Any:
        try:
            return await anext(results)
        except RequestCancelledError as error:
            raise task.reschedule() if task.is_released else error  # noqa: B904
        finally:
            results.close()
            task.rejoin()

    return wait()


class MappedPart:
    """The function that Dask calls with each partition or block; one call of the handle."""

    def __init__(self, handle: Any, rules: Rules) -> None:
        self._handle = handle
        self._rules = rules
        self.__name__ = handle.__name__
        #: Unique, so that no collection reuses the results of another one: a deployment's answers may change.
        self._token = handle._process.connection.request_ids.next()

    def __dask_tokenize__(self) -> Any:
        return (type(self).__name__, self._token)

    def _task(self) -> CurrentTask | None:
        found: CurrentTask | None = self._handle._process.connection.current_task()
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task = self._task()
        if task is None:  # called for metadata, or by another scheduler than the cluster's
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
    """Return a handle with the priority of batch requests, unless it already has a priority."""
    handle = handle._plain()
    if handle._options.stream:
        raise StreamOptionError("A map needs one result for each item; use a handle without stream=True.")
    return handle if handle._options.priority else handle.options(priority=BATCH_PRIORITY)
