"""The part of a local cluster that its simulated processes use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from daskserve.clock import Clock
from daskserve.cluster.base import Store, UseReport
from daskserve.cluster.channel.transport import Transport
from daskserve.cluster.local.topic import LocalTopic
from daskserve.cluster.local.transport import WhenAwake
from daskserve.types import ActorAddress, InstanceName, WorkerAddress, WorkerInfo


class UserProgram(Protocol):
    """The user's program, which keeps what it has sent, and learns when the instance was shut down."""

    when_ended: Callable[[], None] | None

    @property
    def parcels(self) -> dict[str, Sequence[Any]]: ...


class LocalWorld(Protocol):
    """See `daskserve.cluster.local.cluster.LocalCluster`, which implements it."""

    reported: UseReport

    @property
    def program(self) -> UserProgram: ...
    @property
    def instance(self) -> InstanceName: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def rng(self) -> random.Random: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def store(self) -> Store: ...
    @property
    def topic(self) -> LocalTopic: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_adaptive(self) -> bool: ...
    @property
    def refused(self) -> Mapping[WorkerAddress, str]: ...
    def workers(self) -> Sequence[WorkerInfo]: ...
    def remove_worker(self, worker: WorkerAddress) -> None: ...
    async def find_controller(self) -> ActorAddress: ...
    async def drain(self) -> None: ...
    async def end(self) -> None: ...
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> object: ...
    def connect(self, caller: str, when_awake: WhenAwake, worker: WorkerAddress) -> Transport:
        """Return one end of a new connection to a worker; raise `OSError` if there is no such worker."""
