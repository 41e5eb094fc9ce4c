"""A snapshot of an autoscaled backend, and the step to take when its policy fails. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.autoscaling.autoscaler import ScalingStep
from daskserve.autoscaling.context import Sample
from daskserve.control.records.records import BackendRecord
from daskserve.control.scaling.recorded import bounds_of
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.fields.bounds import Bounds


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """A backend's record, options and load at one time.

    Attributes
    ----------
    config : AutoscalingConfig or None
        The backend's autoscaling options; None while they are being removed.
    running : int
        The number of running replicas.
    bounds : Bounds or None
        The bounds of the number of replicas.
    """

    backend: BackendRecord
    config: AutoscalingConfig | None
    sample: Sample
    running: int
    bounds: Bounds | None

    @classmethod
    def of(
        cls, backend: BackendRecord, config: AutoscalingConfig | None, sample: Sample, running: int
    ) -> BackendSnapshot:
        """Return a snapshot of a backend with its current bounds."""
        bounds = None if config is None else bounds_of(backend, config)
        return cls(backend, config, sample, running, bounds)

    @property
    def target(self) -> int:
        """The target number of replicas."""
        return self.backend.num_replicas

    def without_policy(self, problem: str, error: BaseException | None = None) -> ScalingStep:
        """Return the step without a policy: no change, unless requests wait and there is no replica."""
        target, bounds = self.target, self.bounds
        least = 0 if bounds is None else bounds.nearest(1)
        is_dry_run = self.config is None or self.config.dry_run
        if is_dry_run or target > 0 or not self.sample.has_demand or not least:
            return ScalingStep(target, target, f"{problem}, so nothing changes", error)
        return ScalingStep(least, least, f"{problem}; {least} for the waiting requests", error)
