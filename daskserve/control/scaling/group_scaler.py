"""Call the policy of each group of backends, once for all of them, at their shortest interval.

A group consists of the backends whose options have the same group, policy and policy arguments. Backends join
and leave as their options change, so two groups of the same name may exist during an update. Only the policy
call is shared. Each backend keeps its own metrics, bounds, delays, dry run and scaling from zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.autoscaling.context import AutoscalingContext, CustomPolicy, Decision
from daskserve.common.clock import Clock
from daskserve.common.formatting import counted
from daskserve.common.types import BackendTag
from daskserve.control.records.state import State
from daskserve.control.scaling import policy_calls
from daskserve.control.scaling.policy_calls import PolicyCall, PolicyLoader, ScheduledPolicy, problem_of
from daskserve.control.scaling.snapshot import BackendSnapshot
from daskserve.errors import UserCodeError
from daskserve.options.autoscaling import AutoscalingConfig


@dataclass(frozen=True, slots=True)
class Member:
    """One backend of a group, as seen by one check.

    Attributes
    ----------
    facts : mapping
        The arguments of `Autoscaler.context`.
    is_pending : bool
        Whether the last decision has not been applied yet.
    """

    snapshot: BackendSnapshot
    autoscaler: Autoscaler
    facts: Mapping[str, Any]
    is_pending: bool


@dataclass(slots=True, eq=False, kw_only=True)
class Group(ScheduledPolicy[CustomPolicy]):
    """Backends that share one policy call. ``config`` is the config of one of the members and names the
    policy."""

    config: AutoscalingConfig
    members: dict[BackendTag, None] = field(default_factory=dict)
    policy: CustomPolicy | None = None
    #: The members, as seen by the check that has called the policy, and the arguments of that call.
    called_for: Mapping[BackendTag, Member] = field(default_factory=dict)
    contexts: Mapping[BackendTag, AutoscalingContext] = field(default_factory=dict)

    def is_of(self, config: AutoscalingConfig) -> bool:
        """Whether a backend with this config belongs to this group."""
        own = self.config
        return (own.group, own.policy, own.policy_kwargs) == (
            config.group,
            config.policy,
            config.policy_kwargs,
        )


class Groups:
    """All groups of an instance; see the module.

    Parameters
    ----------
    member_of
        Checks a backend; returns None if it is gone or has left the group.
    record
        Records a step.
    wake
        Wakes the loop that calls `begin_due`.
    report_abandoned
        Logs a hanging policy call that is abandoned.
    """

    def __init__(
        self,
        state: State,
        clock: Clock,
        *,
        member_of: Callable[[BackendTag], Member | None],
        record: Callable[[BackendSnapshot, ScalingStep], None],
        wake: Callable[[], None],
        report_abandoned: Callable[[str, PolicyCall[Any] | None], None],
    ) -> None:
        self._state = state
        self._clock = clock
        self._member_of = member_of
        self._record = record
        self._wake = wake
        self._report_abandoned = report_abandoned
        self._groups: list[Group] = []
        self._group_of: dict[BackendTag, Group] = {}

    def join(self, tag: BackendTag, config: AutoscalingConfig) -> None:
        """Add a backend to the group of its config."""
        self.leave(tag)
        now = self._clock.now()
        group = next((each for each in self._groups if each.is_of(config)), None)
        if group is None:
            name = config.group
            loader = PolicyLoader[CustomPolicy](
                self._clock, f"group {name}", f"daskserve-policy-group-{name}"
            )
            group = Group(config=config, due=now, loader=loader)
            self._groups.append(group)
        group.members[tag] = None
        group.due = min(group.due, now)
        self._group_of[tag] = group
        self._wake()

    def leave(self, tag: BackendTag) -> None:
        """Remove a backend from its group. An empty group is dropped, and its policy call abandoned."""
        group = self._group_of.pop(tag, None)
        if group is None:
            return
        del group.members[tag]
        if not group.members:
            self._groups.remove(group)
            self._report_abandoned(group.loader.owner, group.policy_call)
            group.cancel()

    def check_now(self, tag: BackendTag) -> bool:
        """Check the group of a backend now; return False if the backend is in no group."""
        group = self._group_of.get(tag)
        if group is not None:
            group.due = self._clock.now()
        return group is not None

    def begin_due(self, now: float) -> float:
        """Start the checks that are due; return when the next one is due."""
        for group in self._groups:
            if group.due <= now and group.checking is None:
                group.begin(self._check(group), f"group-{group.config.group}", self._wake)
        return min((each.due for each in self._groups if each.checking is None), default=math.inf)

    def close(self) -> None:
        """Cancel all checks."""
        for group in self._groups:
            group.cancel()

    async def _check(self, group: Group) -> None:
        group.due = self._clock.now() + 1.0
        seen = {tag: self._member_of(tag) for tag in list(group.members)}
        members = {tag: each for tag, each in seen.items() if each is not None}
        if not members:
            return
        group.due = self._clock.now() + min(
            each.autoscaler.config.metrics_interval_s for each in members.values()
        )
        if any(each.is_pending for each in members.values()):
            return  # wait until the last decision is applied to all backends of the group
        if group.policy is None and group.loader.is_due:
            group.policy = await group.loader.load(policy_calls.loaded_policy, group.config)
        if group.policy is None:
            self._record_failure(group, members, group.loader.error)
            return
        call = group.evaluating or self._start_call(group, group.policy, members)
        try:
            decisions: Mapping[BackendTag, Decision] = await group.answer(call)
        except (TimeoutError, UserCodeError) as error:
            self._record_failure(group, members, problem_of(error), error)
            return
        for tag, decision in decisions.items():
            self._apply(group, tag, decision)

    def _start_call(
        self, group: Group, policy: CustomPolicy, members: Mapping[BackendTag, Member]
    ) -> PolicyCall[Any]:
        group.called_for = members
        group.contexts = {tag: each.autoscaler.context(**each.facts) for tag, each in members.items()}
        name = f"daskserve-policy-group-{group.config.group}"
        return PolicyCall(self._clock, name, policy_calls.run_group_policy, policy, group.contexts)

    def _record_failure(
        self,
        group: Group,
        members: Mapping[BackendTag, Member],
        problem: str,
        error: BaseException | None = None,
    ) -> None:
        for tag, member in members.items():
            if tag in group.members:
                self._record(member.snapshot, member.snapshot.without_policy(problem, error))

    def _apply(self, group: Group, tag: BackendTag, decision: Decision) -> None:
        """Damp and record the decision for one backend, unless the backend has changed in the meantime."""
        member, backend = group.called_for[tag], self._state.backends.get(tag)
        seen = member.snapshot
        if tag not in group.members or backend is None or backend.is_deleting:
            return
        if backend.autoscaling != seen.backend.autoscaling:
            return  # the next check uses the new options
        snapshot = BackendSnapshot.of(backend, seen.config, seen.sample, seen.running)
        if snapshot.target != seen.target:
            group.due = self._clock.now()
            problem = f"the policy answered late, for {counted(seen.target, 'replica')}"
            self._record(snapshot, snapshot.without_policy(problem))
            return
        self._record(snapshot, member.autoscaler.answered(group.contexts[tag], decision))
