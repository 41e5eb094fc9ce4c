"""Draining instances on the scheduler: the first part of a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from daskserve.cluster.actors.instance_drain import drain
from daskserve.cluster.scheduler.controllers import Instance
from daskserve.common.clock import LoopClock
from daskserve.common.types import InstanceName

#: Maximum wait of one call for a draining instance, because a call occupies a connection.
ANSWER_S = 5.0
#: Time after which the scheduler ends a drained instance, in case the program that shuts it down has died.
DRAINED_S = 5.0


async def end_as_asked(
    instances: Mapping[InstanceName, Instance],
    end: Callable[..., Awaitable[bool]],
    instance: InstanceName,
    start_id: str | None = None,
) -> bool:
    """End an instance for a program; return whether it has ended. ``start_id`` is given to undo a start."""
    entry = instances.get(instance)
    if entry is not None and start_id is not None and start_id == entry.start_id:
        entry.has_failed = True
    return await end(instance, start_id)


class Drains:
    """Lets the requests of instances complete.

    Parameters
    ----------
    known
        Returns the entry of a running instance.
    call
        Calls a verb of an actor.
    end
        Ends the instance of a name and a start id.
    spawn
        Runs a coroutine as a task of the supervisor.
    """

    def __init__(
        self,
        known: Callable[[InstanceName], Instance],
        call: Callable[..., Awaitable[Any]],
        end: Callable[[InstanceName, str], Coroutine[Any, Any, Any]],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._known = known
        self._call = call
        self._end = end
        self._spawn = spawn

    async def drain_instance(self, instance: InstanceName) -> bool:
        """Return whether an instance's requests have completed; after False, call again."""
        entry = self._known(instance)
        if entry.draining is None:
            entry.draining = self._spawn(self._drain(entry))
        done, _ = await asyncio.wait({entry.draining}, timeout=ANSWER_S)
        return bool(done)

    async def _drain(self, entry: Instance) -> None:
        if entry.controller is not None:
            await drain(entry.name, partial(self._call, entry.controller), LoopClock())
        # It serves no requests now, so it must end.
        self.end_after(entry, DRAINED_S)

    def end_after(self, entry: Instance, delay_s: float) -> None:
        """End an instance later, unless its ``grace`` task is cancelled first."""
        entry.grace = asyncio.get_running_loop().call_later(
            delay_s, lambda: self._spawn(self._end(entry.name, entry.start_id))
        )
