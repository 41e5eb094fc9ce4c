"""Hedged requests: second attempts of requests that take long.

Problem: a replica that is slow for a moment, or stuck, makes some requests slow, although other replicas
would answer at once. Choice: a request that takes longer than most is also sent to a second replica. The
first answer is used, and the other try is cancelled. Only requests that may run twice are hedged. A budget
limits the number of second attempts, in case all requests of a deployment take long. While little of the
budget is left, second attempts begin later. Otherwise requests that are only slightly slower than most would
use up the budget, and none would be left for slow ones.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from itertools import islice
from typing import Any, TypeAlias

from daskserve.common.types import DONE, Envelope, EnvelopeKind, Message, Receive, Send
from daskserve.data.caller.request_routers.interface import PendingRequest
from daskserve.telemetry.table import MetricSample

#: The methods of HTTP requests that are sent twice.
METHODS = frozenset({"GET", "HEAD"})
#: Three numbers of latencies: how many are kept, how many are recorded between two computations of the delay,
#: and how many are needed for the first computation.
KEPT, EVERY, LEAST = 512, 32, 20
#: The maximum budget, in second attempts. Below the second number, requests wait longer for a second attempt:
#: up to twice as long when nothing is left.
MAX_SAVED, SCARCE = 10.0, 5.0
#: Maximum number of late requests that are tried when the budget allows a second attempt.
MAX_GRANTED = 8

#: Sends a request.
Attempt: TypeAlias = Callable[[Receive, Send], Coroutine[Any, Any, None]]
#: Takes a replica for a second attempt; returns the coroutine and a function that releases the replica, or
#: None if there is no replica. The coroutine cannot release it itself: a task that is cancelled before its
#: first step never enters its coroutine.
SecondAttempt: TypeAlias = "Callable[[Send], tuple[Coroutine[Any, Any, None], Callable[[], object]] | None]"


class Sent:
    """The replica that a request was sent to; stored in the envelope."""

    __slots__ = ("tag",)

    def __init__(self) -> None:
        self.tag = ""


def note_sent(envelope: Envelope, tag: str) -> None:
    """Record which replica has a request (empty for none), unless a request router records it."""
    if type(envelope.routed) is Sent:
        envelope.routed.tag = tag


def sent_to(envelope: Envelope) -> str:
    """Return the tag of the replica that has a request; empty if none has it."""
    routed = envelope.routed
    if type(routed) is PendingRequest:
        return "" if routed.replica is None else routed.replica.replica_id.unique_id
    return routed.tag if type(routed) is Sent else ""


def no_body() -> Receive:
    """Return the ``receive`` of a second attempt: an empty body, then nothing while the client is connected.

    A disconnect would end a streamed response. When the client leaves, the second attempt is cancelled.
    """
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.get_running_loop().create_future()
        return messages.pop()

    return receive


class Hedging:
    """The second attempts of one deployment's requests in one process.

    Parameters
    ----------
    quantile : float
        The share of requests that have their answer before a second attempt.
    budget : float
        The largest share of requests that get a second attempt.
    min_delay_s : float
        No second attempt begins earlier.
    """

    def __init__(self, quantile: float, budget: float, min_delay_s: float) -> None:
        self.setup = {"quantile": quantile, "budget": budget, "min_delay_s": min_delay_s}
        self._quantile = quantile
        self._budget = budget
        self._min_delay_s = min_delay_s
        self._latencies: deque[float] = deque(maxlen=KEPT)
        self._seen = 0
        self._saved = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        #: The requests without an answer after the delay and without a second attempt, the oldest first.
        self._late: dict[_Race, SecondAttempt] = {}
        #: The delay before a second attempt; None until enough latencies are known.
        self.delay_s: float | None = None
        #: The number of second attempts that answered first, and of second attempts that did not.
        self.won = self.lost = 0

    def covers(self, envelope: Envelope) -> bool:
        """Return whether a request may run twice."""
        head = envelope.head
        if envelope.kind is EnvelopeKind.HTTP:
            return not envelope.has_body and head.get("method") in METHODS and head.get("type") == "http"
        return envelope.is_idempotent_call()

    def samples(self, labels: tuple[str, ...]) -> list[MetricSample]:
        """Return the metric samples."""
        return [
            ("router_hedges", (*labels, "won"), self.won),
            ("router_hedges", (*labels, "lost"), self.lost),
        ]

    async def send(self, first: Attempt, second: SecondAttempt, receive: Receive, send: Send) -> None:
        """Send a request, and send it to a second replica if it takes long."""
        self._saved = min(self._saved + self._budget, MAX_SAVED)
        self._grant()
        loop = asyncio.get_running_loop()
        began = loop.time()
        race = _Race(send, loop)
        tasks = race.tasks
        tasks.append(self._start(first(receive, race.sender(0))))
        try:
            if await race.is_open(self._pause_s()):
                self._late[race] = second
                self._grant()
            winner = await race.run()
            if len(tasks) == 2:
                self.won += winner == 1
                self.lost += winner == 0
            self._note(loop.time() - began)
            await tasks[winner]
        finally:
            self._late.pop(race, None)
            for each in tasks:
                each.cancel()
            if self._late:  # later, because requests that end at the same time need no second attempt
                loop.call_soon(self._grant)

    def _pause_s(self) -> float | None:
        """Return how long a request waits for a second attempt."""
        return None if self.delay_s is None else self.delay_s * (2.0 - min(self._saved / SCARCE, 1.0))

    def _grant(self) -> None:
        """Begin second attempts of the oldest late requests, as far as budget and replicas allow.

        Requests that are only slightly slower than most end while they wait for the budget, so the budget is
        used for slow ones.
        """
        if self._saved < 1 or not self._late:
            return
        for race, second in list(islice(self._late.items(), MAX_GRANTED)):
            if race.is_on and (taken := second(race.sender(1))) is not None:
                del self._late[race]
                self._saved -= 1
                race.join(self._start(*taken))
                if self._saved < 1:
                    return

    def _start(
        self, coroutine: Coroutine[Any, Any, None], give_back: Callable[[], object] | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        if give_back is not None:
            task.add_done_callback(lambda _: give_back())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved, because nothing reads the error of the slower attempt

    def _note(self, took_s: float) -> None:
        self._latencies.append(took_s)
        self._seen += 1
        if len(self._latencies) >= LEAST and (self.delay_s is None or self._seen % EVERY == 0):
            # A quantile, because the largest latency may belong to a slow request.
            found = sorted(self._latencies)[math.ceil(self._quantile * len(self._latencies)) - 1]
            # Slightly longer, so that none of many equal requests is late.
            self.delay_s = max(1.01 * found, self._min_delay_s)


class _Race:
    """Two attempts of a request: the first one with a message wins, and only its messages are passed on."""

    def __init__(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self.tasks: list[asyncio.Task[None]] = []
        self.winner: int | None = None
        #: Done when one of the attempts has won.
        self._decided: asyncio.Future[None] = loop.create_future()
        #: Done when there is a second attempt.
        self._joined: asyncio.Future[None] = loop.create_future()

    def sender(self, number: int) -> Send:
        """Return the function that takes the messages of one attempt."""

        def take(message: Message) -> Awaitable[None]:
            if self.winner is None:
                self.winner = number
                if not self._decided.done():
                    self._decided.set_result(None)
            return self._send(message) if self.winner == number else DONE

        return take

    async def is_open(self, pause_s: float | None) -> bool:
        """Wait for a time; return whether the first attempt has then neither answered nor ended."""
        first = [self.tasks[0], self._decided]
        await asyncio.wait(first, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        return self.is_on

    @property
    def is_on(self) -> bool:
        """Whether the first attempt has neither answered nor ended."""
        return self.winner is None and not self.tasks[0].done()

    def join(self, task: asyncio.Task[None]) -> None:
        """Add the second attempt."""
        self.tasks.append(task)
        self._joined.set_result(None)

    async def run(self) -> int:
        """Return the number of the attempt that has won, or that ended last; cancel the other one."""
        tasks = self.tasks
        while self.winner is None and (running := [each for each in tasks if not each.done()]):
            news = [self._decided] if len(tasks) == 2 else [self._decided, self._joined]
            await asyncio.wait([*running, *news], return_when=asyncio.FIRST_COMPLETED)
            good = [n for n, each in enumerate(tasks) if each.done() and not _has_failed(each)]
            if self.winner is None and good:
                self.winner = good[0]
        winner = 0 if self.winner is None else self.winner
        for number, each in enumerate(tasks):
            if number != winner:
                each.cancel()
        return winner


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
