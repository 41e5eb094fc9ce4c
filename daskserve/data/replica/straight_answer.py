"""Calls that a replica answers without a task; what `daskserve.data.caller.straight_call` is on the other
side.

The worker's loop has nothing to do for a call but to pass it on, across the wall, and back. So it starts user
code where the call comes in, and answers where its end is told. For all that has to be waited for on the
worker's loop itself, as a free slot, a batch or a deadline, there is
`daskserve.data.replica.replica.Replica.handle`. HTTP requests are answered likewise by
`daskserve.data.replica.straight_http`.
"""

from __future__ import annotations

from typing import Any, Protocol

from daskserve.clock import stopwatch
from daskserve.data.replica.answering import Answering
from daskserve.data.replica.conversion import Unfinished
from daskserve.data.replica.definitions import Method
from daskserve.data.replica.wall import Call
from daskserve.types import Envelope, Load, Message, OnAnswer


class Slots(Protocol):
    """The part of a replica that is needed here."""

    def load(self) -> Load: ...
    def free_slot(self) -> None: ...


class StraightAnswer:
    """One call that is being answered; it has its slot until user code has really ended."""

    __slots__ = ("_answering", "_began", "_call", "_envelope", "_is_over", "_method", "_on_answer", "_slots")

    def __init__(
        self, slots: Slots, answering: Answering, method: Method, envelope: Envelope, on_answer: OnAnswer
    ) -> None:
        self._slots = slots
        self._answering = answering
        self._method = method
        self._envelope = envelope
        self._on_answer = on_answer
        self._began = stopwatch()
        self._is_over = False  # nobody waits for the answer any more, whatever user code goes on to do
        self._call: Call[Any]

    def start(self) -> None:
        """Start user code."""
        self._call = call = self._answering.begin_call(self._method, self._envelope)
        call.watcher = self._look

    def give_up(self) -> None:
        """Cancel user code, if it has not ended; nobody wants its answer."""
        if not self._is_over:
            self._is_over = True
            self._answering.figures.give_up(is_late=False)
            self._call.cancel()
            self._end()

    def _look(self) -> None:
        # Called when user code has ended, or was aborted, and may then end later, or both.
        call = self._call
        if self._is_over:
            if call.is_ended:
                self._slots.free_slot()
            return
        try:
            result = call.result()
            if type(result) is Unfinished:
                self._go_on(result)
                return
            message = self._message_of(result)
        except Exception as error:  # it is for the caller
            self._answering.figures.failed += 1
            self._end()
            if call.is_ended:
                self._slots.free_slot()
            self._on_answer(None, error)
        else:
            self._end()
            self._slots.free_slot()
            self._on_answer(message, self._slots.load())

    def _message_of(self, result: Any) -> Message | None:
        return {"type": "call.result", "payload": result}

    def _go_on(self, unfinished: Unfinished) -> None:
        self._call = rest = self._answering.finish_call(self._method, self._envelope, unfinished.result)
        rest.watcher = self._look

    def _end(self) -> None:
        self._is_over = True
        self._answering.figures.latency.observe(stopwatch() - self._began)
