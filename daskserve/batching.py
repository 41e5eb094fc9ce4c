"""Batching of requests, and the types that user code of continuous batches uses."""

from __future__ import annotations

from daskserve.data.batching.continuous.decorator import continuous_batch
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.decorator import batch

__all__ = ["ActiveRequest", "batch", "continuous_batch"]
