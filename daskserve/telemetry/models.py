"""The counters of the multiplexed models of a replica."""

from __future__ import annotations

from collections.abc import Sequence

from daskserve.telemetry.histogram import LIFE_BUCKETS_S, HistogramCounts
from daskserve.telemetry.table import MetricSample

#: Maximum number of models of a replica that have separate samples.
MAX_NAMED = 100


class ModelMetrics:
    """The loads and uses of the multiplexed models of a replica."""

    __slots__ = ("failures", "hits", "load_seconds", "loads", "requests", "unload_seconds", "unloads")

    def __init__(self) -> None:
        #: Requests for models, and requests whose model was already loaded.
        self.requests = self.hits = 0
        self.loads = self.unloads = 0
        #: Loads that ended without a model.
        self.failures = 0
        self.load_seconds = HistogramCounts(LIFE_BUCKETS_S)
        self.unload_seconds = HistogramCounts(LIFE_BUCKETS_S)

    def samples(self, labels: tuple[str, str, str], loaded: Sequence[str]) -> list[MetricSample]:
        """Return the samples, given the models that are loaded; none if no model was ever requested."""
        if not self.requests and not self.loads:
            return []
        deployment = labels[:2]
        return [
            ("replica_multiplexed_models", labels, len(loaded)),
            *(("replica_multiplexed_model", (*labels, each), 1) for each in loaded[:MAX_NAMED]),
            ("multiplexed_model_requests", deployment, self.requests),
            ("multiplexed_model_hits", deployment, self.hits),
            ("multiplexed_model_loads", deployment, self.loads),
            ("multiplexed_model_load_failures", deployment, self.failures),
            ("multiplexed_model_unloads", deployment, self.unloads),
            ("multiplexed_model_load_seconds", deployment, self.load_seconds),
            ("multiplexed_model_unload_seconds", deployment, self.unload_seconds),
        ]
