"""Asking the policy of a group of backends, at the shortest interval of them, about all of them at once.

A group are the backends whose options name the same group, the same policy and the same arguments for it; so
backends join and leave as their options change, and half-way through an update there are two groups of one
name. All but the question is each backend's own: its figures, bounds, delays, dry run and from-zero rule.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.autoscaling.context import AutoscalingContext, Decision
from daskserve.autoscaling.loading import CallablePolicy
from daskserve.clock import Clock
from daskserve.control.scaling import asking
from daskserve.control.scaling.asking import Aside
from daskserve.control.scaling.look import Look
from daskserve.control.state import State
from daskserve.errors import UserCodeError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.types import BackendTag

logger = logging.getLogger("daskserve.autoscaling.context")

#: A policy that could not be had is tried again so often: its module may be installed by then.
RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Member:
    """One backend of a group, as it was seen.

    Attributes
    ----------
    facts : mapping
        What `Autoscaler.context` takes.
    is_pending : bool
        Whether what was decided last has still to be made true.
    """

    look: Look
    autoscaler: Autoscaler
    facts: Mapping[str, Any]
    is_pending: bool


@dataclass(frozen=True, slots=True)
class _Question:
    """The policy at work, and what it was asked about."""

    members: Mapping[BackendTag, Member]
    contexts: Mapping[BackendTag, AutoscalingContext]
    aside: Aside[dict[BackendTag, Decision]]


@dataclass(slots=True, eq=False)
class Group:
    """Backends that are decided about together. ``config`` is one of theirs, and names the policy."""

    config: AutoscalingConfig
    due: float
    members: dict[BackendTag, None] = field(default_factory=dict)
    policy: CallablePolicy | None = None
    looking: asyncio.Task[None] | None = None
    #: The policy on its way here, and under way with an answer; never both.
    loading: Aside[CallablePolicy] | None = None
    question: _Question | None = None
    #: Why there is no policy, and when it is tried again.
    error: str = ""
    retry_at: float = -math.inf

    def is_of(self, config: AutoscalingConfig) -> bool:
        """Whether a backend with this config belongs here."""
        own = self.config
        return (own.group, own.policy, own.policy_kwargs) == (
            config.group,
            config.policy,
            config.policy_kwargs,
        )

    @property
    def aside(self) -> Aside[Any] | None:
        """What the user's code is at, if it is at anything."""
        return self.loading if self.question is None else self.question.aside

    def give_up(self) -> None:
        """End what is under way; a thread ends when its policy does."""
        if self.looking is not None:
            self.looking.cancel()
        if self.aside is not None:
            self.aside.leave()


class Groups:
    """All groups of an instance; see the module.

    Parameters
    ----------
    see
        Takes in what is to be seen of a backend; None if it is gone, or does not belong here any more.
    decide
        Takes note of a step.
    wake
        Has the loop that calls `begin_due` go round.
    leave_behind
        Tells of a thread that hangs and that nobody waits for from now on.
    """

    def __init__(
        self,
        state: State,
        clock: Clock,
        *,
        see: Callable[[BackendTag], Member | None],
        decide: Callable[[Look, ScalingStep], None],
        wake: Callable[[], None],
        leave_behind: Callable[[str, Aside[Any] | None], None],
    ) -> None:
        self._state = state
        self._clock = clock
        self._see = see
        self._decide = decide
        self._wake = wake
        self._leave_behind = leave_behind
        self._groups: list[Group] = []
        self._group_of: dict[BackendTag, Group] = {}

    def join(self, tag: BackendTag, config: AutoscalingConfig) -> None:
        """Decide about a backend together with those of its group from now on."""
        self.leave(tag)
        now = self._clock.now()
        group = next((each for each in self._groups if each.is_of(config)), None)
        if group is None:
            group = Group(config, now)
            self._groups.append(group)
        group.members[tag] = None
        group.due = min(group.due, now)
        self._group_of[tag] = group
        self._wake()

    def leave(self, tag: BackendTag) -> None:
        """Decide about a backend no more; a group without any is forgotten, with what its policy is at."""
        group = self._group_of.pop(tag, None)
        if group is None:
            return
        del group.members[tag]
        if not group.members:
            self._groups.remove(group)
            self._leave_behind(f"group {group.config.group}", group.aside)
            group.give_up()

    def hurry(self, tag: BackendTag) -> bool:
        """Ask about a backend now; False if it is in no group."""
        group = self._group_of.get(tag)
        if group is not None:
            group.due = self._clock.now()
        return group is not None

    def begin_due(self, now: float) -> float:
        """Begin to ask where it is time to; return when it is time again."""
        for group in self._groups:
            if group.due <= now and group.looking is None:
                self._begin(group)
        return min((each.due for each in self._groups if each.looking is None), default=math.inf)

    def close(self) -> None:
        """End what is under way."""
        for group in self._groups:
            group.give_up()

    def _begin(self, group: Group) -> None:
        name = group.config.group
        task = group.looking = asyncio.create_task(self._look(group), name=f"daskserve-scale-group-{name}")

        def done(_: asyncio.Task[None]) -> None:
            group.looking = None
            if not task.cancelled() and task.exception() is not None:
                logger.error("The autoscaler of group %s failed", name, exc_info=task.exception())
            self._wake()

        task.add_done_callback(done)

    async def _look(self, group: Group) -> None:
        group.due = self._clock.now() + 1.0
        seen = {tag: self._see(tag) for tag in list(group.members)}
        members = {tag: each for tag, each in seen.items() if each is not None}
        if not members:
            return
        group.due = self._clock.now() + min(
            each.autoscaler.config.metrics_interval_s for each in members.values()
        )
        if any(each.is_pending for each in members.values()):
            return  # what was decided for some of them is not to be decided anew for the others
        await self._load(group)
        if group.policy is None:
            self._go_without(group, members, group.error)
            return
        if group.question is None:
            group.question = self._asked(group, group.policy, members)
        question = group.question
        try:
            decisions = await question.aside.wait()
        except TimeoutError as error:
            problem = f"the policy has not answered for {asking.ANSWER_S:g} s"
            self._go_without(group, members, problem, error)
            return
        except UserCodeError as error:
            group.question = None
            self._go_without(group, members, f"the policy failed: {error}", error)
            return
        group.question = None
        for tag, decision in decisions.items():
            self._settle(group, tag, question, decision)

    def _asked(self, group: Group, policy: CallablePolicy, members: Mapping[BackendTag, Member]) -> _Question:
        contexts = {tag: each.autoscaler.context(**each.facts) for tag, each in members.items()}
        name = f"daskserve-policy-group-{group.config.group}"
        return _Question(
            members, contexts, Aside(self._clock, name, asking.answer_together, policy, contexts)
        )

    def _go_without(
        self,
        group: Group,
        members: Mapping[BackendTag, Member],
        problem: str,
        error: BaseException | None = None,
    ) -> None:
        for tag, member in members.items():
            if tag in group.members:
                self._decide(member.look, member.look.without_policy(problem, error))

    def _settle(self, group: Group, tag: BackendTag, question: _Question, decision: Decision) -> None:
        """Tame what was decided about one backend, if it is still the one that was asked about."""
        member, backend = question.members[tag], self._state.backends.get(tag)
        seen = member.look
        if tag not in group.members or backend is None or backend.is_deleting:
            return
        if backend.autoscaling != seen.backend.autoscaling:
            return  # it comes back with its new options
        look = Look.at(backend, seen.config, seen.sample, seen.running)
        if look.target != seen.target:
            group.due = self._clock.now()
            problem = f"the policy answered late, for {seen.target} replicas"
            self._decide(look, look.without_policy(problem))
            return
        self._decide(look, member.autoscaler.answered(question.contexts[tag], decision))

    async def _load(self, group: Group) -> None:
        """Have the group's policy, or see what became of it."""
        if group.policy is not None or (group.loading is None and self._clock.now() < group.retry_at):
            return
        name = group.config.group
        if group.loading is None:
            group.loading = Aside(
                self._clock, f"daskserve-policy-group-{name}", asking.loaded_policy, group.config
            )
        before = group.error
        try:
            group.policy = await group.loading.wait()
            group.error = ""
        except TimeoutError:
            still = f"the policy is still being loaded after {asking.ANSWER_S:g} s"
            place = group.loading.whereabouts
            group.error = f"{still}: {place}" if place else still
            if not before.startswith(still):
                logger.warning("Group %s: %s", name, group.error)
            return
        except UserCodeError as error:
            group.error = f"the policy cannot be used: {error}"
            group.retry_at = self._clock.now() + RETRY_S
            if group.error != before:
                logger.error("The autoscaling policy of group %s cannot be used", name, exc_info=error)
        group.loading = None
