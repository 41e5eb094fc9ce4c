"""The share of its replicas that an instance is to have: what the verb makes of the state. Pure."""

from __future__ import annotations

from dataclasses import replace

from daskserve.control.records import BackendRecord, CapacityRecord, Change
from daskserve.control.scaled import autoscaling_of, within_bounds
from daskserve.control.state import State
from daskserve.options.bounds import DOWN, UP, checked_capacity


def set_target_capacity(state: State, percent: float | None, wall: float) -> Change:
    """Let every backend have this share of its replicas from now on; None: all, and no word of a direction.

    The specs in the records stay as they are, so that they hold again with the capacity.
    """
    checked = checked_capacity(percent)
    before = state.capacity
    after = CapacityRecord(checked, _direction(state, checked))
    change: Change = {}
    if after != before:
        # Without one the record goes, and a store that never heard of capacities has none either.
        change[after.key] = after if checked is not None else None
    for backend in state.backends.values():
        wanted = _at(backend, after, wall)
        if wanted != backend:
            change[wanted.key] = wanted
    return change


def at_capacity(state: State, backend: BackendRecord) -> BackendRecord:
    """Return the record of a backend that is new with the target capacity of the instance."""
    return replace(backend, capacity=state.capacity.percent, capacity_direction=state.capacity.direction)


def _at(backend: BackendRecord, capacity: CapacityRecord, wall: float) -> BackendRecord:
    changed = replace(backend, capacity=capacity.percent, capacity_direction=capacity.direction)
    config = autoscaling_of(backend)
    if changed == backend or config is None or config.dry_run:
        return changed
    return within_bounds(changed, config, wall)


def _direction(state: State, percent: float | None) -> str | None:
    before = state.capacity.percent
    if percent is None:
        return None
    if before == percent:
        return state.capacity.direction
    if before is None and not any(not each.is_deleting for each in state.backends.values()):
        return UP  # a new instance is on its way from nothing
    former = 100.0 if before is None else before
    if percent == former:
        return None
    return UP if percent > former else DOWN
