"""The calls of a handle for many items: `Handle.map`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection, Process
from daskserve.common.types import EndpointTag
from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.response import Response, refuse_in_loop
from daskserve.data.caller.mapping.results import MapResults
from daskserve.data.caller.mapping.rules import BATCH_PRIORITY, Errors, Rules, check_max_in_flight
from daskserve.data.caller.mapping.window import Item, Window
from daskserve.data.caller.routing.backlogs import batches_of
from daskserve.data.caller.routing.router import Routers
from daskserve.errors import StreamOptionError


class MapTarget:
    """A handle as the target of a map: it calls one item after the other.

    Parameters
    ----------
    batch_id : str
        Begins the ids of the items.
    """

    def __init__(self, handle: Any, batch_id: str) -> None:
        self._handle = handle
        self._facts = dict(handle._facts or {})
        self._batch_id = batch_id
        self._process: Process = handle._process

    @property
    def connection(self) -> ClusterConnection:
        """The connection of this process."""
        return self._process.connection

    def room(self) -> int:
        """Return how many calls the replicas take at a time, with one more for each that is on its way."""
        routers: Routers | None = self._process.shared.get("routers")
        return 0 if routers is None else routers.room(self._handle._endpoint)

    def block(self, connection: ClusterConnection, wait: Callable[[], bool]) -> bool:
        """Return what ``wait`` returns, which blocks this thread."""
        refuse_in_loop(connection, "`for`", "use `async for`")
        return wait()

    def send(self, item: Item) -> Response:
        """Start the call of an item, whose id user code reads from its request context."""
        handle = object.__new__(type(self._handle))
        vars(handle).update(vars(self._handle))
        handle._facts = {**self._facts, "item_id": f"{self._batch_id}/{item.index}"}
        future, connection, request_id = handle._start((item.value,), {})
        return Response(future, connection, request_id, self._process)


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
        handle: Any = self
        target = MapTarget(batch_handle(handle), handle._process.connection.request_ids.next())
        endpoint: EndpointTag = handle._endpoint
        window = Window(endpoint, target.send, rules, ordered=ordered)
        results = MapResults(items, target, window, rules, max_in_flight)
        target.connection.thread_calls.post(batches_of(handle._process.shared).add, window)
        return results


def batch_handle(handle: Any) -> Any:
    """Return a handle with the priority of batch requests, unless it has one of its own."""
    options: CallOptions = handle._options
    if options.stream:
        raise StreamOptionError("A map needs one result for each item; use a handle without stream=True.")
    return handle if options.priority else handle.options(priority=BATCH_PRIORITY)
