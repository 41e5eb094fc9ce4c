"""Priorities of requests; who sends requests imports this module, so it does not import pydantic."""

from __future__ import annotations

#: Priorities are from minus this number to this number.
MAX_PRIORITY = 100
