"""The number that the autoscaler wants, as it is recorded: within its bounds, and with the reasons. Pure."""

from __future__ import annotations

from dataclasses import replace

from daskserve.autoscaling_config import AutoscalingConfig
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


def carried_over(backend: BackendRecord, before: BackendRecord | None, wall: float) -> BackendRecord:
    """Return a backend's record, perhaps with another config, with the number that was wanted before it.

    That number is what the load asked for, whatever the code and the options are now; but new bounds hold at
    once. One that was not autoscaled begins with the replicas it has.
    """
    config = autoscaling_of(backend)
    if config is None or config.dry_run:
        return replace(backend, scaled_to=None, scalings=())
    if before is None or before.is_deleting:
        return replace(backend, scaled_to=config.first_replicas, scalings=())
    wanted = before.num_replicas
    backend = replace(backend, scaled_to=wanted, scalings=before.scalings)
    bounded = min(max(wanted, config.min_replicas), config.max_replicas)
    if bounded == wanted:
        return backend
    bounds = f"{config.min_replicas} to {config.max_replicas} replicas are allowed now"
    return scaled(backend, bounded, bounds, wall)
