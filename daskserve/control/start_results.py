"""What the start of a replica, or its failure, means for its backend. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.control.backend_verbs import configured
from daskserve.control.records import BackendRecord, ReplicaRecord
from daskserve.errors import DeployError, NoCapacityError, RequestTimeoutError, ServeError
from daskserve.types import described


def with_facts(backend: BackendRecord, replica: ReplicaRecord, facts: Mapping[str, Any]) -> BackendRecord:
    """Return the backend with the facts about its callable that a started replica reports.

    Nothing is known of an import path before it is imported. The facts decide how many requests a replica
    runs, so a change of them reconfigures the replicas.
    """
    if replica.version != backend.version or backend.is_deleting:
        return backend
    config = backend.config.with_facts(facts)
    if config.internal_metadata == backend.config.internal_metadata:
        return backend
    return configured(backend, config, backend.user_config)


def start_error(backend: str, error: BaseException) -> ServeError:
    """Return the error of a goal whose replica could not start or be reconfigured."""
    if isinstance(error, ServeError):
        return error
    return DeployError(
        f"A replica of {described(backend)} could not be created: {type(error).__name__}: {error}"
    )


def late_error(backend: BackendRecord, limit_s: str, why: str | None) -> ServeError:
    """Return the error of a goal that was not reached in time; ``why`` says what replicas wait for."""
    tag, wanted = backend.tag, backend.needed_replicas
    if why is not None:
        where = "placement_group_bundles" if backend.bundles else "actor_options"
        return NoCapacityError(
            f"Cannot scale {described(tag)} to {wanted} replicas within {limit_s} s: {why}. "
            f"Add workers, reduce the resources in {where}, or delete other backends."
        )
    return RequestTimeoutError(
        f"{described(tag, 'Backend')} did not get to {wanted} running replicas within {limit_s} s; "
        "its constructor may need longer: pass a larger timeout_s."
    )
