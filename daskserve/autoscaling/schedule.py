"""A policy that scales on the time of day and week, alone or as bounds for another policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from daskserve.autoscaling.context import AutoscalingContext, Decision, Policy
from daskserve.autoscaling.cron import CronExpression
from daskserve.autoscaling.results import as_decision
from daskserve.common.formatting import as_whole

BOUNDS = ("min_replicas", "max_replicas")


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """The bounds that a cron expression sets, until the next time of another one."""

    line: CronExpression
    least: int
    most: int | None


def scheduled(
    schedule: Mapping[str, Any], timezone: str = "UTC", policy: Callable[..., Any] | None = None
) -> Policy:
    """Return a policy that follows a schedule of cron expressions.

    Parameters
    ----------
    schedule : mapping
        Maps cron expressions such as ``"0 8 * * mon-fri"`` to a number of replicas, or to a dict with
        ``min_replicas``, ``max_replicas`` or both. Each entry applies until the time of another entry.
    timezone : str
        Time zone of the expressions, such as ``Europe/Berlin``.
    policy : callable, optional
        Decides between the bounds; a plain number of replicas is then the lower bound.

    Raises
    ------
    ValueError
        An expression, a number or the time zone is invalid.
    """
    if not isinstance(schedule, Mapping) or not schedule:
        raise ValueError(
            f"schedule is {schedule!r}; give a dict from cron expressions to numbers of replicas, such as "
            '{"0 8 * * mon-fri": 10, "0 18 * * *": 2}'
        )
    entries = [_entry(text, value) for text, value in schedule.items()]
    zone = _zone(timezone)
    minute, entry = -1, entries[0]

    def decide(context: AutoscalingContext) -> Decision:
        nonlocal minute, entry
        if context.wall_time // 60 != minute:  # the search over past days is slow, so run it once a minute
            minute = int(context.wall_time // 60)
            local = datetime.fromtimestamp(context.wall_time, UTC).astimezone(zone).replace(tzinfo=None)
            entry = _in_force(entries, local)
        text = f'by the schedule entry "{entry.line.text}"'
        if policy is None:
            return Decision(entry.least, f"{entry.least} {text}")
        decision = as_decision(policy(context))
        if decision.replicas < entry.least:
            return replace(
                decision, replicas=entry.least, reason=f"{decision.reason}; {entry.least} at least {text}"
            )
        if entry.most is not None and decision.replicas > entry.most:
            return replace(
                decision, replicas=entry.most, reason=f"{decision.reason}; {entry.most} at most {text}"
            )
        return decision

    return decide


def _in_force(entries: list[ScheduleEntry], local: datetime) -> ScheduleEntry:
    """Return the entry with the most recent time; of entries with equal times, the last one."""
    best, best_at = entries[0], datetime.min
    for entry in entries:
        at = entry.line.last_before(local)
        if at is not None and at >= best_at:
            best, best_at = entry, at
    return best


def _entry(text: str, value: Any) -> ScheduleEntry:
    line = CronExpression.parse(text)
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(BOUNDS))
        if unknown or not value:
            raise ValueError(
                f"the schedule has {dict(value)!r} for {text!r}; give {' and '.join(BOUNDS)}, or one of them"
            )
        least = _number(text, value.get("min_replicas", 0))
        most = _number(text, value["max_replicas"]) if "max_replicas" in value else None
        if most is not None and most < least:
            raise ValueError(
                f"the schedule for {text!r} has max_replicas={most} below min_replicas={least}; raise "
                "max_replicas or lower min_replicas"
            )
        return ScheduleEntry(line, least, most)
    return ScheduleEntry(line, _number(text, value), None)


def _number(text: str, value: Any) -> int:
    number = as_whole(value)
    if number is None or number < 0:
        raise ValueError(f"the schedule has {value!r} for {text!r}; give a number of replicas, 0 or more")
    return number


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError, TypeError):
        raise ValueError(
            f'timezone is {name!r}, which is unknown; give a name such as "Europe/Berlin" (if the system has '
            "no time zone data, pip install tzdata)"
        ) from None
