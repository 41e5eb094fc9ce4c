"""A scaler without a controller, whose decisions the test applies or ignores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from control_harness import backend

from daskserve.common.clock import LoopClock
from daskserve.control.observed.observed import Observed, Scaling
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import carried_over
from daskserve.control.scaling.scaler import Scaler

QUICK: Mapping[str, Any] = {
    "min_replicas": 0,
    "max_replicas": 9,
    "initial_replicas": 3,
    "metrics_interval_s": 0.01,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
}


class Desk:
    """A scaler whose decisions are applied by the test, or at once if ``follows`` is true."""

    def __init__(self, *, follows: bool = False) -> None:
        self.follows = follows
        self.enqueued = 0
        self.state = State()
        self.observed = Observed()
        self.clock = LoopClock()
        self.scaler = Scaler(self.state, self.observed, self.clock, enqueue=self._enqueue)

    def _enqueue(self, tags: Iterable[str]) -> None:
        self.enqueued += 1
        for tag in tags:
            number = self.wants(tag)
            if self.follows and number is not None:
                self.set(replace(self.state.backends[tag], scaled_to=number))

    def put(self, policy: str, tag: str = "b", **options: Any) -> BackendRecord:
        """Deploy a backend with a policy, or replace its policy."""
        config = {"autoscaling_config": {**QUICK, **options, "policy": policy}}
        record = carried_over(backend(tag, config=config), self.state.backends.get(tag), 0.0)
        return self.set(record)

    def set(self, record: BackendRecord) -> BackendRecord:
        self.state.apply({record.key: record})
        self.scaler.wake()
        return record

    def decided(self, tag: str = "b") -> Scaling:
        return self.observed.scalings[tag]

    def wants(self, tag: str = "b") -> int | None:
        """Return the number of the last decision, if it would be applied."""
        found = self.observed.scalings.get(tag)
        return found.replicas if found is not None and found.is_for(self.state.backends[tag]) else None

    def reason(self, tag: str = "b") -> str:
        found = self.observed.scalings.get(tag)
        return "" if found is None else found.reason

    def request_waits(self, tag: str = "b") -> None:
        self.observed.loads.report("router", {tag: (7, 0)}, self.clock.now())
        self.scaler.notify_load([tag])


Scene = Callable[[Desk], Coroutine[Any, Any, None]]


async def attended(scene: Scene, *, follows: bool = False) -> None:
    desk = Desk(follows=follows)
    running = asyncio.create_task(desk.scaler.run())
    try:
        await scene(desk)
    finally:
        running.cancel()
        await asyncio.wait([running])
