"""The verbs that set an instance's target capacity (the percentage of its replicas) and its logs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.common.copying import replace
from daskserve.control.records.records import BackendRecord, CapacityRecord, Change
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import autoscaling_of, within_bounds
from daskserve.options.fields.bounds import DOWN, UP
from daskserve.options.start_messages import ControllerStart


def set_target_capacity(state: State, percent: float | None, wall: float) -> Change:
    """Return the change that sets the target capacity of every backend; None resets it.

    The client has checked the percentage. The specs in the records do not change, so they apply again when
    the capacity is reset.
    """
    before = state.capacity
    after = replace(before, percent=percent, direction=_direction(state, percent))
    # If no value is set, the record is removed, as in older stores, which have no such record.
    change: Change = {}
    if after != before:
        change[after.key] = None if after == CapacityRecord() else after
    for backend in state.backends.values():
        wanted = _at(backend, after, wall)
        if wanted != backend:
            change[wanted.key] = wanted
    return change


def set_logging(state: State, config: Mapping[str, Any], start_id: str) -> Change:
    """Return the change that applies a configuration's logging options to an instance, until its next start.

    A configuration without ``logging_config`` changes nothing.
    """
    before, logging = state.capacity, config.get("logging_config")
    if logging is None:
        return {}
    after = replace(before, logging=dict(logging), logging_of=start_id)
    return {} if after == before else {after.key: after}


def logging_of(state: State, start: ControllerStart) -> Mapping[str, Any] | None:
    """Return the logging options of an instance: the changed options, or those of its start."""
    changed = state.capacity
    return changed.logging if changed.logging_of == start.start_id else start.logging


def at_capacity(state: State, backend: BackendRecord) -> BackendRecord:
    """Return the record of a new backend with the instance's target capacity."""
    now = state.capacity
    if (now.percent, now.direction) == (backend.capacity, backend.capacity_direction):
        return backend
    return replace(backend, capacity=now.percent, capacity_direction=now.direction)


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
        return UP  # a new instance starts with no replicas
    former = 100.0 if before is None else before
    if percent == former:
        return None
    return UP if percent > former else DOWN
