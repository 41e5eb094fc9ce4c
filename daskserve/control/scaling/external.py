"""The number of replicas that an external scaler has set. Pure.

The number is recorded like the number of an autoscaler, so that it outlives the controller. A new value of
``num_replicas`` overrides it; an unchanged value does not.
"""

from __future__ import annotations

from daskserve.common.copying import replace
from daskserve.control.records.records import BackendRecord


def carried_over(backend: BackendRecord, before: BackendRecord | None) -> BackendRecord:
    """Return the record of an externally scaled backend, with the previous number.

    A ``num_replicas`` that was changed or newly set overrides it. The previous number counts as at least 1.
    """
    fixed = replace(backend, scaled_to=None, scalings=())
    if before is None or before.is_deleting or before.scaled_to is None:
        return fixed
    if before.is_scaled_externally:
        is_new = fixed.configured_replicas != before.configured_replicas
    else:
        is_new = "num_replicas" in backend.config.model_fields_set
    if is_new:
        return fixed
    return replace(backend, scaled_to=max(1, before.full_replicas), scalings=before.scalings)


def restored(previous: BackendRecord, failed: BackendRecord) -> BackendRecord:
    """Return the record to restore after a failed change, with the number set during the change."""
    return with_number_of(previous, failed) if failed.is_scaled_externally else previous


def with_number_of(previous: BackendRecord, failed: BackendRecord) -> BackendRecord:
    """Return the previous record with the number that was set during the change, if any."""
    if failed.scaled_to is None:
        return previous
    return replace(previous, scaled_to=failed.scaled_to, scalings=failed.scalings)
