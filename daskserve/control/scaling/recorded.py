"""The recorded target number of the autoscaler: within its bounds, and with the reasons. Pure."""

from __future__ import annotations

from daskserve.common.copying import replace
from daskserve.common.formatting import counted
from daskserve.control.records.records import BackendRecord
from daskserve.control.scaling import external
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.fields.bounds import Bounds

#: Number of changes of the target number that are kept for each backend.
KEPT_SCALINGS = 10


def autoscaling_of(backend: BackendRecord) -> AutoscalingConfig | None:
    """Return the autoscaler's options of a backend; None without autoscaling."""
    return None if backend.is_deleting else backend.autoscaling


def scaled(backend: BackendRecord, wanted: int, reason: str, wall: float) -> BackendRecord:
    """Return the backend's record with another target number, and with this change recorded."""
    before = backend.configured_replicas if backend.scaled_to is None else backend.scaled_to
    event = (wall, before, wanted, reason)
    return replace(backend, scaled_to=wanted, scalings=(*backend.scalings, event)[-KEPT_SCALINGS:])


def bounds_of(backend: BackendRecord, config: AutoscalingConfig) -> Bounds:
    """Return the bounds of the autoscaler at the current target capacity."""
    return config.bounds(backend.capacity, backend.capacity_direction)


def current_bounds(backend: BackendRecord) -> Bounds | None:
    """Return the bounds of a backend's autoscaler; None without autoscaling."""
    config = autoscaling_of(backend)
    return None if config is None else bounds_of(backend, config)


def carried_over(backend: BackendRecord, before: BackendRecord | None, wall: float) -> BackendRecord:
    """Return a backend's new record with the previous target number.

    The number is computed from the load, which does not depend on the code or the options. New bounds apply
    immediately. A backend that was not autoscaled keeps its current number at first.
    """
    if backend.is_scaled_externally:
        return external.carried_over(backend, before)
    config = autoscaling_of(backend)
    if before is not None and before.is_deleting:
        before = None
    if config is None or (
        config.dry_run and (before is None or "num_replicas" in backend.config.model_fields_set)
    ):
        if backend.scaled_to is None and not backend.scalings:
            return backend
        return replace(backend, scaled_to=None, scalings=())
    if before is None:
        return replace(backend, scaled_to=bounds_of(backend, config).first, scalings=())
    if config.dry_run:
        return _held(backend, before)
    backend = replace(backend, scaled_to=before.num_replicas, scalings=before.scalings)
    return within_bounds(backend, config, wall)


def within_bounds(backend: BackendRecord, config: AutoscalingConfig, wall: float) -> BackendRecord:
    """Return the backend's record with its number limited to the current bounds."""
    bounds = bounds_of(backend, config)
    allowed = bounds.nearest(backend.num_replicas)
    if allowed == backend.scaled_to:
        return backend
    groups = f" in groups of {bounds.multiple_of}" if bounds.multiple_of > 1 else ""
    why = f"{bounds.least} to {counted(bounds.most, 'replica')}{groups} are allowed now{bounds.capacity_note}"
    return scaled(backend, allowed, why, wall)


def _held(backend: BackendRecord, before: BackendRecord) -> BackendRecord:
    """Keep the number in a dry run without ``num_replicas``; at least 1, to avoid being stuck at 0."""
    fixed = replace(backend, scaled_to=None, scalings=())
    wanted = max(1, before.full_replicas)
    return (
        fixed
        if wanted == fixed.configured_replicas
        else replace(fixed, scaled_to=wanted, scalings=before.scalings)
    )


def restored(previous: BackendRecord, failed: BackendRecord, wall: float) -> BackendRecord:
    """Return the record to restore after a failed change, with the number that the current load needs.

    If nothing has scaled the backend since, that is the number from before the change.
    """
    # These values belong to the whole instance, so the change does not include them.
    previous = replace(previous, capacity=failed.capacity, capacity_direction=failed.capacity_direction)
    if previous.is_scaled_externally:
        return external.restored(previous, failed)
    config = autoscaling_of(previous)
    if config is None and failed.autoscaling is None and not failed.is_scaled_externally:
        # An operator may have scaled it meanwhile.
        return external.with_number_of(previous, failed)
    if config is None or config.dry_run:
        return previous
    if failed.scaled_to is None:
        return within_bounds(previous, config, wall)
    return carried_over(previous, failed, wall)
