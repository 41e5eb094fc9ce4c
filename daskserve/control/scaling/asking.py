"""Running what users wrote for the autoscaler, away from the controller's loop and from everybody else.

A policy, or the module it is imported from, may block for ever and may raise anything. So each call has a
daemon thread of its own: one that hangs takes no thread from others, is left behind when nobody waits for it
any more, and does not keep the process when it is to end. Whatever is raised comes out as a `UserCodeError`:
`sys.exit()` would end the loop that it is raised on, and `CancelledError` the task, without a word.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.autoscaling.context import AutoscalingContext, Decision
from daskserve.autoscaling.groups import decide_together
from daskserve.autoscaling.loading import CallablePolicy, load_policy
from daskserve.clock import Clock
from daskserve.control.scaling.importing import whereabouts
from daskserve.errors import UserCodeError
from daskserve.figures.histogram import LATENCY_BUCKETS_S
from daskserve.options.autoscaling import BUILT_IN_POLICIES, AutoscalingConfig
from daskserve.payload import load_bytes
from daskserve.types import BackendTag

T = TypeVar("T")

#: What has not answered by then is waited for on the side.
ANSWER_S = 5.0


class Aside(Generic[T]):
    """One call of what users wrote, under way in a thread of its own.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, clock: Clock, name: str, function: Callable[..., T], *args: Any) -> None:
        self._clock = clock
        self._begun = clock.now()
        self._thread = _OwnThread(name)
        self._answer = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    @property
    def is_done(self) -> bool:
        """Whether `wait` has something to return or to raise."""
        return self._answer.done()

    @property
    def is_running(self) -> bool:
        """Whether the thread is at work, be it for nobody any more."""
        return self._thread.is_running

    @property
    def is_overdue(self) -> bool:
        """Whether it was waited for in vain."""
        return not self.is_done and self._clock.now() - self._begun >= ANSWER_S

    @property
    def whereabouts(self) -> str:
        """Where the thread is, for people to read; see `daskserve.control.scaling.importing`."""
        return self._thread.whereabouts

    async def wait(self) -> T:
        """Return the answer, or raise `TimeoutError` once `ANSWER_S` have passed since the call began.

        Raises
        ------
        UserCodeError
            What was raised, whatever it was, in words and as its cause.
        """
        left_s = max(0.0, self._begun + ANSWER_S - self._clock.now())
        return await self._clock.wait_for(asyncio.shield(self._answer), left_s)

    def leave(self) -> None:
        """Wait for it no longer; the thread ends when the user's code does."""
        self._answer.cancel()


class _OwnThread(Executor):
    """Runs one function in a daemon thread; for those of a pool the interpreter waits at its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def whereabouts(self) -> str:
        return "" if self._thread is None else whereabouts(self._thread)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                value = function(*args, **kwargs)
            except BaseException as error:  # all of them: the loop gets a stand-in
                future.set_exception(_stand_in(error))
            else:
                future.set_result(value)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        return future


def _stand_in(error: BaseException) -> UserCodeError:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # the user's too
        text = type(error).__name__
    found = UserCodeError(text)
    found.__cause__ = error
    return found


def is_built_in(config: AutoscalingConfig) -> bool:
    """Whether nothing that users wrote decides."""
    below = config.policy_kwargs.get("policy", "schedule")
    return config.policy in BUILT_IN_POLICIES and below in BUILT_IN_POLICIES


def configured(tag: BackendTag, config: AutoscalingConfig, present: Autoscaler | None) -> Autoscaler:
    """Return an autoscaler that goes by these options: the present one with its figures, or a new one."""
    if not is_built_in(config):
        importlib.invalidate_caches()  # the module may have been installed since the last try
    policy = load_bytes(config.policy) if isinstance(config.policy, bytes) else None
    if present is None:
        return Autoscaler(tag, config, policy=policy, latency_bounds_s=LATENCY_BUCKETS_S)
    present.configure(config, policy=policy)
    return present


def configured_in_group(tag: BackendTag, config: AutoscalingConfig, present: Autoscaler | None) -> Autoscaler:
    """Return an autoscaler for figures and bounds alone: its policy is asked with the others of its group."""
    if present is None:
        return Autoscaler(tag, config, policy=_never_alone, latency_bounds_s=LATENCY_BUCKETS_S)
    present.configure(config, policy=_never_alone)
    return present


def _never_alone(context: Any, **options: Any) -> Any:
    raise RuntimeError("the policy of a group is asked about all of its backends at once")


def loaded_policy(config: AutoscalingConfig) -> CallablePolicy:
    """Return the policy that a config names."""
    importlib.invalidate_caches()
    return load_policy(config, load_bytes(config.policy) if isinstance(config.policy, bytes) else None)


def answer_together(
    policy: CallablePolicy, contexts: Mapping[BackendTag, AutoscalingContext]
) -> dict[BackendTag, Decision]:
    """Return what a group's policy answers, with a loop of its own should it be async."""
    return asyncio.run(decide_together(policy, contexts))


def answer(autoscaler: Autoscaler, facts: Mapping[str, Any]) -> ScalingStep:
    """Return what a policy answers, with a loop of its own should it be async."""
    return asyncio.run(autoscaler.step_async(**facts))
