"""The values that are published to routers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from daskserve.common.types import WorkerAddress
from daskserve.control.backend import application as app_state
from daskserve.control.records.config_ids import is_pausing
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.records.version_split import running_of, split_of, stable_of
from daskserve.options.rollout import percent_of


def published_backend(state: State, tag: str, unloadable: str | None = None) -> Any:
    """Return the published value of a backend for routers; None if it was removed.

    During a rollout, it is the value of the old version, with the value of the new version under ``rollout``.
    ``unloadable`` is the reason why replicas cannot load the code; None if they can.
    """
    backend = state.backends.get(tag)
    if backend is None:
        return None
    stable = stable_of(backend)
    running = state.running(tag)
    if stable is None:
        value = _published(backend, running)
    else:
        value = _published(stable, running_of(backend, running)[1]) | {"rollout": _rollout(backend, running)}
    if unloadable is not None:
        value["unloadable"] = unloadable
    if backend.is_deleting and app_state.may_stop(state, backend):
        # The reason if its first deploy failed, otherwise empty. Until then, its callers still need the
        # backend.
        value["ending"] = backend.last_error
    return value


def _published(backend: BackendRecord, running: Iterable[ReplicaRecord]) -> dict[str, Any]:
    value: dict[str, Any] = {
        "replicas": [
            [each.tag, each.worker, each.incarnation] for each in running if not is_pausing(backend, each)
        ],
        "concurrency": backend.config.concurrency(),
        "max_queued": backend.config.max_queued_requests,
        "max_crash_retries": backend.config.max_crash_retries,
    }
    router = backend.config.request_router_config
    if router is not None and (named := router.published()) is not None:
        value["router"] = named
    if (order := backend.config.priority_config) is not None:
        value["order"] = order.published()
    if (hedging := backend.config.hedging_config) is not None:
        value["hedging"] = hedging.published()
    if not backend.is_deployment:
        value["kind"] = backend.kind
    if backend.config.bodies != "gather":
        value["bodies"] = backend.config.bodies
    if backend.config.max_body_bytes is not None:
        value["max_body_bytes"] = backend.config.max_body_bytes
    if backend.autoscaling is not None:
        value["autoscaled"] = True
    if backend.capacity == 0:
        value["off"] = True
    return value


def _rollout(backend: BackendRecord, running: Iterable[ReplicaRecord]) -> dict[str, Any]:
    """Return the state of the new version that is published to routers during a rollout."""
    rollout, plan = backend.canary, backend.config.rollout
    assert rollout is not None
    assert plan is not None
    new, old = running_of(backend, running)
    split = split_of(backend, new, old)
    shadow = percent_of(plan.shadow) / 100
    return {
        "key": split.key,
        "share": split.share,
        "names": list(rollout.names),
        "sticky": plan.sticky,
        "new": _published(backend, new),
        **({"shadow": shadow if new else 0.0, "compare": plan.compare} if shadow else {}),
    }


def published_system(state: State, controller: WorkerAddress) -> dict[str, list[WorkerAddress]]:
    """Return the workers with proxies or the controller, as published for routers."""
    return {"workers": sorted({controller, *state.proxies.workers})}
