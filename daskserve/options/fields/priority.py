"""Priorities of requests. Processes that send requests import this, so it does not import pydantic."""

from __future__ import annotations

#: Priorities range from minus this number to this number.
MAX_PRIORITY = 100
#: The priority of the calls of batch jobs, unless a handle has another one. Requests with this priority or a
#: lower one leave one slot of each replica free for others, if it has several.
BATCH_PRIORITY = -50
