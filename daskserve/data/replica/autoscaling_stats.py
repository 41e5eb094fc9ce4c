"""Custom autoscaling metrics: the values that user code returns from ``record_autoscaling_stats``.

Each read returns the newest values at once, and starts the next call of the user's method where user code
runs. So neither requests nor the controller ever wait for it. Calls do not overlap. An async method that
takes too long is cancelled; a plain one occupies a thread that serves nothing else until it returns.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from daskserve.amounts import shown
from daskserve.clock import Clock
from daskserve.data.replica.definitions import is_async
from daskserve.data.replica.failures import user_traceback
from daskserve.data.replica.runner import CodeRun
from daskserve.data.replica.servable import Servable
from daskserve.data.replica.wall import Wall
from daskserve.errors import ActorLostError

logger = logging.getLogger("daskserve.replica")

#: The name is that of today's Ray Serve.
HOOK = "record_autoscaling_stats"
#: A call that takes longer is late, and its values are ignored.
LIMIT_S = 2.0
#: Values older than this are not reported.
KEPT_S = 3.5
MOST_VALUES = 32
MOST_CHARACTERS = 100

Parts = Callable[[], tuple[Wall, Servable]]


def checked(answer: Any) -> tuple[dict[str, float], str]:
    """Return the valid values of a hook's result, and what is wrong with the rest; on the user's side."""
    if not isinstance(answer, Mapping):
        if inspect.iscoroutine(answer):
            answer.close()
        return {}, f"returned {type(answer).__name__}; return a dict of numbers by name"
    answer = dict(answer)  # a copy, because user code may change it later
    if len(answer) > MOST_VALUES:
        return {}, f"returned {len(answer)} values; {MOST_VALUES} are allowed, so all are ignored"
    values, wrong = {}, ""
    for name, value in answer.items():
        number = _finite(value)
        # A name that is not printable may not be encodable either.
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MOST_CHARACTERS:
            wrong = f"returned the name {name!r:.120}; a name has 1 to {MOST_CHARACTERS} printable characters"
        elif number is None:
            wrong = f"returned {value!r:.120} for {name!r}; a value must be a finite number"
        else:
            values[name] = number
    return values, wrong


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The outcome of a call: the values (None if it failed), and the problem, its kind and its traceback."""

    values: dict[str, float] | None
    wrong: str = ""
    kind: str = "answer"
    traceback: str = ""

    @classmethod
    def failure(cls, error: Exception) -> _Recorded:
        # As text, because the error would keep the user's object alive.
        kind = type(error).__name__
        return cls(None, f"raised {kind}: {error}", kind, user_traceback(error))


async def _record(target: Any) -> _Recorded:
    try:
        return _Recorded(*checked(await getattr(target, HOOK)()))
    except Exception as error:  # an error of user code, which is logged
        return _Recorded.failure(error)


def _record_in_thread(target: Any) -> _Recorded:
    try:
        return _Recorded(*checked(getattr(target, HOOK)()))
    except Exception as error:  # an error of user code, which is logged
        return _Recorded.failure(error)


class StatsRecorder:
    """Calls the hook of a replica's user code, if it has one.

    Parameters
    ----------
    parts
        Returns the wall and the servable; raises `ActorLostError` if the replica has stopped.
    """

    def __init__(self, replica_tag: str, parts: Parts, clock: Clock) -> None:
        self._replica_tag = replica_tag
        self._parts = parts
        self._clock = clock
        self._values: dict[str, float] = {}
        self._recorded_at = -math.inf
        self._run: CodeRun | None = None
        self._began = 0.0
        self._is_async = False
        #: The kinds of problem that are in the log already; otherwise each would be logged every second.
        self._logged: set[str] = set()

    def figures(self) -> dict[str, Any]:
        """Return the newest values as ``{"custom": ...}``, or nothing; start the next call."""
        now = self._clock.now()
        if self._run is None:
            self._begin(now)
        elif self._is_late(now):
            self._give_up(self._run)
        return {"custom": dict(self._values)} if self._values and now - self._recorded_at <= KEPT_S else {}

    def _begin(self, now: float) -> None:
        try:
            wall, servable = self._parts()
        except ActorLostError:
            return
        target = servable.target
        # As its class has it: no code of the user's may run here, such as what hands on all it is asked for.
        hook = inspect.getattr_static(type(target), HOOK, None)
        hook = getattr(hook, "__func__", hook)
        if not servable.is_class or not callable(hook):
            return
        self._began, self._is_async = now, is_async(hook)
        if wall.is_closed:
            return
        context = wall.context.copy()
        if self._is_async:
            self._run = wall.start(True, _record, (target,), context, self)
        else:
            self._run = wall.aside.start(_record_in_thread, (target,), context, self)

    def _is_late(self, now: float) -> bool:
        return now - self._began > LIMIT_S

    def _give_up(self, run: CodeRun) -> None:
        self._complain("late", f"has not returned within {shown(LIMIT_S)} s")
        # A thread cannot be stopped, and an abandoned one would count as a lost slot.
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
        # The only error that gets here is an attempt to end the thread.
        found: _Recorded = value if error is None else _Recorded.failure(error)
        if found.values is None:
            self._complain(found.kind, found.wrong, found.traceback)
        elif self._is_late(now):
            self._complain("late", f"took {now - self._began:.1f} s, more than {shown(LIMIT_S)}")
        else:
            self._values, self._recorded_at = found.values, now
            if found.wrong:
                self._log(found.kind, found.wrong)

    def _complain(self, kind: str, what: str, traceback: str = "") -> None:
        self._values = {}
        self._log(kind, f"{what}; its values are ignored", traceback)

    def _log(self, kind: str, what: str, traceback: str = "") -> None:
        level = logging.DEBUG if kind in self._logged else logging.ERROR
        self._logged.add(kind)
        more = f"\n{traceback}" if traceback else ""
        logger.log(level, "%s() of replica %s %s%s", HOOK, self._replica_tag, what, more)


class ChildStats:
    """The values of a child process, read with its other metrics while the controller wants them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: Mapping[str, float] = {}
        self._recorded_at = self._wanted_at = -math.inf

    @property
    def is_wanted(self) -> bool:
        """Whether the values were read lately."""
        return self._clock.now() - self._wanted_at <= KEPT_S

    def record(self, values: Mapping[str, float]) -> None:
        """Record the values of the child."""
        self._values, self._recorded_at = values, self._clock.now()

    def figures(self) -> dict[str, Any]:
        """Return the newest values, as `StatsRecorder.figures` does."""
        now = self._wanted_at = self._clock.now()
        return {"custom": dict(self._values)} if self._values and now - self._recorded_at <= KEPT_S else {}
