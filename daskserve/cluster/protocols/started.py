"""The instances that a program has started, and which of them end with the program."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from daskserve.common.types import DEFAULT_INSTANCE, InstanceName
from daskserve.errors import NotRunningError, ServeError

logger = logging.getLogger("daskserve.connection")

#: How long a closing Dask client waits for the end of its instances.
CLOSE_S = 5.0


class Started(Protocol):
    """Returns whether other programs use the instances that this process started."""

    def __contains__(self, instance: object) -> bool: ...

    async def is_alone(self, instance: InstanceName) -> bool:
        """Return True if the instance has ended, or if only this program deployed on it."""


class StartedInstances:
    """The instances that this process started and that have not ended, as far as it knows.

    Parameters
    ----------
    owner_id
        The id by which the scheduler knows the program.
    ask
        Calls a verb of the supervisor.
    """

    def __init__(self, owner_id: str, ask: Callable[..., Awaitable[Any]]) -> None:
        self._owner_id = owner_id
        self._ask = ask
        #: Whether each instance ends with this process.
        self._are_owned: dict[InstanceName, bool] = {}
        #: The Dask cluster that was started for them; it closes with the last one.
        self.cluster: Any = None

    def __bool__(self) -> bool:
        return bool(self._are_owned)

    def __contains__(self, instance: object) -> bool:
        return instance in self._are_owned

    @property
    def latest(self) -> InstanceName | None:
        """The latest instance; None if there is none."""
        return next(reversed(self._are_owned), None)

    def add(self, instance: InstanceName, *, is_owned: bool) -> None:
        """Record that an instance was started; an owned one ends when the Dask client closes."""
        self._are_owned[instance] = is_owned

    def forget(self, instance: InstanceName) -> None:
        """Record that an instance has ended, or no longer matters to this process."""
        self._are_owned.pop(instance, None)

    def take_cluster(self) -> Any:
        """Return the cluster to close once the last instance has ended; None before that, or if there is no
        cluster."""
        cluster = None
        if not self._are_owned:
            cluster, self.cluster = self.cluster, None
        return cluster

    async def is_alone(self, instance: InstanceName) -> bool:
        """Return True if the instance has ended, or if only this program deployed on it.

        A cluster that was started for this process ends with it, even if other programs use it.
        """
        if self.cluster is not None:
            return True
        try:
            facts = (await self._ask("instances")).get(instance)
        except NotRunningError:
            return True
        return facts is None or facts["owner"] == self._owner_id

    async def end_owned(self) -> None:
        """End the instances that this process owns, while their workers still run."""
        owned = [instance for instance, is_owned in self._are_owned.items() if is_owned]
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(self._end_if_alone, owned))
        except (OSError, TimeoutError, ServeError) as error:
            # The scheduler ends them once it notices that this client is gone.
            logger.info("Instances %s did not end before their Dask client closed: %r", owned, error)

    async def _end_if_alone(self, instance: InstanceName) -> None:
        if await self.is_alone(instance):
            await self._ask("end_instance", instance=instance)


def common_instance(running: Mapping[InstanceName, Any]) -> InstanceName | None:
    """Return the shared instance: the detached one, or the latest that `run` started; None if none."""
    defaults = [name for name, facts in running.items() if facts["is_default"]]
    return DEFAULT_INSTANCE if DEFAULT_INSTANCE in running else next(reversed(defaults), None)
