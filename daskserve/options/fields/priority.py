"""Priorities of requests; who sends requests imports this module, so it does not import pydantic."""

from __future__ import annotations

#: Priorities are from minus this number to this number.
MAX_PRIORITY = 100
#: The priority of the calls of batch jobs, unless a handle has another one. Requests with this one or a lower
#: one leave one slot of each replica to others, if it has several.
BATCH_PRIORITY = -50
