"""The number that the autoscaler wants, as it is recorded: within its bounds, and with the reasons. Pure."""

from __future__ import annotations

from dataclasses import replace

from daskserve.autoscaling_config import AutoscalingConfig
from daskserve.control import external
from daskserve.control.records import BackendRecord

#: Changes of the wanted number that are remembered of each backend.
KEPT_SCALINGS = 10


def autoscaling_of(backend: BackendRecord) -> AutoscalingConfig | None:
    """Return the autoscaler's options of a backend; None if nothing scales it."""
    plain = backend.autoscaling
    return None if plain is None or backend.is_deleting else AutoscalingConfig(**plain)


def scaled(backend: BackendRecord, wanted: int, reason: str, wall: float) -> BackendRecord:
    """Return the backend's record with another wanted number, and the change among those remembered."""
    event = (wall, backend.num_replicas, wanted, reason)
    return replace(backend, scaled_to=wanted, scalings=(*backend.scalings, event)[-KEPT_SCALINGS:])


def bounded(config: AutoscalingConfig, wanted: int) -> int:
    """Return the number nearest to ``wanted`` that the bounds allow."""
    return min(max(wanted, config.min_replicas), config.max_replicas)


def carried_over(backend: BackendRecord, before: BackendRecord | None, wall: float) -> BackendRecord:
    """Return a backend's record, perhaps with another config, with the number that was wanted before it.

    That number is what the load asked for, whatever the code and the options are now; but new bounds hold at
    once. One that was not autoscaled begins with the replicas it has.
    """
    if backend.is_scaled_externally:
        return external.carried_over(backend, before)
    config = autoscaling_of(backend)
    if before is not None and before.is_deleting:
        before = None
    if config is None or (config.dry_run and (before is None or "num_replicas" in backend.config)):
        return replace(backend, scaled_to=None, scalings=())
    if before is None:
        return replace(backend, scaled_to=config.first_replicas, scalings=())
    wanted = before.num_replicas
    if config.dry_run:
        return _held(backend, before, wanted)
    backend = replace(backend, scaled_to=wanted, scalings=before.scalings)
    allowed = bounded(config, wanted)
    if allowed == wanted:
        return backend
    bounds = f"{config.min_replicas} to {config.max_replicas} replicas are allowed now"
    return scaled(backend, allowed, bounds, wall)


def _held(backend: BackendRecord, before: BackendRecord, wanted: int) -> BackendRecord:
    """Keep the number in a dry run that names none; one at least, as nothing would wake it from zero."""
    fixed = replace(backend, scaled_to=None, scalings=())
    wanted = max(1, wanted)
    return (
        fixed if wanted == fixed.num_replicas else replace(fixed, scaled_to=wanted, scalings=before.scalings)
    )


def taken_back(previous: BackendRecord, failed: BackendRecord, wall: float) -> BackendRecord:
    """Return the record to go back to when a change failed, with the number that the load wants by now.

    Where nothing scaled the backend meanwhile, it is the number from before the change.
    """
    if previous.is_scaled_externally:
        return external.taken_back(previous, failed)
    config = autoscaling_of(previous)
    if config is None or config.dry_run or failed.scaled_to is None:
        return previous
    return carried_over(previous, failed, wall)
