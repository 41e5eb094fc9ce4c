"""The number of replicas that a scaler outside of the cluster asked for. Pure.

It is recorded in the place of an autoscaler's, so that it outlives the controller, and is the user's to
take back: a ``num_replicas`` that says something new holds, one that says the same as before does not.
"""

from __future__ import annotations

from dataclasses import replace

from daskserve.control.records import BackendRecord


def carried_over(backend: BackendRecord, before: BackendRecord | None) -> BackendRecord:
    """Return the record of a backend that is scaled from outside, with the number from before it.

    A ``num_replicas`` that was changed or newly set is the user's own word and holds. Otherwise it is the
    number there was, and one at least.
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


def taken_back(previous: BackendRecord, failed: BackendRecord) -> BackendRecord:
    """Return the record to go back to when a change failed, with what was asked for while it was tried."""
    if failed.scaled_to is None or not failed.is_scaled_externally:
        return previous
    return replace(previous, scaled_to=failed.scaled_to, scalings=failed.scalings)
