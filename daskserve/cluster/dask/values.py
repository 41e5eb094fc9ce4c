"""Dask futures, delayed values and collections among the arguments of a call.

The values themselves are not sent. The caller takes them out of the pickled arguments, submits collections to
the cluster, waits until all values exist, and sends their keys. The replica's process fetches the values from
the workers that hold them (for workers of the same machine, see `daskserve.cluster.dask.shared_values`), and
inserts them when it unpickles the arguments. The caller holds the futures until it has the answer, so that
the cluster keeps the values.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import islice
from typing import Any

from dask.base import is_dask_collection
from dask.sizeof import sizeof
from distributed import Client, Future, Worker, get_client

from daskserve.cluster.channel.kept_results import KeptResults
from daskserve.cluster.dask.shared_values import RequestActor, fetch_shared
from daskserve.cluster.distributed_internals import (
    actors_on,
    call_scheduler,
    desire_keys,
    gather_from_workers,
    scheduler_address,
)
from daskserve.cluster.protocols.base import RemoteValues, ValueTransfer
from daskserve.common.types import KeptPayload, Payload, WorkerAddress
from daskserve.common.value_places import ValuePlaces
from daskserve.errors import BadRequestError, UnavailableError
from daskserve.loops.event_loop import on_loop
from daskserve.payload.arguments import take_out
from daskserve.payload.pickling import SEARCHED_BYTES, load_bytes

#: In arguments that are too large to be searched, the number of items of each container that are looked at,
#: and the depth.
MAX_ITEMS = 100
MAX_DEPTH = 3
#: Maximum number of values of one call that are considered when its replica is chosen.
MAX_PLACED = 1000

_PLAIN = frozenset({str, bytes, bytearray, int, float, bool, type(None)})
_CONTAINERS = (list, tuple, set, frozenset)


def may_hold_values(payload: Payload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments that `daskserve.payload.pickling.may_mention_dask` may hold values of Dask."""
    if len(payload.data) <= SEARCHED_BYTES:
        return True
    return _holds_values(args, MAX_DEPTH) or _holds_values(kwargs, MAX_DEPTH)


def _holds_values(value: Any, depth: int) -> bool:
    if type(value) in _PLAIN:
        return False
    items: Iterable[Any]
    if isinstance(value, _CONTAINERS):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    else:
        return is_dask_value(value)
    return depth >= 0 and any(_holds_values(item, depth - 1) for item in islice(items, MAX_ITEMS))


def is_dask_value(value: Any) -> bool:
    """Return whether a value is a future, a delayed value or a collection of Dask."""
    return isinstance(value, Future) or is_dask_collection(value)


#: How often to check, during a transfer, whether the workers that have the values are still there.
HOLDERS_POLL_S = 1.0
#: Pause before values that no worker had are fetched again.
LOST_PAUSE_S = 0.05


class DaskValues:
    """The values of one call, as futures; a `daskserve.cluster.protocols.base.RemoteValues`."""

    def __init__(self, client: Client, scheduler: str, payload: Payload, values: Sequence[Any]) -> None:
        self.payload = payload
        numbers = [number for number, value in enumerate(values) if not isinstance(value, Future)]
        computed: Any = client.compute([values[number] for number in numbers]) if numbers else []
        made = dict(zip(numbers, computed, strict=True))
        self._futures: list[Future[Any]] = [made.get(number, value) for number, value in enumerate(values)]
        for future in self._futures:
            if future.client is None:
                raise BadRequestError(
                    f"{future!r} belongs to no client; pass it in the process that created it."
                )
        self._scheduler = scheduler
        self._client = client
        self.keys = pickle.dumps([future.key for future in self._futures])

    async def wait(self) -> None:
        for future in self._futures:
            loop = future.client.loop.asyncio_loop
            error = await on_loop(loop, _wait(future, self._scheduler))
            if error is not None:
                # The error is kept with the future, so its traceback must not keep the future.
                del future
                self._futures.clear()
                try:
                    raise error
                finally:
                    del error

    async def places(self) -> ValuePlaces | None:
        """Ask the scheduler where the values are, once; call this on the client's loop."""
        keys = list({future.key for future in self._futures[:MAX_PLACED]})
        try:
            who_has, nbytes = await asyncio.gather(
                call_scheduler(self._client, "who_has", keys=keys),
                call_scheduler(self._client, "nbytes", keys=keys, summary=False),
            )
        except (OSError, KeyError):  # fetching the values will fail, and report the error
            return None
        held: dict[WorkerAddress, int] = {}
        for key, workers in who_has.items():
            for worker in workers:
                held[worker] = held.get(worker, 0) + nbytes.get(key, 0)
        return ValuePlaces(held, sum(nbytes.values())) if held else None


async def _wait(future: Future[Any], scheduler: str) -> BaseException | None:
    """Return None when a future has a value, otherwise its error; runs on the loop of its client."""
    client = await future.client
    found = scheduler_address(client)
    if found != scheduler:
        return BadRequestError(
            f"{future!r} belongs to the Dask cluster {found or 'of a closed client'}, but the replicas run "
            f"on {scheduler}; pass its result instead."
        )
    error: BaseException | None = await future.exception()
    if error is None and future.cancelled():
        try:
            await future.result()
        except Exception as cancelled:  # Dask's own error, with the reason
            return cancelled
    return error


class TakenValues(ValueTransfer):
    """Takes Dask's values out of arguments; a subclass defines how they are sent."""

    def take(self, payload: Payload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RemoteValues | None:
        """Take Dask's values out of a call's arguments and have them computed; None if there are none."""
        if not may_hold_values(payload, args, kwargs):
            return None
        payload, values = take_out((args, kwargs), is_dask_value)
        return self.hold(payload, values) if values else None

    def is_value(self, value: Any) -> bool:
        """Return whether a value is one of Dask's."""
        return is_dask_value(value)


class DaskTransfer(TakenValues):
    """Values that are computed on a Dask cluster, and fetched from its workers by their keys."""

    def __init__(
        self,
        client: Client,
        request: RequestActor,
        worker: Worker | None = None,
        kept: KeptResults | None = None,
    ) -> None:
        self._client = client
        self._request = request
        self._worker = worker
        #: The worker on whose machine this process is; empty if it is not known.
        self.here = "" if worker is None else str(worker.address)
        #: The answers that stay in this process; None in a program.
        self.kept = kept

    def hold(self, payload: Payload, values: Sequence[Any]) -> DaskValues:
        """Start computing values that were taken out of a call's arguments."""
        return DaskValues(self._client, scheduler_address(self._client) or "", payload, values)

    async def fetch(self, keys: bytes) -> list[Any]:
        """Return the values that `take` took out in another process.

        Values that this process's worker holds are the objects in its memory, not copies. Values from memory
        that is shared with other workers are pickled, as `Payload`.

        Raises
        ------
        UnavailableError
            The cluster has released one of them.
        """
        loop: Any = self._client.loop
        return await on_loop(loop.asyncio_loop, self._fetch(load_bytes(keys)))

    async def _fetch(self, names: Sequence[Any]) -> list[Any]:
        held: Any = {} if self._worker is None else self._worker.data
        found = {name: held[name] for name in names if name in held}
        missing = list({name for name in names if name not in found})
        if missing:
            found |= await _fetch_from_others(self._client, self._request, self.here, missing)
        return [found[name] for name in names]

    async def keep(self, result: Payload | KeptPayload) -> Future[Any]:
        """Put the result of a call into the memory of its worker; return a future of this client.

        A result that has already arrived is scattered: a worker puts it into its own memory.
        """
        # Shielded, because a future that is dropped before its value exists could not release the value.
        return await asyncio.shield(asyncio.ensure_future(self._keep(result)))

    async def _keep(self, result: Payload | KeptPayload) -> Future[Any]:
        client, key = self._client, f"daskserve-result-{secrets.token_hex(16)}"
        future: Future[Any] = Future(key, client=client)
        if isinstance(result, KeptPayload):
            answers = await client.run(_put_kept, result.token, key, client.id, workers=[result.worker])
            if result.worker not in answers:
                raise UnavailableError(f"Worker {result.worker}, which held a result, has left the cluster.")
            return future
        value = await asyncio.to_thread(result.load)
        if self._worker is None:
            await client.scatter({key: value}, asynchronous=True)
        else:
            await _put(self._worker, key, value, client.id)
        return future

    def as_read(self, future: Any) -> Any:
        """Return a future of the reader's client: this client, or in a replica the replica's client."""
        try:
            client = get_client()
        except ValueError:  # there is no such client
            return future
        if client is self._client or scheduler_address(client) != scheduler_address(self._client):
            return future
        own: Any = Future(future.key, client=client)
        desire_keys(client, [future.key])
        own.kept_by = future  # the scheduler may hear first that the other future ended
        return own


async def _put_kept(token: str, key: str, owner: str, dask_worker: Worker) -> None:
    """Put an answer that stays in this worker's process into its memory."""
    for actor in actors_on(dask_worker):
        transfer = getattr(getattr(actor, "connection", None), "values", None)
        if isinstance(transfer, DaskTransfer) and transfer.kept is not None:
            payload = transfer.kept.find(token)
            await _put(dask_worker, key, await asyncio.to_thread(payload.load), owner)
            return
    raise UnavailableError(f"Worker {dask_worker.address} does not run daskserve any more.")


async def _put(worker: Worker, key: str, value: Any, owner: str) -> None:
    """Put a value into a worker's memory, for the client with the id ``owner``."""
    worker.update_data(data={key: value})
    scheduler: Any = worker.scheduler
    await scheduler.update_data(who_has={key: [worker.address]}, nbytes={key: sizeof(value)}, client=owner)


async def _fetch_from_others(
    client: Client, request: RequestActor, here: WorkerAddress, names: list[Any]
) -> dict[Any, Any]:
    try:
        states, nbytes, who_has = await asyncio.gather(
            call_scheduler(client, "get_task_status", keys=names),
            call_scheduler(client, "nbytes", keys=names, summary=False),
            call_scheduler(client, "who_has", keys=names),
        )
        for name in names:
            if states.get(name) in (None, "released", "forgotten"):
                raise KeyError(name)
    except KeyError as error:  # the scheduler also raises this for values whose size it does not know
        raise UnavailableError(
            f"The Dask value {error.args[0]!r} was released or lost before a replica fetched it."
        ) from None
    futures: list[Future[Any]] = [Future(name, client=client) for name in names]
    desire_keys(client, names)
    found: dict[Any, Any] = dict(await fetch_shared(request, here, nbytes, who_has))
    try:
        return found | await _gathered(client, [future for future in futures if future.key not in found])
    except CancelledError as error:  # the future was cancelled
        raise UnavailableError(
            f"A Dask value was released or lost before a replica fetched it: {error}"
        ) from None


async def _gathered(client: Client, futures: list[Future[Any]]) -> dict[Any, Any]:
    """Return the values of futures by their keys.

    `Client.gather` is unsuitable for calls that may be cancelled: concurrent gathers share one transfer, and
    cancelling the first of them ends it for the others.
    """
    missing, found = {future.key: future for future in futures}, dict[Any, Any]()
    while missing:
        for future in missing.values():
            error = await future.exception()
            if error is not None:
                raise error
            if future.cancelled():
                await future.result()  # raises Dask's own error, with the reason
        found |= await _transferred(client, list(missing))
        missing = {key: future for key, future in missing.items() if key not in found}
    return found


async def _transferred(client: Client, names: list[Any]) -> dict[Any, Any]:
    """Return the values that arrive; stop once a worker that holds one of them leaves the cluster.

    Dask itself tries to connect to the lost worker for half a minute, even if another worker has the value by
    then.
    """
    before = await call_scheduler(client, "who_has", keys=names)
    transfer = asyncio.ensure_future(_transfer(client, before))
    try:
        while not (await asyncio.wait({transfer}, timeout=HOLDERS_POLL_S))[0]:
            now = await call_scheduler(client, "who_has", keys=names)
            if any(set(before[name]) - set(now[name]) for name in names):
                return {}
        return transfer.result()
    finally:
        transfer.cancel()
        await asyncio.wait({transfer})


async def _transfer(client: Client, who_has: Mapping[Any, Collection[WorkerAddress]]) -> dict[Any, Any]:
    """Fetch values from workers, or through the scheduler if that fails, as `Client.gather` does."""
    found: dict[Any, Any]
    found, missing, failed, _ = await gather_from_workers(who_has, rpc=client.rpc)
    if missing or failed:
        answer = await call_scheduler(client, "gather", keys=[*missing, *failed])
        if answer["status"] == "OK":
            found.update(answer["data"])
            return found
        await asyncio.sleep(LOST_PAUSE_S)  # until the futures know that their values are lost
    return found
