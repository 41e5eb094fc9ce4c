"""The times of schedules, and their tasks."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from cronsim import CronSim

from daskserve.data.tasks.payloads import digest_of, packed_arguments
from daskserve.data.tasks.states import Task

if TYPE_CHECKING:
    from daskserve.data.tasks.config import DurableOptions, TaskSchedule


#: Tolerance for equal times; the times of a schedule are at least a second apart.
NEAR_S = 0.4


def next_time(schedule: TaskSchedule, after: float) -> float:
    """Return the first time of a schedule after a time, in seconds since the epoch."""
    if schedule.every_s is not None:
        # Multiples of the period since the epoch, so that all consumers use the same times.
        number = math.floor(after / schedule.every_s)
        while number * schedule.every_s <= after:  # rounding may leave the quotient one too small
            number += 1
        return number * schedule.every_s
    assert schedule.cron is not None
    local = datetime.fromtimestamp(after, UTC).astimezone(ZoneInfo(schedule.timezone))
    return next(CronSim(schedule.cron, local)).timestamp()


def last_time(schedule: TaskSchedule, after: float, now: float) -> float:
    """Return the latest time of a schedule after a given time and up to now; if there is none, return the
    next time.

    The cost grows with the logarithm of the time span, not with the number of times.
    """
    found, late = next_time(schedule, after), now
    while found <= now and late - after > NEAR_S:
        middle = (after + late) / 2
        following = next_time(schedule, middle)
        if following <= now:
            after, found = middle, following
        else:
            late = middle
    return found


def due_task(queue: str, name: str, schedule: TaskSchedule, at: float, options: DurableOptions) -> Task:
    """Return the task of a schedule at one of its times; the id is the same for all consumers."""
    payload = packed_arguments(schedule.task, schedule.args, schedule.kwargs, options.max_payload_bytes)
    return Task(
        f"{name}@{at:.0f}",
        queue,
        schedule.task,
        payload,
        created_at=at,
        due_at=at,
        priority=schedule.priority,
        digest=digest_of(schedule.args, schedule.kwargs),
        result_ttl_s=max(options.result_ttl_s, 2 * schedule.catch_up_s + 60.0),
    )
