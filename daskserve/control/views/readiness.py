"""Finds the backends that should run and have no running replica, for ``/-/readyz``. Pure."""

from __future__ import annotations

from collections.abc import Set

from daskserve.common.types import BackendTag
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import current_bounds


def should_run(backend: BackendRecord) -> bool:
    """Return whether a backend needs a replica at any load.

    A backend that may be scaled to zero does not, even while its first replica starts. During a change, a
    backend does if the change needs replicas to be complete.
    """
    if backend.is_deleting or backend.needed_replicas == 0:
        return False
    bounds = current_bounds(backend)
    return bounds is None or backend.goal is not None or bounds.least > 0


def unready(state: State, known: frozenset[BackendTag], tags: Set[BackendTag]) -> frozenset[BackendTag]:
    """Return the backends that should run and have no running replica, after a change of some of them."""
    found = set()
    for tag in tags:
        backend = state.backends.get(tag)
        if backend is not None and should_run(backend) and not state.has_running(tag):
            found.add(tag)
    return (known - tags) | found
