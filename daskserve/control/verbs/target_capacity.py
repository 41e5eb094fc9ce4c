"""The verb that sets an instance's target capacity, the percentage of its replicas. Pure."""

from __future__ import annotations

from daskserve.common.copying import replace
from daskserve.control.records.records import BackendRecord, CapacityRecord, Change
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import autoscaling_of, within_bounds
from daskserve.options.fields.bounds import DOWN, UP


def set_target_capacity(state: State, percent: float | None, wall: float) -> Change:
    """Return the change that sets the target capacity of every backend; None: all replicas, no direction.

    The client has checked the percentage. The specs in the records do not change, so they apply again when
    the capacity returns.
    """
    before = state.capacity
    after = CapacityRecord(percent, _direction(state, percent))
    change: Change = {}
    if after != before:
        # Without a capacity the record is removed; older stores have no such record either.
        change[after.key] = after if percent is not None else None
    for backend in state.backends.values():
        wanted = _at(backend, after, wall)
        if wanted != backend:
            change[wanted.key] = wanted
    return change


def at_capacity(state: State, backend: BackendRecord) -> BackendRecord:
    """Return the record of a new backend with the instance's target capacity."""
    return replace(backend, capacity=state.capacity.percent, capacity_direction=state.capacity.direction)


def _at(backend: BackendRecord, capacity: CapacityRecord, wall: float) -> BackendRecord:
    changed = replace(backend, capacity=capacity.percent, capacity_direction=capacity.direction)
    config = autoscaling_of(backend)
    if changed == backend:
        return changed
    if config is not None and not config.dry_run:
        changed = within_bounds(changed, config, wall)
    more = changed.num_replicas - backend.num_replicas
    return replace(changed, last_change="UPSCALE" if more > 0 else "DOWNSCALE") if more else changed


def _direction(state: State, percent: float | None) -> str | None:
    before = state.capacity.percent
    if percent is None:
        return None
    if before == percent:
        return state.capacity.direction
    if before is None and not any(not each.is_deleting for each in state.backends.values()):
        return UP  # a new instance starts from zero
    former = 100.0 if before is None else before
    if percent == former:
        return None
    return UP if percent > former else DOWN
