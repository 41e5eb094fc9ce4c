"""The verbs of a replica that profile its code, or return its stacks, in any state of the replica."""

from __future__ import annotations

import os
from typing import Any

from daskserve.cluster.protocols.base import ContextWith, early_verb
from daskserve.context import HasConnection
from daskserve.data.replica.code_protocol import UserCode
from daskserve.options.start_messages import ReplicaStart


class InspectingVerbs:
    """The verbs that profile and show the stacks of a replica; see `daskserve.data.replica.inspection`."""

    def __init__(self, context: ContextWith[HasConnection], start: ReplicaStart, code: UserCode) -> None:
        self._context = context
        self._start = start
        self._code = code

    @early_verb
    async def profile(self, seconds: float, memory: bool = False) -> dict[str, Any]:
        """Return a profile of user code over ``seconds``."""
        return {**self._place(), **await self._code.inspection.profile(seconds, memory)}

    @early_verb
    async def stacks(self) -> dict[str, Any]:
        """Return the stacks of user code, even while it starts, stops, or is stuck."""
        stage = "" if self._code.slots.is_open else self._code.stage.doing
        return {**self._place(), "stage": stage, **await self._code.inspection.stacks()}

    def _place(self) -> dict[str, Any]:
        return {
            "replica": self._start.replica_tag,
            "worker": self._context.worker,
            "pid": os.getpid(),
            "time": self._context.clock.wall(),
        }
