"""Large values in the memory of a worker go to other workers of its machine through shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tables import each_case

from daskserve.cluster.dask.shared_values import ValueVerbs, fetch_shared, sharing_workers
from daskserve.cluster.protocols.base import TaskRequest
from daskserve.common.types import SHARED_BYTES, ActorAddress, ActorRequest, Envelope, Load, Receive, Send
from daskserve.errors import ActorLostError, UnavailableError

HERE, BESIDE, THIRD, ELSEWHERE = (f"tcp://127.0.0.{at}" for at in ("1:1", "1:2", "1:3", "2:2"))


@each_case(
    ("here", "nbytes", "holders", "expected"),
    [
        (HERE, SHARED_BYTES, [BESIDE, ELSEWHERE], [BESIDE]),
        (HERE, SHARED_BYTES - 1, [BESIDE], []),
        (HERE, SHARED_BYTES, [ELSEWHERE, "inproc://127.0.0.1/1/2"], []),
        ("tls://127.0.0.1:1", SHARED_BYTES, ["tls://127.0.0.1:2"], []),
        ("", SHARED_BYTES, [BESIDE], []),
    ],
)
def test_large_values_on_the_same_machine_are_shared(
    here: str, nbytes: int, holders: list[str], expected: list[str]
) -> None:
    assert sharing_workers(here, nbytes, holders) == expected


class Workers:
    """The Hosts of other workers, each with the memory of its worker."""

    def __init__(self, memories: dict[str, dict[Any, Any]]) -> None:
        self.asked: list[str] = []
        self.memories = memories

    def request(self, address: ActorAddress, envelope: Envelope) -> ActorRequest:
        async def respond(receive: Receive, send: Send) -> Load:
            self.asked.append(address.worker)
            if address.worker not in self.memories:
                raise ActorLostError("gone")
            worker: Any = SimpleNamespace(address=address.worker, data=self.memories[address.worker])
            verb = getattr(ValueVerbs(worker), envelope.head["verb"])
            await send({"type": "control.result", "payload": await verb(**envelope.head["message"])})
            return Load()

        return TaskRequest(respond)


async def test_only_what_is_shared_is_fetched_and_holders_share_the_work() -> None:
    workers = Workers(
        {BESIDE: {"a": 1, ("b", 0): [2]}, THIRD: {("b", 0): [2], "unpicklable": (_ for _ in ())}}
    )
    who_has = {
        "a": [BESIDE],
        ("b", 0): [BESIDE, THIRD],
        "unpicklable": [THIRD],
        "released": [BESIDE],
        "lost": ["tcp://127.0.0.1:9"],
        "far": [ELSEWHERE],
        "nowhere": [],
    }
    found = await fetch_shared(workers.request, HERE, dict.fromkeys(who_has, SHARED_BYTES), who_has)
    assert {key: payload.load() for key, payload in found.items()} == {"a": 1, ("b", 0): [2]}
    assert workers.asked == [BESIDE, THIRD, THIRD, BESIDE, "tcp://127.0.0.1:9"]


async def test_a_spilled_value_is_left_on_disk() -> None:
    memory: Any = SimpleNamespace(fast={"there": np.ones(3)}, slow={"spilled": b"..."})
    worker: Any = SimpleNamespace(address=HERE, data=memory)
    assert (await ValueVerbs(worker).dask_value("there")).load().sum() == 3
    with pytest.raises(UnavailableError, match="'spilled' in its memory"):
        await ValueVerbs(worker).dask_value("spilled")
