"""HTTP requests that a replica answers without a task, as `daskserve.data.replica.straight_answer` does
calls.

It is for requests without a body that came by a channel. If user code returns a whole response, that leaves
with the end of the request. If not, as with streams, a task goes on with it: a `daskserve.types.Rest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import Context

from daskserve.data.replica.conversion import Answer, Unfinished
from daskserve.data.replica.slots import Slot
from daskserve.data.replica.straight_answer import StraightAnswer
from daskserve.types import Load, Message, Receive, Send


class StraightHTTP(StraightAnswer):
    """One request that is being answered; it has its slot until user code has really ended."""

    __slots__ = ("_connected", "_context", "_exchange", "_receive", "_scope", "_send", "_slot", "_unfinished")

    def start(self) -> None:
        answering = self._answering
        self._connected: asyncio.Event | None = None
        self._receive: Receive | None = None  # known from `carry` on
        self._slot: Slot | None = None  # of the rest
        self._scope = scope = dict(self._envelope.head)
        self._exchange = answering.open_exchange(scope, self._receive_later, self._pass_on)
        self._context: Context = answering.context_of(self._envelope)
        self._call = call = answering.begin_http(self._method, scope, self._exchange, self._context)
        call.watcher = self._look

    # ---- the rest

    async def carry(self, receive: Receive, send: Send) -> Load:
        assert self._slot is not None
        self._receive, self._send = receive, send
        if self._connected is not None:
            self._connected.set()
        figures = self._answering.figures
        try:
            await self._answering.finish_http(
                self._unfinished, self._scope, self._exchange, self._context, send, self._slot
            )
        except asyncio.CancelledError:
            figures.give_up(is_late=False)
            raise
        except Exception:
            figures.failed += 1
            raise
        finally:
            self._let_go()
        return self._slots.load()

    def drop(self) -> None:
        if self._slot is not None:  # `carry` was not entered
            self._answering.figures.give_up(is_late=False)
            self._let_go()

    # ---- what `StraightAnswer` leaves open

    def _message_of(self, result: Answer) -> Message | None:
        self._answering.figures.failed += result.is_failure
        return result.message

    def _go_on(self, unfinished: Unfinished) -> None:
        self._unfinished = unfinished
        self._slot = Slot(self._slots.free_slot)
        self._is_over = True  # as far as `give_up` and `_look` are concerned
        self._on_answer(None, self)

    def _end(self) -> None:
        super()._end()
        self._exchange.close()
        del self._exchange  # it refers to this object

    def _let_go(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._end()
            slot.release()

    async def _receive_later(self) -> Message:
        """Wait for what follows the request, which nobody looks at before there is a task."""
        while self._receive is None:
            if self._connected is None:
                self._connected = asyncio.Event()
            await self._connected.wait()
        return await self._receive()

    def _pass_on(self, message: Message) -> Awaitable[None]:
        return self._send(message)
