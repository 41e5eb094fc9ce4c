"""Decides the order of the calls of user code in a continuous batch; a thread or a task makes them.

`Rounds` decides which function to call next, and processes the results. Requests join and leave between the
calls: a request that ends, is preempted or has lost its caller is released before the next step. Callers add
and remove requests on their event loop while a thread may run a step, so a lock protects the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.continuous.slots import Slots
from daskserve.data.batching.stream import MAX_BUFFERED_RESULTS, is_end
from daskserve.errors import RequestTimeoutError, ServeError, StepError, UnavailableError
from daskserve.payload.packed_errors import raisable
from daskserve.telemetry.replica import StepMetrics

#: The result of user code, or its error.
Outcome: TypeAlias = tuple[Any, BaseException | None]
#: The types of results that may not be outputs: errors, and ``StopIteration`` as a class.
_SPECIAL = (BaseException, type)
#: The name of a function of user code, and the requests to call it with.
CallOfUser: TypeAlias = tuple[str, list[ActiveRequest]]


class Rounds:
    """The requests of a continuous batch, shared by their callers and user code.

    Parameters
    ----------
    name : str
        The function, for errors.
    max_outputs : int
        A request that would have more outputs fails.
    """

    def __init__(
        self, name: str, slots: Slots, metrics: StepMetrics, *, max_outputs: int, has_prefill: bool
    ) -> None:
        self.name = name
        self.slots = slots
        self.metrics = metrics
        self._max_outputs = max_outputs
        self._has_prefill = has_prefill
        self._lock = threading.Lock()
        #: Active requests whose callers have left since the last step.
        self._left: list[ActiveRequest] = []
        #: Requests that were active, and that user code has yet to release.
        self._to_release: list[ActiveRequest] = []
        #: Active requests that user code has yet to prefill.
        self._to_prefill: list[ActiveRequest] = []
        #: The requests of the next step; None if they have changed.
        self._steppable: list[ActiveRequest] | None = None
        #: Requests whose callers have something to read.
        self._to_wake: list[ActiveRequest] = []

    # ---- called by the callers

    def add(self, request: ActiveRequest) -> ActiveRequest | None:
        """Add a request to the queue; see `Slots.add`."""
        with self._lock:
            return self.slots.add(request)

    def leave(self, request: ActiveRequest) -> bool:
        """Record that the caller of a request has left; return whether user code has to release it."""
        with self._lock:
            if not request.is_active:
                self.slots.end(request)
                return False
            if not request.has_left:
                request.has_left = True
                self._left.append(request)
            return True

    def resume(self, request: ActiveRequest) -> None:
        """Include a request in steps again, because its caller has caught up."""
        with self._lock:
            request.is_paused = False
            self._steppable = None

    def is_paused(self, request: ActiveRequest) -> bool:
        """Return whether steps leave a request out, once the results of the last step are processed."""
        with self._lock:
            return request.is_paused

    def give_up(self, text: str) -> list[ActiveRequest]:
        """Fail all requests, and return them. Active ones end after the running call."""
        with self._lock:
            given_up = [each for each in self.slots.all_requests() if not each.has_left]
            for request in given_up:
                if request.is_active:
                    request.fail(RequestTimeoutError(text))
                    request.has_left = True
                    self._left.append(request)
                else:
                    request.fail(UnavailableError(text))
                    self.slots.end(request)
            return given_up

    @property
    def is_unwanted(self) -> bool:
        """Whether the callers of all active requests have left."""
        with self._lock:
            return bool(self._left) and all(each.has_left for each in self.slots.active)

    # ---- called by the steps

    def take_woken(self) -> list[ActiveRequest]:
        """Return the requests whose callers have new outputs, and forget them."""
        woken, self._to_wake = self._to_wake, []
        return woken

    def next_call(self) -> CallOfUser | None:
        """Return the next call; None if there is nothing to do."""
        with self._lock:
            self._end_left()
            self._preempt_for_step()
            if self._to_release:
                released, self._to_release = self._to_release, []
                return "release", released
            self._admit()
            if self._to_prefill:
                new, self._to_prefill = self._to_prefill, []
                return "prefill", new
            active = self._steppable or self._find_steppable()
            return ("step", active) if active else None

    def note(self, call: CallOfUser, outcome: Outcome, took_s: float) -> None:
        """Process the outcome of a call, which took ``took_s``."""
        name, requests = call
        if name == "release":
            for request in requests:
                request.state = None
                request.slot = -1
            return
        with self._lock:
            if name == "prefill":
                self._note_prefill(requests, outcome)
            else:
                self.metrics.durations.observe(took_s)
                self._note_step(requests, outcome)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error; user code does not release them."""
        with self._lock:
            for request in self.slots.all_requests():
                self._fail(request, error)
            self._to_release.clear()
            self._to_prefill.clear()

    def _end_left(self) -> None:
        for request in self._left:
            self._end(request)
        self._left.clear()

    def _preempt_for_step(self) -> None:
        slots = self.slots
        if slots.fits_step():
            return
        while len(slots.active) > 1 and not slots.fits_step():
            self._preempt(slots.newest(slots.active))
        if slots.active and not slots.fits_step():
            self._fail(slots.active[0], slots.overgrown(slots.active[0]))

    def _admit(self) -> None:
        new = self.slots.admit()
        if new:
            self._steppable = None
            if self._has_prefill:
                self._to_prefill += new

    def _find_steppable(self) -> list[ActiveRequest]:
        self._steppable = [each for each in self.slots.active if not each.is_paused]
        return self._steppable

    # ---- the results of user code

    def _note_prefill(self, new: list[ActiveRequest], outcome: Outcome) -> None:
        states, error = outcome
        if error is not None:
            self._note_error(new, error)
            self._to_prefill = [each for each in new if each.is_active]
            return
        for request, state in zip(new, states or [None] * len(new), strict=True):
            if issubclass(type(state), BaseException):
                self._note_own_error(request, state)
            elif states is not None:
                request.state = state
            if request.is_finished:
                self._end(request)

    def _note_step(self, active: list[ActiveRequest], outcome: Outcome) -> None:
        results, error = outcome
        if error is not None:
            self._note_error(active, error)
            return
        self.slots.grow(active)
        most, count = self._max_outputs, 0
        for request, result in zip(active, results, strict=True):
            if request.has_left:
                continue
            # Not `isinstance`, which reads the attribute ``__class__`` and may therefore run user code.
            if issubclass(type(result), _SPECIAL) and self._note_special(request, result):
                continue
            if result is not None:
                outputs = request.outputs
                outputs.append(result)
                count += 1
                if request.waiter is not None:
                    self._to_wake.append(request)
                elif len(outputs) - request.read >= MAX_BUFFERED_RESULTS:
                    request.is_paused = True
                    self._steppable = None
                if len(outputs) >= most and not request.is_finished:
                    self._fail(request, self._too_many())
            if request.is_finished:
                self._end(request)
        self.metrics.outputs += count

    def _note_special(self, request: ActiveRequest, result: Any) -> bool:
        """Process an end or an error in place of an output; return False if it is a real output."""
        if is_end(result):
            self._end(request)
        elif isinstance(result, BaseException):
            self._note_own_error(request, result)
        else:
            return False
        return True

    def _note_own_error(self, request: ActiveRequest, error: BaseException) -> None:
        if isinstance(error, MemoryError) and len(self.slots.active) > 1:
            self._preempt(request)
        else:
            self._fail(request, raisable(error))

    def _note_error(self, requests: Sequence[ActiveRequest], error: BaseException) -> None:
        """Process the error that a call with these requests raised. Requests that do not end are in the next
        call."""
        slots = self.slots
        if isinstance(error, MemoryError) and len(slots.active) > 1:
            self._preempt(slots.newest([each for each in requests if each.is_active] or slots.active))
            return
        named: Sequence[ActiveRequest] = ()
        if isinstance(error, StepError):
            named = [each for each in requests if any(each is one for one in error.requests)]
            error = error.for_callers()
        for request in named or requests:
            self._fail(request, raisable(error))

    def _too_many(self) -> ServeError:
        return ServeError(
            f"{self.name} has made {self._max_outputs} outputs for one request, which is max_outputs."
        )

    # ---- the ends of requests

    def _fail(self, request: ActiveRequest, error: Exception) -> None:
        if not request.has_ended:
            request.fail(error)
        self._end(request)

    def _end(self, request: ActiveRequest) -> None:
        if self.slots.end(request):
            self._await_release(request)
        if request.waiter is not None:
            self._to_wake.append(request)

    def _preempt(self, request: ActiveRequest) -> None:
        if request.has_left:
            self._end(request)
            return
        self.slots.preempt(request)
        self.metrics.preemptions += 1
        self._await_release(request)

    def _await_release(self, request: ActiveRequest) -> None:
        if request in self._to_prefill:
            self._to_prefill.remove(request)
        self._to_release.append(request)
        self._steppable = None
