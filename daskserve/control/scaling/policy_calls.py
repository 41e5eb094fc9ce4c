"""Run users' autoscaling policies outside the controller's event loop.

A policy, or the module it is imported from, may block forever and may raise anything. Each call therefore has
its own daemon thread. A call that hangs takes no thread from others, can be abandoned, and does not keep the
process from ending. Every exception is raised as a `UserCodeError`: otherwise `sys.exit()` would silently end
the event loop, and `CancelledError` the task.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.autoscaling.context import AutoscalingContext, CustomPolicy, Decision
from daskserve.autoscaling.groups import decide_together
from daskserve.autoscaling.policies import load_policy
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.common.types import BackendTag
from daskserve.control.scaling.importing import thread_location
from daskserve.errors import BadRequestError, UserCodeError
from daskserve.options.autoscaling import BUILT_IN_POLICIES, AutoscalingConfig
from daskserve.payload.error_text import summary_of
from daskserve.payload.pickling import load_bytes
from daskserve.telemetry.histogram import latency_buckets_s

T = TypeVar("T")

logger = logging.getLogger("daskserve.autoscaling")

#: Timeout of one wait for a policy. A slower call keeps running, and later checks wait for it again.
ANSWER_TIMEOUT_S = 5.0
#: Pause before a policy that failed to load is tried again; its module may have been installed meanwhile.
POLICY_RETRY_S = 30.0


class PolicyCall(Generic[T]):
    """One call of user code in its own thread.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, clock: Clock, name: str, function: Callable[..., T], *args: Any) -> None:
        self._clock = clock
        self._begun = clock.now()
        self._thread = _DaemonThreadExecutor(name)
        self._answer = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    @property
    def is_done(self) -> bool:
        """Whether the call has ended, so that `wait` returns or raises at once."""
        return self._answer.done()

    @property
    def is_running(self) -> bool:
        """Whether the thread still runs, even if the call was abandoned."""
        return self._thread.is_running

    @property
    def is_overdue(self) -> bool:
        """Whether the call has exceeded the timeout."""
        return not self.is_done and self._clock.now() - self._begun >= ANSWER_TIMEOUT_S

    @property
    def location(self) -> str:
        """A human-readable code location of the thread; see `daskserve.control.scaling.importing`."""
        return self._thread.location

    async def wait(self) -> T:
        """Return the result, or raise `TimeoutError` `ANSWER_TIMEOUT_S` after the call began.

        Raises
        ------
        UserCodeError
            The call raised an exception, which is the cause of this error.
        """
        left_s = max(0.0, self._begun + ANSWER_TIMEOUT_S - self._clock.now())
        return await self._clock.wait_for(asyncio.shield(self._answer), left_s)

    def abandon(self) -> None:
        """Stop waiting for the call; the thread ends when the user's code does."""
        self._answer.cancel()


class PolicyLoader(Generic[T]):
    """Loads a user's policy in a thread, and retries after a while if that fails.

    Parameters
    ----------
    owner : str
        The deployment or the group that is scaled, for the log.
    name : str
        Name of the thread.
    """

    def __init__(self, clock: Clock, owner: str, name: str) -> None:
        self._clock = clock
        self.owner = owner
        self._name = name
        #: The running call.
        self.call: PolicyCall[T] | None = None
        #: Why there is no policy, and when to load it again.
        self.error = ""
        self.retry_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether to call `load`: the policy is being loaded, or another attempt is due."""
        return self.call is not None or self._clock.now() >= self.retry_at

    async def load(self, function: Callable[..., T], *args: Any) -> T | None:
        """Start a call of a function that loads the policy, or take its result; None until it has loaded."""
        if self.call is None:
            self.call = PolicyCall(self._clock, self._name, function, *args)
        try:
            loaded = await self.call.wait()
        except TimeoutError:
            before, still = self.error, f"the policy is still being loaded after {shown(ANSWER_TIMEOUT_S)} s"
            place = self.call.location
            self.error = f"{still}: {place}" if place else still
            if not before.startswith(still):
                logger.warning("The autoscaler of %s: %s", self.owner, self.error)
            return None
        except UserCodeError as error:
            self.failed(error)
            return None
        self.loaded()
        return loaded

    def loaded(self) -> None:
        """Record that there is a policy."""
        self.call, self.error, self.retry_at = None, "", math.inf

    def failed(self, error: Exception) -> None:
        """Record why the policy cannot be loaded, and when to try again."""
        text = str(error) if isinstance(error, UserCodeError) else summary_of(error)
        before, self.error = self.error, f"the policy cannot be used: {text}"
        self.call, self.retry_at = None, self._clock.now() + POLICY_RETRY_S
        if self.error != before:
            logger.error("The autoscaling policy of %s cannot be used", self.owner, exc_info=error)


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledPolicy(Generic[T]):
    """The policy of a backend or a group, and when it is due.

    Attributes
    ----------
    checking : Task or None
        The running check.
    evaluating : PolicyCall or None
        The running call of the policy, which later checks wait for if it is slow.
    """

    due: float
    loader: PolicyLoader[T]
    checking: asyncio.Task[None] | None = None
    evaluating: PolicyCall[Any] | None = None

    @property
    def policy_call(self) -> PolicyCall[Any] | None:
        """The running call of user code, if there is one."""
        return self.evaluating or self.loader.call

    def begin(self, check: Coroutine[Any, Any, None], name: str, wake: Callable[[], object]) -> None:
        """Start a check; ``wake`` is called when it ends."""
        task = self.checking = asyncio.create_task(check, name=f"daskserve-scale-{name}")

        def done(_: asyncio.Task[None]) -> None:
            self.checking = None
            if not task.cancelled() and task.exception() is not None:
                logger.error("The autoscaler of %s failed", self.loader.owner, exc_info=task.exception())
            wake()

        task.add_done_callback(done)

    async def answer(self, call: PolicyCall[Any]) -> Any:
        """Return the policy's answer; raise `TimeoutError` if it has none yet, and `UserCodeError` if it
        failed."""
        self.evaluating = call
        try:
            found = await call.wait()
        except UserCodeError:
            self.evaluating = None
            raise
        self.evaluating = None
        return found

    def cancel(self) -> None:
        """Cancel the check and abandon the policy call, whose thread ends when the policy does."""
        if self.checking is not None:
            self.checking.cancel()
        if self.policy_call is not None:
            self.policy_call.abandon()


def problem_of(error: TimeoutError | UserCodeError) -> str:
    """Return why a policy has no answer."""
    if isinstance(error, UserCodeError):
        return f"the policy failed: {error}"
    return f"the policy has not answered for {shown(ANSWER_TIMEOUT_S)} s"


class _DaemonThreadExecutor(Executor):
    """Runs one function in a daemon thread, which does not delay the interpreter's exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def location(self) -> str:
        return "" if self._thread is None else thread_location(self._thread)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                value = function(*args, **kwargs)
            except BaseException as error:  # SystemExit and others must not reach the event loop
                future.set_exception(_as_user_code_error(error))
            else:
                future.set_result(value)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        return future


def _as_user_code_error(error: BaseException) -> UserCodeError:
    found = UserCodeError(summary_of(error))
    found.__cause__ = error
    return found


def is_built_in(config: AutoscalingConfig) -> bool:
    """Whether the policy is built in, and for a schedule also the policy that it bounds."""
    below = config.policy_kwargs.get("policy", "schedule")
    return config.policy in BUILT_IN_POLICIES and below in BUILT_IN_POLICIES


def check_built_in(name: str, config: AutoscalingConfig | None) -> None:
    """Raise `BadRequestError` if a built-in policy does not accept its arguments.

    A policy of the user's is loaded when it is needed, because its module may be on another machine.
    """
    if config is None or not is_built_in(config):
        return
    try:
        load_policy(config)
    except Exception as error:  # an argument of a wrong type, too
        raise BadRequestError(f"The autoscaling_config of {name} cannot be used: {error}") from error


def configured_autoscaler(
    tag: BackendTag, config: AutoscalingConfig, current: Autoscaler | None
) -> Autoscaler:
    """Return an autoscaler with these options: the current one, which keeps its metrics, or a new one."""
    if not is_built_in(config):
        importlib.invalidate_caches()  # so that a module installed since the last attempt is found
    policy = load_bytes(config.policy) if isinstance(config.policy, bytes) else None
    if current is None:
        return Autoscaler(tag, config, policy=policy, latency_bounds_s=latency_buckets_s())
    current.configure(config, policy=policy)
    return current


def group_member_autoscaler(
    tag: BackendTag, config: AutoscalingConfig, current: Autoscaler | None
) -> Autoscaler:
    """Return an autoscaler for metrics and bounds only; the policy is called for its whole group."""
    if current is None:
        return Autoscaler(tag, config, policy=_only_in_group, latency_bounds_s=latency_buckets_s())
    current.configure(config, policy=_only_in_group)
    return current


def _only_in_group(context: Any, **options: Any) -> Any:
    raise RuntimeError("a group's policy was called for one deployment; call it for the whole group")


def loaded_policy(config: AutoscalingConfig) -> CustomPolicy:
    """Return the policy that a config names."""
    importlib.invalidate_caches()
    return load_policy(config, load_bytes(config.policy) if isinstance(config.policy, bytes) else None)


def run_group_policy(
    policy: CustomPolicy, contexts: Mapping[BackendTag, AutoscalingContext]
) -> dict[BackendTag, Decision]:
    """Return the decisions of a group's policy. An async policy runs on a new event loop."""
    return asyncio.run(decide_together(policy, contexts))


def run_step(autoscaler: Autoscaler, facts: Mapping[str, Any]) -> ScalingStep:
    """Return the step of a policy. An async policy runs on a new event loop."""
    return asyncio.run(autoscaler.step_async(**facts))
