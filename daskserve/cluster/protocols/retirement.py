"""What the supervisor answers a worker that retires."""

from __future__ import annotations

import enum


class RetirementStatus(enum.StrEnum):
    """The state of a worker that retires after SIGTERM."""

    #: The actors are still moving; ask again.
    MOVING = "moving"
    #: The worker has no actors left, and no data that only it has.
    MOVED = "moved"
    #: Its actors could not move in time, so the worker completes their requests.
    STAYED = "stayed"
