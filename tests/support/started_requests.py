"""A replica that is asked to answer without a task, for the tests of that."""

from __future__ import annotations

import asyncio
import random
import threading
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from replica_starts import replica_start

from daskserve.cluster.protocols.base import ActorContext, ActorSpec
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorKind, ActorRequest, Envelope, Load, Message
from daskserve.data.replica.replica import Replica
from daskserve.errors import ActorLostError

DEADLINE_S = 10.0
#: What hanging user code waits for, and by which it tells that it has begun.
held, began = threading.Event(), threading.Event()


class Answers:
    """Takes what one request comes to."""

    def __init__(self) -> None:
        self.ends: list[tuple[Message | None, Any]] = []

    def __call__(self, message: Message | None, outcome: Load | Exception | ActorRequest) -> None:
        self.ends.append((message, outcome))

    async def end(self) -> tuple[Message | None, Any]:
        await until(lambda: self.ends)
        (only,) = self.ends
        return only


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what user code does has no event here
        await asyncio.sleep(0.001)


def run_replica(
    definition: Any, envelope: Envelope, scenario: Callable[[Replica], Awaitable[None]], **options: Any
) -> None:
    """Start a replica, run the scenario, and hold it to leaving nothing behind.

    Nothing like the envelope is answered before the replica has started, or once it has stopped.
    """
    held.clear()
    began.clear()

    async def main() -> None:
        options.setdefault("concurrency", 2)
        start = replica_start(definition, **options)
        spec = ActorSpec(ActorKind.REPLICA, "replica/b#AAAAAA", 1, "an-instance", start.encode())
        cluster: Any = types.SimpleNamespace()
        replica = Replica(ActorContext(spec, cluster, LoopClock(), random.Random(0)))
        with pytest.raises(ActorLostError):
            replica.handle(envelope)
        async with asyncio.timeout(DEADLINE_S):
            await replica.start()
            try:
                await scenario(replica)
            finally:
                held.set()
                await replica.stop(DEADLINE_S)
        assert replica.handle(envelope).start(Answers()) is None
        assert replica.load() == Load(0, 0)

    asyncio.run(main())
