"""One request of a continuous batch, as user code sees it, and its states."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping
from enum import Enum, auto
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan


class RequestState(Enum):
    """The state of a request. User code holds resources only for `ACTIVE` requests."""

    WAITING = auto()
    ACTIVE = auto()
    ENDED = auto()


#: The events of a request: the states in which each may happen, and the state after it.
MOVES: Mapping[str, tuple[frozenset[RequestState], RequestState]] = {
    "admit": (frozenset({RequestState.WAITING}), RequestState.ACTIVE),
    "preempt": (frozenset({RequestState.ACTIVE}), RequestState.WAITING),
    "end": (frozenset({RequestState.WAITING, RequestState.ACTIVE}), RequestState.ENDED),
}


class ActiveRequest:
    """A request of a continuous batch; ``prefill``, ``step`` and ``release`` get lists of them.

    Attributes
    ----------
    args, kwargs : tuple, dict
        The arguments of the call.
    state : any
        The result of ``prefill`` for it; user code may replace it. None before, and after ``release``.
    outputs : list
        The outputs so far. ``prefill`` gets earlier outputs if the request was preempted, or continues a
        request of another replica. Do not change the list.
    slot : int
        Its slot, from 0 to ``max_slots - 1``, different from those of other active requests; -1 while it
        waits.
    cost : float
        Its share of ``max_cost`` so far.
    priority : float
        The result of ``priority_fn``; 0 without one.
    user : hashable
        The result of ``user_fn``; None without one.
    request_id : str
        The id of the replica's request whose code made the call; empty outside of requests.
    preemptions : int
        How often it was preempted.
    """

    __slots__ = (
        "account",
        "args",
        "cost",
        "error",
        "has_left",
        "is_finished",
        "is_paused",
        "kwargs",
        "lifecycle",
        "number",
        "outputs",
        "preemptions",
        "priority",
        "read",
        "request_id",
        "slot",
        "span",
        "state",
        "user",
        "waiter",
    )

    def __init__(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        cost: float = 0.0,
        priority: float = 0.0,
        user: Hashable = None,
        outputs: Iterable[Any] = (),
        request_id: str = "",
    ) -> None:
        self.args = args
        self.kwargs = dict(kwargs or {})
        self.cost = cost
        self.priority = priority
        self.user = user
        self.request_id = request_id
        self.state: Any = None
        self.outputs = list(outputs)
        self.slot = -1
        self.preemptions = 0
        #: The account of the request's user; set by `Slots`.
        self.account: Any = None
        #: Whether the caller has left, so that the request ends once no step runs.
        self.has_left = False
        #: Set by `finish`: the running step is the request's last.
        self.is_finished = False
        self.lifecycle = RequestState.WAITING
        #: The request's place in the order of arrival.
        self.number = -1
        #: The error that ended the request, with its first traceback; the caller gets it after the outputs.
        self.error: tuple[Exception, TracebackType | None] | None = None
        #: The number of outputs that the caller has read, and the future on which it waits for the next one.
        self.read = len(self.outputs)
        self.waiter: asyncio.Future[None] | None = None
        #: The span of the call, if the call is sampled.
        self.span: RecordedSpan | None = None
        #: Whether the caller is so far behind that steps leave the request out.
        self.is_paused = False

    def __repr__(self) -> str:
        state = self.lifecycle.name.lower()
        return f"<ActiveRequest {self.number} {state} slot={self.slot} outputs={len(self.outputs)}>"

    def finish(self) -> None:
        """End the request with this step; its caller still gets the step's output. For use in ``step``."""
        self.is_finished = True

    def fail(self, error: Exception) -> None:
        """Set the error that the caller gets; only the first one is kept."""
        if self.error is None:
            self.error = error, error.__traceback__

    def take_error(self) -> Exception:
        """Return the error to raise, with its first traceback: other callers may raise the same object."""
        assert self.error is not None
        (error, traceback), self.error = self.error, None
        return error.with_traceback(traceback)

    def move(self, what: str) -> None:
        """Apply one of `MOVES`; raise `ValueError` if the state does not allow it."""
        sources, target = MOVES[what]
        if self.lifecycle not in sources:
            raise ValueError(f"{self!r} cannot {what}")
        self.lifecycle = target

    @property
    def is_active(self) -> bool:
        return self.lifecycle is RequestState.ACTIVE

    @property
    def has_ended(self) -> bool:
        return self.lifecycle is RequestState.ENDED
