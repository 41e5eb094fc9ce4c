"""Profiles and stacks of the user code of a child process, even if the process does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from daskserve.cluster.worker.child import ChildProcess
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.common.types import ReplicaTag, short_tag
from daskserve.data.replica.inspection import MEMORY_S, checked_seconds
from daskserve.errors import InspectionError

#: The timeout for an answer of the child, which usually takes milliseconds.
ANSWER_S = 2.0


class ChildInspection:
    """A `daskserve.data.replica.inspection.Inspection` of a child process.

    Parameters
    ----------
    call : callable
        Calls a verb of the child.
    find_child : callable
        Returns the child; None before it starts.
    """

    def __init__(
        self,
        tag: ReplicaTag,
        call: Callable[..., Awaitable[Any]],
        find_child: Callable[[], ChildProcess | None],
        clock: Clock,
    ) -> None:
        self._name = f"replica {short_tag(tag)!r}"
        self._call = call
        self._find_child = find_child
        self._clock = clock

    async def profile(self, seconds: float, memory: bool = False) -> dict[str, Any]:
        checked_seconds(seconds)
        self._child()
        asking = self._call("profile", seconds=seconds, memory=memory)
        patience_s = MEMORY_S if memory else ANSWER_S
        try:
            found: dict[str, Any] = await self._clock.wait_for(asking, seconds + patience_s)
        except TimeoutError:
            raise InspectionError(
                f"The process of {self._name} did not answer within {shown(patience_s)} s: it is stopped, or "
                "code in C holds its interpreter's lock; `daskserve stacks` shows where."
            ) from None
        return found

    async def stacks(self) -> dict[str, Any]:
        child = self._child()
        try:
            found: dict[str, Any] = await self._clock.wait_for(self._call("stacks"), ANSWER_S)
        except TimeoutError:
            native = await child.stacks()
            cause = f"The process did not answer within {shown(ANSWER_S)} s"
            state = child.state()
            note = (
                f"{cause}: code in C holds its interpreter's lock. The stacks of its threads, the innermost "
                "call first:"
                if native
                else f"{cause}, and handles no signals; its state is {state or 'unknown'}."
            )
            return {"pid": child.pid, "threads": [], "tasks": [], "native": native, "note": note}
        return found

    def _child(self) -> ChildProcess:
        child = self._find_child()
        if child is None or child.ended.is_set():
            raise InspectionError(f"The process of {self._name} does not run now.")
        return child
