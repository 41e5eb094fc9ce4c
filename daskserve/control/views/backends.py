"""The status of backends as plain values. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from daskserve.common.types import BackendTag
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.control.views.messages import message_of, with_models

UNVERSIONED = "Unversioned"


def backend_status(state: State, observed: Observed, backend: BackendRecord, wall: float) -> dict[str, Any]:
    """Return a backend's status, with the reason if it is not healthy."""
    models = state.models.get(backend.tag)
    replicas = state.replicas_of(backend.tag)
    running = len(state.running(backend.tag))
    return {
        "kind": backend.kind,
        "application": backend.application,
        "status": status_word(observed, backend, running),
        "wanted": backend.num_replicas,
        "running": running,
        "version": backend.user_version or UNVERSIONED,
        "message": with_models(state, observed, backend.tag, message_of(observed, backend, replicas, wall)),
        "models": {
            name: {version: each["state"] for version, each in versions.items()}
            for name, versions in ({} if models is None else models.models).items()
        },
        "dead_replicas": dead_replicas(observed, backend.tag),
    }


def dead_replicas(observed: Observed, tag: BackendTag) -> list[dict[str, Any]]:
    """Return the last dead replicas of a backend, oldest first, with the reasons."""
    return [asdict(each) for each in observed.notes_of(tag).dead]


def status_word(observed: Observed, backend: BackendRecord, running: int) -> str:
    """Return the status word of a backend with the given number of running replicas."""
    if backend.is_deleting:
        return "DELETING"
    if running >= backend.num_replicas and backend.goal is None:
        return "HEALTHY"
    # The backend is being scaled, unless replicas fail.
    is_failing = observed.notes_of(backend.tag).failures or is_replacing(observed, backend)
    is_asked = backend.scaled_to is not None or backend.last_change == "UPSCALE"
    is_scaling = is_asked and not is_failing
    return "UPDATING" if backend.goal is not None or is_scaling else "UNHEALTHY"


def is_replacing(observed: Observed, backend: BackendRecord) -> bool:
    """Return whether missing replicas were lost, rather than requested by the last change."""
    dead = observed.notes_of(backend.tag).dead
    scaled_at = backend.scalings[-1][0] if backend.scalings else 0.0
    return len(dead) > 0 and dead[-1].at > max(scaled_at, backend.deployed_at)
