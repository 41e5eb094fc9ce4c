"""One look at an autoscaled backend: what its policy is to decide by, and what to do without it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.autoscaling.autoscaler import ScalingStep
from daskserve.autoscaling.context import Sample
from daskserve.control.records import BackendRecord
from daskserve.control.scaled import bounds_of
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.bounds import Bounds


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen, and of which record.

    Attributes
    ----------
    config : AutoscalingConfig or None
        The backend's options; None while they are on their way out.
    running : int
        How many replicas run.
    bounds : Bounds or None
        Between which numbers to choose.
    """

    backend: BackendRecord
    config: AutoscalingConfig | None
    sample: Sample
    running: int
    bounds: Bounds | None

    @classmethod
    def at(
        cls, backend: BackendRecord, config: AutoscalingConfig | None, sample: Sample, running: int
    ) -> Look:
        """Return a look with the bounds of now."""
        bounds = None if config is None else bounds_of(backend, config)
        return cls(backend, config, sample, running, bounds)

    @property
    def target(self) -> int:
        """How many replicas are wanted."""
        return self.backend.num_replicas

    def without_policy(self, problem: str, error: BaseException | None = None) -> ScalingStep:
        """Return the step to take: none, but for those who wait where there is no replica."""
        target, bounds = self.target, self.bounds
        least = 0 if bounds is None else bounds.nearest(1)
        is_dry_run = self.config is None or self.config.dry_run
        if is_dry_run or target > 0 or not self.sample.is_waited_for or not least:
            return ScalingStep(target, target, f"{problem}, so nothing changes", error)
        return ScalingStep(least, least, f"{problem}; {least} for the requests that wait", error)
