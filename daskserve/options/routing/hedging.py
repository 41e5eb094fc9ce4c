"""Second attempts of requests that take long."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from daskserve.options.fields.base import Options


class HedgingConfig(Options):
    """Second attempts of GET and HEAD requests without a body, and of calls that are marked as idempotent."""

    place: ClassVar[str] = "hedging_config"

    quantile: float = Field(
        0.95,
        ge=0.5,
        lt=1,
        description="Quantile of the recent latencies after which a request gets a second attempt.",
    )
    budget: float = Field(
        0.05, gt=0, le=0.5, description="Maximum share of requests that get a second attempt."
    )
    min_delay_s: float = Field(0.005, ge=0, description="Minimum delay before a second attempt, in seconds.")

    def published(self) -> dict[str, Any]:
        """Return the options that the processes that send requests need."""
        return self.model_dump()
