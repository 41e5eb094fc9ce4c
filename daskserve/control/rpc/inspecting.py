"""The verbs that inspect running user code: they forward the call to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import ANSWER_S as INSPECT_S
from daskserve.cluster.protocols.base import verb
from daskserve.common.formatting import shown
from daskserve.common.types import WorkerAddress, short_tag
from daskserve.control.core import ControllerCore
from daskserve.control.decisions.replicas import busiest, named_replicas
from daskserve.control.records.records import ReplicaRecord
from daskserve.errors import BadRequestError, InspectionError, ServeError, UnavailableError

#: The default and the maximum duration of a profile, and the additional time limits of the answer: for other
#: profiles, and for profiles of memory.
SECONDS, MAX_SECONDS, ANSWER_S, MEMORY_S = 5.0, 60.0, 5.0, 35.0
#: Maximum number of replicas of a deployment that are compared.
MAX_COMPARED = 200


class InspectingVerbs:
    """The verbs that inspect running user code."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core

    @verb
    async def profile(self, replica: str, seconds: float = SECONDS, memory: bool = False) -> dict[str, Any]:
        """Return a profile of a replica's user code over some time; see `Client.profile`."""
        if not 0 < seconds <= MAX_SECONDS:
            raise BadRequestError(
                f"seconds={shown(seconds)} must be more than 0 and at most {shown(MAX_SECONDS)}."
            )
        takes_s = seconds + (MEMORY_S if memory else ANSWER_S)
        return await self._ask(replica, "profile", takes_s, seconds=seconds, memory=memory)

    @verb
    async def stacks(self, replica: str) -> dict[str, Any]:
        """Return the stacks of a replica's user code; see `Client.stacks`."""
        return await self._ask(replica, "stacks", ANSWER_S)

    async def _ask(self, name: str, verb: str, takes_s: float, **message: Any) -> dict[str, Any]:
        found = await self._find(name)
        asking = self._core.cluster.call(found.address(self._core.cluster.instance), verb, **message)
        try:
            answer: dict[str, Any] = await self._core.clock.wait_for(asking, takes_s)
        except TimeoutError:
            raise InspectionError(
                f"Worker {found.worker}, which has replica {short_tag(found.tag)!r}, did not answer within "
                f"{shown(takes_s)} s: its event loop is blocked, or its process is stopped."
            ) from None
        except UnavailableError as error:
            # Not retried: the replica has ended.
            raise InspectionError(
                f"Replica {short_tag(found.tag)!r} ended, or worker {found.worker} was lost, while its code "
                f"was inspected: {error}"
            ) from error
        backend = self._core.state.backends.get(found.backend)
        return {
            **answer,
            "replica": short_tag(found.tag),
            "deployment": short_tag(found.backend),
            "application": "" if backend is None else backend.application,
            "state": found.state.value,
        }

    async def _find(self, name: str) -> ReplicaRecord:
        """Return the replica with a name, or the busiest replica of the deployment with that name."""
        found = named_replicas(self._core.state, name)[:MAX_COMPARED]
        if len(found) == 1:
            return found[0]
        instance = self._core.cluster.instance
        listed = await asyncio.gather(*map(self._actors_on, {each.worker or "" for each in found}))
        by_name = {actor["name"]: actor for actors in listed for actor in actors}
        names = {each.tag: each.address(instance).name for each in found}
        return busiest(found, {tag: by_name[each] for tag, each in names.items() if each in by_name})

    async def _actors_on(self, worker: WorkerAddress) -> Sequence[Mapping[str, Any]]:
        try:
            return await self._core.clock.wait_for(self._core.cluster.inspect(worker), INSPECT_S)
        except (ServeError, OSError, TimeoutError):
            return ()
