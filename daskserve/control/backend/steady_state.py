"""Decides whether a backend is in a steady state, in which a step would change nothing. Pure.

The ticks check one backend after another, and nearly all of them are in a steady state. This check is much
cheaper than a step. It may miss a steady state, which only costs time.
"""

from __future__ import annotations

from collections.abc import Sequence

from daskserve.common.types import ReplicaState
from daskserve.control.backend.inputs import StepInputs
from daskserve.control.backend.ranks import are_valid
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord, ReplicaRecord


def is_steady(inputs: StepInputs, backend: BackendRecord, replicas: Sequence[ReplicaRecord]) -> bool:
    """Return whether a step would change nothing."""
    state, observed, tag = inputs.state, inputs.observed, backend.tag
    if backend.goal is not None or backend.is_deleting or backend.canary is not None:
        return False
    app = state.apps.get(backend.application) if backend.application else None
    if app is not None and (app.goal is not None or tag not in app.deployments.values()):
        return False
    notes, decided = observed.notes.get(tag), observed.scalings.get(tag)
    if notes is not None and not notes.is_steady:
        return False
    if decided is not None and decided.is_for(backend):
        return False
    wanted = backend.num_replicas
    if len(replicas) != wanted or not _are_current(backend, replicas):
        return False
    # The step removes the codes of older versions, unless the history needs them.
    if any(
        code.name != backend.code_key and not state.revisions.need(code.name) for code in state.codes.of(tag)
    ):
        return False
    return _is_quiet(observed, replicas) and _have_right_ranks(observed, replicas, wanted)


def _are_current(backend: BackendRecord, replicas: Sequence[ReplicaRecord]) -> bool:
    version, config_id, running = backend.version, backend.config_id, ReplicaState.RUNNING
    return all(
        each.state is running and each.version == version and each.config_id == config_id and not each.gang
        for each in replicas
    )


def _is_quiet(observed: Observed, replicas: Sequence[ReplicaRecord]) -> bool:
    """Return whether there are no observations of replicas and their workers that a step would process."""
    tags = {each.tag for each in replicas}
    levels = (
        observed.unhealthy.keys(),
        observed.failed.keys(),
        observed.configured.keys(),
        observed.reconfigure_failed.keys(),
        observed.terminating,
    )
    if not all(tags.isdisjoint(each) if len(each) > len(tags) else each.isdisjoint(tags) for each in levels):
        return False
    places = {worker for each in replicas for worker in (each.worker, *each.bundle_workers)}
    are_there = places.isdisjoint(observed.lost_workers) and places.isdisjoint(observed.unresponsive)
    known = (observed.workers.get(worker or "") for worker in places)
    return (
        are_there
        and observed.moving not in tags
        and not any(info is not None and info.is_retiring for info in known)
    )


def _have_right_ranks(observed: Observed, replicas: Sequence[ReplicaRecord], wanted: int) -> bool:
    """Return whether the ranks of running replicas have no gaps, and whether the replicas have these
    ranks."""
    ranks = [each.rank for each in replicas]
    hosts = [observed.host_of(each.worker or "") for each in replicas]
    known = [observed.rank_infos.get(each.tag) for each in replicas]
    return are_valid(ranks, hosts, is_settled=True) and all(
        info is None or info == (*rank, wanted) for info, rank in zip(known, ranks, strict=True)
    )
