"""Second tries of requests that take long."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from daskserve.options.fields.base import Options


class HedgingConfig(Options):
    """Second tries of GET and HEAD requests without a body, and of calls that are marked as idempotent."""

    place: ClassVar[str] = "hedging_config"

    quantile: float = Field(
        0.95,
        ge=0.5,
        lt=1,
        description="A second attempt begins once a request takes longer than this quantile of the recent "
        "latencies.",
    )
    budget: float = Field(
        0.05, gt=0, le=0.5, description="Maximum share of the requests that get a second attempt."
    )
    min_delay_s: float = Field(0.005, ge=0, description="Minimum time before a second attempt, in seconds.")

    def published(self) -> dict[str, Any]:
        """Return the options that the processes that send requests need."""
        return self.model_dump()
