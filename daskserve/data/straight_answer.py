"""Calls that a replica answers without a task; what `daskserve.data.straight_call` is on the other side.

The worker's loop has nothing to do for a call but to pass it on, across the wall, and back. So it starts user
code where the call comes in, and answers where its end is told. For all that has to be waited for on the
worker's loop itself, as a free slot, a batch or a deadline, there is `daskserve.data.replica.Replica.handle`.
"""

from __future__ import annotations

from collections.abc import Callable

from daskserve.clock import stopwatch
from daskserve.data.answering import Answering
from daskserve.data.callables import Method
from daskserve.data.conversion import Unfinished
from daskserve.data.requests import Slot
from daskserve.data.wall import Call
from daskserve.replica_figures import ReplicaFigures
from daskserve.types import Envelope, Load, Message, OnAnswer, Payload


class StraightAnswer:
    """One call that is being answered; it has its slot.

    Parameters
    ----------
    load : callable
        Returns the replica's load.
    """

    __slots__ = (
        "_answering",
        "_began",
        "_call",
        "_envelope",
        "_figures",
        "_load",
        "_method",
        "_on_answer",
        "_slot",
    )

    def __init__(
        self,
        answering: Answering,
        method: Method,
        envelope: Envelope,
        slot: Slot,
        figures: ReplicaFigures,
        load: Callable[[], Load],
        on_answer: OnAnswer,
    ) -> None:
        self._answering = answering
        self._method = method
        self._envelope = envelope
        self._slot = slot
        self._figures = figures
        self._load = load
        self._on_answer = on_answer
        self._began = stopwatch()
        #: None once the call is over, whatever user code goes on to do.
        self._call: Call[Payload | Unfinished] | None = None

    def start(self) -> None:
        """Start user code."""
        self._follow(self._answering.begin_call(self._method, self._envelope, self._slot))

    def give_up(self) -> None:
        """Cancel user code, if it has not ended; nobody wants its answer."""
        call = self._call
        if call is not None:
            self._figures.give_up(is_late=False)
            self._leave(call)
            call.cancel()

    def _follow(self, call: Call[Payload | Unfinished]) -> None:
        self._call = call
        call.watcher = self._look

    def _look(self) -> None:
        call = self._call
        if call is None or not call.is_decided:
            return
        message: Message | None = None
        try:
            result = call.result()
            if isinstance(result, Unfinished):
                call.watcher = None
                self._follow(
                    self._answering.finish_call(self._method, self._envelope, self._slot, result.result)
                )
                return
            message = {"type": "call.result", "payload": result}
        except Exception as error:  # it is for the caller
            self._figures.failed += 1
            self._leave(call)
            self._on_answer(None, error)
        else:
            self._leave(call)
            self._on_answer(message, self._load())

    def _leave(self, call: Call[Payload | Unfinished]) -> None:
        self._call = call.watcher = None
        self._figures.latency.observe(stopwatch() - self._began)
        self._slot.release()
