"""Large values of Dask that another worker of the same machine holds, through shared memory.

Problem: Dask sends a value to another process over TCP, which takes 50 ms and more for 100 MB even if both
processes share their memory. Choice: the replica's process asks the holder's Host for the pickled value over
their channel, whose large buffers travel through `daskserve.cluster.channel.wire.segments`. Dask transfers
all other values: small ones, and those on other machines, spilled to disk, lost in the meantime, or
impossible to pickle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from distributed import Worker
from distributed.comm import get_address_host

from daskserve.cluster.actors.calls import control_call, host_of
from daskserve.cluster.channel.wire.segments import HAS_SEGMENTS
from daskserve.cluster.protocols.base import verb
from daskserve.common.types import (
    SHARED_BYTES,
    ActorAddress,
    ActorRequest,
    Envelope,
    Payload,
    WorkerAddress,
)
from daskserve.errors import UnavailableError
from daskserve.payload.pickling import dump

logger = logging.getLogger("daskserve.channel")

#: Sends a request to an actor.
RequestActor = Callable[[ActorAddress, Envelope], ActorRequest]


class ValueVerbs:
    """The verb that returns values from the memory of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @verb
    async def dask_value(self, key: Any) -> Payload:
        """Return a value by its key; raise `UnavailableError` if it is not in memory."""
        # Any buffer that spills has this attribute (`distributed.spill.ManualEvictProto`).
        memory: Any = getattr(self._worker.data, "fast", self._worker.data)
        if key not in memory:
            raise UnavailableError(f"Worker {self._worker.address} does not hold {key!r} in its memory.")
        # In a thread, because pickling may take long, and may run user code. Values of Dask do not change.
        return await asyncio.to_thread(dump, memory[key], is_final=True)


def sharing_workers(
    here: WorkerAddress, nbytes: int, holders: Collection[WorkerAddress]
) -> list[WorkerAddress]:
    """Return the workers that may share a value of some size with a process at the address ``here``."""
    if nbytes < SHARED_BYTES or not HAS_SEGMENTS or not here.startswith("tcp://"):
        return []
    host = get_address_host(here)
    return [each for each in holders if each.startswith("tcp://") and get_address_host(each) == host]


async def fetch_shared(
    request: RequestActor,
    here: WorkerAddress,
    nbytes: Mapping[Any, int],
    who_has: Mapping[Any, Collection[WorkerAddress]],
) -> dict[Any, Payload]:
    """Return the values, pickled, of those keys that workers of this machine share."""
    sharing = {key: sharing_workers(here, nbytes.get(key, 0), holders) for key, holders in who_has.items()}
    # If several workers hold a value, the requests are spread over them.
    asked = {
        key: holders[number % len(holders)]
        for number, (key, holders) in enumerate(sharing.items())
        if holders
    }
    answers = await asyncio.gather(*(_ask(request, worker, key) for key, worker in asked.items()))
    return {key: answer for key, answer in zip(asked, answers, strict=True) if answer is not None}


async def _ask(request: RequestActor, worker: WorkerAddress, key: Any) -> Payload | None:
    try:
        found = await control_call(partial(request, host_of(worker)), "dask_value", {"key": key})
    except Exception as error:
        # Any error, even of the value's own code: Dask's transfer follows, and reports the error if it
        # persists.
        logger.debug("%s does not share %r: %s", worker, key, error)
        return None
    assert isinstance(found, Payload)
    return found
