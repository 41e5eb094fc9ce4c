"""Statistics of user code: the hooks that daskserve calls regularly, and the checks of their results.

Each read returns the newest values at once, and starts the next call of the hook where user code runs. So
neither requests nor the controller ever wait for it. Calls do not overlap. An async hook that takes too long
is cancelled; a plain hook occupies a separate thread until it returns.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.runner import CodeRun
from daskserve.data.replica.user_code.definitions import is_async
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import ActorLostError
from daskserve.payload.error_text import name_of
from daskserve.payload.packed_errors import packed_here

logger = logging.getLogger("daskserve.replica")

#: The method that is called once, after the constructor.
METADATA = "record_replica_metadata"
#: Maximum size of the result of `METADATA`, and of routing statistics, as JSON.
MOST_CHARACTERS = 4096

Parts = Callable[[], tuple[UserExecutor, Servable]]


@dataclass(frozen=True, slots=True)
class Hook:
    """A method of user code that reports statistics. The names are those of Ray Serve.

    Attributes
    ----------
    period_s : float
        Minimum time between the starts of two calls.
    limit_s : float
        A call that takes longer is late, and its values are ignored.
    kept_s : float
        Values older than this are not reported.
    checked : callable
        Returns the valid values of a result, and the problem of the others; runs on the user's side.
    """

    name: str
    period_s: float
    limit_s: float
    kept_s: float
    checked: Callable[[Any], tuple[dict[str, Any], str]]


def checked_plain(answer: Any) -> tuple[dict[str, Any], str]:
    """Return a result as plain values, and its problem; see `Hook.checked`."""
    if not isinstance(answer, Mapping) or not all(isinstance(name, str) for name in answer):
        if inspect.iscoroutine(answer):
            answer.close()
        return {}, f"returned {type(answer).__name__}; return a dict with texts as keys"
    try:
        text = json.dumps(dict(answer))
        values: dict[str, Any] = json.loads(text)
        msgpack.packb(values)  # the format of messages, which does not allow large numbers
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return {}, f"returned a value that cannot be sent as JSON: {error}"
    if len(text) > MOST_CHARACTERS:
        return {}, f"returned {len(text)} characters as JSON; {MOST_CHARACTERS} are allowed"
    return values, ""


def as_plain(answer: Any) -> dict[str, Any]:
    """Return the result of ``record_replica_metadata`` as plain values; raise `TypeError` for others."""
    values, wrong = checked_plain(answer)
    if wrong:
        raise TypeError(f"it {wrong}")
    return values


ROUTING = Hook("record_routing_stats", period_s=10.0, limit_s=30.0, kept_s=math.inf, checked=checked_plain)


def routing_hook(options: Any) -> Hook:
    """Return the hook ``record_routing_stats`` with the times of a ``request_router_config``."""
    if options is None:
        return ROUTING
    from daskserve.options.routing.request_router import (
        RequestRouterConfig,
    )  # imported here, because few child processes need pydantic

    router = RequestRouterConfig(**options) if isinstance(options, Mapping) else options
    return replace(
        ROUTING,
        period_s=router.request_routing_stats_period_s,
        limit_s=router.request_routing_stats_timeout_s,
    )


async def _record(target: Any, hook: Hook) -> tuple[dict[str, Any], str]:
    return hook.checked(await getattr(target, hook.name)())


def _record_in_thread(target: Any, hook: Hook) -> tuple[dict[str, Any], str]:
    return hook.checked(getattr(target, hook.name)())


class StatsRecorder:
    """Calls a hook of a replica's user code, if the hook exists.

    Parameters
    ----------
    parts
        Returns the executor and the servable; raises `ActorLostError` if the replica has stopped.
    """

    def __init__(self, replica_tag: str, parts: Parts, clock: Clock, hook: Hook) -> None:
        self._replica_tag = replica_tag
        self._parts = parts
        self._clock = clock
        self._hook = hook
        self._values: dict[str, Any] = {}
        self._recorded_at = -math.inf
        self._run: CodeRun | None = None
        self._began = -math.inf
        self._is_async = False
        #: The kinds of problem that were logged; each kind is logged once, because calls repeat every second.
        self._logged: set[str] = set()

    def values(self) -> dict[str, Any]:
        """Return the newest values; start the next call if it is due."""
        now = self._clock.now()
        if self._run is None:
            if now - self._began >= self._hook.period_s:
                self._begin(now)
        elif self._is_late(now):
            self._give_up(self._run)
        return dict(self._values) if now - self._recorded_at <= self._hook.kept_s else {}

    def _begin(self, now: float) -> None:
        try:
            executor, servable = self._parts()
        except ActorLostError:
            return
        self._began, target = now, servable.target
        # Looked up in the class, because user code such as ``__getattr__`` must not run here.
        hook = inspect.getattr_static(type(target), self._hook.name, None)
        hook = getattr(hook, "__func__", hook)
        if not servable.is_class or not callable(hook):
            return
        self._is_async = is_async(hook)
        if executor.is_closed:
            return
        context = executor.context.copy()
        if self._is_async:
            self._run = executor.start(True, _record, (target, self._hook), context, self)
        else:
            self._run = executor.background.start(_record_in_thread, (target, self._hook), context, self)

    def _is_late(self, now: float) -> bool:
        return now - self._began > self._hook.limit_s

    def _give_up(self, run: CodeRun) -> None:
        self._complain("late", f"has not returned within {shown(self._hook.limit_s)} s")
        # Only async code has a timeout: a thread cannot be stopped, and would count as a lost slot if
        # abandoned.
        if self._is_async:
            run.cancel()

    def run_aborted(self, error: Exception) -> None:
        """Do nothing: the replica stops, and `run_ended` follows."""

    def run_ended(self, value: Any, error: Exception | None) -> None:
        """Record the outcome of a call."""
        run, self._run = self._run, None
        if run is None or run.is_cancelled:
            return  # the call was late, or the replica is stopping
        now = self._clock.now()
        if error is not None:
            packed = packed_here(error)
            self._complain(name_of(packed.kind), f"raised {packed.summary}", packed.text)
            packed.error = None  # the error refers to the user's object
        elif self._is_late(now):
            self._complain("late", f"took {now - self._began:.1f} s, more than {shown(self._hook.limit_s)}")
        else:
            (self._values, wrong), self._recorded_at = value, now
            if wrong:
                self._log("answer", wrong)

    def _complain(self, kind: str, what: str, traceback: str = "") -> None:
        self._values = {}
        self._log(kind, f"{what}; its values are ignored", traceback)

    def _log(self, kind: str, what: str, traceback: str = "") -> None:
        level = logging.DEBUG if kind in self._logged else logging.ERROR
        self._logged.add(kind)
        more = f"\n{traceback}" if traceback else ""
        logger.log(level, "%s() of replica %s %s%s", self._hook.name, self._replica_tag, what, more)
