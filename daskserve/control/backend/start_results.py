"""Turns a replica's start or failure into changes of its backend. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.control.decisions.backends import configured
from daskserve.control.observed.observed import DeadReplica
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.errors import DeployError, ServeError
from daskserve.payload.error_text import summary_of


def with_facts(backend: BackendRecord, replica: ReplicaRecord, facts: Mapping[str, Any]) -> BackendRecord:
    """Return the backend with the facts about its callable that a started replica reports.

    The facts about an import path are unknown until a replica imports it. They determine how many requests a
    replica runs concurrently, so a change of them reconfigures the replicas.
    """
    if replica.version != backend.version or backend.is_deleting:
        return backend
    config = backend.config.with_facts(facts)
    if config is backend.config:
        return backend
    return configured(backend, config, backend.user_config)


def start_error(backend: BackendRecord, error: BaseException) -> ServeError:
    """Return the error of a goal whose replica could not start or be reconfigured."""
    if isinstance(error, ServeError):
        return error
    return DeployError(f"A replica of {backend.display_name} could not be created: {summary_of(error)}")


def lost_error(backend: BackendRecord, death: DeadReplica) -> ServeError:
    """Return the error of a change whose replicas are lost repeatedly."""
    return DeployError(
        f"A replica of {backend.display_name} was lost before the change was complete: {death.reason}"
    )
