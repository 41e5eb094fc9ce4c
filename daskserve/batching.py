"""Batches of requests, and what user code of a continuous batch works with."""

from __future__ import annotations

from daskserve.data.batching.continuous.decorator import continuous_batch
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.decorator import batch

__all__ = ["ActiveRequest", "batch", "continuous_batch"]
